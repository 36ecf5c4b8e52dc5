"""The keys that a query sees, as one interval of queries per key.

Key j is visible to row i of the query exactly when ``first[j] <= i < last[j]``. Row i stands at key
position ``i + key_length - query_length`` (the last query sees the last key). Two integers per key replace
the query_length x key_length mask, and every constructor here takes O(key_length) time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from .._core import ops, torch_ops
from .._core.checks import check_count, check_tensor, check_window, resolve_flag

SELECTIONS = ("per_query", "global")
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
        _check_length(self.query_length, "query_length")
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
        return own_batch in (1, batch) and own_heads in (1, heads) and own_length == key_length

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


# So that intervals pass through torch.compile, checkpointing and the like as their tensor.
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
    keep_window_size: int,
    *,
    selection: str = "per_query",
    is_causal: bool = True,
    key_mask: Tensor | None = None,
    query_length: int | None = None,
) -> KeyIntervals:
    """The keys with the highest scores, for every query.

    scores: [B, H, key_length] (or [B, H, 1, key_length], or [B, key_length]), any floating dtype. The
        choice is not differentiable: no gradient flows to the scores.
    keep_window_size: how many keys a query keeps.
    selection: "per_query": query i keeps the best among the keys it may see; "global": the best of the
        row, the same for all queries (then causal).
    is_causal: query row i may see keys up to i + key_length - query_length.
    key_mask: bool, False hides the key: [B, key_length] or [B, H, key_length].
    query_length: defaults to key_length.

    Higher scores win; of equal ones the more recent key. NaN and hidden keys are never chosen. Returns
    intervals of shape [B, H, key_length, 2], is_causal included. O(key_length log keep_window_size).
    """
    check_selection(selection)
    check_window(keep_window_size)
    is_causal = resolve_flag(is_causal, "is_causal")
    scores = _per_key(scores, "scores").detach()
    if not scores.is_floating_point():
        raise TypeError(f"scores: got {scores.dtype}, expected a floating dtype")
    if key_mask is not None:
        key_mask = _per_key(key_mask, "key_mask")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: got {key_mask.dtype}, expected torch.bool")
        shape = _broadcast(scores.shape, key_mask.shape, "key_mask")
        scores, key_mask = scores.expand(shape), key_mask.expand(shape)
    query_length = scores.shape[2] if query_length is None else query_length
    check_count(query_length, "query_length")
    return select(scores, key_mask, keep_window_size, selection, is_causal, query_length)


def select(
    scores: Tensor,
    key_mask: Tensor | None,
    keep_window_size: int,
    selection: str,
    is_causal: bool,
    query_length: int,
) -> KeyIntervals:
    """select_key_intervals of arguments in normal form: scores and key_mask [B, H, key_length]."""
    library = ops if ops.has_kernels_for(scores) else torch_ops
    intervals = library.select_key_intervals(
        scores, key_mask, keep_window_size, selection, is_causal, query_length
    )
    arriving = is_causal and selection == "per_query"
    return _unchecked(intervals, query_length, (keep_window_size, int(arriving)))


def sliding_window(
    key_length: int,
    window: int,
    *,
    lookahead: int = 0,
    query_length: int | None = None,
    device: torch.device | str | None = None,
) -> KeyIntervals:
    """Every query sees its own position, the `window` - 1 before it and the `lookahead` after it."""
    check_count(window, "window")
    check_count(lookahead, "lookahead")
    query_length = _check_lengths(key_length, query_length)
    diagonal = _diagonal(key_length, query_length, device)
    bound = (window + lookahead, 1)
    return _clipped(diagonal - lookahead, diagonal + window, query_length, bound)


def prefix_lm(
    key_length: int,
    prefix_length: int | Tensor,
    *,
    query_length: int | None = None,
    device: torch.device | str | None = None,
) -> KeyIntervals:
    """The first `prefix_length` keys are visible to every query, the others causally.

    prefix_length: an int, or an integer tensor [B].
    """
    query_length = _check_lengths(key_length, query_length)
    prefix = _check_prefix(prefix_length, device).reshape(-1, 1, 1)
    keys = torch.arange(key_length, device=prefix.device)
    first = torch.where(keys < prefix, 0, _diagonal(key_length, query_length, prefix.device))
    bound = (key_length, 0)
    return _clipped(first, torch.full_like(first, query_length), query_length, bound)


def packed_documents(
    cu_seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    is_causal: bool = True,
    key_length: int | None = None,
    query_length: int | None = None,
    max_length: int | None = None,
) -> KeyIntervals:
    """Documents packed one after the other: a query sees the keys of its own document only.

    cu_seqlens_k, cu_seqlens_q: integer [documents + 1], where each document begins, and the total at the
        end; rising from 0. cu_seqlens_q defaults to cu_seqlens_k. Empty documents are allowed.
    is_causal: aligned to the bottom right corner of each document.
    key_length, query_length: the packed lengths, by default the last offsets (reading them synchronises
        with a GPU). Keys past the last document are never visible.
    max_length: the number of keys of the longest document, where it is known. For documents that have as
        many queries as keys (cu_seqlens_q is not given, or is cu_seqlens_k) it makes the `bound`.
    """
    is_causal = resolve_flag(is_causal, "is_causal")
    if max_length is not None:
        check_count(max_length, "max_length")
    for name, length in (("key_length", key_length), ("query_length", query_length)):
        if length is not None:
            _check_length(length, name)
    check_offsets(cu_seqlens_k, "cu_seqlens_k", key_length, longest=max_length)
    if cu_seqlens_q is not None and cu_seqlens_q is not cu_seqlens_k:
        check_offsets(cu_seqlens_q, "cu_seqlens_q", query_length)
    bound = None
    if max_length is not None and (cu_seqlens_q is None or cu_seqlens_q is cu_seqlens_k):
        bound = (max_length if is_causal else 2 * max_length, 1)
    cu_k = cu_seqlens_k.long()
    cu_q = cu_k if cu_seqlens_q is None else cu_seqlens_q.long()
    if cu_k.shape != cu_q.shape:
        raise ValueError(
            f"cu_seqlens_k, cu_seqlens_q: got shapes {tuple(cu_k.shape)}, {tuple(cu_q.shape)}, "
            "expected [documents + 1] both"
        )
    if cu_q.device != cu_k.device:
        raise TypeError(f"cu_seqlens_q: got a tensor on {cu_q.device}, expected {cu_k.device}")
    key_length = int(cu_k[-1]) if key_length is None else key_length
    query_length = int(cu_q[-1]) if query_length is None else query_length
    keys = torch.arange(key_length, device=cu_k.device)
    document = torch.searchsorted(cu_k[1:].contiguous(), keys, right=True)
    past_the_end = cu_q[-1:]  # an empty interval for keys after the last document
    first = torch.cat([cu_q[:-1], past_the_end])[document]
    last = torch.cat([cu_q[1:], past_the_end])[document]
    if is_causal:
        # Counted from their ends, query and key have the same position in a document.
        end_k = torch.cat([cu_k[1:], cu_k[-1:]])[document]
        first = torch.maximum(first, keys - end_k + last)
    return _clipped(first[None, None], last[None, None], query_length, bound)


def from_padding(key_mask: Tensor, query_length: int | None = None) -> KeyIntervals:
    """Hides padding from every query. key_mask: bool [B, key_length], False for padding on any side."""
    check_tensor(key_mask, "key_mask")
    if key_mask.dim() != 2 or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask: got {key_mask.dtype} of shape {tuple(key_mask.shape)}, "
            "expected bool of shape [B, key_length]"
        )
    query_length = _check_lengths(key_mask.shape[1], query_length)
    last = key_mask[:, None] * query_length
    return _clipped(torch.zeros_like(last), last, query_length, (key_mask.shape[1], 0))


def until_faded(
    cumulative: Tensor, prune: float, heads: int, query_length: int | None = None
) -> KeyIntervals:
    """Causality among keys of which a query at position t sees j while cumulative[t] - cumulative[j] >= prune.

    cumulative: [B, H, key_length], never rising; prune: at most 0; heads: H, or a divisor of it: heads of a group see what
        any of them does.
    """
    length = cumulative.shape[2]
    query_length = _check_lengths(length, query_length)
    falling = -cumulative.contiguous()
    last = torch.searchsorted(falling, falling - prune, right=True)  # the first position past prune
    if last.shape[1] not in (1, heads):
        last = last.unflatten(1, (heads, -1)).amax(2)
    first = _diagonal(length, query_length, last.device)
    return _clipped(first.expand_as(last), last - (length - query_length), query_length, None)


def rows_of(intervals: KeyIntervals, begin: int, end: int, key_length: int) -> KeyIntervals:
    """Of the query rows begin to end, and the first keys."""
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


def check_selection(selection: str) -> None:
    if selection not in SELECTIONS:
        raise ValueError(f"selection: got {selection!r}, expected one of {SELECTIONS}")


def check_offsets(
    offsets: Tensor,
    name: str,
    total: int | None = None,
    *,
    longest: int | None = None,
    name_of_longest: str = "max_length",
) -> Tensor:
    """Offsets of packed documents. Their values are checked on the CPU only: on a GPU the check would wait for it.

    longest: how long the documents are at most, as the caller's argument of that name has it.
    """
    check_tensor(offsets, name)
    is_integer = not (offsets.is_floating_point() or offsets.is_complex())
    if offsets.dim() != 1 or not is_integer or offsets.dtype == torch.bool or 0 in offsets.shape:
        raise ValueError(
            f"{name}: got {offsets.dtype} of shape {tuple(offsets.shape)}, "
            "expected int32 of shape [sequences + 1]"
        )
    readable = type(offsets) is Tensor and offsets.device.type == "cpu"
    if readable and not torch.compiler.is_compiling():
        values = offsets.tolist()
        fits = total is None or values[-1] <= total
        if values[0] != 0 or values != sorted(values) or not fits:
            end = "" if total is None else f" and end at {total} at most"
            raise ValueError(
                f"{name}: got {values}, expected offsets that begin at 0, never fall{end}"
            )
        length = max((b - a for a, b in pairwise(values)), default=0)
        if longest is not None and length > longest:
            raise ValueError(
                f"{name_of_longest}: got {longest}, expected at least {length}, the longest of {name}"
            )
    return offsets


def _check_bound(bound: tuple[int, int] | None) -> None:
    if bound is None:
        return
    if not isinstance(bound, (tuple, list)) or len(bound) != 2:
        raise TypeError(f"bound: got {bound!r}, expected None or two integers")
    for value in bound:
        check_count(value, "bound")


def _check_lengths(key_length: int, query_length: int | None) -> int:
    """The query length."""
    _check_length(key_length, "key_length")
    if query_length is None:
        return key_length
    _check_length(query_length, "query_length")
    return query_length


def _check_length(length: int, name: str) -> None:
    """Rows are int32."""
    check_count(length, name)
    if length >= 2**31:
        raise ValueError(f"{name}: got {length}, expected less than 2^31")


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


def _diagonal(key_length: int, query_length: int, device) -> Tensor:
    """[1, 1, key_length]: the query row that stands at each key's position; may lie outside the rows."""
    keys = torch.arange(key_length, device=device)
    return (keys - (key_length - query_length))[None, None]


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
