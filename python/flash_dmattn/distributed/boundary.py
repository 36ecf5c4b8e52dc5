"""The keys that tokens after a piece see: the number of these keys, and a KV cache that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core.checks import check_count
from ..generation.cache import KVSlots
from ..keys.intervals import KeyIntervals
from ..keys.rule import RuleParts, SelectionRule, takes_rule
from ._exchange.arguments import checked_lengths
from ._exchange.collectives import Group, collectives_of
from ._exchange.earlier_keys import take_rows
from ._exchange.pieces import Boundary, PieceOffsets, keys_seen_before
from .attention import ExchangedKeys, check_exchanged


@takes_rule
def boundary_places(
    group: Group,
    tokens: int,
    keep_window_size: int | Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    **rule: Unpack[RuleParts],
) -> int:
    """Returns how many rows `headroom` leaves in front of a rank's keys and values.

    tokens: the number of tokens of this rank. The other arguments are as in `begin_exchange`.
    """
    collectives = collectives_of(group)
    check_count(tokens, "tokens")
    rule = SelectionRule.of_keywords(keep_window_size, rule).checked_state_rule()
    pieces = PieceOffsets.from_lengths(
        collectives.rank, checked_lengths(lengths, collectives, tokens)
    )
    return Boundary.from_rule(pieces, rule, 1).places


def boundary_state(exchanged: ExchangedKeys, *, chunk: int = 0) -> KVSlots:
    """Returns a KV cache of the keys that tokens after this piece see. Generation continues from the last rank's cache.

    If a document continues after the piece, positions and `seen` count from the document's beginning. If no document
    does, the cache is empty. The cache's `capped` does not count keys that left before this piece.

    chunk: the cache's maximum number of pending tokens.

    Raises ValueError if the bias is not the scores, because a cache keeps one value for each key.
    """
    check_exchanged(exchanged)
    if exchanged.bias is not None and not exchanged.bias_is_score:
        raise ValueError("exchanged: got another bias than the scores, expected 'scores' or None")
    boundary, rule = exchanged.boundary, exchanged.boundary.rule
    key, value, scores = (t.detach() for t in (exchanged.key, exchanged.value, exchanged.scores))
    batch, length, heads, head_dim = key.shape
    cache = KVSlots(
        batch,
        heads,
        head_dim=head_dim,
        value_dim=value.shape[3],
        chunk=chunk,
        dtype=key.dtype,
        device=key.device,
        **rule._asdict(),
    )
    begun = torch.zeros((1, 1, 1), dtype=torch.int64, device=key.device)
    if boundary.begun is not None:
        begun = boundary.begun[:, boundary.pieces.rank + 1, None, None]
    seen = (boundary.pieces.end() - begun.view(-1)).expand(batch)
    if length:
        places, positions = _state_of_keys(exchanged, begun)
        there = places >= 0
        rows = places.clamp(min=0)
        scores = torch.where(there, scores.gather(-1, rows), torch.nan)
        # The intervals are those of a single query, which sees every key that is present.
        intervals = torch.stack([torch.zeros_like(there), there], -1).int()
        key, value = (take_rows(t, rows).transpose(1, 2) for t in (key, value))
        cache.fill(key, value, scores, KeyIntervals(intervals, 1))
        cache.renumber((positions - begun).int(), seen)
    cache.seen.copy_(seen)
    return cache


def _state_of_keys(exchanged: ExchangedKeys, begun: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the keys that the last query of this piece sees. Returns (places, positions), each int64 [B, Hkv, S].

    places: indices among the keys of `exchanged`, -1 for no key. `KVSlots.fill` finds recent keys by their index, so
        the last recent_window entries are for the last recent_window positions, whether a key is there or not. The
        entries before them are the other keys in their order.
    positions: the positions of these keys in the whole sequence.

    begun: where the document that continues after the piece begins.
    """
    pieces, rule = exchanged.boundary.pieces, exchanged.boundary.rule
    own_positions = torch.arange(pieces.begin(), pieces.end(), device=exchanged.key.device)
    batch, heads, length = exchanged.scores.shape
    positions = torch.cat([exchanged.positions.long(), own_positions.expand(batch, heads, -1)], -1)
    present = (positions >= 0) & (positions >= begun)
    if exchanged.present is not None:
        present[..., exchanged.boundary.places :] &= exchanged.present
    size, recent = rule.place_count(), rule.recent_window
    seen = keys_seen_before(
        pieces.end(),
        exchanged.scores.detach().flatten(0, 1)[None],
        positions.flatten(0, 1)[None],
        present.flatten(0, 1)[None],
        exchanged.boundary.rule_of_rows(slice(None), batch),
        size,
    )[0].unflatten(0, (batch, heads))
    at = positions.gather(-1, seen.clamp(min=0))
    first_recent = pieces.end() - recent
    in_order = torch.arange(size, device=seen.device)
    index = torch.where(at >= first_recent, at - first_recent + size - recent, in_order)
    index = torch.where(seen < 0, size, index)  # the last column, which is cut off
    places = seen.new_full((batch, heads, size + 1), -1).scatter_(-1, index, seen)[..., :size]
    return places, positions.gather(-1, places.clamp(min=0))
