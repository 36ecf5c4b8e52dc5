"""Rules that say which keys a query sees by their scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, get_type_hints

from torch import Tensor

from .._core.checks import (
    LARGEST_COUNT,
    check_count,
    check_flag,
    clamp_count,
)
from .._core.numerics import check_number

SELECTIONS = ("per_query", "global")


class RuleParts(TypedDict, total=False):
    """The parts of a `KeyRule` besides keep_window_size."""

    selection: str
    recent_window: int
    recent_competes: bool
    sink_tokens: int
    score_threshold: float | None


class KeyRule(RuleParts, total=False):
    """The rule that says which keys a query sees by their scores, as keyword arguments.

        rule = KeyRule(keep_window_size=1024, recent_window=256, sink_tokens=4)
        out = flash_dmattn_func(q, k, v, attn_bias=scores, is_causal=True, **rule)
        cache = KVSlots(batch, heads_kv, head_dim=head_dim, **rule)

    With causality, the query at position t sees a present key at position j <= t when
        - it is one of the first `sink_tokens` present keys (of its document), or
        - t - j < recent_window (the query's own key is one of these), or
        - its score is not NaN, at or above `score_threshold`, and among the best `keep_window_size` of those that compete.
    Higher scores win; of two keys with equal scores, the more recent one wins.

    keep_window_size: how many of the competing keys a query keeps, 0 or more, or a sequence with one number for each
        key head, which its query heads share. By default a query keeps all keys that reach the threshold.
    selection: "per_query", the default: query i keeps the best among the keys it may see; "global": the best of the
        row, the same for all queries (then causal). Caches, layers and context parallelism need "per_query".
    recent_window: how many of the most recent keys a query sees whatever their scores, its own key included; 0 by default.
        Needs causality. DMS trains with t - j <= W, which is recent_window=W + 1; WG-KV trains with t - j < W.
    recent_competes: False, the default: only keys with t - j >= recent_window compete, so a query sees the recent keys and
        the best of the older keys. True: every key competes as soon as it is written, so a query sees the recent keys and
        the best of all keys.
    sink_tokens: the first present keys, which stay visible and do not compete; 0 by default.
    score_threshold: the least score of a key that is kept; None by default. Without keep_window_size, shapes do not limit
        the number of visible keys: every call on a GPU then waits for a count, unless `measured` has counted once.
    """

    keep_window_size: int | Sequence[int]


class SelectionRule(NamedTuple):
    """A KeyRule as a value. The keys that compete are those with t - j >= delay(); sinks never do."""

    keep_window_size: int | Sequence[int] | None = None
    selection: str = "per_query"
    recent_window: int = 0
    recent_competes: bool = False
    sink_tokens: int = 0
    score_threshold: float | None = None

    @staticmethod
    def of_keywords(keep_window_size: object, parts: RuleParts) -> SelectionRule:
        """Makes a rule of arguments of the public functions, unchecked but for their names."""
        for name in parts:
            if name not in SelectionRule._fields:
                raise TypeError(
                    f"{name}: got an unknown argument, expected one in the function's signature; the parts of a rule are "
                    f"{', '.join(SelectionRule._fields)}"
                )
        return SelectionRule(keep_window_size, **parts)

    @staticmethod
    def from_arguments(keep_window_size: object, parts: RuleParts) -> SelectionRule | None:
        """Makes the normal form of arguments of the public functions. None: they hide no key."""
        if keep_window_size is None and not parts:
            return None
        rule = SelectionRule.of_keywords(keep_window_size, parts).checked_rule()
        return rule if rule.hides_keys() else None

    def checked_rule(self) -> SelectionRule:
        """Returns the rule in normal form: counts within int32, a float as threshold, windows as a tuple."""
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
        window, _, recent_window, _, sink_tokens, threshold = self
        is_number = window is not None and not isinstance(window, tuple)
        return is_number and recent_window == 0 and sink_tokens == 0 and threshold is None

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

    def select_operands(self, scores: Tensor, is_causal: bool) -> tuple:
        """Returns the scores [B, H, Sk] with one head for each window, the windows, the operands, and the bound of the result."""
        operands = self.windows(), self.operands(), self.key_bound(is_causal)
        return self.expand_scores(scores), *operands

    def operands(self) -> tuple:
        """Returns the operators' arguments that follow query_length."""
        return self[2:]

    def checked_per_query(self) -> SelectionRule:
        """Checks the rule for text that grows."""
        rule = self.checked_rule()
        if rule.selection != "per_query":
            raise ValueError(
                f"selection: got {rule.selection!r}, expected 'per_query': under another one later tokens and later ranks bring "
                "keys back"
            )
        return rule

    def checked_state_rule(self) -> SelectionRule:
        """Checks the rule for a cache, or for ranks, that hold only the keys that it shows to later queries."""
        rule = self.checked_per_query()
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


def takes_rule(function: Callable) -> Callable:
    """Lists the parts of a rule in the signature of a function that takes them as `**rule`."""
    own, types = inspect.signature(function), get_type_hints(RuleParts)
    parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name]
        )
        for name, default in _DEFAULTS._asdict().items()
        if name in types
    ]
    function.__signature__ = own.replace(parameters=parameters)
    return function
