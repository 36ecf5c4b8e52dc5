"""Rules that say which keys a query sees by their scores, and torch operations that follow them.

The operator select_key_intervals follows a rule if each key's position is its index. The functions here also handle
documents, explicit positions and keys that other intervals show. They read no value back from a GPU, so they do not
wait for it and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core import ops
from .._core.checks import (
    LARGEST_COUNT,
    check_count,
    check_flag,
    clamp_count,
)
from .._core.numerics import check_number
from . import selection_in_torch
from .positions import ShownKeys

SELECTIONS = ("per_query", "global")


class SelectionRule(NamedTuple):
    """A rule. Its parts are arguments of the public functions, whose documentation describes them.

    The query at position t sees a present key at position j <= t when it is one of the first `sink_tokens` present keys,
    or t - j < recent_window, or its score is not NaN, at or above `score_threshold`, and among the best
    `keep_window_size` of the keys that compete: those with t - j >= delay(). Sinks never compete.
    """

    keep_window_size: int | Sequence[int] | None = None  # None: no limit
    selection: str = "per_query"
    recent_window: int = 0
    recent_competes: bool = False
    sink_tokens: int = 0
    score_threshold: float | None = None  # None: no threshold

    def checked_rule(self) -> SelectionRule:
        window = self.keep_window_size
        # Most calls set at most keep_window_size: this saves 3 µs of 30.
        is_count = type(window) is int and 0 <= window <= LARGEST_COUNT
        if (window is None or is_count) and self[1:] == _DEFAULTS[1:]:
            return self
        if isinstance(window, Sequence) and not isinstance(window, (str, bytes)):
            if not window:
                raise ValueError("keep_window_size: got no sizes, expected one for each key head")
            for size in window:
                check_count(size, "keep_window_size")
            window = tuple(map(clamp_count, window))
        elif window is not None:
            check_count(window, "keep_window_size")
            window = clamp_count(window)
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection: got {self.selection!r}, expected one of {SELECTIONS}")
        check_count(self.recent_window, "recent_window")
        check_count(self.sink_tokens, "sink_tokens")
        threshold = self.score_threshold
        if threshold is not None:
            check_number(threshold, "score_threshold")
            threshold = float(threshold)
            if threshold != threshold:
                raise ValueError("score_threshold: got nan, expected a number")
        rule = self._replace(
            keep_window_size=window,
            recent_window=clamp_count(self.recent_window),
            sink_tokens=clamp_count(self.sink_tokens),
            recent_competes=check_flag(self.recent_competes, "recent_competes"),
            score_threshold=threshold,
        )
        if rule.shows_unselected_keys() and not rule.hides_keys():
            name = "recent_window" if rule.recent_window else "sink_tokens"
            raise ValueError(
                f"{name}: got {getattr(rule, name)} without keep_window_size and score_threshold, so that every key is "
                "visible; expected one of them (keep_window_size=0 where no other key is to be seen)"
            )
        return rule

    def non_default_parts(self) -> dict:
        """Returns the parts that differ from their defaults."""
        return {
            name: value
            for name, value in self._asdict().items()
            if value != getattr(_DEFAULTS, name)
        }

    def check_causality(self, is_causal: bool) -> None:
        if self.recent_window > 0 and not is_causal:
            raise ValueError(
                f"recent_window: got {self.recent_window} with is_causal=False, expected 0, as no key is recent then"
            )

    def delay(self) -> int:
        """Returns for how many positions after itself a key does not compete."""
        return 0 if self.recent_competes else self.recent_window

    def hides_keys(self) -> bool:
        """Whether the rule can hide keys."""
        return self.keep_window_size is not None or self.score_threshold is not None

    def shows_unselected_keys(self) -> bool:
        """Whether the rule shows keys that are not selected by their scores."""
        return self.recent_window > 0 or self.sink_tokens > 0

    def is_window(self) -> bool:
        """Whether the rule is a single number of keys and nothing else."""
        return not (
            self.shows_unselected_keys()
            or self.keep_window_size is None
            or isinstance(self.keep_window_size, tuple)
            or self.score_threshold is not None
        )

    def reads_scores(self) -> bool:
        """Whether the rule reads scores."""
        return self.score_threshold is not None or any(self.windows() or (1,))

    def windows(self) -> Sequence[int]:
        """Returns the windows as the operators take them: none, one for all heads, or one for each head."""
        if self.keep_window_size is None:
            return ()
        if isinstance(self.keep_window_size, tuple):
            return self.keep_window_size
        return (self.keep_window_size,)

    def operands(self) -> tuple:
        """Returns the operators' arguments that follow query_length."""
        return self.recent_window, self.recent_competes, self.sink_tokens, self.score_threshold

    def checked_state_rule(self) -> SelectionRule:
        """Checks the rule for a cache, or for ranks, that hold only the keys that it shows to later queries."""
        rule = self.checked_rule()
        if rule.selection != "per_query":
            raise ValueError(
                f"selection: got {rule.selection!r}, expected 'per_query': under another one later tokens and later ranks bring "
                "keys back"
            )
        if rule.keep_window_size is None:
            raise ValueError(
                "keep_window_size: got None, expected a number of keys, since a cache and a rank have room for that many. With "
                "score_threshold it is the most keys that the threshold may keep"
            )
        return rule

    def checked_cache_rule(self) -> SelectionRule:
        """Checks the rule for a cache, which needs at least one place."""
        rule = self.checked_state_rule()
        if rule.place_count() < 1:
            raise ValueError(
                "keep_window_size: got 0, expected 1 or more where there is no recent_window and no sink_tokens"
            )
        return rule

    def check_heads(self, heads: int) -> None:
        """Raises ValueError unless there is one window, or one for each of `heads` key heads."""
        sizes = len(self.windows())
        if sizes > 1 and sizes != heads:
            raise ValueError(
                f"keep_window_size: got {sizes} sizes, expected one, or {heads}: one for each key head"
            )

    def place_count(self) -> int:
        """Returns the most keys that a query sees. The rule has to have a window."""
        return self.sink_tokens + max(self.windows()) + self.recent_window

    def places_of_heads(self, heads: int) -> list[int]:
        """Returns the most keys that a query of each head sees. The rule has to have a window."""
        windows = self.windows()
        sizes = windows if len(windows) == heads else windows * heads
        return [self.sink_tokens + window + self.recent_window for window in sizes]

    def has_equal_heads(self) -> bool:
        """Whether all heads have one window. The rule has to have a window."""
        return len(set(self.windows())) == 1

    def cache_arguments(self) -> tuple[list[int], float]:
        """Returns the operators' arguments that follow the six tensors of a cache."""
        threshold = -math.inf if self.score_threshold is None else self.score_threshold
        numbers = [self.sink_tokens, self.recent_window, int(self.recent_competes)]
        return [*numbers, *self.windows()], threshold

    def has_room_for(self, key_length: int) -> bool:
        """Whether the rule hides no key out of `key_length`, except those whose score is NaN."""
        return self.score_threshold is None and all(w >= key_length for w in self.windows())

    def key_bound(self, is_causal: bool, documents: bool = False) -> tuple[int, int] | None:
        """Returns KeyIntervals.bound if it follows from the rule, or None for a threshold without a window.

        documents: whether rows consist of documents with equal numbers of queries and keys.
        """
        if self.keep_window_size is None:
            return None
        seen = max(self.windows()) + self.recent_window + self.sink_tokens
        arriving = is_causal and self.selection == "per_query"
        if documents and not arriving:
            # n consecutive queries see the kept keys of their first and their last document. Each document in between
            # has at most as many keys as queries.
            return 2 * seen, 1
        return seen, int(arriving or self.recent_window > 0)

    def competing_scores(self, scores: Tensor, eligible: Tensor | None) -> Tensor:
        """Returns the scores of the keys that compete, and NaN for the other keys."""
        if self.score_threshold is not None:
            above = scores.double() >= self.score_threshold
            eligible = above if eligible is None else eligible & above
        return scores if eligible is None else torch.where(eligible, scores, float("nan"))

    def rule_of_heads(self, heads: int) -> SelectionRule:
        """Returns the rule for `heads` heads of scores. Each query head of a group has the window of its key head."""
        windows = self.windows()
        if len(windows) < 2 or heads <= len(windows):
            return self
        group, rest = divmod(heads, len(windows))
        if rest:
            raise ValueError(
                f"keep_window_size: got {len(windows)} sizes, expected one, or one for each key head; {heads} heads of scores "
                f"are no multiple of {len(windows)}"
            )
        return self._replace(keep_window_size=tuple(w for w in windows for _ in range(group)))

    def expand_scores(self, scores: Tensor) -> Tensor:
        """Expands scores [B, H, Sk] to one head for each window."""
        windows = len(self.windows())
        if windows < 2 or scores.shape[1] == windows:
            return scores
        if scores.shape[1] != 1:
            raise ValueError(
                f"keep_window_size: got {windows} sizes, expected one, or {scores.shape[1]} for as many heads of scores"
            )
        return scores.expand(-1, windows, -1)


