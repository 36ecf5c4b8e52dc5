"""Finite gradients for finite inputs, and the treatment of inputs that are not finite."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.compare import GRADIENT_LIMIT, assert_matches_oracle
from flash_dmattn.check.oracle import Problem, Result

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


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("largest", ["all", "q", "v", "dout"])
@pytest.mark.parametrize("window", [None, 20])
def test_inputs_at_dtype_limit_give_finite_gradients(dtype, largest, window):
    q, k, v = leaves(dtype)
    bias = torch.randn(1, 2, 150, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(q)
    edge = torch.finfo(dtype).max
    with torch.no_grad():
        for name, tensor in {"q": q, "k": k, "v": v, "dout": dout}.items():
            if largest in (name, "all"):
                tensor.copy_(torch.where(torch.rand_like(tensor.float()) < 0.5, edge, -edge))
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window, return_lse=True
    )
    out.backward(dout)
    assert_finite(out, lse, q.grad, k.grad, v.grad, bias.grad)
    for grad in (q.grad, k.grad, v.grad, bias.grad):
        assert grad.abs().max().double() <= limit_of(dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_output_gradients_count_as_zero(dtype, value):
    q, k, v = leaves(dtype)
    dout = torch.randn_like(q)
    hit = torch.rand_like(dout.float()) < 0.01
    bad, cleaned = dout.masked_fill(hit, value), dout.masked_fill(hit, 0)
    out = flash_dmattn_func(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), bad, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), cleaned)
    for got, wanted in zip(grads, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_nonfinite_output_gradients_stay_visible_when_propagated(dtype, value):
    q, k, v = leaves(dtype)
    dout = torch.randn_like(q)
    dout[0, 100, 0, 3] = value
    out = flash_dmattn_func(q, k, v, is_causal=True, nonfinite="propagate")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    for grad in (dq, dk, dv):
        assert not grad.isfinite().all()
    assert_finite(dq[:, :100], dq[:, 101:], dk[:, 101:], dv[:, 101:])  # what row 100 cannot reach
    assert not dv[0, :101, 0, 3].isfinite().any()


@pytest.mark.parametrize("dtype", LOW)
def test_gradients_saturate_or_overflow(dtype):
    q, k, v = leaves(dtype, seqlen=64)
    dout = torch.full_like(q, 0.9 * torch.finfo(dtype).max)
    out = flash_dmattn_func(q, k, v)
    dv = torch.autograd.grad(out, v, dout)[0]  # two heads, so weights sum to about 2
    assert_finite(dv)
    assert (dv.double() == limit_of(dtype)).any()
    out = flash_dmattn_func(q, k, v, nonfinite="propagate")
    dv = torch.autograd.grad(out, v, dout)[0]
    assert (dv == torch.inf).any()


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("fill", ["finfo_min", "-inf", "nan", "mask_value"])
@pytest.mark.parametrize("dims", [3, 4])
def test_masking_biases_mask(dtype, fill, dims):
    lowest = torch.finfo(dtype).min
    value = {"finfo_min": lowest, "-inf": -torch.inf, "nan": torch.nan,
             "mask_value": {torch.bfloat16: -1e30, torch.float16: -1e4}.get(dtype, lowest)}[fill]  # fmt: skip
    q, k, v = leaves(dtype)
    shape = (1, 2, 150) if dims == 3 else (1, 2, 150, 150)
    hidden = torch.rand(shape) < 0.4
    bias = torch.randn(shape).to(dtype).masked_fill(hidden, value).requires_grad_()
    dout = torch.randn_like(q)
    out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
    out.backward(dout)
    assert (bias.grad[hidden] == 0).all()
    four = (lambda t: t[:, :, None]) if dims == 3 else (lambda t: t)
    problem = Problem(q, k, v, dout, bias=four(bias.detach()))
    assert_matches_oracle(Result(out, lse, q.grad, k.grad, v.grad, four(bias.grad)), problem)


@pytest.mark.parametrize("dtype", ALL)
def test_rows_that_see_nothing_get_and_give_no_gradient(dtype):
    q, k, v = leaves(dtype)
    bias = torch.full((1, 1, 150, 150), torch.finfo(dtype).min, dtype=dtype)
    bias[:, :, 20:] = 0
    bias.requires_grad_()
    dout = torch.full_like(q, torch.finfo(dtype).max)
    dout[:, 20:] = 0
    out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    for grad in torch.autograd.grad(out, (q, k, v, bias), dout):
        assert (grad == 0).all()


def test_scores_beyond_fp32_saturate():
    q, k, v = (torch.full((1, 3, 1, 8), 3e38, requires_grad=True) for _ in range(3))
    bias = torch.tensor([3e38, -1e38, 3e38]).view(1, 1, 3).requires_grad_()
    out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
    out.sum().backward()
    assert_finite(out, lse, q.grad, k.grad, v.grad, bias.grad)


@pytest.mark.parametrize("dtype", ALL)
def test_unused_memory_of_the_inputs_is_not_read(dtype):
    """Inputs inside NaN-filled memory: a lane past the end of a tensor would show."""

    def inside(tensor):
        memory = torch.full([size + 9 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
        view = memory[tuple(slice(3, 3 + size) for size in tensor.shape)]
        return view.copy_(tensor.detach()).requires_grad_()

    q, k, v = leaves(dtype, seqlen=67, head_dim=20)
    bias = torch.randn(1, 2, 67).to(dtype).requires_grad_()
    dout = torch.randn_like(q)
    plain = [q, k, v, bias]
    surrounded = [inside(t) for t in plain]
    results = []
    for tensors, grad in ((plain, dout), (surrounded, inside(dout).detach())):
        out = flash_dmattn_func(
            *tensors[:3], attn_bias=tensors[3], is_causal=True, keep_window_size=9
        )
        results.append([out, *torch.autograd.grad(out, tensors, grad)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
