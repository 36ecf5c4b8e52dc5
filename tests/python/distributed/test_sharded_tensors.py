"""Attention over DTensors that are sharded by batch elements or heads is correct without communication."""

import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flash_dmattn import flash_dmattn_func, score_projection
from processes import run_in_processes

B, S, HQ, HKV, D = 2, 24, 4, 2, 8

DELAYED = {"recent_window": 4, "sink_tokens": 2, "score_threshold": -1.0}

# (shape of the bias, arguments). Heads with different windows stay together, so their scores are gathered.
CASES = [
    ((B, HKV, S), {"keep_window_size": 5}),
    ((B, HQ, S), {}),
    ((1, 1, S), {"keep_window_size": 5}),
    ((B, HKV, S), {"keep_window_size": 5, **DELAYED}),
    ((1, 1, S), {"score_threshold": 0.0, "recent_window": 3}),
    ((B, HKV, S), {"keep_window_size": (3, 7), "recent_window": 2, "recent_competes": True}),
    ((B, HKV, S), {"bias_delay": 4}),
    ((1, 1, S), {"bias_delay": 4, "keep_window_size": 5, "recent_window": 4}),
]


def attend(q, k, v, bias, sinks=None, **options):
    options = {"sink_logits": sinks, "is_causal": True, "return_lse": True, **options}
    return flash_dmattn_func(q, k, v, attn_bias=bias, **options)


def compare(dim, bias_shape, options, with_sinks=False):
    mesh = DeviceMesh("cpu", [0, 1])
    shapes = [(B, S, HQ, D), (B, S, HKV, D), (B, S, HKV, D), bias_shape]
    whole = [torch.randn(shape) for shape in shapes]
    weights = [torch.randn(shapes[0]), torch.randn(B, HQ, S)]
    head_dims = [2, 2, 2, 1]
    if with_sinks:
        whole.append(torch.randn(HQ))
        head_dims.append(0)

    def placement(tensor, head_dim):
        at = head_dim if dim == "heads" else 0
        is_shared = tensor.shape[at] == 1 or (tensor.dim() == 1 and dim == "batch")
        return Replicate() if is_shared else Shard(at)

    expected_leaves = [t.clone().requires_grad_() for t in whole]
    expected = attend(*expected_leaves, **options)
    gradients = torch.autograd.grad(expected, expected_leaves, weights)

    leaves = [
        distribute_tensor(t, mesh, [placement(t, at)]).requires_grad_()
        for t, at in zip(whole, head_dims, strict=True)
    ]
    lse_placement = Shard(1 if dim == "heads" else 0)
    sharded_weights = [
        distribute_tensor(weight, mesh, [at])
        for weight, at in zip(weights, (leaves[0].placements[0], lse_placement), strict=True)
    ]
    with CommDebugMode() as communication:
        out, lse = attend(*leaves, **options)
        assert out.placements == leaves[0].placements and lse.placements == (lse_placement,)
        sharded_gradients = torch.autograd.grad((out, lse), leaves, sharded_weights)
    gathers_scores = dim == "heads" and isinstance(options.get("keep_window_size"), tuple)
    adds_sinks = dim == "batch" and with_sinks  # their gradient sums over all rows
    assert communication.get_total_counts() == gathers_scores + adds_sinks
    for actual, wanted in zip([out, lse, *sharded_gradients], [*expected, *gradients], strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted)


def compare_all(rank):
    for dim in ("batch", "heads"):
        for case in CASES:
            compare(dim, *case)
        compare(dim, (B, HKV, S), {"keep_window_size": 5}, with_sinks=True)


def compare_projections(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    whole = [torch.randn(B, S, D), torch.randn(HKV, D), torch.randn(HKV)]
    leaves = [t.clone().requires_grad_() for t in whole]
    expected = score_projection(*leaves)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    shared = Replicate()
    for placements in (
        [Shard(0), shared, shared], [Shard(1), shared, shared], [shared, Shard(0), Shard(0)],
        [Shard(2), shared, shared],  # features are gathered
    ):  # fmt: skip
        sharded = [
            distribute_tensor(t, mesh, [at]).requires_grad_()
            for t, at in zip(whole, placements, strict=True)
        ]
        scores = score_projection(*sharded)
        assert torch.equal(scores.full_tensor(), expected)
        actual = torch.autograd.grad(scores.square().sum(), sharded)
        for gradient, wanted in zip(actual, gradients, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), wanted)


def test_sharded_projection_of_scores_equals_one_process():
    run_in_processes(2, compare_projections)


def test_sharded_attention_equals_one_process():
    run_in_processes(2, compare_all)
