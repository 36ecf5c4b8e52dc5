"""Intervals that follow from positions: windows, prefixes, documents, padding, and scores that fade."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_count, check_tensor, clamp_count, resolve_flag
from .intervals import KeyIntervals, clipped_intervals
from .positions import KeyPositions, check_batches, check_length, check_offsets


def sliding_window(
    key_length: int,
    window: int,
    *,
    lookahead: int = 0,
    query_length: int | None = None,
    device: torch.device | str | None = None,
    **positions,
) -> KeyIntervals:
    """Returns intervals by which every query sees its own position, the `window` - 1 positions before it and the `lookahead`
    positions after it.

    key_length, query_length: the numbers of keys and queries, by default as many. device: of the intervals.
    positions: key_mask, cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    check_count(window, "window")
    check_count(lookahead, "lookahead")
    window, lookahead = clamp_count(window), clamp_count(lookahead)
    keys = KeyPositions.from_arguments(key_length, query_length, device=device, **positions)
    bound = (window + lookahead, 1) if keys.same_length else None
    return _make_intervals(keys, keys.own_row - lookahead, keys.own_row + window, bound)


def prefix_lm(
    key_length: int,
    prefix_length: int | Tensor,
    *,
    query_length: int | None = None,
    device: torch.device | str | None = None,
    **positions,
) -> KeyIntervals:
    """Returns intervals that show the first `prefix_length` keys of each document to all of its queries, and its other keys
    causally.

    key_length, query_length, device: as in sliding_window.
    prefix_length: an int, or an integer tensor [B].
    positions: key_mask, cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    if device is None and isinstance(prefix_length, Tensor):
        device = prefix_length.device
    keys = KeyPositions.from_arguments(key_length, query_length, device=device, **positions)
    prefix = _check_prefix(prefix_length, keys.own_row.device)
    shape = torch.broadcast_shapes(keys.own_row.shape, keys.end.shape)
    check_batches(shape[:2], {"prefix_length": prefix})
    first = torch.where(keys.position < prefix.reshape(-1, 1, 1), 0, keys.own_row)
    return _make_intervals(keys, first, None, (key_length, 0))


def causal_intervals(query: Tensor, key: Tensor) -> KeyIntervals:
    """Returns causality as intervals."""
    return prefix_lm(key.shape[1], 0, query_length=query.shape[1], device=key.device)


def packed_documents(
    cu_seqlens_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    key_length: int | None = None,
    query_length: int | None = None,
    max_seqlen_k: int | None = None,
    **positions,
) -> KeyIntervals:
    """Returns intervals that show a query the keys of its own document only. Documents are packed one after the other.

    cu_seqlens_k, cu_seqlens_q: integer [documents + 1], rising from 0: where each document begins, and then the total.
        Rows of the batch may have documents of their own: [B, documents + 1]. Empty documents are allowed. cu_seqlens_q
        defaults to cu_seqlens_k.
    is_causal: whether causality, aligned to the bottom right corner of each document, also hides keys.
    key_length, query_length: the packed lengths, by default the last offsets (reading them synchronises
        with a GPU). Keys past the last document are never visible.
    max_seqlen_k: the number of keys of the longest document, if it is known. It gives the intervals their `bound` if
        each document has equal numbers of queries and keys (cu_seqlens_q is not given, or is cu_seqlens_k).
    positions: key_mask, key_positions and query_position, as in select_key_intervals.
    """
    is_causal = resolve_flag(is_causal, "is_causal")
    if max_seqlen_k is not None:
        check_count(max_seqlen_k, "max_seqlen_k")
    for name, length in (("key_length", key_length), ("query_length", query_length)):
        if length is not None:
            check_length(length, name)
    check_offsets(cu_seqlens_k, "cu_seqlens_k", key_length, longest=max_seqlen_k, batched=True)
    offsets_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    if offsets_q is not cu_seqlens_k:
        check_offsets(offsets_q, "cu_seqlens_q", query_length, batched=True)
    key_length = int(cu_seqlens_k[..., -1].max()) if key_length is None else key_length
    query_length = int(offsets_q[..., -1].max()) if query_length is None else query_length
    keys = KeyPositions.from_arguments(
        key_length, query_length, cu_seqlens_k=cu_seqlens_k, cu_seqlens_q=cu_seqlens_q, **positions
    )
    bound = None
    if max_seqlen_k is not None and keys.same_length:
        bound = (max_seqlen_k if is_causal else 2 * max_seqlen_k, 1)
    return _make_intervals(keys, keys.own_row if is_causal else None, None, bound)


def from_padding(key_mask: Tensor, query_length: int | None = None, **positions) -> KeyIntervals:
    """Returns intervals that hide padding from every query.

    key_mask: bool [B, key_length], False for padding on any side.
    positions: cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    check_tensor(key_mask, "key_mask")
    if key_mask.dim() != 2 or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask: got {key_mask.dtype} of shape {tuple(key_mask.shape)}, "
            "expected bool of shape [B, key_length]"
        )
    key_length = key_mask.shape[1]
    keys = KeyPositions.from_arguments(key_length, query_length, key_mask=key_mask, **positions)
    return _make_intervals(keys, None, None, (key_length, 0))


def until_faded(
    cumulative: Tensor, prune: float, heads: int, query_length: int, **positions
) -> KeyIntervals:
    """Shows key j to the query at position t >= j while cumulative[t] - cumulative[j] >= prune.

    cumulative: [B, H, key_length], never rising. prune: at most 0.
    heads: H, or a divisor of H: each head of a group then sees all keys that any head of the group sees.
    """
    key_length = cumulative.shape[2]
    falling = -cumulative.contiguous()
    last = torch.searchsorted(falling, falling - prune, right=True)  # the first position past prune
    if last.shape[1] not in (1, heads):
        last = last.unflatten(1, (heads, -1)).amax(2)
    keys = KeyPositions.from_arguments(
        key_length, query_length, device=cumulative.device, **positions
    )
    return _make_intervals(keys, keys.own_row, last - (key_length - query_length), None)


def _check_prefix(prefix_length: int | Tensor, device) -> Tensor:
    if not isinstance(prefix_length, Tensor):
        check_count(prefix_length, "prefix_length")
        # as_tensor would make the number a constant of torch.compile.
        return torch.full((), prefix_length, dtype=torch.int64, device=device)
    is_integer = not (prefix_length.is_floating_point() or prefix_length.is_complex())
    if prefix_length.dim() > 1 or not is_integer or prefix_length.dtype == torch.bool:
        raise ValueError(
            f"prefix_length: got {prefix_length.dtype} of shape {tuple(prefix_length.shape)}, "
            "expected integers of shape [B]"
        )
    return prefix_length.to(device=device)


def _make_intervals(
    keys: KeyPositions, first: Tensor | None, last: Tensor | None, bound: tuple[int, int] | None
) -> KeyIntervals:
    """Makes intervals [first, last), clipped to the rows that may see each key. None: the range of these rows."""
    first = keys.begin if first is None else torch.maximum(first, keys.begin)
    last = keys.end if last is None else torch.minimum(last, keys.end)
    in_order = keys.order is None
    return clipped_intervals(
        *torch.broadcast_tensors(first, last), keys.query_length, bound, in_order
    )
