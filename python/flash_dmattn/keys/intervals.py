"""The keys that a query sees, as one interval of queries per key.

Key j is visible to row i of the query exactly when ``first[j] <= i < last[j]``. Row i stands at key
position ``i + key_length - query_length`` (the last query sees the last key). Two integers per key replace
the query_length x key_length mask, and every constructor here takes O(key_length) time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from .._core import ops
from .._core.checks import check_count, check_tensor, clamp_count, resolve_flag
from . import torch_selection
from .places import Places, check_length, check_offsets
from .rule import KeySelection, choose_among

_NEVER = 2**31 - 1


@dataclass(frozen=True, eq=False, repr=False)
class KeyIntervals:
    """Intervals of query rows, one per key.

    intervals: int32 [B or 1, Hkv or 1, key_length, 2]; the last dimension is (first, last). A key whose
        first >= last is never visible.
    query_length: the number of query rows that the intervals refer to.
    bound: (base, per_query), when it is known that any n consecutive queries together see at most
        base + per_query * n keys. It bounds the memory of lists of keys on a GPU. Without one it
        has to count first, which waits for the GPU at every call (and a CUDA graph cannot be captured);
        `measured` does that once. Too small a bound loses keys.
    consecutive: every query sees consecutive keys, or nearly, as in windows and packed documents. It changes
        no result: a GPU then makes no lists and needs no bound. It is quicker for such keys, and slower for
        others.
    """

    intervals: Tensor
    query_length: int
    bound: tuple[int, int] | None = None
    consecutive: bool = False

    def __post_init__(self):
        check_tensor(self.intervals, "intervals")
        check_length(self.query_length, "query_length")
        _check_bound(self.bound)
        resolve_flag(self.consecutive, "consecutive")
        shape = tuple(self.intervals.shape)
        if len(shape) != 4 or shape[3] != 2 or self.intervals.dtype != torch.int32:
            raise ValueError(
                f"intervals: got {self.intervals.dtype} of shape {shape}, "
                "expected int32 of shape [B or 1, Hkv or 1, key_length, 2]"
            )

    def __repr__(self) -> str:
        held = self.intervals
        if isinstance(held, Tensor):  # a leaf of a pytree may be anything
            held = f"<{held.dtype} {tuple(held.shape)} on {held.device}>"
        return (
            f"KeyIntervals(intervals={held}, query_length={self.query_length}, bound={self.bound}, "
            f"consecutive={self.consecutive})"
        )

    @property
    def key_length(self) -> int:
        return self.intervals.shape[2]

    @property
    def heads(self) -> int:
        return self.intervals.shape[1]

    def fits(self, batch: int, heads: int, key_length: int) -> bool:
        """Whether there is an interval for each key of [batch, heads], if only by broadcasting."""
        own_batch, own_heads, own_length, _ = self.intervals.shape
        fits = broadcasts(own_batch, batch) and broadcasts(own_heads, heads)
        return fits and own_length == key_length

    def bound_operand(self) -> tuple[int, int, int]:
        """The operators' key_bound."""
        base, per_query = (-1, 0) if self.bound is None else self.bound  # -1: unknown
        return base, per_query, int(self.consecutive)

    def to(self, device) -> KeyIntervals:
        return self.with_intervals(self.intervals.to(device))

    def with_intervals(self, intervals: Tensor) -> KeyIntervals:
        """Other intervals with the same bound and properties."""
        return KeyIntervals(intervals, self.query_length, self.bound, self.consecutive)

    def measured(self) -> KeyIntervals:
        """The same intervals with a known bound, and known to be consecutive where they are; unchanged where
        the library has no kernels for the device."""
        if self.bound is not None or not ops.has_kernels_for(self.intervals):
            return self
        bound = ops.measure_key_bound(self.intervals, self.query_length)
        consecutive = self.consecutive or _are_consecutive(self.intervals)
        return KeyIntervals(self.intervals, self.query_length, tuple(bound), consecutive)

    def to_mask(self) -> Tensor:
        """The mask that the intervals stand for: bool [B or 1, Hkv or 1, query_length, key_length].

        For display and for tests: this is the quadratic array that the intervals avoid.
        """
        rows = torch.arange(self.query_length, device=self.intervals.device)[:, None]
        first, last = self.intervals[:, :, None].unbind(-1)
        return (first <= rows) & (rows < last)


