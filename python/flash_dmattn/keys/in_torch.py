"""Selection and tile lists in torch's operators.

They serve what the C++ library has no operator for: documents, explicit positions, keys that other intervals show, dense
masks, and GPUs without its kernels. There is no loop over keys, and no value is read back from a GPU, so that the host
waits for nothing and CUDA graphs can capture the calls; only tile lists without a small bound are counted first. Apart
from dense masks no tensor has Sq x Sk elements. The time is O(Sk log Sk) and O(entries log entries).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from .._core import ops
from .positions import ShownKeys
from .rule import SelectionRule

MOST_ENTRIES = 2**24  # lists that may have more entries are counted first
_STEP_ELEMENTS = 2**24  # scores in one step of `best_elements`, which limits its temporaries


def intervals_of_rule(
    scores: Tensor, shown: ShownKeys, rule: SelectionRule, is_causal: bool, query_length: int
) -> Tensor:
    """Returns the intervals, int32 [B, H, Sk, 2], of the shown keys that a rule keeps.

    scores: [B or 1, H or 1, Sk].
    """
    first, last, own_row, document = shown
    appears = first.clamp(min=0)
    scores = rule.expand_scores(scores)
    shape = torch.broadcast_shapes(scores.shape, first.shape, last.shape)
    visible = first < last
    competes_at = appears
    if rule.delay():
        competes_at = torch.maximum(appears, own_row + rule.delay())
    eligible = visible
    is_sink = None
    if rule.sink_tokens > 0:
        is_sink = find_sinks(shown, rule)
        eligible = eligible & ~is_sink
    per_query = is_causal and rule.selection == "per_query"
    if not per_query and rule.delay():
        eligible = eligible & (competes_at < last)  # a global selection is made at the last row
    scores = scores.detach()
    if rule.score_threshold is not None:
        eligible = eligible & (scores.double() >= rule.score_threshold)
    scores = torch.where(eligible, scores, float("nan")).expand(shape)
    if document is not None:
        scores = rank_by_document(scores, document)
    # Keys are selected as if every key appeared with a query of its own: key t appears at row t.
    length = shape[-1]
    beaten_by = _beaten_by(scores, rule.windows())
    selected = beaten_by > torch.arange(length, device=scores.device)
    if not per_query:
        # A key of a later document beats every key of earlier documents, but these keys have left by then.
        leaves_before = length if document is None else _end_of_document(document, length)
        selected = selected & (beaten_by >= leaves_before)
        kept_until = last
    else:
        never = torch.full_like(competes_at[..., :1], 2**31 - 1)
        rows = torch.cat([competes_at, never], dim=-1).expand(*shape[:2], -1)
        kept_until = torch.minimum(last, rows.gather(-1, beaten_by))
    end = torch.where(selected, kept_until, 0)
    if rule.recent_window > 0:
        end = torch.maximum(end, torch.minimum(last, own_row + rule.recent_window))
    if is_sink is not None:
        end = torch.where(is_sink, last, end)
    first, end = torch.broadcast_tensors(first.clamp(min=0), end.clamp(max=query_length))
    is_seen = visible & (first < end)
    return (torch.stack([first, end], dim=-1) * is_seen.unsqueeze(-1)).int()


def _beaten_by(scores: Tensor, windows: Sequence[int]) -> Tensor:
    """Returns the index of the key with which a key has as many better keys as its window has places, int64 [B, H, Sk]:
    Sk if there is none, and at most the key's own index if the key is never selected.

    scores: [B, H, Sk]; NaN is never selected. windows: none, one, or one for each head.
    """
    length = scores.shape[-1]
    if ops.has_kernels_for(scores):
        keys = ops.select_key_intervals(scores, None, windows, "per_query", True, length)
        return keys[..., 1].long()
    # The best key first, the more recent one of two equal keys first, and NaN last.
    worst_last = scores + 0.0  # -0 is 0
    ranked = length - 1 - worst_last.flip(-1).argsort(dim=-1, descending=True, stable=True)
    is_nan = scores.isnan()
    ranked = ranked.gather(-1, is_nan.gather(-1, ranked).int().argsort(dim=-1, stable=True))
    rank = torch.arange(length, device=scores.device)
    # torch.full: a copy from a list would wait for the GPU. [heads or 1, 1]
    sizes = [torch.full((1,), size, device=scores.device) for size in windows or [length]]
    window = torch.stack(sizes)
    beaten_by = torch.where(rank < window, length, 0).expand_as(ranked)
    if any(0 < size < length for size in windows):
        # A key leaves with the window-th key that is better, and is never selected again.
        leaves = _kth_smallest_before(ranked, (window - 1).clamp(min=0))
        beaten_by = torch.where((rank < window) | (window == 0), beaten_by, leaves)
    beaten_by = torch.empty_like(ranked).scatter_(-1, ranked, beaten_by)
    return beaten_by.masked_fill(is_nan, 0)


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


def find_sinks(shown: ShownKeys, rule: SelectionRule) -> Tensor:
    """Returns whether each key is a sink, bool [B or 1, H or 1, Sk]."""
    visible = shown.first < shown.last
    return visible & (rank_in_document(visible, shown.document) < rule.sink_tokens)


def rank_by_document(scores: Tensor, document: Tensor) -> Tensor:
    """Ranks keys by score within a document, and each document above all earlier documents.

    A key of a document that ended before another key appeared then never beats this key. The later one
    of two keys with equal scores has the higher rank. NaN stays NaN.
    """
    if scores.dtype == torch.float64:  # 64 bits leave no room for the document
        in_document = _rank(scores)
    else:
        # Float bits compare as integers except for the sign, so one sort has the documents in the upper halves.
        bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0: -0 and +0 are equal
        in_document = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = _rank((document.long() << 32) + in_document)
    exact = torch.float32 if rank.shape[-1] <= 2**24 else torch.float64
    return rank.to(exact).masked_fill(scores.isnan(), float("nan"))


def _rank(values: Tensor) -> Tensor:
    """Returns the number of values below each value. The later one of two equal values counts as larger."""
    order = values.argsort(dim=-1, stable=True)
    rank = torch.empty_like(order)
    return rank.scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    )


def rank_in_document(visible: Tensor, document: Tensor | None) -> Tensor:
    """Returns the number of visible keys before each key in its document."""
    before = visible.long().cumsum(-1) - visible.long()
    if document is None:
        return before
    begins = F.pad(document[..., 1:] != document[..., :-1], (1, 0), value=True)
    before, begins = torch.broadcast_tensors(before, begins)
    return before - torch.where(begins, before, 0).cummax(-1).values


def _end_of_document(document: Tensor, length: int) -> Tensor:
    """Returns the index after the last key of each key's document."""
    keys = torch.arange(length, device=document.device)
    ends = F.pad(document[..., 1:] != document[..., :-1], (0, 1), value=True)
    end = torch.where(ends, keys + 1, length)
    return end.flip(-1).cummin(-1).values.flip(-1)


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
    """Counts the ranges [begin, end), int64 [B, H, n], that contain each of 0 to size - 1: int64 [B, H, size]. A range that ends
    before it begins is empty."""
    end = torch.maximum(begin, end)
    changes = begin.new_zeros((*begin.shape[:2], size + 1))
    one = torch.ones_like(begin)
    changes.scatter_add_(2, begin, one).scatter_add_(2, end, -one)
    return changes.cumsum(2)[..., :size]


