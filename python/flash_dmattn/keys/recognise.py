"""Masks with a query dimension as key intervals.

The masks of language models (causal, padded, packed, prefix, sliding window) show every key to
consecutive queries: `KeyIntervals` describe them exactly.
"""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .._core.checks import MASK_VALUE, may_read
from .in_torch import count_ranges
from .intervals import KeyIntervals

# Mask elements per step: bounds the memory for recognising a mask.
_BLOCK_ELEMENTS = 1 << 22


class Memo:
    """Keeps results that are computed from tensors shared by a model's layers, for one forward.

    The model makes a memo when a forward begins and passes it to its layers. Nothing outlives the forward: between two
    forwards a tensor can change without a trace (collectives, DLPack, raw pointers, graph replay).
    """

    def __init__(self):
        self.known: dict[str, tuple[torch.Tensor, object]] = {}


def cached_result(memo: Memo | None, name: str, tensor: torch.Tensor, find: Callable):
    """Returns find(tensor). With a memo, `find` is called once for each name and tensor.

    Compiled code cannot read values, so it skips the memo. It would also treat a length in a name as a constant.
    """
    if memo is None or not may_read():
        return find(tensor)
    known = memo.known.get(name)
    if known is None or known[0] is not tensor:
        known = memo.known[name] = (tensor, find(tensor))
    return known[1]


def intervals_of_mask(mask: torch.Tensor, memo: Memo | None = None) -> KeyIntervals | None:
    """Returns the key intervals of a mask [B, H, Sq, Sk], or None if no intervals describe it.

    The function reads every element (a sample would prove nothing), in blocks of rows, so the extra memory is O(B H
    Sk). Only a memo saves reading the mask again.

    Args:
        mask: bool, or additive floating point where 0 allows and anything at or below -1e4 (float16) or -1e30
            (other dtypes) masks. Dimensions expanded with stride 0 are read once.

    Returns:
        None also if an additive mask has other values, and for a tensor without values (on meta).
    """
    if _has_no_values(mask):
        return None
    return cached_result(memo, "intervals", mask, _find_intervals)


def refuse_negative(mask: torch.Tensor, memo: Memo | None = None) -> None:
    """Raises for negative integers, if values may be read.

    A nonzero integer shows its key. A negative one suggests an additive mask, in which it would hide the key.
    """
    if mask.is_floating_point() or mask.dtype == torch.bool or _has_no_values(mask):
        return
    if cached_result(memo, "negative", mask, lambda integers: bool((integers < 0).any())):
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with negative numbers, expected bool or "
            "integers, nonzero for visible keys; an additive mask has four dimensions and is of floating point"
        )


def split_additive(mask: torch.Tensor, memo: Memo | None = None) -> tuple[torch.Tensor, bool]:
    """Returns the elements that an additive mask allows, as bool, and whether it adds values other than 0 to them."""
    return cached_result(memo, "dense", mask, _split_additive)


def mask_of_intervals(allowed: KeyIntervals, memo: Memo | None = None) -> torch.Tensor:
    """Returns the mask that equals the intervals, for a selection that no intervals describe."""

    def make(intervals: torch.Tensor) -> torch.Tensor:
        mask = allowed.with_intervals(_drop_expanded(intervals)).to_mask()
        return mask.expand(*intervals.shape[:2], -1, -1)

    return cached_result(memo, "dense of intervals", allowed.intervals, make)


def _find_intervals(mask: torch.Tensor) -> KeyIntervals | None:
    distinct = _drop_expanded(mask)
    return intervals_of_rows(
        lambda start, stop: _allowed_block(distinct[:, :, start:stop]), distinct.shape, mask.device
    )


def _split_additive(mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
    distinct = _drop_expanded(mask)
    allowed = distinct > MASK_VALUE[mask.dtype]
    step = _rows_of_block(distinct.numel() // max(1, distinct.shape[2]))
    blocks = zip(distinct.split(step, 2), allowed.split(step, 2), strict=True)
    adds = any(bool((seen & (block != 0)).any()) for block, seen in blocks)
    return allowed.expand(mask.shape), adds


def _drop_expanded(mask: torch.Tensor) -> torch.Tensor:
    """Narrows expanded batch and head dimensions (stride 0) to size 1, so that each element is there once."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def intervals_of_rows(
    rows: Callable[[int, int], torch.Tensor | None], shape: torch.Size, device: torch.device
) -> KeyIntervals | None:
    """Returns the key intervals of a mask of `shape` [B, H, Sq, Sk], which it reads in blocks of rows.

    Args:
        rows: (start, stop) -> bool [B, H, stop - start, Sk], or None to give up.

    Returns:
        None if `rows` gives up, or if the queries that see a key have a gap between them.
    """
    batch, heads, query_length, key_length = shape
    first = torch.full((batch, heads, key_length), query_length, dtype=torch.int32, device=device)
    last = torch.zeros_like(first)
    count = torch.zeros_like(first)
    step = _rows_of_block(batch * heads * key_length)
    for start in range(0, query_length, step):
        stop = min(start + step, query_length)
        block = rows(start, stop)
        if block is None:
            return None
        seen = block.sum(2, dtype=torch.int32)
        # argmax finds the first of equal elements. It reads bytes: int32 indices of all rows would take four times as
        # much memory as the block.
        bits = block.to(torch.uint8)
        begin = start + bits.argmax(2).int()
        end = stop - bits.flip(2).argmax(2).int()
        first = torch.where(seen > 0, torch.minimum(first, begin), first)
        last = torch.where(seen > 0, end, last)
        count += seen
        if (count < last - first).any():
            return None
    intervals = torch.stack([torch.minimum(first, last), last], dim=-1)
    return KeyIntervals(intervals, query_length).measured()


def visible_counts(allowed: KeyIntervals) -> torch.Tensor:
    """Returns how many keys each query sees, int32 [B, H, Sq]."""
    first, last = allowed.intervals.long().unbind(-1)
    return count_ranges(first, last, allowed.query_length).int()


def _has_no_values(tensor: torch.Tensor) -> bool:
    """Whether values are absent (meta, fake tensors) or must not be read (compiling, capturing)."""
    return not may_read() or tensor.is_meta or isinstance(tensor, FakeTensor)


def _rows_of_block(row_elements: int) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, row_elements))


def _allowed_block(block: torch.Tensor) -> torch.Tensor | None:
    """Returns the allowed elements in rows of a bool or additive mask, or None if an additive mask has other values."""
    if not block.is_floating_point():
        return block.bool()
    allowed = block == 0
    return allowed if (allowed | (block <= MASK_VALUE[block.dtype])).all() else None