def split_by_age(
    keys: KeyIntervals, age: int, own_row: Tensor | None = None
) -> tuple[KeyIntervals, KeyIntervals]:
    """The keys that a query sees in two parts: those fewer than `age` positions before it or after it, and the others.

    own_row: the row that stands at each key's position, [B or 1, H or 1, key_length]; by default the last query stands at
        the last key.
    """
    first, last = keys.intervals.long().unbind(-1)
    if own_row is None:
        own_row = Places.of(keys.key_length, keys.query_length, device=first.device).own
    end = own_row + clamp_count(age)  # where the key is no longer recent
    parts = (first, torch.minimum(last, end)), (torch.maximum(first, end), last)
    return tuple(
        _clipped(*torch.broadcast_tensors(*part), keys.query_length, keys.bound, keys.consecutive)
        for part in parts
    )


def broadcasts(size: int, to: int) -> bool:
    """Not `size in (1, to)`: compiled code takes a number and a symbol for different there, even where they are equal."""
    return size == 1 or size == to


def _are_consecutive(intervals: Tensor) -> bool:
    """Whether blocks of neighbouring keys execute few more queries than lists of keys would; waits for a GPU.

    A kernel has blocks of 128 keys or tiles of 128 queries: it executes all queries that see a key of the block,
    or for each key the queries that see it, rounded up. The first takes three quarters of the time for the same work.
    """
    block = 128
    first, last = intervals.long().unbind(-1)
    seen = first < last
    with_lists = (last - first + block - 1)[seen].sum()
    padding = (0, -intervals.shape[2] % block)
    first = F.pad(torch.where(seen, first, _NEVER), padding, value=_NEVER)
    last = F.pad(torch.where(seen, last, 0), padding)
    together = last.unflatten(-1, (-1, block)).amax(-1) - first.unflatten(-1, (-1, block)).amin(-1)
    return bool(block * together.clamp(min=0).sum() <= 4 / 3 * with_lists)


# Intervals pass through torch.compile and checkpointing as their tensor.
_pytree.register_pytree_node(
    KeyIntervals,
    lambda value: ([value.intervals], (value.query_length, value.bound, value.consecutive)),
    lambda leaves, context: _unchecked(leaves[0], *context),
    serialized_type_name=f"{ops.NAMESPACE}.KeyIntervals",
)


def _unchecked(leaf, query_length, bound, consecutive=False) -> KeyIntervals:
    # Leaves of a pytree may have any type while it is being mapped over.
    value = object.__new__(KeyIntervals)
    object.__setattr__(value, "intervals", leaf)
    object.__setattr__(value, "query_length", query_length)
    object.__setattr__(value, "bound", bound)
    object.__setattr__(value, "consecutive", consecutive)
    return value


