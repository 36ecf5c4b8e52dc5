"""Exact attention over a sequence whose pieces are on several ranks, and sharding over batch elements and heads."""

from ._exchange.collectives import Traffic, exchanged_bytes
from .attention import (
    ExchangedKeys,
    attend_to_pieces,
    begin_exchange,
    context_parallel_dmattn,
)
from .batch import ContextParallel, Piece
from .boundary import boundary_places, boundary_state
from .headroom import linear_with_headroom

__all__ = [
    "ContextParallel",
    "ExchangedKeys",
    "Piece",
    "Traffic",
    "attend_to_pieces",
    "begin_exchange",
    "boundary_places",
    "boundary_state",
    "context_parallel_dmattn",
    "exchanged_bytes",
    "linear_with_headroom",
]
