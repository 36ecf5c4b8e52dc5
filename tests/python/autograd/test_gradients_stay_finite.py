"""Finite inputs have finite gradients, and non-finite inputs follow the chosen mode."""

from itertools import product

import pytest
import torch

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    forgetting,
    forgetting_attention,
)
from flash_dmattn.check.compare import GRADIENT_LIMIT
from gpu import where_there_is_a_gpu
from nonfinite_routes import ADDED, ROUTES, Setting

LOW = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *LOW]


def leaves(dtype, seqlen=150, heads=(4, 2), head_dim=32, factor=1.0):
    shapes = [(1, seqlen, h, head_dim) for h in (heads[0], heads[1], heads[1])]
    return [(factor * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def limit_of(dtype):
    return GRADIENT_LIMIT.get(dtype, torch.finfo(dtype).max)


def assert_finite(*tensors):
    for tensor in tensors:
        assert tensor.isfinite().all()


def settings(routes, routes_on_gpu):
    """Returns the parameters device, dtype and route."""
    on_gpu = where_there_is_a_gpu(*product(["cuda"], LOW, routes_on_gpu))
    return pytest.mark.parametrize(
        "device, dtype, route", [*product(["cpu"], ALL, routes), *on_gpu]
    )


@settings(ROUTES, ROUTES | ADDED)
@pytest.mark.parametrize("largest", ["all", "q", "v", "dout"])
def test_inputs_at_dtype_limit_give_finite_gradients(device, dtype, route, largest):
    setting, edge = Setting(route, dtype, device), torch.finfo(dtype).max
    q, k, v, _ = setting.leaves
    with torch.no_grad():
        for name, tensor in {"q": q, "k": k, "v": v, "dout": setting.dout}.items():
            if largest in (name, "all"):
                tensor.copy_(torch.where(torch.rand_like(tensor.float()) < 0.5, edge, -edge))
    out, *gradients = setting.gradients()
    assert_finite(out, *gradients)
    assert (setting.attend(return_lse=True)[1] < torch.inf).all()
    for gradient in gradients:
        assert gradient.abs().max().double() <= limit_of(dtype)


@settings(ROUTES, ROUTES)
def test_gradients_saturate_or_overflow(device, dtype, route):
    setting = Setting(route, dtype, device)
    with torch.no_grad():
        setting.leaves[0].zero_()  # every key has the same weight
    setting.dout.fill_(0.9 * torch.finfo(dtype).max)
    dv = setting.gradients()[3]  # two heads and many queries
    assert_finite(dv)
    assert (dv.double() == limit_of(dtype)).any()
    dv = setting.gradients(nonfinite="propagate")[3]
    assert (dv == torch.inf).any()


@settings(ROUTES, ROUTES)
def test_rows_without_visible_keys_have_no_gradient(device, dtype, route):
    setting = Setting(route, dtype, device)
    with torch.no_grad():
        setting.leaves[3][..., :20] = torch.finfo(dtype).min  # queries 0 to 19 see nothing
    setting.dout.zero_()
    setting.dout[:, :20] = torch.finfo(dtype).max
    out, *gradients = setting.gradients()
    assert (out[:, :20] == 0).all()
    for gradient in gradients:
        assert (gradient == 0).all()


def test_scores_beyond_fp32_saturate():
    q, k, v = (torch.full((1, 3, 1, 8), 3e38, requires_grad=True) for _ in range(3))
    bias = torch.tensor([3e38, -1e38, 3e38]).view(1, 1, 3).requires_grad_()
    out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
    out.sum().backward()
    assert_finite(out, lse, q.grad, k.grad, v.grad, bias.grad)


# ---- Gradients that autograd adds or rounds, between an operator and the caller's tensors -----------

KEYS = 64


def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def packed(call, q, k, v, bias, *rest, **options):
    return call(q[0], k[0], v[0], *rest, attn_bias=bias, **options)[None]


CALLS = {
    "scores of query heads": lambda q, k, v, bias, **options: flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, keep_window_size=20, **options
    ),
    "bias of key heads, scores of query heads": lambda q, k, v, bias, **options: flash_dmattn_func(
        q, k, v, attn_bias=bias[:, :2], selection_scores=bias, keep_window_size=20, **options
    ),
    "delay and other offsets of queries": lambda q, k, v, bias, **options: packed(
        flash_dmattn_varlen_func, q, k, v, bias[0].t(), offsets(0, 20, KEYS), offsets(0, 24, KEYS),
        is_causal=True, bias_delay=4, **options,
    ),
    "value for all keys": lambda q, k, v, bias, **options: packed(
        flash_dmattn_varlen_func, q, k, v, bias[0, :, :1].t(), *[offsets(0, KEYS)] * 2, **options
    ),
    "bias of another dtype": lambda q, k, v, bias, **options: flash_dmattn_func(
        *(t.detach().float() for t in (q, k, v)), attn_bias=bias, is_causal=True, **options
    ),
    "forget gates in two calls": lambda q, k, v, bias: forgetting_attention(
        q, k, v, -bias.mT.abs()
    ),
}  # fmt: skip


def gradients_at_the_limit(name, dtype, **options):
    q, k, v = leaves(dtype, seqlen=KEYS, heads=(8, 2), head_dim=8)
    inputs = (q, k, v, torch.randn(1, 8, KEYS, dtype=dtype, requires_grad=True))
    out = CALLS[name](*inputs, **options)
    dout = torch.full_like(out, torch.finfo(out.dtype).max)
    return torch.autograd.grad(out, inputs, dout, materialize_grads=True)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_outside_the_operators_saturate(name, dtype, monkeypatch):
    monkeypatch.setattr(forgetting, "ROWS", KEYS // 2)
    for gradient in gradients_at_the_limit(name, dtype):
        assert_finite(gradient)
        assert gradient.abs().max().double() <= limit_of(dtype)


def test_sums_over_query_heads_that_choose_overflow_under_propagate():
    gradients = gradients_at_the_limit(
        "scores of query heads", torch.float16, nonfinite="propagate"
    )
    assert (gradients[2] == torch.inf).any()
