"""The exchange as a pair of operators, and the selection of keys as a third one.

torch.compile and selective checkpointing see them by their names. The exchange takes only the winners and returns only
the keys in `places`, so a checkpoint that saves the results of `exchange_keys` saves w keys and does not run the
exchange again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..._core.load import NAMESPACE
from ...keys.rule import SelectionRule
from . import pieces
from .collectives import collectives_of
from .kinds import EXCHANGES, Exchange
from .pieces import Boundary, PieceOffsets


def collect(exchange: Exchange, rows: Tensor, metadata: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Calls `Exchange.collect`. Under torch.compile or a dispatch mode it calls the operator."""
    if not _is_watched():
        return exchange.collect(rows, metadata)
    return exchange_keys_op(rows, metadata, *_operands(exchange))


def give_back(exchange: Exchange, route: Tensor, *gradients: Tensor) -> list[Tensor] | None:
    """Calls `Exchange.give_back`. Under torch.compile or a dispatch mode it calls the operator.

    The operator has a result on every rank, because a compiler removes an operator whose results are not read.
    """
    if not _is_watched():
        return exchange.give_back(route, *gradients)
    return return_gradients_op(route, list(gradients), *_operands(exchange))


def select_in_piece(
    scores: Tensor,
    positions: Tensor,
    present: Tensor | None,
    documents: Tensor | None,
    begin: int,
    rule: SelectionRule,
) -> tuple[Tensor, Tensor]:
    """Calls `pieces.select_in_piece`. Under torch.compile or a dispatch mode it calls the operator.

    The inductor of torch 2.13 compiled that function to code with different intervals for documents.
    """
    if not _is_watched():
        return pieces.select_in_piece(scores, positions, present, documents, begin, rule)
    options = (list(rule.windows()), *rule.operands())
    return select_in_piece_op(scores, positions, present, documents, begin, *options)


def _is_watched() -> bool:
    # Other calls skip the operator, because it adds 0.1 ms of host time.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _operands(exchange: Exchange) -> tuple:
    """Returns an exchange as the operators' arguments."""
    boundary, rule = exchange.boundary, exchange.boundary.rule
    name = next(name for name, kind in EXCHANGES.items() if type(exchange) is kind)
    return (
        boundary.begun,
        list(boundary.pieces.begins),
        boundary.heads,
        list(rule.windows()),
        *rule.operands(),
        boundary.saturate,
        name,
        exchange.collectives.group.group_name,
    )


def _exchange(
    begun, begins, heads, windows, recent, competes, sinks, threshold, saturate, name, group
) -> Exchange:
    collectives = collectives_of(dist.distributed_c10d._resolve_process_group(group))
    rule = _rule(windows, recent, competes, sinks, threshold)
    offsets = PieceOffsets(collectives.rank, tuple(begins))
    return EXCHANGES[name](collectives, Boundary.from_rule(offsets, rule, heads, begun, saturate))


def _rule(windows: list[int], *options) -> SelectionRule:
    window = tuple(windows) if len(windows) > 1 else windows[0]
    return SelectionRule(window, "per_query", *options)


# The arguments for a rule and for an exchange in the operators' schemas.
_RULE_SCHEMA = "SymInt[] windows, SymInt recent_window, bool recent_competes, SymInt sink_tokens, float? score_threshold"
_EXCHANGE_SCHEMA = f"Tensor? begun, SymInt[] begins, SymInt heads, {_RULE_SCHEMA}, bool saturate, str exchange, str group"


def _operator(name: str, schema: str):
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)


@_operator(
    "select_in_piece",
    f"(Tensor scores, Tensor positions, Tensor? present, Tensor? documents, SymInt begin, {_RULE_SCHEMA}) -> (Tensor, Tensor)",
)
def select_in_piece_op(scores, positions, present, documents, begin, windows, *options):
    rule = _rule(windows, *options)
    return pieces.select_in_piece(scores, positions, present, documents, begin, rule)


@select_in_piece_op.register_fake
def _select_in_piece_fake(scores, *operands):
    own_row = scores.new_empty(scores.shape, dtype=torch.int64)
    return own_row, scores.new_empty((*scores.shape, 2), dtype=torch.int32)


@_operator(
    "exchange_keys",
    f"(Tensor rows, Tensor metadata, {_EXCHANGE_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def exchange_keys_op(rows, metadata, *operands):
    results = _exchange(*operands).collect(rows, metadata)
    # A result of an operator must not be a view of another result.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in results)


@exchange_keys_op.register_fake
def _exchange_keys_fake(rows, metadata, *operands):
    exchange = _exchange(*operands)
    places, P = exchange.boundary.places, rows.shape[0]
    return (
        rows.new_empty((P, places, rows.shape[2])),
        metadata.new_empty((P, places, metadata.shape[2])),
        rows.new_empty(exchange.route_shape(P), dtype=torch.int64),
    )


@_operator(
    "return_gradients", f"(Tensor route, Tensor[] gradients, {_EXCHANGE_SCHEMA}) -> Tensor[]"
)
def return_gradients_op(route, gradients, *operands):
    exchange = _exchange(*operands)
    sums = exchange.give_back(route, *gradients)
    if sums is None:
        return [t.zero_() for t in _like_sums(exchange, gradients)]
    return [t.clone(memory_format=torch.contiguous_format) for t in sums]


@return_gradients_op.register_fake
def _return_gradients_fake(route, gradients, *operands):
    return _like_sums(_exchange(*operands), gradients)


def _like_sums(exchange: Exchange, gradients: list[Tensor]) -> list[Tensor]:
    winners = exchange.boundary.winners
    return [
        g.new_empty(
            (g.shape[0], winners, g.shape[2]), dtype=torch.promote_types(g.dtype, torch.float32)
        )
        for g in gradients
    ]
