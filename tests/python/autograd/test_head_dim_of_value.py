"""value may have its own head dimension, as in torch's scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, triton_dmattn_func

B, S, HQ, HKV, D = 2, 37, 4, 2, 16  # the scale of D 16 is 1 / 4, which multiplies without rounding
VALUE_DIMS = [1, 8, 40, 256]


def leaves_of(value_dim, dtype):
    shapes = [(B, S, HQ, D), (B, S, HKV, D), (B, S, HKV, value_dim), (B, HKV, S)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def of_torch(q, k, v, bias):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    mask = bias.repeat_interleave(HQ // HKV, 1)[:, :, None].masked_fill(~causal, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def packed(q, k, v, bias):
    offsets = torch.arange(B + 1, dtype=torch.int32) * S
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    bias = bias.transpose(1, 2).flatten(0, 1)
    out = flash_dmattn_varlen_func(q, k, v, offsets, offsets, is_causal=True, attn_bias=bias)
    return out.unflatten(0, (B, S))


def plain(q, k, v, bias):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)


def chosen(q, k, v, bias):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=S)


@pytest.mark.parametrize("call", [plain, chosen, packed])
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
def test_value_head_dim_equals_torch(value_dim, call):
    leaves = leaves_of(value_dim, torch.float64 if call is plain else torch.float32)
    results = []
    for function in (of_torch, call):
        out = function(*leaves)
        assert out.shape == (B, S, HQ, value_dim)
        dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if call is not plain else {}
    torch.testing.assert_close(results[1], results[0], **tolerance)


@pytest.mark.parametrize("call", [plain, chosen])
def test_value_of_a_fused_projection_equals_its_copy(call):
    q, _, _, bias = leaves_of(8, torch.float32)
    fused = torch.randn(B, S, HKV, D + 8).requires_grad_()
    results = []
    for value_of in (lambda t: t[..., D:], lambda t: t[..., D:].contiguous()):
        out = call(q, fused[..., :D], value_of(fused), bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, fused, bias))])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_gradient_of_lse_alone_leaves_value_zero():
    q, k, v, bias = leaves_of(8, torch.float32)
    _, lse = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, return_lse=True)
    gradients = torch.autograd.grad(lse.sum(), (q, k, v))
    assert gradients[2].shape == v.shape and not gradients[2].any()
    padded = F.pad(v, (0, D - 8))
    _, lse = flash_dmattn_func(q, k, padded, attn_bias=bias, is_causal=True, return_lse=True)
    torch.testing.assert_close(gradients[:2], torch.autograd.grad(lse.sum(), (q, k)))


def test_flops_count_the_columns_of_value():
    q, k, v, _ = leaves_of(8, torch.float32)
    with FlopCounterMode(display=False) as counter:
        flash_dmattn_func(q, k, v).sum().backward()
    elements = B * HQ * S * S
    assert counter.get_total_flops() == 2 * elements * ((D + 8) + (3 * D + 2 * 8))


def test_default_scale_follows_query_head_dim():
    for function in (flash_dmattn_func, triton_dmattn_func):
        q, k, v, bias = (t.detach() for t in leaves_of(40, torch.float32))
        expected = function(q, k, v, attn_bias=bias, softmax_scale=D**-0.5)
        torch.testing.assert_close(function(q, k, v, attn_bias=bias), expected)
