"""The keys that a query sees, as one interval of queries per key.

Key j is visible to row i of the query exactly when ``first[j] <= i < last[j]``. Row i is at key
position ``i + key_length - query_length`` (the last query sees the last key). Two integers per key replace
the query_length x key_length mask, and every constructor takes O(key_length) time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from .._core import ops
from .._core.checks import check_count, check_on_device, check_tensor, clamp_count, resolve_flag
from .positions import KeyPositions, check_length

_NEVER = 2**31 - 1
QUERY_TILE_ROWS = 128  # queries that share a list of keys on a GPU (query_tile_rows in src/cuda/attention/params.h)


@dataclass(frozen=True, eq=False, repr=False)
class KeyIntervals:
    """Intervals of query rows, one per key.

    intervals: int32 [B or 1, Hkv or 1, key_length, 2]; the last dimension is (first, last). A key whose
        first >= last is never visible.
    query_length: the number of query rows that the intervals refer to.
    bound: (base, per_query): any n consecutive queries together see at most base + per_query * n keys. On a GPU it
        limits the memory of lists of keys. Without a bound, every call has to count the keys first: it waits for the
        GPU and cannot be captured in a CUDA graph. `measured` counts them once. If a bound is too small, attention
        loses keys.
    consecutive: every query sees consecutive keys, or nearly, as in windows and packed documents. The flag changes no
        result: with it, a GPU makes no lists and needs no bound, which is faster for such keys and slower for others.
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
        """Returns the number of keys."""
        return self.intervals.shape[2]

    @property
    def heads(self) -> int:
        """Returns the number of heads, 1 if all have the same intervals."""
        return self.intervals.shape[1]

    def fits(self, batch: int, heads: tuple[int, ...], key_length: int) -> bool:
        """Whether there is an interval for each key of [batch, one of heads], if need be after broadcasting."""
        own_batch, own_heads, own_length, _ = self.intervals.shape
        fits = broadcasts(own_batch, batch) and any(broadcasts(own_heads, h) for h in heads)
        return fits and own_length == key_length

    def shown_keys(self) -> Tensor:
        """Returns whether any query sees each key, bool [B or 1, Hkv or 1, key_length]."""
        first, last = self.intervals.unbind(-1)
        return first < last

    def to(self, device: torch.device | str) -> KeyIntervals:
        """Returns these intervals on a device."""
        return self.with_intervals(self.intervals.to(device))

    def with_intervals(self, intervals: Tensor) -> KeyIntervals:
        """Returns other intervals with this bound and this `consecutive`."""
        return KeyIntervals(intervals, self.query_length, self.bound, self.consecutive)

    def measured(self) -> KeyIntervals:
        """Returns the same intervals with a measured bound, and with `consecutive` set if they are consecutive.

        The bound holds for attention's tiles: 64 or more queries that begin at a multiple of their number. Other
        consecutive queries may see more keys. If the library has no kernels for the device, nothing is measured.
        """
        if self.bound is not None or not ops.has_kernels_for(self.intervals):
            return self
        bound = ops.measure_key_bound(self.intervals, self.query_length)
        consecutive = self.consecutive or _are_consecutive(self.intervals)
        return KeyIntervals(self.intervals, self.query_length, tuple(bound), consecutive)

    def to_mask(self) -> Tensor:
        """Returns the mask that equals the intervals, bool [B or 1, Hkv or 1, query_length, key_length].

        It is for display and for tests: this is the quadratic array that the intervals avoid.
        """
        rows = torch.arange(self.query_length, device=self.intervals.device)[:, None]
        first, last = self.intervals[:, :, None].unbind(-1)
        return (first <= rows) & (rows < last)


def check_intervals(key_intervals: KeyIntervals, query: Tensor, key: Tensor) -> None:
    if not isinstance(key_intervals, KeyIntervals):
        raise TypeError(f"key_intervals: got {type(key_intervals).__name__}, expected KeyIntervals")
    batch, seqlen_q = query.shape[:2]
    seqlen_k, heads_kv = key.shape[1:3]
    shape = key_intervals.intervals.shape
    heads_q = query.shape[2]
    fits = key_intervals.fits(batch, (heads_kv, heads_q), seqlen_k)
    if not fits or key_intervals.query_length != seqlen_q:
        raise ValueError(
            f"key_intervals: got intervals of shape {tuple(shape)} for query length "
            f"{key_intervals.query_length}, expected [{batch} or 1, {heads_kv}, {heads_q} or 1, {seqlen_k}, 2] for "
            f"{seqlen_q}"
        )
    if key_intervals.intervals.device != query.device:
        check_on_device(key_intervals.intervals, "key_intervals", query.device)


