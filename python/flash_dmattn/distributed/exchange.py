"""How the winners of every rank reach the ranks that see them, and how their gradients come back.

Rows are those of (b, kv head), P of them. A rank gives the rows of its c winners [P, c, F] with their notes, int32 [P, c, M]: the
bits of the score, the position, and the bits of a bias. It gets rows [P, W, F] and notes [P, W, M] of the keys of earlier ranks
that it sees, in the order of their positions; a place without a key has rows of zeros and the notes of `no_key`. Sizes follow from
shapes alone, so that the host waits for nothing and a CUDA graph can be captured.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .shards import Border, keys_seen_before
from .wire import Wire, pack, packed_bytes, unpack


class Exchange(Protocol):
    wire: Wire
    border: Border
    routes_one: bool  # whether the route is that of this rank alone, [P, W], or of all ranks for a part of the rows

    def collect(self, rows: Tensor, notes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and notes of the keys that this rank sees, and the route by which their gradients return."""

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        """The sums over all later ranks, in their order and in float32, of gradients [P, W, F]: [P, c, F] for the winners of
        this rank; None where no rank is later."""


def no_key(notes: Tensor) -> Tensor:
    """Notes [M] of a place without a key: a score of NaN, the position -1, a bias of 0."""
    nan = torch.full((1,), math.nan, device=notes.device).view(torch.int32)
    rest = torch.zeros(notes.shape[-1] - 2, dtype=torch.int32, device=notes.device)
    return torch.cat([nan, torch.full_like(nan, -1), rest])


def score_of(notes: Tensor) -> Tensor:
    return notes[..., 0].view(torch.float32)


def position_of(notes: Tensor) -> Tensor:
    return notes[..., 1]


def bias_of(notes: Tensor) -> Tensor:
    return notes[..., 2:].contiguous().view(torch.float32)


def _take(candidates: Tensor, places: Tensor, missing: Tensor | float) -> Tensor:
    """candidates [P, L, F] at places [K, P, W], and `missing` where a place is -1: [K, P, W, F]."""
    K, P, W = places.shape
    candidates = candidates.expand(K, *candidates.shape)
    index = places.clamp(min=0)[..., None].expand(K, P, W, candidates.shape[-1])
    found = candidates.gather(2, index)
    return torch.where(places[..., None] < 0, missing, found)


def _add_rows(total: Tensor, rows: Tensor, places: Tensor) -> None:
    """The transpose of `_take` for one border: adds rows [P, W, F] to total [P, L + 1, F] at places [P, W], of which none but -1
    occurs twice. The last row of the total takes what has no place."""
    last = total.shape[1] - 1
    index = torch.where(places < 0, last, places)[..., None].expand(rows.shape)
    total.scatter_(1, index, total.gather(1, index) + rows)


