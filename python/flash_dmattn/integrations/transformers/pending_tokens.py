"""Pending tokens of slots whose rows have padding between tokens.

Padding that took a position between two tokens would use up the recent window, so the slots get the tokens of each row first, and
the padding after them is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...generation.cache import KVSlots
from ...keys.rule import SelectionRule
from .._shared.attention_interface.token_order import (
    counts_tokens,
    gather_columns,
    tokens_first,
)


class PendingTokens:
    """The order of the pending tokens of slots, by the columns of a batch.

    Attributes:
        present: which pending columns are no padding, bool [B, pending]. None: the slots have the columns as they are.
    """

    def __init__(self, rule: SelectionRule):
        self._counts_tokens = counts_tokens(rule)
        self.present: Tensor | None = None

    def have_order(self, key_mask: Tensor | None) -> bool:
        """Whether padding of new tokens, bool [B, S], changes their order in the slots."""
        return key_mask is not None and self._counts_tokens

    def append(
        self, slots: KVSlots, key: Tensor, value: Tensor, scores: Tensor, key_mask: Tensor | None
    ) -> Tensor | None:
        """Adds tokens. Returns the place of each column among the pending ones, [B, pending]; None: in order.

        key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; scores: [B, Hkv, S]; key_mask: bool [B, S], False for padding.
        """
        if self.present is None and not self.have_order(key_mask):
            slots.append(key, value, scores, key_mask=key_mask)
            return None
        if key_mask is None:
            key_mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        present = self.present
        if present is None:
            present = slots.pending_mask()
            order = torch.arange(slots.pending, device=key.device).expand(present.shape)
        else:
            order = tokens_first(present).argsort(1)
        earlier = take_columns(slots.pending_tokens(), order)
        slots.drop(slots.pending)
        states = [
            torch.cat([old, new], dim=dim)
            for old, new, dim in zip(earlier, (key, value, scores), (1, 1, 2), strict=True)
        ]
        self.present = present = torch.cat([present, key_mask], dim=1)
        columns = tokens_first(present)
        is_token = torch.arange(present.shape[1], device=key.device) < present.sum(1, keepdim=True)
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
            self.append(slots, *states, present[:, excess:])

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
