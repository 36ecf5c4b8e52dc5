"""The situations in which other implementations of dynamic mask attention failed, at full size."""

import pytest
import torch

from compare import assert_matches_oracle
from flash_dmattn import flash_dmattn_func
from oracle import Problem, Result, select


def forward_and_backward(problem: Problem, **options) -> Result:
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else problem.bias.detach().requires_grad_()
    out, lse, _ = flash_dmattn_func(
        q, k, v, problem.mask, bias, is_causal=problem.causal, return_attn_probs=True, **options
    )
    out.backward(problem.dout)
    return Result(out, lse, q.grad, k.grad, v.grad, None if bias is None else bias.grad)


def top_keys_of_every_row(bias, window, causal):
    shown = bias.masked_fill(~causal, -torch.inf).topk(window, dim=-1).indices
    return torch.zeros(bias.shape, dtype=torch.bool).scatter_(-1, shown, True) & causal


def test_bf16_length_4096_window_2048_head_dim_128_with_4d_mask_and_bias():
    """Here the outputs and gradients of the CUDA kernels differed from plain attention."""
    length, window, head_dim = 4096, 2048, 128
    q, dout = (torch.randn(1, length, 2, head_dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, length, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(1, 1, length, length, dtype=torch.bfloat16)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = top_keys_of_every_row(bias, window, causal)
    problem = Problem(q, k, v, dout, mask, bias, causal=True)
    assert_matches_oracle(forward_and_backward(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim",
    [(256, 256, 64), (256, 192, 64), (192, 192, 64), (256, 256, 80), (100, 192, 80)],
)
def test_gradients_are_finite_and_right_for_every_seed(seqlen_q, seqlen_k, head_dim, dtype):
    """Here dV held NaN and inf for some seeds: lanes past the end of a tile entered its sums."""
    for seed in range(12):
        torch.manual_seed(seed)
        q, dout = (torch.randn(1, seqlen_q, 2, head_dim).to(dtype) for _ in range(2))
        k, v = (torch.randn(1, seqlen_k, 1, head_dim).to(dtype) for _ in range(2))
        problem = Problem(q, k, v, dout, causal=True)
        result = forward_and_backward(problem)
        for grad in (result.dq, result.dk, result.dv):
            assert grad.isfinite().all(), f"seed {seed}"
        assert_matches_oracle(result, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_reach_the_bias_and_not_the_choice(dtype):
    """Here the gradient went through the top-k, and through -inf fills, as NaN."""
    length, window = 300, 32
    q, k, v, dout = (torch.randn(2, length, 2, 32).to(dtype) for _ in range(4))
    bias = torch.randn(2, 2, length).to(dtype)
    bias[0, :, :40] = torch.finfo(dtype).min  # padding, as other code fills it
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    shown = select(bias, window, causal & (bias > torch.finfo(dtype).min)[:, :, None])
    problem = Problem(q, k, v, dout, None, bias[:, :, None], shown, causal=True)

    leaf = bias.clone().requires_grad_()
    q_, k_, v_ = (t.clone().requires_grad_() for t in (q, k, v))
    out, lse, _ = flash_dmattn_func(
        q_, k_, v_, attn_bias=leaf, is_causal=True, keep_window_size=window, return_attn_probs=True
    )
    out.backward(dout)
    result = Result(out, lse, q_.grad, k_.grad, v_.grad, leaf.grad[:, :, None])
    assert_matches_oracle(result, problem)
    assert leaf.grad.isfinite().all() and (leaf.grad[0, :, :40] == 0).all()
    assert (leaf.grad != 0).any()
