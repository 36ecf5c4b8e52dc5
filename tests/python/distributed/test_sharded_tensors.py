"""Attention over DTensors: sharded by batch elements or heads, without communication, and right."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from processes import run_in_processes

B, S, HQ, HKV, D = 2, 24, 4, 2, 8

# Shape of the bias and keep_window_size.
CASES = [((B, HKV, S), 5), ((B, HQ, S), None), ((1, 1, S), 5)]


def attend(q, k, v, bias, window):
    from flash_dmattn import flash_dmattn_func

    options = {"keep_window_size": window} if window else {}
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


def compare(dim, bias_shape, window):
    mesh = DeviceMesh("cpu", [0, 1])
    shapes = [(B, S, HQ, D), (B, S, HKV, D), (B, S, HKV, D), bias_shape]
    whole = [torch.randn(shape) for shape in shapes]
    dout = torch.randn(shapes[0])
    head_dims = (2, 2, 2, 1)

    def placement(tensor, head_dim):
        at = head_dim if dim == "heads" else 0
        return Replicate() if tensor.shape[at] == 1 else Shard(at)

    expected_leaves = [t.clone().requires_grad_() for t in whole]
    expected = attend(*expected_leaves, window)
    gradients = torch.autograd.grad(expected, expected_leaves, dout)

    leaves = [
        distribute_tensor(t, mesh, [placement(t, at)]).requires_grad_()
        for t, at in zip(whole, head_dims, strict=True)
    ]
    sharded_dout = distribute_tensor(dout, mesh, leaves[0].placements)
    with CommDebugMode() as communication:
        out = attend(*leaves, window)
        assert out.placements == leaves[0].placements
        found = torch.autograd.grad(out, leaves, sharded_dout)
    assert communication.get_total_counts() == 0
    for actual, wanted in zip([out, *found], [expected, *gradients], strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted)


def compare_all(rank):
    for dim in ("batch", "heads"):
        for case in CASES:
            compare(dim, *case)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_equals_one_process():
    run_in_processes(2, compare_all)
