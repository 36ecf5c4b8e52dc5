"""Selection among the keys that intervals show, for selections that intervals describe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import may_read
from .in_torch import intervals_of_rule
from .intervals import KeyIntervals
from .positions import ShownKeys
from .recognise import Memo, cached_result, visible_counts
from .rule import SelectionRule


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
        most_visible, is_in_order, groups = cached_result(
            memo, "order", allowed.intervals, lambda _: _find_order(allowed)
        )
        if rule.has_room_for(most_visible) and not scores.isnan().any():
            return allowed
        if not is_in_order:
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
    if not reading or groups > 1:
        document = _documents(visible, last, left_before)
    own_row = torch.arange(allowed.key_length, device=first.device)[None, None]
    own_row = own_row - (allowed.key_length - allowed.query_length)
    shown = ShownKeys(first.long(), last.long(), own_row, document)
    intervals = intervals_of_rule(scores, shown, rule, True, allowed.query_length)
    if not reading:  # a query sees at most the keys that the rule keeps, and adds at most one
        return KeyIntervals(intervals, allowed.query_length, rule.key_bound(True))
    return KeyIntervals(intervals, allowed.query_length).measured()


def _find_order(allowed: KeyIntervals) -> tuple[int, bool, int]:
    """Reads from the device the most keys that a query sees, whether keys appear and leave as `select_among_intervals`
    needs, and the most groups of keys that leave together in a row."""
    visible, _, left_before, in_order = _interval_order(allowed.intervals)
    documents = _documents(visible, allowed.intervals[..., 1], left_before)
    most_visible = int(visible_counts(allowed).max())
    return most_visible, bool((in_order | ~visible).all()), int(documents.max())


def _interval_order(intervals: Tensor) -> tuple[Tensor, ...]:
    """Returns four facts of each key: whether any query sees it, a lower bound of its first query, the last query that
    sees an earlier key, and whether its start and end are in order."""
    first, last = intervals.unbind(-1)
    visible = last > first
    appears, left = (torch.where(visible, row, 0).cummax(-1).values for row in (first, last))
    left_before = F.pad(left[..., :-1], (1, 0))
    in_order = (first == appears) & ((last == left_before) | (first >= left_before))
    return visible, appears, left_before, in_order


def _documents(visible: Tensor, last: Tensor, left_before: Tensor) -> Tensor:
    """Numbers the groups of keys that leave together, and returns the number of each key's group."""
    return (visible & (last > left_before)).cumsum(-1)