def split_by_age(
    keys: KeyIntervals, age: int, own_row: Tensor | None = None
) -> tuple[KeyIntervals, KeyIntervals]:
    """Splits the keys that a query sees into two parts: recent keys and older keys.

    A recent key is after the query or fewer than `age` positions before it.
    own_row: the row at each key's position, [B or 1, H or 1, key_length]; by default the last query is at
        the last key.
    """
    first, last = keys.intervals.long().unbind(-1)
    if own_row is None:
        own_row = KeyPositions.from_arguments(
            keys.key_length, keys.query_length, device=first.device
        ).own_row
    end = own_row + clamp_count(age)  # where the key is no longer recent
    parts = (first, torch.minimum(last, end)), (torch.maximum(first, end), last)
    return tuple(
        clipped_intervals(
            *torch.broadcast_tensors(*part), keys.query_length, keys.bound, keys.consecutive
        )
        for part in parts
    )


def broadcasts(size: int, to: int) -> bool:
    """Whether a size broadcasts to another one. (In compiled code `size in (1, to)` can be False for a number and a
    symbol that are equal.)"""
    return size == 1 or size == to


def _are_consecutive(intervals: Tensor) -> bool:
    """Whether a kernel is faster with blocks of neighbouring keys than with lists of keys. Waits for a GPU.

    With blocks of 128 keys, a kernel computes all queries that see any key of the block. With lists for tiles of 128
    queries, it computes for each key the queries that see it, rounded up to tiles. For the same number of queries,
    blocks take three quarters of the time.
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


# torch.compile and checkpointing handle KeyIntervals as a pytree whose leaf is their tensor.
_pytree.register_pytree_node(
    KeyIntervals,
    lambda value: ([value.intervals], (value.query_length, value.bound, value.consecutive)),
    lambda leaves, context: unchecked_intervals(leaves[0], *context),
    serialized_type_name=f"{ops.NAMESPACE}.KeyIntervals",
)


def unchecked_intervals(leaf, query_length, bound, consecutive=False) -> KeyIntervals:
    # While a pytree is mapped over, its leaves may have any type, so the checks are skipped.
    value = object.__new__(KeyIntervals)
    object.__setattr__(value, "intervals", leaf)
    object.__setattr__(value, "query_length", query_length)
    object.__setattr__(value, "bound", bound)
    object.__setattr__(value, "consecutive", consecutive)
    return value


def cut_query_rows(intervals: KeyIntervals, begin: int, end: int, key_length: int) -> KeyIntervals:
    """Returns the intervals of the query rows [begin, end) and of the first `key_length` keys."""
    first, last = (intervals.intervals[:, :, :key_length] - begin).unbind(-1)
    return clipped_intervals(first, last, end - begin, intervals.bound, intervals.consecutive)


def intersect(*parts: KeyIntervals) -> KeyIntervals:
    """Returns the intervals of the keys that all parts show. Batch and head dimensions broadcast."""
    if not parts:
        raise ValueError("intersect: got no intervals, expected one or more")
    for part in parts:
        if not isinstance(part, KeyIntervals):
            raise TypeError(f"intersect: got {type(part).__name__}, expected KeyIntervals")
    query_length, key_length = parts[0].query_length, parts[0].key_length
    # A set would hash the lengths, which would make them constants of torch.compile.
    for part in parts[1:]:
        if part.query_length != query_length or part.key_length != key_length:
            lengths = [(part.query_length, part.key_length) for part in parts]
            raise ValueError(
                f"intersect: got (query_length, key_length) {sorted(lengths)}, expected all equal"
            )
    for a, b in pairwise(part.intervals for part in parts):
        broadcast_shapes(a.shape, b.shape, "intersect")
    first = reduce(torch.maximum, (part.intervals[..., 0] for part in parts))
    last = reduce(torch.minimum, (part.intervals[..., 1] for part in parts))
    bound, tile = None, QUERY_TILE_ROWS
    for part in parts:  # not min(), which compiled code cannot have with a key
        part_bound = part.bound
        if part_bound is None:
            continue
        if bound is None or part_bound[0] + tile * part_bound[1] < bound[0] + tile * bound[1]:
            bound = part_bound
    consecutive = all(part.consecutive for part in parts)
    return clipped_intervals(first, last, query_length, bound, consecutive)


def _check_bound(bound: tuple[int, int] | None) -> None:
    if bound is None:
        return
    if not isinstance(bound, (tuple, list)) or len(bound) != 2:
        raise TypeError(f"bound: got {bound!r}, expected None or two integers")
    for value in bound:
        check_count(value, "bound")


def clipped_intervals(
    first: Tensor,
    last: Tensor,
    query_length: int,
    bound: tuple[int, int] | None,
    consecutive: bool = True,
) -> KeyIntervals:
    """Clips intervals to the query rows. An empty interval becomes (0, 0)."""
    first, last = first.clamp(min=0), last.clamp(max=query_length)
    intervals = torch.stack([first, last], dim=-1) * (first < last).unsqueeze(-1)
    return KeyIntervals(intervals.to(torch.int32), query_length, bound, consecutive)


def broadcast_shapes(a: torch.Size, b: torch.Size, argument: str) -> torch.Size:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        raise ValueError(
            f"{argument}: got shape {tuple(b)}, expected one that broadcasts with {tuple(a)}"
        ) from None
