"""A model trained by two processes (DDP, FSDP2) has the loss and gradients of one process."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.utils.checkpoint import checkpoint

from flash_dmattn import flash_dmattn_func
from processes import run_in_processes

B, S, HEADS, HEADS_KV, D = 4, 20, 4, 2, 8


class Layer(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.qkv = torch.nn.Linear(HEADS * D, (HEADS + 2 * HEADS_KV) * D)
        self.score = torch.nn.Linear(HEADS * D, HEADS_KV)
        self.out = torch.nn.Linear(HEADS * D, HEADS * D)

    def attend(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, D))
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=2)
        bias = self.score(x).transpose(1, 2)
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=5)
        return x + self.out(out.flatten(2))

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)


def make_model(checkpointed):
    torch.manual_seed(1)
    return torch.nn.Sequential(Layer(checkpointed), Layer(checkpointed))


def gradients_of(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]


def compare(rank):
    x = torch.randn(B, S, HEADS * D)
    mine = x[rank::2]
    for checkpointed in (False, True):
        expected = gradients_of(make_model(checkpointed), x)
        for parallel in (data_parallel, fully_sharded):
            gradients = gradients_of(parallel(make_model(checkpointed)), mine)
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-7)


def data_parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fully_sharded(model):
    mesh = DeviceMesh("cpu", [0, 1])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_gradients_equal_one_process():
    run_in_processes(2, compare)
