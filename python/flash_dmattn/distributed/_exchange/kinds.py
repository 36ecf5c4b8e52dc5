"""The kinds of exchange. Each sends the winners of every rank to the ranks that see them, and returns their gradients.

The winners of a rank are its keys that later ranks may see. The rank sends each winner as a row (its key and value) and
metadata: the bits of its score, its position, and the bits of its bias if there is one. The rank receives the rows and
metadata of the keys of earlier ranks that it sees, in the order of their positions. A place without a key has a row of
zeros and the metadata of `no_key`. Sizes follow from shapes alone, so the host never waits for the device, and a CUDA
graph can be captured.

Letters of the shapes:
  P  pairs (b, kv head)
  c  winners of a rank
  W  places for keys of earlier ranks
  L  candidates for these places
  K  boundaries between ranks, for which places are selected
  F  columns of a row: those of key and value, or of their gradients
  M  columns of the metadata, int32
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import Collectives, pack, unpack
from .pieces import Boundary, keys_seen_before


class Exchange(Protocol):
    collectives: Collectives
    boundary: Boundary

    def route_shape(self, P: int) -> tuple[int, ...]: ...

    def collect(self, rows: Tensor, metadata: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends the winners' rows and metadata. Returns the rows and metadata of the keys that this rank sees, and their
        route, by which their gradients return."""

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        """Returns the gradients [P, W, F] of the keys that this rank has seen to the ranks that sent them.

        Returns the gradients of this rank's winners, [P, c, F]: the sums over all later ranks, in the order of ranks
        and in float32. Returns None on the last rank.
        """


def no_key(metadata: Tensor) -> Tensor:
    """Returns the metadata [M] of a place without a key: the score NaN, the position -1 and, if M is 3, the bias 0."""
    nan = torch.full((1,), math.nan, device=metadata.device).view(torch.int32)
    rest = torch.zeros(metadata.shape[-1] - 2, dtype=torch.int32, device=metadata.device)
    return torch.cat([nan, torch.full_like(nan, -1), rest])


def score_of(metadata: Tensor) -> Tensor:
    return metadata[..., 0].view(torch.float32)


def position_of(metadata: Tensor) -> Tensor:
    return metadata[..., 1]


def bias_of(metadata: Tensor) -> Tensor:
    return metadata[..., 2:].contiguous().view(torch.float32)


def _take_rows(candidates: Tensor, places: Tensor, missing: Tensor | float) -> Tensor:
    """Gathers candidates [P, L, F] at places [K, P, W]. Returns [K, P, W, F], with `missing` for each place of -1."""
    K, P, W = places.shape
    candidates = candidates.expand(K, *candidates.shape)
    index = places.clamp(min=0)[..., None].expand(K, P, W, candidates.shape[-1])
    rows = candidates.gather(2, index)
    return torch.where(places[..., None] < 0, missing, rows)


def _add_rows(total: Tensor, rows: Tensor, places: Tensor) -> None:
    """Adds rows [P, W, F] to total [P, L + 1, F] at places [P, W]: the transpose of `_take_rows` for one boundary.

    Only the place -1 may occur more than once. Its rows go to the last row of `total`, which callers drop.
    """
    last = total.shape[1] - 1
    index = torch.where(places < 0, last, places)[..., None].expand(rows.shape)
    total.scatter_(1, index, total.gather(1, index) + rows)


