"""The order in which kernels visit the keys of key intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, frexp

from ..._core import ops
from ...keys import in_torch
from .tiles import TILE_ROWS


class TileLists(NamedTuple):
    """The keys that any of TILE_ROWS consecutive queries sees; those that all of them see (`full`) come first.

    Tile t of (b, h) has keys[begin[.., t]] to keys[begin[.., t] + count[.., t]].
    """

    keys: Any  # int32 [entries]
    begin: Any  # int64 [rows, tiles]
    count: Any  # int32 [rows, tiles]
    full: Any  # int32 [rows, tiles]
    batch: int  # strides in rows; a row is one [Sk] of intervals
    head: int


def build_tile_lists(intervals: Tensor, seqlen_q: int, bound: list[int]) -> TileLists:
    """Builds tile lists. intervals: int32 [B or 1, Hkv or 1, Sk, 2].

    bound: (base, per_query) if n consecutive queries together see at most base + per_query n keys. If it is empty, the
    keys are counted first, which waits for the device.
    """
    library = ops if ops.has_kernels_for(intervals) else in_torch
    keys, begin, count, full = library.build_tile_lists(intervals, TILE_ROWS.value, seqlen_q, bound)
    batch, heads = intervals.shape[:2]
    return TileLists(keys, begin, count, full, heads if batch > 1 else 0, 1 if heads > 1 else 0)


def lifetime_order(intervals: Tensor) -> Tensor:
    """Returns int32 [B or 1, Hkv or 1, Sk]: the keys sorted by the power of two of their lifetime, then by their first
    query.

    The cost of a key-major kernel is the number of queries from the earliest `first` to the latest `last`
    of each block of keys. In this order that is at most twice the mean lifetime, and the spread of their firsts adds
    at most one sequence per octave: Sq log2(Sq) in all, for any intervals.
    """
    first, last = intervals.long().unbind(-1)
    lifetime = (last - first).clamp(min=0)
    octave = frexp(lifetime.float()).exponent  # 0 for keys that no query sees
    rank = octave.long() << 32 | first.clamp(min=0)
    return rank.sort(dim=-1, stable=True).indices.int()