_DEFAULTS = SelectionRule()


def intervals_of_rule(
    scores: Tensor, shown: ShownKeys, rule: SelectionRule, is_causal: bool, query_length: int
) -> Tensor:
    """Returns the intervals, int32 [B, H, Sk, 2], of the shown keys that a rule keeps.

    scores: [B or 1, H or 1, Sk].
    """
    first, last, own_row, appears, document = shown
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
    scores = rule.competing_scores(scores.detach(), eligible).expand(shape)
    if document is not None:
        scores = rank_by_document(scores, document)
    # Keys are selected as if every key appeared with a query of its own: key t appears at row t.
    library = ops if ops.has_kernels_for(scores) else selection_in_torch
    length = shape[-1]
    moments = library.select_key_intervals(
        scores, None, rule.windows(), "per_query", True, length
    ).long()
    selected = moments[..., 1] > moments[..., 0]
    beaten_by = moments[..., 1]
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


def find_sinks(shown: ShownKeys, rule: SelectionRule) -> Tensor:
    """Returns whether each key is a sink, bool [B or 1, H or 1, Sk]."""
    visible = shown.first < shown.last
    return visible & (rank_in_document(visible, shown.document) < rule.sink_tokens)


def rank_by_document(scores: Tensor, document: Tensor) -> Tensor:
    """Ranks keys by score within a document, and each document above all earlier documents.

    A key of a document that ended before another key appeared then never beats this key. Of two keys with equal scores,
    the later one has the higher rank. NaN stays NaN.
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
    """Returns the number of values below each value. Of two equal values, the later one counts as larger."""
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
