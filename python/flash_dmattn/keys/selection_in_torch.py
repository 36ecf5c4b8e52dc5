"""Selection and tile lists in torch's own operators, for GPUs without kernels of the C++ library.

No tensor here has Sq x Sk elements, and there is no loop over keys. The time is O(Sk log Sk) and O(entries log
entries).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ENTRIES = 2**24  # lists that may have more entries are counted first


def select_key_intervals(
    scores: Tensor,
    key_mask: Tensor | None,
    windows: Sequence[int],
    selection: str,
    is_causal: bool,
    query_length: int,
    recent_window: int = 0,
    recent_competes: bool = False,
    sink_tokens: int = 0,
    score_threshold: float | None = None,
) -> Tensor:
    """Does what the operator select_key_intervals does for windows: scores [B, H, Sk] -> int32 [B, H, Sk, 2]."""
    assert (recent_window, sink_tokens, score_threshold) == (0, 0, None)
    key_length = scores.shape[-1]
    eligible = ~scores.isnan()
    if key_mask is not None:
        eligible = eligible & key_mask
    ranked = _positions_by_rank(scores, eligible)
    rank = torch.arange(key_length, device=scores.device)
    shift = key_length - query_length  # position minus row
    first = ranked - shift if is_causal else torch.zeros_like(ranked)
    # [heads or 1, 1]
    # torch.full: a copy from a list would wait for the GPU.
    sizes = windows or [key_length]
    window = torch.stack([torch.full((1,), size, device=scores.device) for size in sizes])
    last = torch.where(rank < window, query_length, 0).expand_as(ranked)
    if is_causal and selection == "per_query" and any(0 < w < key_length for w in windows):
        # A key leaves at the position of the window-th key that beats it, and is never visible again.
        out_at = _kth_smallest_before(ranked, (window - 1).clamp(min=0))
        last = torch.where((rank < window) | (window == 0), last, out_at - shift)
    first, last = first.clamp(min=0), last.clamp(max=query_length)
    visible = (first < last) & eligible.gather(-1, ranked)
    by_rank = torch.stack([first, last], -1) * visible[..., None]
    by_position = torch.empty_like(by_rank).scatter_(
        2, ranked[..., None].expand_as(by_rank), by_rank
    )
    return by_position.int()


def _positions_by_rank(scores: Tensor, eligible: Tensor) -> Tensor:
    """Sorts the positions of keys, int64 [B, H, Sk]: the best key first, the more recent of two equal keys first, and
    keys that are not eligible last."""
    last = scores.shape[-1] - 1
    ranked = last - (scores + 0.0).flip(-1).argsort(dim=-1, descending=True, stable=True)  # -0 is 0
    return ranked.gather(
        -1, eligible.gather(-1, ranked).logical_not().int().argsort(dim=-1, stable=True)
    )


def _kth_smallest_before(values: Tensor, k: Tensor) -> Tensor:
    """Finds, for each r, the k-th smallest (from 0) of values[: r]. Returns [B, H, n], undefined where r <= k.

    values: a permutation of 0..n - 1 in each row. k: [H or 1, 1].

    The algorithm is a wavelet matrix. For each bit from the highest one on, every r counts how many of its values have
    a 0 in this bit, and goes to the half that has its result. The values are then partitioned by this bit, stably.
    """
    n = values.shape[-1]
    index = torch.arange(n, device=values.device).expand_as(values)
    begin, end = torch.zeros_like(values), index
    remaining, kth = k.expand_as(values), torch.zeros_like(values)
    for bit in reversed(range(max(n - 1, 1).bit_length())):
        ones = values >> bit & 1
        zeros_before = F.pad((1 - ones).cumsum(-1), (1, 0))
        zeros = zeros_before[..., -1:]
        zeros_begin, zeros_end = zeros_before.gather(-1, begin), zeros_before.gather(-1, end)
        zeros_inside = zeros_end - zeros_begin
        to_ones = remaining >= zeros_inside
        remaining = torch.where(to_ones, remaining - zeros_inside, remaining)
        kth = kth + (to_ones.long() << bit)
        begin = torch.where(to_ones, zeros + begin - zeros_begin, zeros_begin)
        end = torch.where(to_ones, zeros + end - zeros_end, zeros_end)
        zeros_before = zeros_before[..., :-1]
        place = torch.where(ones == 1, zeros + index - zeros_before, zeros_before)
        values = torch.empty_like(values).scatter_(-1, place, values)
    return kth


def build_tile_lists(
    intervals: Tensor, tile_rows: int, query_length: int, bound: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Does what the operator build_tile_lists does. Returns keys [entries], and begin, count and full [B, H, tiles].

    bound: a small bound determines the size of the lists, so that the host does not wait for the device.
    """
    batch, heads, key_length, _ = intervals.shape
    tiles = -(-query_length // tile_rows)
    lists = batch * heads * tiles
    first, last = intervals.long().unbind(-1)
    first, last = first.clamp(min=0), last.clamp(max=query_length)
    seen = first < last
    tile_begin = torch.where(seen, first // tile_rows, 0)
    tile_end = torch.where(seen, -(-last // tile_rows), 0)
    full_begin = -(-first // tile_rows)
    full_end = torch.where(last == query_length, tiles, last // tile_rows)
    wide = seen & (full_begin < full_end)
    count = count_ranges(tile_begin, tile_end, tiles)
    full = count_ranges(torch.where(wide, full_begin, 0), torch.where(wide, full_end, 0), tiles)
    begin = F.pad(count.flatten().cumsum(0), (1, 0))[:-1]

    capacity = min(key_length, bound[0] + bound[1] * tile_rows) * lists if bound else None
    if capacity is None or capacity > MOST_ENTRIES:
        capacity = int(count.sum())  # waits for the device
    # Entries are made in key order, and then sorted by tile with full keys first.
    entries_before = (tile_end - tile_begin).flatten().cumsum(0)
    entry = torch.arange(capacity, device=intervals.device)
    key = torch.searchsorted(entries_before, entry, right=True)
    exists = key < entries_before.shape[0]
    key = key.clamp(max=max(entries_before.shape[0] - 1, 0))
    at = entry - (entries_before - (tile_end - tile_begin).flatten())[key] if capacity else entry
    tile = tile_begin.flatten()[key] + at
    is_full = (full_begin.flatten()[key] <= tile) & (tile < full_end.flatten()[key])
    order = 2 * (key // max(key_length, 1) * tiles + tile) + is_full.logical_not()
    order = torch.where(exists, order, 2 * lists).argsort(stable=True)
    keys = (key % max(key_length, 1))[order].int()
    shape = (batch, heads, tiles)
    # If intervals break their bound, keys are lost, but no element outside of `keys` is read.
    count = count.flatten().minimum((capacity - begin).clamp(min=0))
    full = full.flatten().minimum(count)
    return keys, begin.view(shape), count.int().view(shape), full.int().view(shape)


def count_ranges(begin: Tensor, end: Tensor, size: int) -> Tensor:
    """Counts the ranges [begin, end), int64 [B, H, n], that contain each of 0 to size - 1: int64 [B, H, size]."""
    changes = begin.new_zeros((*begin.shape[:2], size + 1))
    one = torch.ones_like(begin)
    changes.scatter_add_(2, begin, one).scatter_add_(2, end, -one)
    return changes.cumsum(2)[..., :size]
