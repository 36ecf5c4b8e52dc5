"""Rules of torch.distributed.tensor that shard the operators of attention and selection over devices.

Importing this module registers the rules. The first call of attention after an import of torch.distributed.tensor
registers them, too.

A call needs no communication if all tensors are sharded alike: by batch elements, or by key heads together with the
query heads of their groups. A mask, bias or selection that all batch elements or heads share is replicated, and the
gradient of a replicated bias is a partial sum. torch redistributes tensors with other placements to one of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from .._core import ops
from .._core.signatures import GRADIENTS, LAYOUTS, Layout, Signature


def _register(operator) -> None:
    signature = Signature(operator)

    @register_sharding(operator)
    def placements(*arguments):
        named = signature.arguments_by_name(arguments)
        return [_replicated_placements(signature, named)] + [
            _split_placements(signature, named, axis, size) for axis, size in _splits(named)
        ]

    # Without this declaration, torch caches the result of a rule by the tensors alone and ignores the other arguments.
    propagator = DTensor._op_dispatcher.sharding_propagator
    tensors = len(signature.tensors)
    propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(tensors, needs_pytree=True)


def _splits(named: dict[str, object]) -> list[tuple[int, int]]:
    """Returns (axis, size) of each axis by which a call may be split: the batch (axis 0) and the key heads (axis 1)."""
    if "k" in named:
        tensor, sizes = named["k"], (named["k"].shape[0], named["k"].shape[2])
    else:
        tensor, sizes = named["scores"], named["scores"].shape[:2]
    if len(named.get("windows", ())) > 1:
        sizes = sizes[:1]  # heads with windows of their own stay together
    most = max(tensor.mesh.shape)
    return [(axis, size) for axis, size in enumerate(sizes) if size > 1 and size % most == 0]


def _replicated_placements(
    signature: Signature, named: dict[str, object]
) -> tuple[Sequence, Sequence]:
    inputs = [None if named[name] is None else Replicate() for name in signature.tensors]
    return [Replicate()] * len(signature.results), _append_options(signature, inputs)


def _split_placements(
    signature: Signature, named: dict[str, object], axis: int, size: int
) -> tuple[Sequence, Sequence]:
    """Returns the placements of the results and of the arguments if an axis of this size is split."""
    inputs = [_placement(name, named[name], axis, size) for name in signature.tensors]
    outputs = [_result(name, named, axis, size) for name in signature.results]
    return outputs, _append_options(signature, inputs)


def _placement(name: str, tensor, axis: int, size: int) -> Placement | None:
    if tensor is None:
        return None
    dim = LAYOUTS[name].dim_of(axis)
    is_shared = LAYOUTS[name] is Layout.SHARED and tensor.shape[dim] == 1 and size > 1
    return Replicate() if is_shared else Shard(dim)


def _result(name: str, named: dict[str, object], axis: int, size: int) -> Placement:
    if not named.get(f"need_{name}", True):
        return Replicate()  # an empty tensor
    if name == GRADIENTS["bias"]:
        bias = _placement("bias", named["bias"], axis, size)
        return Partial() if bias == Replicate() else bias
    if name == "key_intervals":  # selected by the bias, so they are placed like it
        return _placement("bias", named["bias"], axis, size)
    return Shard(LAYOUTS[name].dim_of(axis))


def _append_options(signature: Signature, placements: list) -> list:
    return placements + [None] * len(signature.options)


@register_sharding(ops.score_projection)
def _projection_placements(hidden, weight, bias, factor, form):
    """Splits batch elements, tokens or heads. Features stay together, because a score adds them in one order."""
    most = max(hidden.mesh.shape)
    whole = Replicate()
    splits = [
        (hidden.shape[0], Shard(0), Shard(0), whole),
        (hidden.shape[1], Shard(2), Shard(1), whole),
        (weight.shape[0], Shard(1), whole, Shard(0)),
    ]
    splits = [split for size, *split in splits if size > 1 and size % most == 0]
    return [
        ([out], [tokens, heads, *(None if t is None else heads for t in (bias, factor)), None])
        for out, tokens, heads in [(whole, whole, whole), *splits]
    ]


for _operator in (
    ops.forward,
    ops.select_and_attend,
    ops.backward,
    ops.select_key_intervals,
):
    _register(_operator)