def select_key_intervals(
    scores: Tensor,
    keep_window_size: int | Sequence[int] | None = None,
    *,
    selection: str = "per_query",
    is_causal: bool = True,
    recent_window: int = 0,
    recent_competes: bool = True,
    sink_tokens: int = 0,
    score_threshold: float | None = None,
    key_mask: Tensor | None = None,
    query_length: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_position: int | Tensor | None = None,
) -> KeyIntervals:
    """The keys that a rule keeps by their scores, for every query.

    With causality, the query at position t sees a present key at position j <= t when
        - it is one of the first `sink_tokens` present keys (of its document), or
        - t - j < recent_window: its own key is the first of these, or
        - its score is not NaN, at or above `score_threshold`, and among the best `keep_window_size` of those that compete.

    scores: [B, H, key_length] (or [B, H, 1, key_length], or [B, key_length]), any floating dtype. The
        choice is not differentiable: no gradient flows to the scores.
    keep_window_size: how many of the keys that compete a query keeps; 0 or more, or a sequence with a number for each head
        of the scores. None: all that reach the threshold.
    selection: "per_query": query i keeps the best among the keys it may see; "global": the best of the
        row, the same for all queries (then causal).
    is_causal: query row i may see keys up to i + key_length - query_length.
    recent_window: the most recent keys that a query sees whatever their scores, its own among them. DMS trains with
        t - j <= W, which is recent_window=W + 1; WG-KV with t - j < W. Needs is_causal.
    recent_competes: True: every key competes from the moment it is written, so that a query sees the recent keys and the
        best of all. False: only keys with t - j >= recent_window compete, so that it sees the best of the older ones.
    sink_tokens: the first present keys, which stay visible and do not compete.
    score_threshold: the least score. Without keep_window_size the number of visible keys is not known from the shapes:
        `measured` counts it once, where otherwise every call on a GPU waits for a count.
    key_mask: bool, False: the key is not present. [B, key_length] or [B, H, key_length].
    query_length: defaults to key_length.
    cu_seqlens_k, cu_seqlens_q: documents packed one after the other, as in packed_documents; int32 [documents + 1], or
        [B, documents + 1] where rows of the batch have documents of their own. A query chooses among the keys of its own.
    key_positions: the position of each key in its row, where it is not the key's index: integers [key_length],
        [B, key_length] or [B, H, key_length], no two of a row alike. With documents, cu_seqlens_k are offsets of positions.
    query_position: the position of the first query row; integer, or integers [B]. The other rows follow it. By default
        key_length - query_length; with documents 0.

    Higher scores win; of equal ones the more recent key. NaN and hidden keys are never chosen. Returns
    intervals of shape [B, H, key_length, 2], is_causal included. O(key_length log keep_window_size); with documents or
    positions the keys are sorted first.
    """
    rule = KeySelection(
        keep_window_size, selection, recent_window, recent_competes, sink_tokens, score_threshold
    ).checked()
    is_causal = resolve_flag(is_causal, "is_causal")
    if not rule.limits():
        raise TypeError("keep_window_size: got None, expected it or score_threshold")
    scores, key_mask = per_key_scores(scores, key_mask)
    query_length = scores.shape[2] if query_length is None else query_length
    check_length(query_length, "query_length")
    if all(t is None for t in (cu_seqlens_k, cu_seqlens_q, key_positions, query_position)):
        return select(scores, key_mask, rule, is_causal, query_length)
    places = Places.of(
        scores.shape[2],
        query_length,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        key_mask=key_mask,
        key_positions=key_positions,
        query_position=query_position,
        device=scores.device,
    )
    return select_at(places, scores, rule, is_causal)


