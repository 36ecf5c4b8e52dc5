"""Combines tensor and context parallelism on 2 x 2 processes. Scores are split like key heads, and each part of the heads has its
own exchange."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import context_parallel_dmattn
from processes import run_in_processes

N, WIDTH, HEAD_DIM, HEADS_KV = 64, 32, 16, 4


class Layer(nn.Module):
    """Attention with as many heads as its weights have."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, 2 * HEADS_KV * HEAD_DIM, bias=False)
        self.key = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM, bias=False)
        self.value = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM, bias=False)
        self.gate = nn.Linear(WIDTH, HEADS_KV)
        self.out = nn.Linear(2 * HEADS_KV * HEAD_DIM, WIDTH, bias=False)

    def forward(self, hidden, attend):
        q, k, v = (
            project(hidden).unflatten(-1, (-1, HEAD_DIM))
            for project in (self.query, self.key, self.value)
        )
        scores = nn.functional.logsigmoid(self.gate(hidden)).transpose(1, 2)
        return self.out(attend(q, k, v, scores).flatten(2))


def make_layer():
    torch.manual_seed(3)
    return Layer()


def compare(rank, rule):
    hidden = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(5))
    dout = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(6))
    one = make_layer()
    expected = one(
        hidden, lambda q, k, v, s: flash_dmattn_func(q, k, v, None, s, is_causal=True, **rule)
    )
    expected.backward(dout)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    columns = dict.fromkeys(("query", "key", "value", "gate"), ColwiseParallel())
    layer = parallelize_module(make_layer(), mesh["tp"], columns | {"out": RowwiseParallel()})
    n = N // 2
    rows = slice(mesh.get_local_rank("cp") * n, (mesh.get_local_rank("cp") + 1) * n)
    out = layer(
        hidden[:, rows],
        lambda q, k, v, s: context_parallel_dmattn(q, k, v, s, group=mesh["cp"], **rule),
    )
    torch.testing.assert_close(out, expected[:, rows], rtol=2e-5, atol=5e-6)
    out.backward(dout[:, rows])
    for (name, parameter), other in zip(layer.named_parameters(), one.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        dist.all_reduce(gradient, group=mesh.get_group("cp"))
        torch.testing.assert_close(
            gradient, other.grad, rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "rule",
    [{"keep_window_size": 13}, {"keep_window_size": 9, "recent_window": 5, "sink_tokens": 2}],
    ids=["window", "rule"],
)
def test_heads_and_pieces_on_four_processes_equal_one(rule):
    run_in_processes(4, compare, rule)
