"""The position and document of each key, and whether it is present."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.checks import check_count, check_tensor

_ONE_FOR_EACH_ROW = ("query_position", "prefix_length")


class ShownKeys(NamedTuple):
    """The query rows to which each key is shown before any selection. All tensors are int64 [B or 1, H or 1, Sk].

    Keys that appear later may beat a key. So keys have to appear in their order (`first` rises over the keys that are
    shown), and leave either all together or by document, where each document leaves before the next one appears.
    """

    first: Tensor  # the first row to which the key is shown
    last: Tensor  # the row after the last one; the key is never shown if it is `first` or less
    own_row: Tensor  # the row at the key's position, perhaps outside of the query's rows
    document: Tensor | None = None  # the key's document, rising; None: all keys leave together


class KeyPositions(NamedTuple):
    """The query row at the position of each key, and the range of query rows that may see it.

    Tensors are [B or 1, H or 1, key_length], int64.
    """

    own_row: Tensor  # the row at the key's position, which may be outside of the query
    # [begin, end) are the rows of the key's document, or all rows. The range is empty if the key is not present.
    begin: Tensor
    end: Tensor
    position: Tensor  # the key's position in its document
    document: Tensor | None  # the number of the key's document; None: there is one document
    order: Tensor | None  # the keys' indices by position; None: indices are in this order
    query_length: int
    same_length: bool  # whether each document has its queries and its keys in the same places

    @classmethod
    def from_arguments(
        cls,
        key_length: int,
        query_length: int | None = None,
        *,
        cu_seqlens_k: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_positions: Tensor | None = None,
        query_position: int | Tensor | None = None,
        device: torch.device | str | None = None,
        batch_and_heads: Sequence[int] = (1, 1),
    ) -> KeyPositions:
        """Makes KeyPositions from arguments that select_key_intervals describes.

        batch_and_heads: the batch and head sizes of the scores. The arguments' sizes have to broadcast with them.
        """
        tensors = {
            "key_positions": key_positions,
            "cu_seqlens_k": cu_seqlens_k,
            "cu_seqlens_q": cu_seqlens_q,
            "key_mask": key_mask,
            "query_position": query_position if isinstance(query_position, Tensor) else None,
        }
        device = _common_device(tensors, device)
        check_batches(batch_and_heads, tensors)
        query_length = check_lengths(key_length, query_length)
        if cu_seqlens_q is cu_seqlens_k:
            cu_seqlens_q = None
        if cu_seqlens_q is not None and cu_seqlens_k is None:
            raise ValueError(
                "cu_seqlens_q: got offsets without cu_seqlens_k, expected both or neither"
            )
        if cu_seqlens_q is not None and (key_positions is not None or query_position is not None):
            name = "key_positions" if key_positions is not None else "query_position"
            raise ValueError(
                f"{name}: got a value together with cu_seqlens_q, expected cu_seqlens_k alone, whose offsets are positions then"
            )
        position = torch.arange(key_length, device=device)[None, None]
        if key_positions is not None:
            position = _per_key_integers(key_positions, "key_positions", key_length)
        documents = cu_seqlens_k is not None
        shift = key_length - query_length if not documents else 0
        if query_position is not None:
            shift = _query_row(query_position)
        own_row = position - shift
        begin, end = torch.zeros_like(own_row), torch.full_like(own_row, query_length)
        document = None
        if documents:
            if key_positions is None and query_position is None:
                check_offsets(cu_seqlens_k, "cu_seqlens_k", key_length, batched=True)
            own_row, begin, end, position, document = _place_in_documents(
                position, shift, query_length, cu_seqlens_k, cu_seqlens_q
            )
        if key_mask is not None:
            end = torch.where(_present_keys(key_mask, key_length), end, 0)
        order = None
        if key_positions is not None:
            by_position = own_row if document is None else (document << 32) + position
            order = by_position.argsort(dim=-1, stable=True)
        same_length = cu_seqlens_q is None
        return cls(own_row, begin, end, position, document, order, query_length, same_length)

    def shown_keys(self, is_causal: bool) -> ShownKeys:
        """Returns the keys for a selection, in the order of their positions."""
        first = torch.maximum(self.begin, self.own_row) if is_causal else self.begin
        # A key that is not present has an empty range of rows, so it beats no other key.
        keys = (first, self.end, self.own_row, self.document)
        return ShownKeys(
            *(key if self.order is None else self._sort_by_position(key) for key in keys)
        )

    def _sort_by_position(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor, order = torch.broadcast_tensors(tensor, self.order)
        return tensor.gather(-1, order)

    def scores_by_position(self, scores: Tensor) -> Tensor:
        """Returns scores [B, H, key_length] in the order of `shown_keys`."""
        return scores if self.order is None else self._sort_by_position(scores)

    def intervals_by_index(self, intervals: Tensor) -> Tensor:
        """Returns intervals [B, H, key_length, 2] in the order of the keys' indices."""
        if self.order is None:
            return intervals
        order = self.order.expand(intervals.shape[:3])
        return torch.empty_like(intervals).scatter_(
            2, order[..., None].expand_as(intervals), intervals
        )