def best_elements(
    scores: Tensor, allowed: Tensor, count: int, least: float | None = None
) -> Tensor:
    """Selects the `count` best allowed elements of every row of scores [.., Q or 1, K], as a mask of their common shape.

    The last one of equal scores wins. least: a score at or below it is never selected; None: no score is too low. NaN
    is never selected.
    """
    kept = scores.new_empty(torch.broadcast_shapes(scores.shape, allowed.shape), dtype=torch.bool)
    rows = kept.shape[-2]
    if is_compiling():  # a loop would make the number of rows a constant
        steps = [slice(None)]
    else:
        step = max(1, _STEP_ELEMENTS * rows // max(1, kept.numel()))
        steps = [slice(start, start + step) for start in range(0, rows, step)]
    for some in steps:
        some_scores, some_allowed = (
            t[..., some, :] if t.shape[-2] > 1 else t for t in (scores, allowed)
        )
        is_number = ~some_scores.isnan() if least is None else some_scores > least
        kept[..., some, :] = _keep_best(some_scores, some_allowed & is_number, count)
    return kept


def _keep_best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Returns which keys are the `count` best allowed ones of their row. The last ones of equal scores win."""
    if count >= allowed.shape[-1]:
        return allowed
    if count == 0:
        return torch.zeros_like(allowed)
    if scores.shape[-2] == 1 < allowed.shape[-2]:
        return _keep_best_of_one_order(scores, allowed, count)
    scores = torch.where(allowed, scores, float("-inf"))
    worst_kept = scores.topk(count, dim=-1).values[..., -1:]
    better = scores > worst_kept
    equal = (scores == worst_kept) & allowed
    rank_from_last = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return better | equal & (rank_from_last <= count - better.sum(-1, keepdim=True))


def _keep_best_of_one_order(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Returns what `_keep_best` returns if the rows share their scores, [..., 1, K]: the keys are sorted once.

    A row keeps the allowed keys up to the rank at which it has `count` of them.
    """
    length = allowed.shape[-1]
    newest_first = (scores + 0.0).flip(-1)  # some sorts put 0 before -0
    order = length - 1 - newest_first.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(length, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, ranks)
    shape = torch.broadcast_shapes(order.shape, allowed.shape)
    best_first = allowed.expand(shape).gather(-1, order.expand(shape))
    last_kept = (best_first.cumsum(-1, dtype=torch.int32) < count).sum(-1, keepdim=True)
    return allowed & (rank <= last_kept)
