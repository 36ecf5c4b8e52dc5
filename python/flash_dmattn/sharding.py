"""How attention and selection are sharded over devices: torch.distributed.tensor's rules for the operators.

Importing this module registers them. `import flash_dmattn` does so as soon as torch.distributed.tensor is imported, before
it or after it.

A call is computed without communication where all tensors are sharded alike: by batch elements, or by heads of key with
the query heads of their groups. A mask, bias or choice that all of them share is replicated, and the gradient of such a
bias is a partial sum. Other placements are redistributed to one of these.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from . import _ops
from ._ops import KEYS

_BATCH, _HEADS = 0, 1  # dimensions of all tensors but rows such as q, whose heads are dimension 2
_INPUTS = 5 + len(KEYS)  # q, k, v, mask, bias


def _by(dim: int, tensor, whole: int):
    """The placement of a mask, bias or choice, one of whose dimensions may be 1 of `whole`."""
    if tensor is None:
        return None
    return Replicate() if tensor.shape[dim] == 1 and whole > 1 else Shard(dim)


def _splits(mesh_shape: tuple[int, ...], batch: int, heads_kv: int) -> list[tuple[int, int]]:
    """(dimension, size) by which a call with these sizes may be split."""
    sizes = ((_BATCH, batch), (_HEADS, heads_kv))
    return [(dim, size) for dim, size in sizes if size > 1 and size % max(mesh_shape) == 0]


def _attention_placements(q, k, v, *operands):
    """Of rows such as q, of the operands, and of statistics [2, B, Hq, Sq]: one of each for every way of sharding."""
    yield Replicate(), [t if t is None else Replicate() for t in operands], Replicate()
    for dim, size in _splits(q.mesh.shape, k.shape[0], k.shape[2]):
        rows = Shard(2 if dim == _HEADS else dim)
        yield rows, [_by(dim, t, size) for t in operands], Shard(dim + 1)


@register_sharding(_ops.forward)
def _forward(*arguments):
    options = [None] * (len(arguments) - _INPUTS)
    return [
        ([rows, statistics], [rows, rows, rows, *operands, *options])
        for rows, operands, statistics in _attention_placements(*arguments[:_INPUTS])
    ]


@register_sharding(_ops.select_and_attend)
def _select_and_attend(q, k, v, bias, *options):
    others = [None] * len(options)
    return [
        ([rows, statistics, of_bias], [rows, rows, rows, of_bias, *others])
        for rows, (of_bias,), statistics in _attention_placements(q, k, v, bias)
    ]


@register_sharding(_ops.backward)
def _backward(dout, *arguments):
    options = [None] * (len(arguments) - _INPUTS - 2)  # after out and lse
    *needs, needs_dbias = arguments[-4:]
    found = []
    for rows, operands, statistics in _attention_placements(*arguments[:_INPUTS]):
        dbias = operands[1] if needs_dbias else Replicate()  # of no elements
        if needs_dbias and dbias == Replicate() and rows != Replicate():
            dbias = Partial()
        outputs = [*(rows if needed else Replicate() for needed in needs), dbias]
        inputs = [rows, rows, rows, rows, *operands, rows, statistics, *options]
        found.append((outputs, inputs))
    return found


def _choice_placements(tensors, options, outputs: int):
    """Of operators whose tensors and outputs all begin with batch and heads."""
    scores = tensors[0]
    others = [None] * len(options)
    found = [([Replicate()] * outputs, [t if t is None else Replicate() for t in tensors] + others)]
    for dim, size in _splits(scores.mesh.shape, *scores.shape[:2]):
        found.append(([Shard(dim)] * outputs, [_by(dim, t, size) for t in tensors] + others))
    return found


@register_sharding(_ops.select_key_intervals)
def _select_key_intervals(scores, key_mask, *options):
    return _choice_placements((scores, key_mask), options, 1)


@register_sharding(_ops.select_key_list)
def _select_key_list(scores, key_mask, *options):
    return _choice_placements((scores, key_mask), options, 2)


# torch keeps a rule's result by the tensors alone where no argument is declared to matter.
for operator, tensors in (
    (_ops.forward, _INPUTS),
    (_ops.select_and_attend, 4),
    (_ops.backward, 1 + _INPUTS + 2),
    (_ops.select_key_intervals, 2),
    (_ops.select_key_list, 2),
):
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(tensors, needs_pytree=True)
