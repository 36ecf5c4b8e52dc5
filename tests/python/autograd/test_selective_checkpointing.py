"""Selective checkpointing that saves attention by the operators' names recomputes everything else."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flash_dmattn import flash_dmattn_func
from flash_dmattn.kernels import recorded_kernels

operators = [
    torch.ops.flash_dmattn.forward.default,
    torch.ops.flash_dmattn.select_and_attend.default,
]
saves_attention = partial(create_selective_checkpoint_contexts, operators)


def block(q, k, v, bias, window=5):
    q, k = q.sin(), k.cos()
    out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window)
    return out.sigmoid()


def tensors():
    shapes = [(2, 33, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16), (2, 2, 33)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def gradients(function, inputs):
    return torch.autograd.grad(function(*inputs).sum(), inputs)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("window", [5, None])
def test_saved_attention_runs_once(saved, window):
    inputs = tensors()
    options = {"context_fn": saves_attention} if saved else {}
    body = partial(block, window=window)

    def checkpointed(*args):
        return checkpoint(body, *args, use_reentrant=False, **options)

    expected = gradients(body, inputs)
    with recorded_kernels() as kernels:
        checkpointed_gradients = gradients(checkpointed, inputs)
    assert sum("forward" in name for name in kernels) == (1 if saved else 2)
    torch.testing.assert_close(checkpointed_gradients, expected, rtol=0, atol=0)


def test_compiled_checkpointing_equals_eager():
    torch._dynamo.reset()
    counts = []

    def count(graph, _):
        counts.append(sum(node.target in operators for node in graph.graph.nodes))
        return graph

    def checkpointed(*args):
        return checkpoint(block, *args, use_reentrant=False, context_fn=saves_attention)

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    inputs = tensors()
    compiled = torch.compile(checkpointed, backend=backend, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(block, inputs))
    assert counts == [1, 0]
