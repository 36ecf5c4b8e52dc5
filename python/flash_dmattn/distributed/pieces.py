"""Consecutive pieces of one sequence, and the keys of earlier pieces that a later one still sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.gradients import narrow_gradient
from ..keys.best_keys import best_keys, indices_of_true
from ..keys.positions import KeyPositions, ShownKeys
from ..keys.rule import SelectionRule, intervals_of_rule


class PieceOffsets(NamedTuple):
    """Where the piece of each rank begins, in the order of ranks; `begins` has the end of the sequence, too."""

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
    """Facts of the boundaries between pieces that every rank knows before anything is exchanged.

    A rank sends the `winners` keys of its piece that later pieces may see, and has `places` for keys of earlier pieces: the
    same numbers on every rank, whatever the scores are.
    """

    pieces: PieceOffsets
    rule: SelectionRule
    heads: int
    # int64 [B or 1, R + 1]: where the document that continues at each of `begins` has begun; None: there is one document.
    begun: Tensor | None
    winners: int
    places: int
    saturate: bool  # gradients in 16 bits; False: inf stays

    @classmethod
    def from_rule(
        cls,
        pieces: PieceOffsets,
        rule: SelectionRule,
        heads: int,
        begun: Tensor | None = None,
        saturate: bool = True,
    ) -> Boundary:
        # A query sees no more keys than that; those that the last query before a boundary sees are all that later queries see.
        most, _ = rule.key_bound(is_causal=True)
        winners = min(most, pieces.longest())
        places = min(most, (pieces.ranks() - 1) * winners)
        return cls(pieces, rule, heads, begun, winners, places, saturate)

    def round_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum of gradients in a narrower dtype."""
        return narrow_gradient(gradient, dtype, self.saturate)

    def rule_of_rows(self, rows: slice, batch: int) -> SelectionRule:
        """The rule for some of the rows (b, head) as if they were heads."""
        windows = self.rule.windows()
        if len(windows) < 2:
            return self.rule
        return self.rule._replace(keep_window_size=tuple(windows * batch)[rows])


def begins_of_documents(offsets: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Start of the document that contains the first position after each boundary, or the boundary itself if no document contains it.
    int64 [B or 1, boundaries].

    offsets: [B or 1, documents + 1], of packed documents in the whole sequence.
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
    """Indices of the keys that the last query before a boundary sees, ascending, padded with -1: int64 [K, P, size].

    boundary: the position after that query; a number or [K, 1, 1].
    scores: float32 [K or 1, P, L], of keys in the order of their positions; NaN is never chosen.
    positions: int64 [K or 1, P or 1, L], of those that are present.
    present: bool [K, P, L]: there is a key, it is before the boundary, and its document continues there; None: all are present.
    rule: of P heads.
    """
    scores = scores if present is None else scores.expand(present.shape)
    if rule.is_window():
        indices, _ = best_keys(scores, present, rule.keep_window_size)
    else:
        own_row = positions - boundary + 1  # in rows of which row 0 is the last query
        zeros = torch.zeros_like(own_row)
        last = zeros + 1 if present is None else present.long()
        seen = intervals_of_rule(scores, ShownKeys(zeros, last, own_row, zeros), rule, True, 1)
        indices, _ = indices_of_true(seen[..., 1] > 0, size)
    indices = indices[..., :size].long()
    missing = size - indices.shape[-1]
    return torch.nn.functional.pad(indices, (0, missing), value=-1) if missing else indices


def keys_of_piece(
    scores: Tensor,
    positions: Tensor,
    present: Tensor | None,
    documents: Tensor | None,
    begin: int,
    rule: SelectionRule,
) -> tuple[Tensor, Tensor]:
    """The row at each key's position, int64 [B, H, W + n], and the intervals int32 [B, H, W + n, 2] of the n queries that see it.

    scores: [B, H, W + n], of W keys of earlier ranks and those of a piece that begins at the position `begin`; other arguments as
    in `shown_in_piece`.
    """
    n = scores.shape[2] - positions.shape[2]
    shown = shown_in_piece(positions, n, present, documents, begin)
    return shown.own_row, intervals_of_rule(scores, shown, rule, True, n)


def shown_in_piece(
    positions: Tensor, n: int, present: Tensor | None, documents: Tensor | None, begin: int
) -> ShownKeys:
    """The rows of n queries, a piece that begins at the position `begin`, to which W keys of earlier ranks and n of the piece are shown.

    positions: int32 [B, H, W], of the former; -1: there is no key. present: bool [B, 1 or H, n]. documents: int64 offsets
    [B or 1, documents + 1].
    """
    W = positions.shape[2]
    offsets = None if documents is None else (documents - begin).clamp(0, n)
    piece = KeyPositions.from_arguments(n, n, cu_seqlens_k=offsets, device=positions.device)
    last = piece.end if present is None else torch.where(present, piece.end, 0)
    # Keys of earlier ranks are of the document to which the first token here belongs.
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
    return ShownKeys(first, last, own_row, first, document)
