"""A delayed bias on the GPU, which takes one kernel in each direction, equals the definition in double."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.check.oracle import Problem, Result
from flash_dmattn.kernels import recorded_kernels
from gpu import capture
from problem_calls import assert_matches_oracle

RULE = {"keep_window_size": 100, "recent_window": 90}
CHOICES = [
    {},
    {"keep_window_size": 100},
    RULE,
    {**RULE, "recent_competes": True},
    {"keep_window_size": 100, "selection": "global"},
]


def problem_of(length_q, length_k, head_dim, dtype, delay):
    torch.manual_seed(length_q + delay)
    q, dout = torch.randn(2, 2, length_q, 4, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, length_k, 2, head_dim, device="cuda", dtype=dtype)
    bias = torch.randn(2, 2, 1, length_k, device="cuda", dtype=torch.float32)
    return Problem(q, k, v, dout, bias=bias, causal=True, bias_delay=delay)


def attend(problem, **options):
    inputs = (problem.q, problem.k, problem.v, problem.bias[:, :, 0])
    q, k, v, bias = (t.detach().requires_grad_() for t in inputs)
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, bias_delay=problem.bias_delay, is_causal=True, return_lse=True, **options
    )  # fmt: skip
    gradients = torch.autograd.grad(out, (q, k, v, bias), problem.dout)
    return Result(out, lse, *gradients[:3], gradients[3][:, :, None])


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(
    "head_dim, dtype", [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)]
)
@pytest.mark.parametrize("lengths", [(700, 700), (300, 700), (5, 700)], ids=str)
@pytest.mark.parametrize("delay", [1, 90, 128, 333, 5000])
def test_delayed_bias_equals_definition(choice, head_dim, dtype, lengths, delay):
    problem = problem_of(*lengths, head_dim, dtype, delay)
    if choice:
        chosen = select_key_intervals(
            problem.bias[:, :, 0], **choice, is_causal=True, query_length=lengths[0]
        )
        problem.shown = chosen.to_mask()
    with recorded_kernels() as kernels:
        result = attend(problem, **choice)
    assert_matches_oracle(result, problem)
    assert len(kernels) == 2


def test_deterministic_gradients_give_same_bits():
    for choice in CHOICES:
        problem = problem_of(1500, 1500, 128, torch.bfloat16, 200)
        first, second = (attend(problem, deterministic=True, **choice) for _ in range(2))
        for name in ("dq", "dk", "dv", "dbias"):
            assert torch.equal(getattr(first, name), getattr(second, name)), (name, choice)


@pytest.mark.parametrize("choice", [{}, RULE], ids=str)
def test_graph_gives_same_bits(choice):
    problem = problem_of(700, 700, 128, torch.bfloat16, 90)
    expected = attend(problem, deterministic=True, **choice)
    graph, captured = capture(lambda: attend(problem, deterministic=True, **choice))
    graph.replay()
    for name in ("out", "dq", "dk", "dv", "dbias"):
        assert torch.equal(getattr(captured, name), getattr(expected, name)), name
