"""Keys of earlier ranks and of this one, between the two steps of context parallelism."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..keys.intervals import KeyIntervals
from ..keys.rule import find_sinks
from ..keys.visibility import Visibility
from .operators import choose_keys
from .options import Options
from .pieces import Boundary, shown_in_piece
from .wire import Wire


class ExchangedKeys(NamedTuple):
    """Keys of earlier ranks, then those of this rank: what `begin_exchange` returns, for `attend_to_pieces` and `boundary_state`.

    The first `places` keys are of earlier ranks, in the order of their positions; after them come places without a key, whose
    position is -1.
    """

    boundary: Boundary
    key: Tensor  # [B, places + n, Hkv, D]
    value: Tensor
    scores: Tensor  # float32 [B, Hkv, places + n], NaN: never chosen
    bias: Tensor | None  # float32, of the same shape; None: none is added
    bias_is_score: bool
    positions: Tensor  # int32 [B, Hkv, places], in the whole sequence
    present: Tensor | None  # bool [B, 1 or Hkv, n]: which keys of this rank are there; None: all
    documents: Tensor | None  # int64 [B or 1, documents + 1]: their offsets in the whole sequence
    stream: torch.cuda.Stream | None = None  # which makes the tensors; None: the current one did
    # The options of `attend_to_pieces` that `begin_exchange` has got and compared; None: it got none.
    options: Options | None = None
    # The wire whose ranks compare what `attend_to_pieces` gets; None: they have, or cannot in compiled code.
    wire: Wire | None = None
    check: bool | None = None  # of `begin_exchange`


def check_exchanged(exchanged: object) -> None:
    if not isinstance(exchanged, ExchangedKeys):
        raise TypeError(
            f"exchanged: got {type(exchanged).__name__}, expected the result of begin_exchange"
        )


def seen_keys(exchanged: ExchangedKeys) -> tuple[Tensor, Visibility]:
    """The row at each key's position, int64 [B, Hkv, places + n], and the keys that queries see."""
    boundary = exchanged.boundary
    own_row, chosen = choose_keys(
        exchanged.scores,
        exchanged.positions,
        exchanged.present,
        exchanged.documents,
        boundary.pieces.begin(),
        boundary.rule,
    )
    n = exchanged.scores.shape[2] - boundary.places
    return own_row, Visibility(
        keys=KeyIntervals(chosen, n, boundary.rule.key_bound(is_causal=True))
    )


def bias_without_sinks(exchanged: ExchangedKeys) -> ExchangedKeys:
    """The keys with a bias of 0 for sinks, which then have no gradient of it."""
    boundary, places = exchanged.boundary, exchanged.boundary.places
    if not boundary.rule.sink_tokens or exchanged.bias is None:
        return exchanged
    n = exchanged.scores.shape[2] - places
    shown = shown_in_piece(
        exchanged.positions, n, exchanged.present, exchanged.documents, boundary.pieces.begin()
    )
    is_sink = find_sinks(shown, boundary.rule)
    return exchanged._replace(bias=torch.where(is_sink, 0, exchanged.bias))