def _seen_of_candidates(border: Border, notes: Tensor, ranks: slice, rows: slice, P: int) -> Tensor:
    """Places [ranks, rows, W] of the keys that each of the ranks sees among candidates with notes [rows, L, M]; rows: of P."""
    begins = border.shards.begins[ranks]
    # fill is used because a copy from a list would wait for the device.
    begins = torch.stack([torch.full((1, 1), begin, device=notes.device) for begin in begins])
    positions = position_of(notes)[None].long()
    begun = 0
    if border.begun is not None:
        of_rows = border.begun[:, ranks]
        of_rows = of_rows.repeat_interleave(P // of_rows.shape[0], 0)
        begun = of_rows[rows].t()[..., None].clamp(min=0)
    present = (positions >= begun) & (positions < begins)
    rule = border.rule_of_rows(rows, P // border.heads)
    scores = score_of(notes)[None]
    return keys_seen_before(begins, scores, positions, present, rule, border.places)


class Direct:
    """Winners straight to every later rank, gradients straight to their owners: one collective each way, (R - 1) c rows of the
    busiest rank. For two ranks nothing is less."""

    routes_one = True

    def __init__(self, wire: Wire, border: Border):
        self.wire, self.border = wire, border

    def collect(self, rows: Tensor, notes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, size = self.wire.rank, self.wire.size
        later = size - 1 - rank
        bytes_of_one = packed_bytes(notes, rows)
        message = (
            pack(notes[None], rows[None]).expand(later, -1).reshape(-1) if later else _nothing(rows)
        )
        found = self.wire.swap(
            message,
            [0] * (rank + 1) + [bytes_of_one] * later,
            [bytes_of_one] * rank + [0] * (size - rank),
        )
        P, c, columns = rows.shape
        W = self.border.places
        if rank == 0:
            none = torch.full((P, W), -1, device=rows.device)
            return rows.new_zeros((P, W, columns)), no_key(notes).expand(P, W, -1), none
        notes, rows = (
            part.transpose(0, 1).flatten(1, 2) for part in unpack(found, rank, notes, rows)
        )
        if rank == 1:  # who sees all winners of the one before
            missing = W - c
            route = torch.arange(c, device=rows.device)
            route = F.pad(torch.where(position_of(notes) < 0, -1, route), (0, missing), value=-1)
            if not missing:
                return rows, notes, route
        else:
            route = self._seen(notes)
        empty = no_key(notes)
        return _take(rows, route[None], 0)[0], _take(notes, route[None], empty)[0], route

    def _seen(self, notes: Tensor) -> Tensor:
        border, P = self.border, notes.shape[0]
        rank = slice(self.wire.rank, self.wire.rank + 1)
        return _seen_of_candidates(border, notes, rank, slice(0, P), P)[0]

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        rank, size = self.wire.rank, self.wire.size
        later, c = size - 1 - rank, self.border.winners
        like = [g.new_empty((g.shape[0], c, g.shape[2])) for g in gradients]
        bytes_of_one = packed_bytes(*like)
        message = _nothing(route)
        if rank > 0:
            parts = gradients
            if rank > 1 or route.shape[1] > c:
                parts = [g.new_zeros((g.shape[0], rank * c + 1, g.shape[2])) for g in gradients]
                for part, gradient in zip(parts, gradients, strict=True):
                    _add_rows(part, gradient, route)
                parts = [part[:, :-1] for part in parts]
            parts = [part.unflatten(1, (rank, c)).transpose(0, 1) for part in parts]
            message = pack(*parts).reshape(-1)
        found = self.wire.swap(
            message,
            [bytes_of_one] * rank + [0] * (size - rank),
            [0] * (rank + 1) + [bytes_of_one] * later,
        )
        if not later:
            return None
        return [_in_order(part) for part in unpack(found, later, *like)]


class TwoHops:
    """Rank i collects the i-th part of all winners (some rows; columns of one row where there are more ranks than rows), and gives
    each rank this part of what it sees: two collectives each way, less than 2 W rows whatever R is and wherever the best keys
    are."""

    routes_one = False

    def __init__(self, wire: Wire, border: Border):
        self.wire, self.border = wire, border

    def _parts(self, P: int) -> tuple[int, int]:
        """Groups of rows, and blocks of columns; their product is R."""
        groups = math.gcd(P, self.wire.size)
        return groups, self.wire.size // groups

    def _split(self, rows: Tensor) -> Tensor:
        """[P, L, F] -> [R, rows of a part, L, columns of a part]."""
        groups, blocks = self._parts(rows.shape[0])
        rows = F.pad(rows, (0, -rows.shape[2] % blocks)) if rows.shape[2] % blocks else rows
        rows = rows.unflatten(0, (groups, -1)).unflatten(-1, (blocks, -1))
        return rows.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def _join(self, parts: Tensor, P: int, columns: int) -> Tensor:
        groups, blocks = self._parts(P)
        parts = parts.unflatten(0, (groups, blocks)).permute(0, 2, 3, 1, 4)
        return parts.flatten(3).flatten(0, 1)[..., :columns]

    def _copies(self, notes: Tensor) -> Tensor:
        """[P, L, M] -> [R, rows of a part, L, M]: all of it to each block of columns."""
        groups, blocks = self._parts(notes.shape[0])
        return notes.unflatten(0, (groups, -1)).repeat_interleave(blocks, 0)

    def _one_copy(self, parts: Tensor, P: int) -> Tensor:
        _, blocks = self._parts(P)
        return parts[::blocks].flatten(0, 1)

    def _swap(self, *parts: Tensor) -> list[Tensor]:
        """Sends part r of each tensor to rank r."""
        size = self.wire.size
        message = pack(*parts)
        equal = [message.shape[1]] * size
        found = self.wire.swap(message.view(-1), equal, equal)
        return unpack(found, size, *(part[0] for part in parts))

    def collect(self, rows: Tensor, notes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        P, _, columns = rows.shape
        met_notes, met = self._swap(self._copies(notes), self._split(rows))
        met_notes, met = (part.transpose(0, 1).flatten(1, 2) for part in (met_notes, met))
        route = self._seen(met_notes, P)
        empty = no_key(notes)
        notes, parts = self._swap(_take(met_notes, route, empty), _take(met, route, 0))
        return self._join(parts, P, columns), self._one_copy(notes, P), route

    def _seen(self, notes: Tensor, P: int) -> Tensor:
        """Places [R, rows of this part, W] of the keys that each rank sees among the candidates."""
        border, size = self.border, self.wire.size
        groups, blocks = self._parts(P)
        part = self.wire.rank // blocks
        own = slice(part * (P // groups), (part + 1) * (P // groups))
        return _seen_of_candidates(border, notes, slice(0, size), own, P)

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        size, c = self.wire.size, self.border.winners
        P = gradients[0].shape[0]
        # A single column, that of a bias, goes to every block.
        split = [self._copies(g) if g.shape[2] == 1 else self._split(g) for g in gradients]
        totals = []
        for met in self._swap(*split):
            wide = torch.promote_types(met.dtype, torch.float32)
            total = met.new_zeros((met.shape[1], size * c + 1, met.shape[3]), dtype=wide)
            for rank in range(1, size):
                _add_rows(total, met[rank], route[rank])
            total = total[:, :-1].unflatten(1, (size, c)).transpose(0, 1)
            totals.append(self.border.rounded(total, met.dtype))
        found = self._swap(*totals)
        return [
            _wide(self._one_copy(part, P) if g.shape[2] == 1 else self._join(part, P, g.shape[2]))
            for part, g in zip(found, gradients, strict=True)
        ]


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def _in_order(parts: Tensor) -> Tensor:
    total = _wide(parts[0])
    for part in parts[1:]:
        total = total + part
    return total


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


EXCHANGES = {"direct": Direct, "two_hops": TwoHops}


def choose_exchange(name: str, ranks: int) -> type[Direct] | type[TwoHops]:
    """By its name; "auto" is the one that moves fewer bytes."""
    if name == "auto":
        name = "direct" if ranks <= 2 else "two_hops"
    if name not in EXCHANGES:
        raise ValueError(f"exchange: got {name!r}, expected 'auto' or one of {tuple(EXCHANGES)}")
    return EXCHANGES[name]