def per_key_scores(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checked scores and mask in normal form, [B, H, key_length] both."""
    scores = _per_key(scores, "scores").detach()
    if not scores.is_floating_point():
        raise TypeError(f"scores: got {scores.dtype}, expected a floating dtype")
    if key_mask is not None:
        key_mask = _per_key(key_mask, "key_mask")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: got {key_mask.dtype}, expected torch.bool")
        shape = _broadcast(scores.shape, key_mask.shape, "key_mask")
        scores, key_mask = scores.expand(shape), key_mask.expand(shape)
    return scores, key_mask


def select(
    scores: Tensor,
    key_mask: Tensor | None,
    rule: KeySelection,
    is_causal: bool,
    query_length: int,
) -> KeyIntervals:
    """The keys that a rule keeps, of arguments in normal form: scores and key_mask [B, H, key_length]."""
    rule.check_causality(is_causal)
    if not ops.has_kernels_for(scores) and not rule.is_window():
        places = Places.of(scores.shape[2], query_length, key_mask=key_mask, device=scores.device)
        return select_at(places, scores, rule, is_causal)
    scores = rule.for_heads(scores)
    if key_mask is not None:
        key_mask = key_mask.expand(scores.shape)
    library = ops if ops.has_kernels_for(scores) else torch_selection
    intervals = library.select_key_intervals(
        scores, key_mask, rule.windows(), rule.selection, is_causal, query_length, *rule.options()
    )
    return _unchecked(intervals, query_length, rule.bound(is_causal))


def select_at(places: Places, scores: Tensor, rule: KeySelection, is_causal: bool) -> KeyIntervals:
    """The keys that a rule keeps where they do not stand at their index, or in documents; scores [B, H, key_length]."""
    rule.check_causality(is_causal)
    chosen = choose_among(
        places.by_position(scores), places.shown(is_causal), rule, is_causal, places.query_length
    )
    bound = None
    if places.same_length:
        bound = rule.bound(is_causal, documents=places.document is not None)
    return _unchecked(places.by_index(chosen), places.query_length, bound)


def sliding_window(
    key_length: int,
    window: int,
    *,
    lookahead: int = 0,
    query_length: int | None = None,
    device: torch.device | str | None = None,
    **places,
) -> KeyIntervals:
    """Every query sees its own position, the `window` - 1 before it and the `lookahead` after it.

    places: key_mask, cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    check_count(window, "window")
    check_count(lookahead, "lookahead")
    window, lookahead = clamp_count(window), clamp_count(lookahead)
    keys = Places.of(key_length, query_length, device=device, **places)
    bound = (window + lookahead, 1) if keys.same_length else None
    return _shown(keys, keys.own - lookahead, keys.own + window, bound)


def prefix_lm(
    key_length: int,
    prefix_length: int | Tensor,
    *,
    query_length: int | None = None,
    device: torch.device | str | None = None,
    **places,
) -> KeyIntervals:
    """The first `prefix_length` keys (of each document) are visible to every query (of it), the others causally.

    prefix_length: an int, or an integer tensor [B].
    places: key_mask, cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    if device is None and isinstance(prefix_length, Tensor):
        device = prefix_length.device
    keys = Places.of(key_length, query_length, device=device, **places)
    prefix = _check_prefix(prefix_length, keys.own.device)
    first = torch.where(keys.position < prefix.reshape(-1, 1, 1), 0, keys.own)
    return _shown(keys, first, None, (key_length, 0))


def packed_documents(
    cu_seqlens_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    key_length: int | None = None,
    query_length: int | None = None,
    max_seqlen_k: int | None = None,
    **places,
) -> KeyIntervals:
    """Documents packed one after the other: a query sees the keys of its own document only.

    cu_seqlens_k, cu_seqlens_q: integer [documents + 1], where each document begins, and the total at the
        end; rising from 0. cu_seqlens_q defaults to cu_seqlens_k. Empty documents are allowed. [B, documents + 1] where
        rows of the batch have documents of their own.
    is_causal: aligned to the bottom right corner of each document.
    key_length, query_length: the packed lengths, by default the last offsets (reading them synchronises
        with a GPU). Keys past the last document are never visible.
    max_seqlen_k: the number of keys of the longest document, where it is known. For documents that have as
        many queries as keys (cu_seqlens_q is not given, or is cu_seqlens_k) it makes the `bound`.
    places: key_mask, key_positions and query_position, as in select_key_intervals.
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
    keys = Places.of(
        key_length, query_length, cu_seqlens_k=cu_seqlens_k, cu_seqlens_q=cu_seqlens_q, **places
    )
    bound = None
    if max_seqlen_k is not None and keys.same_length:
        bound = (max_seqlen_k if is_causal else 2 * max_seqlen_k, 1)
    return _shown(keys, keys.own if is_causal else None, None, bound)


def from_padding(key_mask: Tensor, query_length: int | None = None, **places) -> KeyIntervals:
    """Hides padding from every query.

    key_mask: bool [B, key_length], False for padding on any side.
    places: cu_seqlens_k, cu_seqlens_q, key_positions and query_position, as in select_key_intervals.
    """
    check_tensor(key_mask, "key_mask")
    if key_mask.dim() != 2 or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask: got {key_mask.dtype} of shape {tuple(key_mask.shape)}, "
            "expected bool of shape [B, key_length]"
        )
    key_length = key_mask.shape[1]
    keys = Places.of(key_length, query_length, key_mask=key_mask, **places)
    return _shown(keys, None, None, (key_length, 0))


def until_faded(
    cumulative: Tensor, prune: float, heads: int, query_length: int, **places
) -> KeyIntervals:
    """A query at position t sees key j <= t while cumulative[t] - cumulative[j] >= prune.

    cumulative: [B, H, key_length], never rising; prune: at most 0.
    heads: H, or a divisor of it: heads of a group see what any of them does.
    """
    key_length = cumulative.shape[2]
    falling = -cumulative.contiguous()
    last = torch.searchsorted(falling, falling - prune, right=True)  # the first position past prune
    if last.shape[1] not in (1, heads):
        last = last.unflatten(1, (heads, -1)).amax(2)
    keys = Places.of(key_length, query_length, device=cumulative.device, **places)
    return _shown(keys, keys.own, last - (key_length - query_length), None)


def rows_of(intervals: KeyIntervals, begin: int, end: int, key_length: int) -> KeyIntervals:
    """The intervals of the query rows begin to end and of the first keys."""
    first, last = (intervals.intervals[:, :, :key_length] - begin).unbind(-1)
    return _clipped(first, last, end - begin, intervals.bound, intervals.consecutive)