def check_lengths(key_length: int, query_length: int | None) -> int:
    """Checks both lengths, and returns the query length. It defaults to the key length."""
    check_length(key_length, "key_length")
    if query_length is None:
        return key_length
    check_length(query_length, "query_length")
    return query_length


def check_batches(batch_and_heads: Sequence[int], tensors: dict[str, Tensor | None]) -> None:
    """Raises ValueError for a tensor [B or 1, H or 1, ..] whose batch or head size does not broadcast with
    `batch_and_heads` and the tensors before it."""
    sizes = list(batch_and_heads)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        leading = tensor.shape if name in _ONE_FOR_EACH_ROW else tensor.shape[:-1]
        for i, size in enumerate(leading[:2]):
            if size != 1 and sizes[i] != 1 and size != sizes[i]:
                what = "a batch" if i == 0 else "heads"
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, expected {what} of {sizes[i]} or 1"
                )
            sizes[i] = max(sizes[i], size)


def check_length(length: int, name: str) -> None:
    """Raises unless `length` is a count that fits into int32, the dtype of rows."""
    check_count(length, name)
    if length >= 2**31:
        raise ValueError(f"{name}: got {length}, expected less than 2^31")


def check_offsets(
    offsets: Tensor,
    name: str,
    total: int | None = None,
    *,
    longest: int | None = None,
    name_of_longest: str = "max_seqlen_k",
    batched: bool = False,
) -> Tensor:
    """Checks the offsets of packed documents. Values are checked on the CPU only: on a GPU the check would wait for it.

    longest: the greatest length of a document that the caller has promised.
    batched: whether offsets may also be [B, sequences + 1].
    """
    check_tensor(offsets, name)
    dims = (1, 2) if batched else (1,)
    if offsets.dim() not in dims or not _is_integer(offsets) or 0 in offsets.shape:
        shapes = "[sequences + 1] or [B, sequences + 1]" if batched else "[sequences + 1]"
        raise ValueError(
            f"{name}: got {offsets.dtype} of shape {tuple(offsets.shape)}, expected int32 of shape {shapes}"
        )
    readable = type(offsets) is Tensor and offsets.device.type == "cpu"
    if readable and not torch.compiler.is_compiling():
        for values in offsets.reshape(-1, offsets.shape[-1]).tolist():
            _check_rising(values, name, total, longest, name_of_longest)
    return offsets


def _check_rising(
    values: list[int], name: str, total: int | None, longest: int | None, name_of_longest: str
) -> None:
    fits = total is None or values[-1] <= total
    if values[0] != 0 or values != sorted(values) or not fits:
        end = "" if total is None else f" and end at {total} at most"
        raise ValueError(f"{name}: got {values}, expected offsets that begin at 0, never fall{end}")
    length = max((b - a for a, b in pairwise(values)), default=0)
    if longest is not None and length > longest:
        raise ValueError(
            f"{name_of_longest}: got {longest}, expected at least {length}, the longest of {name}"
        )


