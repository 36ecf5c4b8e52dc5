"""The order in which kernels meet the keys of key intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import load_interval

_KEYS_AT_ONCE = 1024


class Plan(NamedTuple):
    """Of every tile of queries, the keys that one of them sees: first those that all see (`full`)."""

    keys: Any  # int32 [rows, tiles, capacity]
    count: Any  # int32 [rows, tiles]
    full: Any  # int32 [rows, tiles]
    batch: int  # strides in rows; a row is one [Sk] of intervals
    head: int
    capacity: int


@triton.jit
def plan_kernel(
    intervals, keys, count, full, heads, seqlen_q, seqlen_k, capacity,
    M: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the keys of one query tile, and lists them where WRITE."""
    tiles = tl.cdiv(seqlen_q, M)
    tile = tl.program_id(0) % tiles
    row = tl.program_id(0) // tiles
    begin = tile * M
    end = tl.minimum(begin + M, seqlen_q)
    full_count = tl.zeros((), tl.int32)
    touched_count = tl.zeros((), tl.int32)
    for start in range(0, seqlen_k, BLOCK):
        index = start + tl.arange(0, BLOCK)
        first, last = load_interval(intervals, row // heads, row % heads, index, index < seqlen_k)
        touched = (first < end) & (last > begin) & (first < last)
        touched_count += tl.sum(touched.to(tl.int32))
        full_count += tl.sum((touched & (first <= begin) & (last >= end)).to(tl.int32))
    at = tl.program_id(0).to(tl.int64)
    # Intervals that break their bound make a wrong plan, not a write outside of it.
    tl.store(count + at, tl.minimum(touched_count, capacity))
    tl.store(full + at, tl.minimum(full_count, capacity))
    if WRITE:
        next_full = tl.zeros((), tl.int32)
        next_partial = full_count
        for start in range(0, seqlen_k, BLOCK):
            index = start + tl.arange(0, BLOCK)
            first, last = load_interval(
                intervals, row // heads, row % heads, index, index < seqlen_k
            )
            touched = (first < end) & (last > begin) & (first < last)
            seen_by_all = touched & (first <= begin) & (last >= end)
            partial = touched & ~seen_by_all
            place_full = next_full + tl.cumsum(seen_by_all.to(tl.int32), 0) - 1
            place_partial = next_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
            place = tl.where(seen_by_all, place_full, place_partial)
            tl.store(keys + at * capacity + place, index, mask=touched & (place < capacity))
            next_full += tl.sum(seen_by_all.to(tl.int32))
            next_partial += tl.sum(partial.to(tl.int32))


def build_plan(intervals: Tensor, seqlen_q: int, bound: list[int], tile_rows: int, view) -> Plan:
    """intervals: int32 [B or 1, Hkv or 1, Sk, 2], dense. view: the same as Intervals.

    bound: (base, per_query) where n consecutive queries together see at most base + per_query n keys; or
    nothing, and then the keys are counted first, which waits for the device. Every tile looks at every
    interval: Sq Sk / tile_rows tests, which the attention's own work hides up to millions of keys.
    """
    batch, heads, seqlen_k, _ = intervals.shape
    tiles = triton.cdiv(seqlen_q, tile_rows)
    rows = batch * heads
    count, full = (
        torch.empty((rows, tiles), dtype=torch.int32, device=intervals.device) for _ in range(2)
    )
    per_row = view._replace(batch=heads * seqlen_k * 2, head=seqlen_k * 2)

    def launch(keys, capacity, write):
        plan_kernel[(rows * tiles,)](
            per_row, keys, count, full, heads, seqlen_q, seqlen_k, capacity,
            M=tile_rows, WRITE=write, BLOCK=_KEYS_AT_ONCE,
        )  # fmt: skip

    if bound:
        capacity = min(seqlen_k, bound[0] + bound[1] * tile_rows)
    else:
        launch(count, seqlen_k, False)
        capacity = int(count.max()) if rows * tiles else 0
    keys = torch.empty((rows, tiles, max(capacity, 1)), dtype=torch.int32, device=count.device)
    if rows * tiles:
        launch(keys, keys.shape[2], True)
    return Plan(keys, count, full, heads if batch > 1 else 0, 1 if heads > 1 else 0, keys.shape[2])


def lifetime_order(intervals: Tensor) -> Tensor:
    """[B or 1, Hkv or 1, Sk] int32: the keys by the octave of their lifetime, then by their first query.

    What a key-major kernel costs is the number of queries from the earliest `first` to the latest `last`
    of each block of keys. In this order that is at most twice the mean lifetime, and what blocks add by
    the spread of their firsts is at most one sequence per octave: Sq log2(Sq) in all, for any intervals.
    """
    first, last = intervals.unbind(-1)
    lifetime = (last - first).clamp(min=0)
    octave = torch.frexp(lifetime.float()).exponent  # 0 for keys that nobody sees
    rank = octave.long() << 32 | first.clamp(min=0).long()
    return rank.sort(dim=-1, stable=True).indices.int()