def _seen_of_candidates(
    boundary: Boundary, metadata: Tensor, boundaries: slice, rows: slice, P: int, size: int
) -> Tensor:
    """Finds the candidates that the last query before each boundary sees: places [boundaries, rows, size].

    metadata: [rows, L, M], of the candidates. boundaries: a slice of the K boundaries. rows: a slice of the P rows.
    """
    begins = boundary.pieces.begins[boundaries]
    # torch.full: a copy from a list would wait for the device.
    begins = torch.stack([torch.full((1, 1), begin, device=metadata.device) for begin in begins])
    positions = position_of(metadata)[None].long()
    begun = 0
    if boundary.begun is not None:
        begun_of_rows = boundary.begun[:, boundaries]
        begun_of_rows = begun_of_rows.repeat_interleave(P // begun_of_rows.shape[0], 0)
        begun = begun_of_rows[rows].t()[..., None].clamp(min=0)
    present = (positions >= begun) & (positions < begins)
    rule = boundary.rule_of_rows(rows, P // boundary.heads)
    scores = score_of(metadata)[None]
    return keys_seen_before(begins, scores, positions, present, rule, size)


def _swap_parts(collectives: Collectives, to: range, since: range, *parts: Tensor) -> list[Tensor]:
    """Sends part i of each tensor [len(to), ...] to rank to[i]. Returns the parts that the ranks `since` sent to this
    rank, [len(since), ...] for each tensor, or an empty list if `since` is empty."""
    message = pack(*parts)
    sent, received = [0] * collectives.size, [0] * collectives.size
    for ranks, byte_counts in ((to, sent), (since, received)):
        for rank in ranks:
            byte_counts[rank] = message.shape[1]
    received_message = collectives.swap(message.reshape(-1), sent, received)
    if not since:
        return []
    return unpack(received_message, len(since), *(part.new_empty(part.shape[1:]) for part in parts))


def _copies_of_part(part: Tensor, ranks: range) -> Tensor:
    """Expands one part to [len(ranks), ...], so that every rank of `ranks` gets it."""
    return part[None].expand(len(ranks), *part.shape)


def _join_ranks(parts: Tensor) -> Tensor:
    """Joins the candidates of all ranks: [ranks, P, L, F] -> [P, ranks L, F]."""
    return parts.transpose(0, 1).flatten(1, 2)


class Direct:
    """Sends each rank's winners straight to every later rank, and gradients straight to the ranks that own the keys.

    Forward and backward use one collective each, in which the busiest rank moves (R - 1) c rows. With two ranks no
    exchange can move less.
    """

    def __init__(self, collectives: Collectives, boundary: Boundary):
        self.collectives, self.boundary = collectives, boundary
        self.earlier, self.later = (
            range(collectives.rank),
            range(collectives.rank + 1, collectives.size),
        )

    def route_shape(self, P: int) -> tuple[int, ...]:
        return P, self.boundary.places

    def collect(self, rows: Tensor, metadata: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        earlier_parts = _swap_parts(
            self.collectives,
            self.later,
            self.earlier,
            *(_copies_of_part(t, self.later) for t in (metadata, rows)),
        )
        P, c, columns = rows.shape
        W, rank = self.boundary.places, self.collectives.rank
        if rank == 0:
            none = torch.full((P, W), -1, device=rows.device)
            return rows.new_zeros(()).expand(P, W, columns), no_key(metadata).expand(P, W, -1), none
        metadata, rows = map(_join_ranks, earlier_parts)
        if rank == 1:  # rank 1 sees all winners of rank 0
            missing = W - c
            route = torch.arange(c, device=rows.device)
            route = F.pad(torch.where(position_of(metadata) < 0, -1, route), (0, missing), value=-1)
            if not missing:
                return rows, metadata, route
        else:
            own_boundary = slice(rank, rank + 1)
            route = _seen_of_candidates(self.boundary, metadata, own_boundary, slice(0, P), P, W)[0]
        empty = no_key(metadata)
        return (
            _take_rows(rows, route[None], 0)[0],
            _take_rows(metadata, route[None], empty)[0],
            route,
        )

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        rank, c = self.collectives.rank, self.boundary.winners
        parts = gradients
        if rank == 0:
            parts = [g[:, :0] for g in gradients]
        elif rank > 1 or route.shape[1] > c:
            parts = [g.new_zeros((g.shape[0], rank * c + 1, g.shape[2])) for g in gradients]
            for part, gradient in zip(parts, gradients, strict=True):
                _add_rows(part, gradient, route)
            parts = [part[:, :-1] for part in parts]
        parts = [part.unflatten(1, (rank, c)).transpose(0, 1) for part in parts]
        later_parts = _swap_parts(self.collectives, self.earlier, self.later, *parts)
        return [_sum_in_order(part) for part in later_parts] if self.later else None


class Parts(NamedTuple):
    """Cuts rows [P, L, F] into one part for each rank: into groups of rows, and each group into blocks of columns.

    There is more than one block only if the number of ranks does not divide P.
    """

    groups: int
    blocks: int

    @classmethod
    def for_ranks(cls, P: int, ranks: int) -> Parts:
        groups = math.gcd(P, ranks)
        return cls(groups, ranks // groups)

    def rows_of(self, part: int, P: int) -> slice:
        """Returns which of the P rows a part has."""
        group, size = part // self.blocks, P // self.groups
        return slice(group * size, (group + 1) * size)

    def split(self, rows: Tensor) -> Tensor:
        """Cuts [P, L, F] into [parts, rows of a part, L, columns of a part]. A bias (F = 1) is in every block."""
        if rows.shape[2] == 1:
            return self.copies(rows)
        missing = -rows.shape[2] % self.blocks
        rows = F.pad(rows, (0, missing)) if missing else rows
        rows = rows.unflatten(0, (self.groups, -1)).unflatten(-1, (self.blocks, -1))
        return rows.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def join(self, parts: Tensor, columns: int) -> Tensor:
        if columns == 1:
            return self.one_copy(parts)
        parts = parts.unflatten(0, (self.groups, self.blocks)).permute(0, 2, 3, 1, 4)
        return parts.flatten(3).flatten(0, 1)[..., :columns]

    def copies(self, metadata: Tensor) -> Tensor:
        """Cuts [P, L, M] into [parts, rows of a part, L, M]. Every block of columns gets all M columns."""
        return metadata.unflatten(0, (self.groups, -1)).repeat_interleave(self.blocks, 0)

    def one_copy(self, parts: Tensor) -> Tensor:
        return parts[:: self.blocks].flatten(0, 1)


class TwoHops:
    """Sends each winner to the rank that selects for its part, and from there to the ranks that see it.

    Rank i collects part i of all winners, and sends each rank part i of the keys that this rank sees. Forward and
    backward use two collectives each. A rank moves less than 2 W rows for any number R of ranks and any scores.
    """

    def __init__(self, collectives: Collectives, boundary: Boundary):
        self.collectives, self.boundary = collectives, boundary
        ranks = range(collectives.size)
        self._swap = partial(_swap_parts, collectives, ranks, ranks)

    def route_shape(self, P: int) -> tuple[int, ...]:
        rows = P // Parts.for_ranks(P, self.collectives.size).groups
        return rows, self.collectives.size * self.boundary.places

    def collect(self, rows: Tensor, metadata: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        P, _, columns = rows.shape
        ranks, boundary = self.collectives.size, self.boundary
        parts = Parts.for_ranks(P, ranks)
        own_rows, all_boundaries = parts.rows_of(self.collectives.rank, P), slice(0, ranks)
        swapped = self._swap(parts.copies(metadata), parts.split(rows))
        metadata, rows = map(_join_ranks, swapped)
        route = _seen_of_candidates(
            boundary, metadata, all_boundaries, own_rows, P, boundary.places
        )
        metadata, rows = self._swap(
            _take_rows(metadata, route, no_key(metadata)), _take_rows(rows, route, 0)
        )
        return parts.join(rows, columns), parts.one_copy(metadata), route.transpose(0, 1).flatten(1)

    def give_back(self, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
        ranks, c = self.collectives.size, self.boundary.winners
        parts = Parts.for_ranks(gradients[0].shape[0], ranks)
        route = route.unflatten(1, (ranks, -1)).transpose(0, 1)
        totals = []
        for gathered in self._swap(*map(parts.split, gradients)):
            total = _zero_sums(gathered, ranks * c)
            for rank in range(1, ranks):  # rank 0 sees no earlier key
                _add_rows(total, gathered[rank], route[rank])
            totals.append(total[:, :-1].unflatten(1, (ranks, c)).transpose(0, 1))
        # The sums stay float32: another rounding would be a third of the total distance from the result of one process.
        return [
            parts.join(part, g.shape[2])
            for part, g in zip(self._swap(*totals), gradients, strict=True)
        ]


def _zero_sums(gathered: Tensor, candidates: int) -> Tensor:
    """Returns zeros [P, candidates + 1, F], to which gradients [ranks, P, W, F] are added. The last row takes gradients
    of places without a key."""
    wide = torch.promote_types(gathered.dtype, torch.float32)
    return gathered.new_zeros((gathered.shape[1], candidates + 1, gathered.shape[3]), dtype=wide)


def _sum_in_order(parts: Tensor) -> Tensor:
    total = _widen_values(parts[0])
    for part in parts[1:]:
        total = total + part
    return total


def _widen_values(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


EXCHANGES = {"direct": Direct, "two_hops": TwoHops}


def choose_exchange(name: str, collectives: Collectives) -> type[Direct] | type[TwoHops]:
    """Returns the exchange of this name. "auto" chooses the one that moves fewer bytes among this number of ranks."""
    if name == "auto":
        name = "direct" if collectives.size <= 2 else "two_hops"
    if not isinstance(name, str) or name not in EXCHANGES:
        raise ValueError(f"exchange: got {name!r}, expected 'auto' or one of {tuple(EXCHANGES)}")
    return EXCHANGES[name]
