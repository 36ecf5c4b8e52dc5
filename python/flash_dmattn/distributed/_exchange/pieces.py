"""Consecutive pieces of one sequence, and the keys of earlier pieces that later pieces still see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..._core.gradients import narrow_gradient
from ...keys.in_torch import intervals_of_rule
from ...keys.positions import KeyPositions, ShownKeys
from ...keys.rule import SelectionRule
from ...keys.select import best_keys, indices_of_true


class PieceOffsets(NamedTuple):
    """The position at which each rank's piece begins. The last entry of `begins` is the end of the sequence."""

    rank: int
    begins: tuple[int, ...]

    @classmethod
    def from_lengths(cls, rank: int, lengths: Sequence[int]) -> PieceOffsets:
        return cls(rank, (0, *accumulate(lengths)))

    def begin(self) -> int:
        return self.begins[self.rank]

    def end(self) -> int:
        return self.begins[self.rank + 1]

    def ranks(self) -> int:
        return len(self.begins) - 1

    def is_last(self) -> bool:
        return self.rank == self.ranks() - 1

    def longest(self) -> int:
        return max(b - a for a, b in zip(self.begins, self.begins[1:], strict=False))


class Boundary(NamedTuple):
    """Facts about the boundaries between pieces. Every rank knows them before the exchange.

    A rank sends `winners` keys of its piece, which later pieces may see, and has `places` rows for keys of earlier
    pieces. Both numbers are the same on every rank and do not depend on the scores.
    """

    pieces: PieceOffsets
    rule: SelectionRule
    heads: int
    # int64 [B or 1, R + 1]: the begin of the document that continues at each of `begins`; None: there is one document.
    begun: Tensor | None
    winners: int
    places: int
    saturate: bool  # whether gradients in 16 bits saturate; False: inf stays

    @classmethod
    def from_rule(
        cls,
        pieces: PieceOffsets,
        rule: SelectionRule,
        heads: int,
        begun: Tensor | None = None,
        saturate: bool = True,
    ) -> Boundary:
        # A query sees at most this many keys. Later queries see no keys before a boundary but those that the last query
        # before the boundary sees.
        most, _ = rule.key_bound(is_causal=True)
        winners = min(most, pieces.longest())
        places = min(most, (pieces.ranks() - 1) * winners)
        return cls(pieces, rule, heads, begun, winners, places, saturate)

    def round_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts a sum of gradients to a narrower dtype."""
        return narrow_gradient(gradient, dtype, self.saturate)

    def rule_of_rows(self, rows: slice, batch: int) -> SelectionRule:
        """Returns the rule for a slice of the rows (b, head), each of which counts as a head."""
        windows = self.rule.windows()
        if len(windows) < 2:
            return self.rule
        return self.rule._replace(keep_window_size=tuple(windows * batch)[rows])


def begins_of_documents(offsets: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Finds where the document that contains the first position after each boundary begins, int64 [B or 1, boundaries].

    If no document contains this position, the entry is the boundary itself.
    offsets: [B or 1, documents + 1], offsets of packed documents in the whole sequence.
    """
    at = torch.stack([torch.full((1,), b, device=offsets.device) for b in boundaries], 1)
    at = at.expand(offsets.shape[0], -1)
    document = torch.searchsorted(offsets, at.contiguous(), right=True)
    begun = offsets.gather(1, (document - 1).clamp(min=0))
    return torch.where(at < offsets[:, -1:], begun, at)


def keys_seen_before(
    boundary: int | Tensor,
    scores: Tensor,
    positions: Tensor,
    present: Tensor | None,
    rule: SelectionRule,
    size: int,
) -> Tensor:
    """Finds the keys that the last query before a boundary sees: ascending indices, padded with -1, int64 [K, P, size].

    boundary: the position after the last query; a number or [K, 1, 1].
    scores: float32 [K or 1, P, L], the scores of keys in the order of their positions; a key whose score is NaN is
        never selected.
    positions: int64 [K or 1, P or 1, L], the positions of the keys that are present.
    present: bool [K, P, L], whether there is a key, it is before the boundary, and its document continues at the
        boundary. None: all keys are present.
    rule: a rule for P heads.
    """
    scores = scores if present is None else scores.expand(present.shape)
    if rule.is_window():
        indices, _ = best_keys(scores, present, rule)
    else:
        own_row = positions - boundary + 1  # the last query is row 0
        zeros = torch.zeros_like(own_row)
        last = zeros + 1 if present is None else present.long()
        seen = intervals_of_rule(scores, ShownKeys(zeros, last, own_row), rule, True, 1)
        indices, _ = indices_of_true(seen[..., 1] > 0, size)
    indices = indices[..., :size].long()
    missing = size - indices.shape[-1]
    return torch.nn.functional.pad(indices, (0, missing), value=-1) if missing else indices


def select_in_piece(
    scores: Tensor,
    positions: Tensor,
    present: Tensor | None,
    documents: Tensor | None,
    begin: int,
    rule: SelectionRule,
) -> tuple[Tensor, Tensor]:
    """Returns the row at each key's position, int64 [B, H, W + n], and the interval of the n queries that see each key,
    int32 [B, H, W + n, 2].

    scores: [B, H, W + n], the scores of W keys of earlier ranks, then of the n keys of this piece.
    The other arguments are as in `shown_in_piece`.
    """
    n = scores.shape[2] - positions.shape[2]
    shown = shown_in_piece(positions, n, present, documents, begin)
    return shown.own_row, intervals_of_rule(scores, shown, rule, True, n)


def shown_in_piece(
    positions: Tensor, n: int, present: Tensor | None, documents: Tensor | None, begin: int
) -> ShownKeys:
    """Finds the rows to which each key is shown, among the n queries of a piece that begins at position `begin`. There
    are W keys of earlier ranks and then the n keys of the piece.

    positions: int32 [B, H, W], the positions of the keys of earlier ranks; -1: there is no key.
    present: bool [B, 1 or H, n], whether a key of the piece is present; None: all are.
    documents: int64 [B or 1, documents + 1], offsets of the documents in the whole sequence.
    """
    W = positions.shape[2]
    offsets = None if documents is None else (documents - begin).clamp(0, n)
    piece = KeyPositions.from_arguments(n, n, cu_seqlens_k=offsets, device=positions.device)
    last = piece.end if present is None else torch.where(present, piece.end, 0)
    # Keys of earlier ranks belong to the same document as the first token of this piece.
    positions = positions.long()
    exists = positions >= 0
    document, end = None, n
    if piece.document is not None and n:
        first_document = piece.document[..., :1].expand(-1, -1, W)
        document = torch.cat([first_document, piece.document], -1)
        end = piece.end[..., :1]
    shape = (*positions.shape[:2], n)
    own_row = torch.cat(
        [torch.where(exists, positions - begin, -1), piece.own_row.expand(shape)], -1
    )
    last = torch.cat([torch.where(exists, end, 0), last.expand(shape)], -1)
    first = own_row.clamp(min=0)
    return ShownKeys(first, last, own_row, document)
