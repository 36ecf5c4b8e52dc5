"""Rows of a batch without the padding between their tokens: a recent window counts tokens, not columns.

A row has such padding when it got a short message beside a long one. Without it, the row is that of the text alone.
`TokenOrder` moves it out of prompts, and `PendingTokens` out of the pending tokens of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.checks import may_read
from ...generation.cache import KVSlots
from ...keys.intervals import KeyIntervals
from ...keys.rule import SelectionRule


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

    def align_intervals(self, shown: KeyIntervals) -> KeyIntervals:
        """Aligns keys and queries of intervals with one head."""
        rows = torch.arange(shown.query_length, device=self.queries.device)
        is_token = torch.zeros_like(self.queries, dtype=torch.bool)
        is_token = is_token.scatter(1, self.queries, rows >= self.hidden)
        tokens_before = F.pad(is_token.cumsum(1), (1, 0))
        intervals = self.align(shown.intervals, 2)
        bounds = intervals.long().flatten(1).clamp(0, shown.query_length)
        aligned = self.hidden + tokens_before.gather(1, bounds)
        aligned = aligned.view(intervals.shape).int() * self.align(shown.shown_keys(), 2)[..., None]
        return KeyIntervals(aligned, shown.query_length, shown.bound, shown.consecutive)

    def restore_intervals(self, chosen: KeyIntervals) -> KeyIntervals:
        """Returns intervals of aligned queries and keys as intervals of columns."""
        first, last = chosen.intervals.long().unbind(-1)
        shape, end = first.shape, chosen.query_length - 1
        first = self.queries.gather(1, first.clamp(0, end).flatten(1)).view(shape)
        last = self.queries.gather(1, (last - 1).clamp(0, end).flatten(1)).view(shape) + 1
        columns = torch.stack([first, last], dim=-1) * chosen.shown_keys()[..., None]
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
    """Tokens of a batch with their scores."""

    key: Tensor  # [B, S, Hkv, D]
    value: Tensor  # [B, S, Hkv, Dv]
    scores: Tensor  # float32 [B, Hkv, S]
    present: Tensor | None = None  # bool [B, S], False for padding; None: all are tokens

    def part(self, start: int, stop: int) -> ScoredTokens:
        key, value, scores, present = self
        present = None if present is None else present[:, start:stop]
        return ScoredTokens(
            key[:, start:stop], value[:, start:stop], scores[..., start:stop], present
        )


class PendingTokens:
    """The order of the pending tokens of slots, by the columns of a batch. The slots get the tokens of each row first, and
    the padding after them is dropped.

    Attributes:
        present: which pending columns are no padding, bool [B, pending]. None: the slots have the columns as they are.
    """

    def __init__(self, rule: SelectionRule):
        self._counts_tokens = counts_tokens(rule)
        self.present: Tensor | None = None

    def have_order(self, tokens: ScoredTokens) -> bool:
        """Whether padding of new tokens changes their order in the slots."""
        return tokens.present is not None and self._counts_tokens

    def append(self, slots: KVSlots, tokens: ScoredTokens) -> Tensor | None:
        """Adds tokens. Returns the place of each column among the pending ones, [B, pending]; None: in order."""
        *states, key_mask = tokens
        device = tokens.key.device
        if self.present is None and not self.have_order(tokens):
            slots.append(*states, key_mask=key_mask)
            return None
        if key_mask is None:
            key_mask = torch.ones(tokens.key.shape[:2], dtype=torch.bool, device=device)
        present = self.present
        if present is None:
            present = slots.pending_mask()
            order = torch.arange(slots.pending, device=device).expand(present.shape)
        else:
            order = tokens_first(present).argsort(1)
        earlier = take_columns(slots.pending_tokens(), order)
        slots.drop(slots.pending)
        states = [
            torch.cat([old, new], dim=dim)
            for old, new, dim in zip(earlier, states, (1, 1, 2), strict=True)
        ]
        self.present = present = torch.cat([present, key_mask], dim=1)
        columns = tokens_first(present)
        is_token = torch.arange(present.shape[1], device=device) < present.sum(1, keepdim=True)
        slots.append(*take_columns(states, columns), key_mask=is_token)
        return columns.argsort(1)

    def attend(
        self, slots: KVSlots, query: Tensor, places: Tensor | None, **options
    ) -> tuple[Tensor, Tensor]:
        """Computes attention of the last tokens of `append`, whose result is `places`. Returns out [B, S, Hq, Dv] and its
        log-sum-exp [B, Hq, S]. query: [B, S, Hq, D]."""
        if places is None:
            return slots.attend(query, **options)
        new = query.shape[1]
        earlier = query.new_zeros(query.shape[0], places.shape[1] - new, *query.shape[2:])
        queries = torch.cat([earlier, query], dim=1)
        out, lse = slots.attend(gather_columns(queries, places.argsort(1), 1), **options)
        last = places[:, -new:]
        return gather_columns(out, last, 1), gather_columns(lse, last, 2)

    def commit(self, slots: KVSlots, tokens: int | None = None) -> None:
        """Moves the first `tokens` columns to the slots, by default all. Drops the others."""
        present, self.present = self.present, None
        if present is not None:
            slots.commit(present[:, :tokens].sum(1, dtype=torch.int32))
        elif slots.pending:
            slots.commit(tokens)

    def commit_oldest(self, slots: KVSlots, tokens: int) -> None:
        """Moves the oldest columns to the slots until `tokens` new ones fit."""
        excess = min(slots.pending + tokens - slots.chunk, slots.pending)
        if excess <= 0:
            return
        present = self.present
        if present is None:
            present = slots.pending_mask()
            later = torch.arange(excess, slots.pending, device=present.device)
            later = later.expand(present.shape[0], -1)
        else:
            later = tokens_first(present).argsort(1)[:, excess:]
        states = take_columns(slots.pending_tokens(), later)
        self.commit(slots, excess)
        if later.shape[1]:
            self.append(slots, ScoredTokens(*states, present[:, excess:]))

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows of the batch by the rows with these numbers."""
        if self.present is not None:
            self.present = self.present[rows]

    def move_to(self, device: torch.device | str) -> None:
        """Moves the order to a device, as the slots."""
        if self.present is not None:
            self.present = self.present.to(device)


def take_columns(states: tuple[Tensor, ...] | list[Tensor], columns: Tensor) -> tuple[Tensor, ...]:
    """Returns the columns [B, n] of key, value [B, S, Hkv, D] and scores [B, Hkv, S]."""
    return tuple(gather_columns(t, columns, dim) for t, dim in zip(states, (1, 1, 2), strict=True))
