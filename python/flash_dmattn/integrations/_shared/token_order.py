"""Rows of a batch without the padding between their tokens: a recent window counts tokens, not columns.

A row has such padding when it got a short message beside a long one. Without it, the row is that of the text alone.
`TokenOrder` moves it out of prompts; slots get the tokens of a row first, and not its padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.checks import may_read
from ...keys.intervals import KeyIntervals
from ...keys.rule import SelectionRule
from ...keys.visible import Visible


def counts_tokens(rule: SelectionRule) -> bool:
    """Whether padding between tokens changes which keys a rule keeps. A window of 1 is the query's own key."""
    return rule.recent_window > 1


class TokenOrder(NamedTuple):
    """Moves the padding of each row to its left. Tokens keep their order.

    keys: int64 [B, Sk], the column of each place. queries: int64 [B, Sq], likewise, for the last Sq columns.
    hidden: int64 [B, 1], the number of queries that are padding.
    """

    keys: Tensor
    queries: Tensor
    hidden: Tensor

    @classmethod
    def of_padding(
        cls,
        present: Tensor,
        query_length: int,
        first_query: int | Tensor | None = None,
    ) -> TokenOrder | None:
        """Returns the order of tokens, or None if all padding is known to be on the left.

        present: bool [B, Sk]. first_query: the column of the first query, Sk - Sq by default.
        """
        # On a GPU each layer would wait for it.
        if may_read() and present.is_cpu and not (present[:, :-1] & ~present[:, 1:]).any():
            return None
        if first_query is None:
            first_query = present.shape[1] - query_length
        columns = torch.arange(query_length, device=present.device) + first_query
        queries = present.index_select(1, columns)
        return cls(_false_first(present), _false_first(queries), (~queries).sum(1, keepdim=True))

    def align(self, states: Tensor, dim: int, of_queries: bool = False) -> Tensor:
        """Moves the padding of states [B, ...] to the left, where dimension `dim` counts columns."""
        return gather_columns(states, self.queries if of_queries else self.keys, dim)

    def restore(self, states: Tensor, dim: int, of_queries: bool = False) -> Tensor:
        """Undoes `align`."""
        return gather_columns(states, (self.queries if of_queries else self.keys).argsort(1), dim)

    def _align_intervals(self, shown: KeyIntervals) -> KeyIntervals:
        rows = torch.arange(shown.query_length, device=self.queries.device)
        is_token = torch.zeros_like(self.queries, dtype=torch.bool)
        is_token = is_token.scatter(1, self.queries, rows >= self.hidden)
        tokens_before = F.pad(is_token.cumsum(1), (1, 0))
        intervals = self.align(shown.intervals, 2)
        bounds = intervals.long().flatten(1).clamp(0, shown.query_length)
        aligned = self.hidden + tokens_before.gather(1, bounds)
        aligned = aligned.view(intervals.shape).int() * self.align(shown.shown_keys(), 2)[..., None]
        return KeyIntervals(aligned, shown.query_length, shown.bound, shown.consecutive)

    def align_visible(self, visible: Visible) -> Visible:
        """Aligns keys and queries of intervals with one head, or a mask of keys, [B, 1, 1, Sk]."""
        if visible.intervals is not None:
            return visible._replace(intervals=self._align_intervals(visible.intervals))
        return visible._replace(mask=self.align(visible.mask, 3))

    def restore_intervals(self, chosen: KeyIntervals) -> KeyIntervals:
        """Returns intervals of aligned queries and keys as intervals of columns."""
        first, last = chosen.intervals.long().unbind(-1)
        first = torch.maximum(first, self.hidden[..., None])  # earlier queries are padding
        shown = first < last
        shape, end = first.shape, chosen.query_length - 1
        first = self.queries.gather(1, first.clamp(0, end).flatten(1)).view(shape)
        last = self.queries.gather(1, (last - 1).clamp(0, end).flatten(1)).view(shape) + 1
        columns = torch.stack([first, last], dim=-1) * shown[..., None]
        return KeyIntervals(
            self.restore(columns.int(), 2), chosen.query_length, chosen.bound, chosen.consecutive
        )


def tokens_first(present: Tensor) -> Tensor:
    """Returns the columns [B, S] of each row's tokens, and after them those of its padding. present: bool [B, S]."""
    return _false_first(~present)


def _false_first(flags: Tensor) -> Tensor:
    return flags.byte().argsort(dim=1, stable=True)


def gather_columns(states: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Returns the columns [B, n] of states [B, ...], where dimension `dim` counts columns."""
    if states.shape[0] != columns.shape[0]:
        states = states.expand(columns.shape[0], *states.shape[1:])
    shape = [1] * states.dim()
    shape[0], shape[dim] = columns.shape
    return torch.take_along_dim(states, columns.view(shape), dim)


class ScoredTokens(NamedTuple):
    """Columns of a batch with their scores."""

    key: Tensor  # [B, S, Hkv, D]
    value: Tensor  # [B, S, Hkv, Dv]
    scores: Tensor  # float32 [B, Hkv, S]
    present: Tensor | None = None  # bool [B, S], False for padding; None: all are tokens

    def each(self, change: Callable[[Tensor, int], Tensor]) -> ScoredTokens:
        """Returns change(tensor, its dimension of columns) of each tensor."""
        dims = zip(self, (1, 1, 2, 1), strict=True)
        return ScoredTokens(*(None if t is None else change(t, dim) for t, dim in dims))

    def part(self, start: int, stop: int) -> ScoredTokens:
        return self.each(lambda t, dim: t.narrow(dim, start, stop - start))

    def copied(self) -> ScoredTokens:
        """Returns a copy, which keeps no memory of other columns."""
        return self.each(lambda t, _: t.clone())

    def at(self, columns: Tensor) -> ScoredTokens:
        """Returns the columns with these numbers, [B, n]."""
        return self.each(lambda t, dim: gather_columns(t, columns, dim))

    def before(self, later: ScoredTokens) -> ScoredTokens:
        """Returns these columns and the later ones."""
        pair = [self, later]
        if self.present is not None or later.present is not None:
            pair = [
                t if t.present is not None
                else t._replace(present=t.key.new_ones(t.key.shape[:2], dtype=torch.bool))
                for t in pair
            ]  # fmt: skip
        first, last = pair
        rest = iter(last)
        return first.each(lambda t, dim: torch.cat([t, next(rest)], dim))
