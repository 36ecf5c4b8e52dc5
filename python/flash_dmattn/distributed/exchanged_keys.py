"""The keys of earlier ranks and of this rank, which the first step of context parallelism hands to the second."""

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
    """The result of `begin_exchange`: keys of earlier ranks, then those of this rank.

    `attend_to_pieces` and `boundary_state` take it. The first `places` rows are for keys of earlier ranks. The keys
    come first, in the order of their positions. The places that are left hold no key and have the position -1.
    """

    boundary: Boundary
    key: Tensor  # [B, places + n, Hkv, D]
    value: Tensor
    scores: Tensor  # float32 [B, Hkv, places + n]; a key whose score is NaN is never chosen
    bias: Tensor | None  # float32 [B, Hkv, places + n]; None: no bias is added
    bias_is_score: bool
    positions: Tensor  # int32 [B, Hkv, places], positions in the whole sequence
    present: Tensor | None  # bool [B, 1 or Hkv, n]: which keys of this rank are present; None: all
    documents: Tensor | None  # int64 [B or 1, documents + 1]: offsets in the whole sequence
    # The CUDA stream that makes the tensors. None: the current stream has made them.
    stream: torch.cuda.Stream | None = None
    # The options for `attend_to_pieces` that `begin_exchange` got and compared; None: it got no options.
    options: Options | None = None
    # The ranks of this wire compare the options of `attend_to_pieces`. None: `begin_exchange` has compared them, or the
    # code is compiled and cannot compare.
    wire: Wire | None = None
    check: bool | None = None  # the argument of `begin_exchange`


def check_exchanged(exchanged: object) -> None:
    if not isinstance(exchanged, ExchangedKeys):
        raise TypeError(
            f"exchanged: got {type(exchanged).__name__}, expected the result of begin_exchange"
        )


def seen_keys(exchanged: ExchangedKeys) -> tuple[Tensor, Visibility]:
    """Returns the row at each key's position, int64 [B, Hkv, places + n], and the keys that each query sees."""
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
    """Returns the keys with the bias of sinks set to 0, so that the bias of a sink gets no gradient."""
    boundary, places = exchanged.boundary, exchanged.boundary.places
    if not boundary.rule.sink_tokens or exchanged.bias is None:
        return exchanged
    n = exchanged.scores.shape[2] - places
    shown = shown_in_piece(
        exchanged.positions, n, exchanged.present, exchanged.documents, boundary.pieces.begin()
    )
    is_sink = find_sinks(shown, boundary.rule)
    return exchanged._replace(bias=torch.where(is_sink, 0, exchanged.bias))
