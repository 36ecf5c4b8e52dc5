"""Tokens that a layer of a cache records: they stay pending in its slots, so that `crop` can drop the last ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...generation.cache import KVSlots
from ...keys.rule import SelectionRule
from .._shared.token_order import ScoredTokens, counts_tokens, gather_columns, tokens_first

RECORDED_TOKENS = 128  # at least this many tokens can be dropped again


class RecordedTokens:
    """The pending columns of slots.

    Slots hold the tokens of each row first. If padding gives columns another order there, `columns` holds them in their order in
    the text. Slots are an argument, because a layer replaces its slots when its batch or its device changes.
    """

    def __init__(self, rule: SelectionRule):
        self._counts_tokens = counts_tokens(rule)
        self.columns: ScoredTokens | None = None

    def have_order(self, tokens: ScoredTokens) -> bool:
        """Whether padding of tokens changes their order in the slots."""
        return tokens.present is not None and self._counts_tokens

    def attend(
        self, slots: KVSlots, query: Tensor, tokens: ScoredTokens, *options
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens and computes their attention: out [B, S, Hq, Dv] and lse [B, Hq, S]. options: of `KVSlots.attend_with`."""
        parts = []
        for rows in query.split(slots.chunk, 1):
            length, start = rows.shape[1], sum(out.shape[1] for out, _ in parts)
            self._commit_oldest(slots, slots.pending + length - slots.chunk)
            columns = self.append(slots, tokens.part(start, start + length))
            if columns is None:
                parts.append(slots.attend_with(rows, None, *options))
                continue
            earlier = columns.shape[1] - length
            queries = F.pad(rows, (0, 0, 0, 0, earlier, 0))
            result = slots.attend_with(gather_columns(queries, columns, 1), None, *options)
            last = columns.argsort(1)[:, earlier:]
            parts.append(
                tuple(gather_columns(t, last, dim) for t, dim in zip(result, (1, 2), strict=True))
            )
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)

    def append(self, slots: KVSlots, tokens: ScoredTokens) -> Tensor | None:
        """Adds columns. If padding changes their order, the numbers of all columns in the order of the slots are returned,
        [B, n]."""
        has_order = self.columns is not None or self.have_order(tokens)
        earlier = self._pending_columns(slots) if has_order and slots.pending else None
        slots.append(*tokens[:3], key_mask=tokens.present)  # raises before anything has changed
        if not has_order:
            return None
        self.columns = tokens.copied() if earlier is None else earlier.before(tokens)
        slots.drop(slots.pending)
        columns = tokens_first(self.columns.present)
        ordered = self.columns.at(columns)
        slots.append(*ordered[:3], key_mask=ordered.present)
        return columns

    def commit(self, slots: KVSlots, count: int) -> None:
        """Moves the tokens of the first `count` columns to the slots. Drops the others."""
        columns, self.columns = self.columns, None
        if columns is not None:
            slots.commit(columns.present[:, :count].sum(1, dtype=torch.int32))
        elif slots.pending:
            slots.commit(count)

    def rescore_last(self, slots: KVSlots, scores: Tensor, present: Tensor | None) -> None:
        """Gives the last keys the scores [B, Hkv] that the first new token makes, if their row gets one.

        present: of the new columns, bool [B, S]; None: no column is padding.
        """
        slots.rescore_last(scores, None if present is None else present.any(1))
        if self.columns is not None:
            inverse = tokens_first(self.columns.present).argsort(1)
            scores = gather_columns(slots.pending_part(slots.scores), inverse, 2)
            self.columns = self.columns._replace(scores=scores)

    def select_rows(self, rows: Tensor) -> None:
        if self.columns is not None:
            self.columns = self.columns.each(lambda t, _: t[rows])

    def move(self, device: torch.device | str) -> None:
        if self.columns is not None:
            self.columns = self.columns.each(lambda t, _: t.to(device))

    def clear(self) -> None:
        self.columns = None

    def _pending_columns(self, slots: KVSlots) -> ScoredTokens:
        if self.columns is not None:
            return self.columns
        return ScoredTokens(*slots.pending_tokens(), slots.pending_mask())

    def _commit_oldest(self, slots: KVSlots, excess: int) -> None:
        """Moves the tokens of the first `excess` columns to the slots, or of all if they are fewer."""
        pending = slots.pending
        if excess <= 0 or not pending:
            return
        rest = self._pending_columns(slots).part(excess, pending) if excess < pending else None
        self.commit(slots, min(excess, pending))
        if rest is not None:
            self.append(slots, rest)
