"""Masks with a query dimension as key intervals, and the per-query choice among the keys they allow.

The masks of language models (causal, padded, packed, prefix, sliding window) show every key to
consecutive queries: `KeyIntervals` describe them exactly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from .._core.checks import MASK_VALUE, may_read
from .intervals import KeyIntervals
from .positions import ShownKeys
from .rule import KeySelection, choose_among
from .torch_operators import count_ranges

# Mask elements per step: bounds the memory for recognising a mask.
_BLOCK_ELEMENTS = 1 << 22


class Memo:
    """Results computed from tensors that the layers of a model share, kept for one forward.

    The model makes a memo when a forward begins and passes it to its layers. Nothing outlives the forward: a tensor
    can change between two of them without a trace (collectives, DLPack, raw pointers, graph replay).
    """

    def __init__(self):
        self.known: dict[str, tuple[torch.Tensor, object]] = {}


def cached_result(memo: Memo | None, name: str, tensor: torch.Tensor, find: Callable):
    """Returns find(tensor), called once per name and tensor if a memo is given. Compiled code cannot read values and therefore
    skips the memo; it would treat a length in a name as a constant."""
    if memo is None or not may_read():
        return find(tensor)
    known = memo.known.get(name)
    if known is None or known[0] is not tensor:
        known = memo.known[name] = (tensor, find(tensor))
    return known[1]


class AllowedElements(NamedTuple):
    """Elements that queries may see apart from causality: where a mask is True and a bias does not mask.

    Both are [B or 1, H or 1, Sq or 1, Sk], with or without heads of their own; one of them may be None.
    """

    mask: torch.Tensor | None
    bias: torch.Tensor | None

    # A method: torch.compile of torch 2.10 cannot trace properties of a named tuple.
    def shape(self) -> torch.Size:
        """[B or 1, H or 1, Sq or 1, Sk]."""
        sizes = zip(*(part.shape for part in self.parts()), strict=True)
        return torch.Size(0 if 0 in lengths else max(lengths) for lengths in sizes)

    def parts(self) -> list[torch.Tensor]:
        return [part for part in (self.mask, self.bias) if part is not None]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """bool [B or 1, H or 1, stop - start, Sk]."""
        heads = self.shape()[1]
        allowed = None
        for part in self.parts():
            block = part[:, :, start:stop] if part.shape[2] > 1 else part
            block = block if part is self.mask else block > MASK_VALUE[block.dtype]
            if block.shape[1] not in (1, heads):
                block = block.repeat_interleave(heads // block.shape[1], 1)
            allowed = block if allowed is None else allowed & block
        return allowed

    def to_mask(self) -> torch.Tensor:
        """The mask and the bias as one bool mask: the mask itself where there is no bias."""
        return self.mask if self.bias is None else self.rows(0, self.shape()[2])

    def seen_by_any_query(self) -> torch.Tensor:
        """The keys that some query may see, bool [B, H, Sk]."""
        if self.bias is None:
            return self.mask.any(2)
        batch, heads, seqlen_q, seqlen_k = self.shape()
        if seqlen_q == 1:  # without a loop, whose steps would be in the guards of compiled code
            return self.rows(0, 1)[:, :, 0]
        seen = self.bias.new_zeros((batch, heads, seqlen_k), dtype=torch.bool)
        step = _rows_of_block(batch * heads * seqlen_k)
        for start in range(0, seqlen_q, step):
            seen |= self.rows(start, min(start + step, seqlen_q)).any(2)
        return seen

    def to_intervals(self, memo: Memo | None = None) -> KeyIntervals | None:
        """The result of `intervals_of_mask` for these masks."""
        if self.bias is None:
            return intervals_of_mask(self.mask, memo)
        if _has_no_values(self.bias):
            return None
        return intervals_of_rows(self.rows, self.shape(), self.bias.device)


def intervals_of_mask(mask: torch.Tensor, memo: Memo | None = None) -> KeyIntervals | None:
    """The key intervals of a mask [B, H, Sq, Sk], or None when no intervals describe it.

    Every element is read (a sample would prove nothing), in blocks of rows, so the extra memory is
    O(B H Sk). Only a memo saves the second reading.

    Args:
        mask: bool, or additive floating point where 0 allows and anything at or below -1e4 (float16) or -1e30
            (other dtypes) masks. Dimensions expanded with stride 0 are read once.

    Returns:
        None also when an additive mask holds other values, and for a tensor without values (on meta).
    """
    if _has_no_values(mask):
        return None
    return cached_result(memo, "intervals", mask, _find_intervals)


def refuse_negative(mask: torch.Tensor, memo: Memo | None = None) -> None:
    """Raises for negative integers, where values may be read: nonzero integers show keys, and a negative one suggests an
    additive mask, which means the opposite."""
    if mask.is_floating_point() or mask.dtype == torch.bool or _has_no_values(mask):
        return
    if cached_result(memo, "negative", mask, lambda numbers: bool((numbers < 0).any())):
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with negative numbers, expected bool or "
            "integers, nonzero for visible keys; an additive mask has four dimensions and is of floating point"
        )


def split_additive(mask: torch.Tensor, memo: Memo | None = None) -> tuple[torch.Tensor, bool]:
    """The elements that an additive mask allows, as bool, and whether it also adds other values than 0 to them."""
    return cached_result(memo, "dense", mask, _split_additive)


def mask_of_intervals(allowed: KeyIntervals, memo: Memo | None = None) -> torch.Tensor:
    """The mask of intervals, for a choice that no intervals describe."""

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
    """The mask with each batch element and head that is in memory, once."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def intervals_of_rows(
    rows: Callable[[int, int], torch.Tensor | None], shape: torch.Size, device: torch.device
) -> KeyIntervals | None:
    """The key intervals of a mask of `shape` [B, H, Sq, Sk] that is read by blocks of rows.

    Args:
        rows: (start, stop) -> bool [B, H, stop - start, Sk], or None to give up.

    Returns:
        None when a key is visible to queries with a gap between them.
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
        # argmax finds the first of equal elements. It reads bytes: indices of all rows would be four times the block.
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
    """How many keys every query sees: int32 [B, H, Sq]."""
    first, last = allowed.intervals.long().unbind(-1)
    return count_ranges(first, last, allowed.query_length).int()


class _Order(NamedTuple):
    """The numbers that a choice among intervals reads from the device."""

    most_visible: int  # keys that a query sees
    is_in_order: bool  # keys appear and leave as `select_among` needs it
    group_count: int  # of keys that leave together, at most in a row


def _find_order(allowed: KeyIntervals) -> _Order:
    visible, _, left_before, in_order = _interval_order(allowed.intervals)
    documents = _documents(visible, allowed.intervals[..., 1], left_before)
    return _Order(
        int(visible_counts(allowed).max()),
        bool((in_order | ~visible).all()),
        int(documents.max()),
    )


def _interval_order(intervals: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The facts of each key: whether any query sees it; a lower bound of its first query; the last query of all earlier keys;
    whether its start and end are in order."""
    first, last = intervals.unbind(-1)
    visible = last > first
    appears = torch.where(visible, first, 0).cummax(-1).values
    left_before = F.pad(last.cummax(-1).values[..., :-1], (1, 0))
    in_order = (first == appears) & ((last == left_before) | (first >= left_before))
    return visible, appears, left_before, in_order


