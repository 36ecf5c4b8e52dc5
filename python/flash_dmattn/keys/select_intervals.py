"""Intervals of the keys that a rule keeps by their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core import ops
from .._core.checks import check_tensor, may_read, resolve_flag
from .intervals import KeyIntervals, broadcast_shapes, unchecked_intervals
from .positions import KeyPositions, ShownKeys, check_length
from .recognise import Memo, cached_result, visible_counts
from .rule import SelectionRule
from .selection_in_torch import intervals_of_rule


def select_key_intervals(
    scores: Tensor,
    keep_window_size: int | Sequence[int] | None = None,
    *,
    selection: str = "per_query",
    is_causal: bool = True,
    recent_window: int = 0,
    recent_competes: bool = False,
    sink_tokens: int = 0,
    score_threshold: float | None = None,
    key_mask: Tensor | None = None,
    query_length: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_position: int | Tensor | None = None,
) -> KeyIntervals:
    """Returns the intervals of the keys that a rule keeps for each query by their scores.

    With causality, the query at position t sees a present key at position j <= t when
        - it is one of the first `sink_tokens` present keys (of its document), or
        - t - j < recent_window (the query's own key is one of these), or
        - its score is not NaN, at or above `score_threshold`, and among the best `keep_window_size` of those that compete.

    scores: [B, H, key_length] (or [B, H, 1, key_length], or [B, key_length]), any floating dtype. The
        selection is not differentiable: no gradient flows to the scores.
    keep_window_size: how many of the competing keys a query keeps, 0 or more, or a sequence with one number for each
        head of the scores. None: a query keeps all keys that reach the threshold.
    selection: "per_query": query i keeps the best among the keys it may see; "global": the best of the
        row, the same for all queries (then causal).
    is_causal: query row i may see keys up to i + key_length - query_length.
    recent_window: how many of the most recent keys a query sees whatever their scores, its own key included. Needs
        is_causal. DMS trains with t - j <= W, which is recent_window=W + 1; WG-KV trains with t - j < W.
    recent_competes: False: only keys with t - j >= recent_window compete, so a query sees the recent keys and the best
        of the older keys. True: every key competes as soon as it is written, so a query sees the recent keys and the
        best of all keys.
    sink_tokens: the first present keys, which stay visible and do not compete.
    score_threshold: the least score of a key that is kept. Without keep_window_size, shapes do not limit the number of
        visible keys: every call on a GPU then waits for a count, unless `measured` has counted once.
    key_mask: bool [B, key_length] or [B, H, key_length]; False: the key is not present.
    query_length: defaults to key_length.
    cu_seqlens_k, cu_seqlens_q: offsets of documents packed one after the other, as in packed_documents: int32
        [documents + 1], or [B, documents + 1] if rows of the batch have documents of their own. A query selects among
        the keys of its own document.
    key_positions: the position of each key in its row, if it is not the key's index: integers [key_length],
        [B, key_length] or [B, H, key_length]. No two keys of a row may have the same position. With documents,
        cu_seqlens_k are offsets of positions.
    query_position: the position of the first query row, an integer or integers [B]. The other rows follow it. The
        default is key_length - query_length, or 0 with documents.

    Higher scores win; of two keys with equal scores, the more recent one wins. Keys that are hidden or have the score
    NaN are never selected. The intervals have the shape [B, H, key_length, 2] and include is_causal. The time is
    O(key_length log keep_window_size); with documents or positions the keys are sorted first.
    """
    rule = SelectionRule(
        keep_window_size, selection, recent_window, recent_competes, sink_tokens, score_threshold
    ).checked_rule()
    is_causal = resolve_flag(is_causal, "is_causal")
    if not rule.hides_keys():
        raise TypeError("keep_window_size: got None, expected a number of keys, or score_threshold")
    scores, key_mask = per_key_scores(scores, key_mask)
    query_length = scores.shape[2] if query_length is None else query_length
    check_length(query_length, "query_length")
    if all(t is None for t in (cu_seqlens_k, cu_seqlens_q, key_positions, query_position)):
        return select_by_rule(scores, key_mask, rule, is_causal, query_length)
    keys = KeyPositions.from_arguments(
        scores.shape[2],
        query_length,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        key_mask=key_mask,
        key_positions=key_positions,
        query_position=query_position,
        device=scores.device,
        batch_and_heads=scores.shape[:2],
    )
    return select_at(keys, scores, rule, is_causal)


def select_by_rule(
    scores: Tensor,
    key_mask: Tensor | None,
    rule: SelectionRule,
    is_causal: bool,
    query_length: int,
) -> KeyIntervals:
    """Does what select_key_intervals does, for arguments in normal form: scores and key_mask [B or 1, H or 1, Sk]."""
    rule.check_causality(is_causal)
    if not ops.has_kernels_for(scores):
        keys = KeyPositions.from_arguments(
            scores.shape[2], query_length, key_mask=key_mask, device=scores.device
        )
        return select_at(keys, scores, rule, is_causal)
    scores = rule.expand_scores(scores)
    if key_mask is not None:
        scores, key_mask = torch.broadcast_tensors(scores, key_mask)
    intervals = ops.select_key_intervals(
        scores, key_mask, rule.windows(), rule.selection, is_causal, query_length, *rule.operands()
    )
    return unchecked_intervals(intervals, query_length, rule.key_bound(is_causal))


def select_at(
    keys: KeyPositions, scores: Tensor, rule: SelectionRule, is_causal: bool
) -> KeyIntervals:
    """Selects keys in documents, or keys whose position is not their index. scores: [B, H, key_length]."""
    rule.check_causality(is_causal)
    selected = intervals_of_rule(
        keys.scores_by_position(scores),
        keys.shown_keys(is_causal),
        rule,
        is_causal,
        keys.query_length,
    )
    bound = None
    if keys.same_length:
        bound = rule.key_bound(is_causal, documents=keys.document is not None)
    return unchecked_intervals(keys.intervals_by_index(selected), keys.query_length, bound)


def select_among_intervals(
    scores: Tensor, allowed: KeyIntervals, rule: SelectionRule, memo: Memo | None = None
) -> KeyIntervals | None:
    """Selects the keys that a rule keeps among the keys that each query is allowed to see. Returns intervals, or None.

    Usually intervals describe the selection: while a key is visible, more and more keys that beat it appear, so a key that
    has dropped out stays out, unless a key that beats it leaves. So keys have to appear in the order of their
    positions, and leave all together (causal, padding, prefix) or in groups, where each group leaves before the next
    one appears (packed documents). Query i is at position i + Sk - Sq.

    Args:
        scores: float [B or 1, H or 1, Sk]. Higher scores win; of two equal scores, the later key wins; NaN never wins.
        allowed: [B or 1, H or 1, Sk, 2].

    Compiled code and CUDA graph capture read no values. They accept only intervals without a bound, such as the masks
    of models, and assert at run time that keys appear in this order, and one at a time except at the first query. The
    bound of the result needs the latter.

    Returns:
        None if no intervals describe the selection, for example under a sliding window wider than `keep_window_size`.
    """
    reading = may_read()
    if 0 in allowed.intervals.shape or allowed.query_length == 0:
        return allowed
    if not reading:
        if allowed.bound is not None:
            return None  # such as windows; masks of models come without a bound
    else:
        order = cached_result(memo, "order", allowed.intervals, lambda _: _find_order(allowed))
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
            "flash_dmattn: a compiled selection among keys of these intervals is not supported; expected keys that "
            "appear one by one and leave together",
        )
    document = None
    if not reading or order.group_count > 1:
        document = _documents(visible, last, left_before)
    own_row = torch.arange(allowed.key_length, device=first.device)[None, None]
    own_row = own_row - (allowed.key_length - allowed.query_length)
    shown = ShownKeys(first.long(), last.long(), own_row, appears.long(), document)
    intervals = intervals_of_rule(scores, shown, rule, True, allowed.query_length)
    if not reading:  # a query sees at most the keys that the rule keeps, and adds at most one
        return KeyIntervals(intervals, allowed.query_length, rule.key_bound(True))
    return KeyIntervals(intervals, allowed.query_length).measured()


def per_key_scores(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checks scores and key_mask, and returns both in normal form, [B, H, key_length]."""
    scores = _per_key(scores, "scores").detach()
    if not scores.is_floating_point():
        raise TypeError(f"scores: got {scores.dtype}, expected a floating dtype")
    if key_mask is not None:
        key_mask = _per_key(key_mask, "key_mask")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: got {key_mask.dtype}, expected torch.bool")
        shape = broadcast_shapes(scores.shape, key_mask.shape, "key_mask")
        scores, key_mask = scores.expand(shape), key_mask.expand(shape)
    return scores, key_mask


def _per_key(tensor: Tensor, argument: str) -> Tensor:
    """Returns a tensor with one value per key as [B, H, key_length]."""
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


class _Order(NamedTuple):
    """The numbers that a selection among intervals reads from the device."""

    most_visible: int  # the most keys that a query sees
    is_in_order: bool  # whether keys appear and leave as `select_among_intervals` needs
    group_count: int  # the most groups of keys that leave together in a row


def _find_order(allowed: KeyIntervals) -> _Order:
    visible, _, left_before, in_order = _interval_order(allowed.intervals)
    documents = _documents(visible, allowed.intervals[..., 1], left_before)
    return _Order(
        int(visible_counts(allowed).max()),
        bool((in_order | ~visible).all()),
        int(documents.max()),
    )


def _interval_order(intervals: Tensor) -> tuple[Tensor, ...]:
    """Returns four facts of each key: whether any query sees it, a lower bound of its first query, the last query of
    all earlier keys, and whether its start and end are in order."""
    first, last = intervals.unbind(-1)
    visible = last > first
    appears = torch.where(visible, first, 0).cummax(-1).values
    left_before = F.pad(last.cummax(-1).values[..., :-1], (1, 0))
    in_order = (first == appears) & ((last == left_before) | (first >= left_before))
    return visible, appears, left_before, in_order


def _documents(visible: Tensor, last: Tensor, left_before: Tensor) -> Tensor:
    """Numbers the groups of keys that leave together, and returns the number of each key's group."""
    return (visible & (last > left_before)).cumsum(-1)