def _place_in_documents(
    position: Tensor,
    shift: int | Tensor,
    query_length: int,
    cu_seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (own row, begin, end, position in the document, document) of keys at `position` in the packed row."""
    cu_k = check_offsets(cu_seqlens_k, "cu_seqlens_k", batched=True).long()
    cu_k = cu_k.reshape(-1, 1, cu_k.shape[-1])
    batch = torch.broadcast_shapes(position.shape[:2], cu_k.shape[:2])
    position, cu_k = position.expand(*batch, -1), cu_k.expand(*batch, -1)
    document = torch.searchsorted(cu_k[..., 1:].contiguous(), position.contiguous(), right=True)

    def offsets_of_keys(offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where each key's document begins and ends. Keys after the last document are in an empty document."""
        offsets = torch.cat([offsets, offsets[..., -1:]], dim=-1)
        return offsets.gather(-1, document), offsets.gather(-1, document + 1)

    begin_k, end_k = offsets_of_keys(cu_k)
    if cu_seqlens_q is None:
        own_row, begin, end = position - shift, begin_k - shift, end_k - shift
    else:
        cu_q = check_offsets(cu_seqlens_q, "cu_seqlens_q", query_length, batched=True).long()
        if cu_q.shape[-1] != cu_k.shape[-1]:
            raise ValueError(
                f"cu_seqlens_k, cu_seqlens_q: got shapes {tuple(cu_seqlens_k.shape)}, {tuple(cu_seqlens_q.shape)}, "
                "expected as many documents in both"
            )
        begin, end = offsets_of_keys(cu_q.reshape(-1, 1, cu_q.shape[-1]).expand(*batch, -1))
        # A query and the key at its position have the same distance from the end of their document.
        own_row = position - end_k + end
    return own_row, begin.clamp(min=0), end.clamp(max=query_length), position - begin_k, document


def _present_keys(key_mask: Tensor, key_length: int) -> Tensor:
    check_tensor(key_mask, "key_mask")
    fits = key_mask.dim() in (2, 3) and key_mask.shape[-1] == key_length
    if not fits or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask: got {key_mask.dtype} of shape {tuple(key_mask.shape)}, "
            f"expected bool of shape [B, {key_length}] or [B, H, {key_length}]"
        )
    return key_mask[:, None] if key_mask.dim() == 2 else key_mask


def _per_key_integers(tensor: Tensor, name: str, key_length: int) -> Tensor:
    check_tensor(tensor, name)
    fits = tensor.dim() in (1, 2, 3) and tensor.shape[-1] == key_length
    if not fits or not _is_integer(tensor):
        raise ValueError(
            f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"expected integers of shape [{key_length}], [B, {key_length}] or [B, H, {key_length}]"
        )
    tensor = tensor.long()
    if tensor.dim() == 1:
        return tensor[None, None]
    return tensor[:, None] if tensor.dim() == 2 else tensor


def _query_row(query_position: int | Tensor) -> int | Tensor:
    """Checks query_position, and returns a number, or a tensor [B, 1, 1]."""
    if not isinstance(query_position, Tensor):
        check_count(query_position, "query_position")
        return query_position
    if query_position.dim() > 1 or not _is_integer(query_position):
        raise ValueError(
            f"query_position: got {query_position.dtype} of shape {tuple(query_position.shape)}, "
            "expected an integer or integers of shape [B]"
        )
    return query_position.long().reshape(-1, 1, 1)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _common_device(
    tensors: dict[str, Tensor | None], device: torch.device | str | None
) -> torch.device | str | None:
    """Returns the device of the tensors, which have to agree, or `device` if there are no tensors."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(tensor, name)
        expected = tensor.device if device is None else torch.device(device)
        if tensor.device.type != expected.type or expected.index not in (None, tensor.device.index):
            raise TypeError(f"{name}: got a tensor on {tensor.device}, expected {expected}")
        device = tensor.device
    return device