def _documents(
    visible: torch.Tensor, last: torch.Tensor, left_before: torch.Tensor
) -> torch.Tensor:
    """The number of each key's group of keys that leave together."""
    return (visible & (last > left_before)).cumsum(-1)


def select_among(
    scores: torch.Tensor, allowed: KeyIntervals, rule: KeySelection, memo: Memo | None = None
) -> KeyIntervals | None:
    """The keys that a rule keeps of those that every query is allowed, as intervals where that is possible.

    It usually is, because while a key is visible, ever more keys that beat it appear, so once it is out it
    stays out, provided that no key that beats it leaves. So keys must appear in the order of their
    position and leave together (causal, padding, prefix), or leave in groups, each before the next
    appears (packed documents). Query i is at position i + Sk - Sq.

    Args:
        scores: float [B or 1, H or 1, Sk]; higher is better, equal scores: the later key; NaN: never.
        allowed: [B or 1, H or 1, Sk, 2].

    Compiled code reads no values, nor does a CUDA graph that is captured. They take intervals without a bound, which
    the masks of models are, and assert that order when they run, and that keys appear one at a time except at the
    first query: the bound of the result.

    Returns:
        None when no intervals describe the choice (under a sliding window wider than `keep_window_size`, for
        one).
    """
    reading = may_read()
    if 0 in allowed.intervals.shape or allowed.query_length == 0:
        return allowed
    if not reading:
        if allowed.bound is not None:
            return None  # windows, for one; masks of models come without a bound
    else:
        order = cached_result(
            memo,
            "order",
            allowed.intervals,
            lambda _: _find_order(allowed),
        )
        if rule.has_room_for(order.most_visible) and not scores.isnan().any():
            return allowed
        if not order.is_in_order:
            return None
    first, last = allowed.intervals.unbind(-1)
    visible, appears, left_before, in_order = _interval_order(allowed.intervals)
    if not reading:
        one_at_a_time = (first == 0) | (first > F.pad(appears[..., :-1], (1, 0)))
        torch._assert_async(
            ((in_order & one_at_a_time) | ~visible).all(),
            "flash_dmattn: a compiled choice among keys of these intervals is not supported; expected keys that "
            "appear one by one and leave together",
        )
    document = None
    if not reading or order.group_count > 1:
        document = _documents(visible, last, left_before)
    own = torch.arange(allowed.key_length, device=first.device)[None, None]
    own = own - (allowed.key_length - allowed.query_length)
    shown = ShownKeys(first.long(), last.long(), own, appears.long(), document)
    intervals = choose_among(scores, shown, rule, True, allowed.query_length)
    if not reading:  # every query sees no more keys than the rule keeps, and brings one at most
        return KeyIntervals(intervals, allowed.query_length, rule.key_bound(True))
    return KeyIntervals(intervals, allowed.query_length).measured()


def _has_no_values(tensor: torch.Tensor) -> bool:
    """Whether values are absent (meta, fake tensors) or must not be read (compiling, capturing)."""
    return not may_read() or tensor.is_meta or isinstance(tensor, FakeTensor)


def _rows_of_block(row_elements: int) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, row_elements))


def _allowed_block(block: torch.Tensor) -> torch.Tensor | None:
    """The allowed elements of a few rows of a bool or additive mask; None when it adds other values."""
    if not block.is_floating_point():
        return block.bool()
    allowed = block == 0
    return allowed if (allowed | (block <= MASK_VALUE[block.dtype])).all() else None