def intersect(*parts: KeyIntervals) -> KeyIntervals:
    """The keys that all parts show. Batch and head dimensions broadcast."""
    if not parts:
        raise ValueError("intersect: got no intervals, expected one or more")
    for part in parts:
        if not isinstance(part, KeyIntervals):
            raise TypeError(f"intersect: got {type(part).__name__}, expected KeyIntervals")
    query_length, key_length = parts[0].query_length, parts[0].key_length
    # One by one: in a set they would be hashed, which makes them constants of torch.compile.
    for part in parts[1:]:
        if part.query_length != query_length or part.key_length != key_length:
            lengths = [(part.query_length, part.key_length) for part in parts]
            raise ValueError(
                f"intersect: got (query_length, key_length) {sorted(lengths)}, expected all equal"
            )
    for a, b in pairwise(part.intervals for part in parts):
        _broadcast(a.shape, b.shape, "intersect")
    first = reduce(torch.maximum, (part.intervals[..., 0] for part in parts))
    last = reduce(torch.minimum, (part.intervals[..., 1] for part in parts))
    bound, tile = None, 128  # queries per list of keys on a GPU
    for part in parts:  # not min(), which compiled code cannot have with a key
        given = part.bound
        if given is None:
            continue
        if bound is None or given[0] + tile * given[1] < bound[0] + tile * bound[1]:
            bound = given
    consecutive = all(part.consecutive for part in parts)
    return _clipped(first, last, query_length, bound, consecutive)


def _check_bound(bound: tuple[int, int] | None) -> None:
    if bound is None:
        return
    if not isinstance(bound, (tuple, list)) or len(bound) != 2:
        raise TypeError(f"bound: got {bound!r}, expected None or two integers")
    for value in bound:
        check_count(value, "bound")


def _check_prefix(prefix_length: int | Tensor, device) -> Tensor:
    if not isinstance(prefix_length, Tensor):
        check_count(prefix_length, "prefix_length")
        # Not by as_tensor, which makes the number a constant of torch.compile.
        return torch.full((), prefix_length, dtype=torch.int64, device=device)
    is_integer = not (prefix_length.is_floating_point() or prefix_length.is_complex())
    if prefix_length.dim() > 1 or not is_integer or prefix_length.dtype == torch.bool:
        raise ValueError(
            f"prefix_length: got {prefix_length.dtype} of shape {tuple(prefix_length.shape)}, "
            "expected integers of shape [B]"
        )
    return prefix_length.to(device=device)


def _shown(
    keys: Places, first: Tensor | None, last: Tensor | None, bound: tuple[int, int] | None
) -> KeyIntervals:
    """Rows [first, last) of each key, of those that it may be shown to; None: from the first, to the last of them."""
    first = keys.begin if first is None else torch.maximum(first, keys.begin)
    last = keys.end if last is None else torch.minimum(last, keys.end)
    in_order = keys.order is None
    return _clipped(*torch.broadcast_tensors(first, last), keys.query_length, bound, in_order)


def _clipped(
    first: Tensor,
    last: Tensor,
    query_length: int,
    bound: tuple[int, int] | None,
    consecutive: bool = True,
) -> KeyIntervals:
    """Clips to the query rows; an empty interval becomes (0, 0)."""
    first, last = first.clamp(min=0), last.clamp(max=query_length)
    intervals = torch.stack([first, last], dim=-1) * (first < last).unsqueeze(-1)
    return KeyIntervals(intervals.to(torch.int32), query_length, bound, consecutive)


def _per_key(tensor: Tensor, argument: str) -> Tensor:
    """[B, H, key_length] of a tensor with one value per key."""
    check_tensor(tensor, argument)
    if tensor.dim() == 2:
        return tensor[:, None]
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() == 4 and tensor.shape[2] == 1:
        return tensor[:, :, 0]
    raise ValueError(
        f"{argument}: got shape {tuple(tensor.shape)}, expected one value per key: [B, H, key_length], "
        "[B, H, 1, key_length] or [B, key_length]"
    )


def _broadcast(a: torch.Size, b: torch.Size, argument: str) -> torch.Size:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        raise ValueError(
            f"{argument}: got shape {tuple(b)}, expected one that broadcasts with {tuple(a)}"
        ) from None
