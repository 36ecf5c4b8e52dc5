"""select_and_attend selects keys by the bias and attends to them in one operator, with the results of a separate selection."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, select_key_intervals
from operators_called import OperatorsCalled

B, SQ, SK, HQ, HKV, D, W = 2, 40, 50, 4, 2, 16, 7


def tensors(bias_shape, dtype=torch.float32):
    shapes = [(B, SQ, HQ, D), (B, SK, HKV, D), (B, SK, HKV, D)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v, torch.randn(bias_shape, requires_grad=True)


def ours(called):
    return [op._opname for op in called.all if op.namespace == "flash_dmattn"]


def attend_and_differentiate(inputs, wanted, **options):
    q, k, v, bias = inputs
    out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, **options)
    leaves = [t for t, w in zip(inputs, wanted, strict=True) if w]
    return out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)


@pytest.mark.parametrize("wanted", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "bias_shape", [(B, SK), (B, HKV, SK), (B, HKV, 1, SK), (1, 1, SK), (1, 1, 1, SK)]
)
def test_select_and_attend_equals_a_choice_made_before(bias_shape, is_causal, wanted):
    inputs = tensors(bias_shape)
    for tensor, is_wanted in zip(inputs, wanted, strict=True):
        tensor.requires_grad_(bool(is_wanted))
    bias = inputs[3].detach()
    scores = bias[:, None] if bias.dim() == 2 else bias
    chosen = select_key_intervals(scores, W, is_causal=is_causal, query_length=SQ)
    expected = attend_and_differentiate(inputs, wanted, key_intervals=chosen)
    with OperatorsCalled() as called:
        results = attend_and_differentiate(inputs, wanted, keep_window_size=W, is_causal=is_causal)
    assert ours(called) == ["select_and_attend", "backward"]
    for actual, value in zip(results, expected, strict=True):
        assert torch.equal(actual, value)


def test_16_bit_call_selects_by_float32_bias():
    inputs = tensors((B, HKV, SK), torch.bfloat16)
    chosen = select_key_intervals(inputs[3], W, query_length=SQ)
    expected = attend_and_differentiate(inputs, (1, 1, 1, 1), key_intervals=chosen)
    results = attend_and_differentiate(inputs, (1, 1, 1, 1), keep_window_size=W, is_causal=True)
    assert results[-1].dtype == torch.float32
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("window", [W, None])
def test_strided_bias_gives_same_result_and_gradient(window):
    """A bias per key may have any strides, and so may its gradient."""
    q, k, v, _ = tensors((1,))
    forms = {
        "strided": (torch.randn(SK, HKV, B), lambda base: base.permute(2, 1, 0)),
        "expanded": (torch.randn(1, 1, SK), lambda base: base.expand(B, HKV, SK)),
        "every second": (torch.randn(B, HKV, SK, 2), lambda base: base[..., 0]),
    }
    if window is None:
        forms["of all keys"] = (torch.randn(B, HKV, 1), lambda base: base)
    for name, (base, view) in forms.items():
        base.requires_grad_()
        bias = view(base)
        dense = bias.detach().expand(B, HKV, SK).contiguous().requires_grad_()
        options = {"is_causal": True, "keep_window_size": window}
        out = flash_dmattn_func(q, k, v, attn_bias=bias, **options)
        expected = flash_dmattn_func(q, k, v, attn_bias=dense, **options)
        assert torch.equal(out, expected), name
        (dense_gradient,) = torch.autograd.grad(expected.sin().sum(), dense)
        (base_gradient,) = torch.autograd.grad(out.sin().sum(), base)
        # The sum is in double, because the gradient of a bias that all keys share is 0 while its terms reach 40.
        wide = base.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(
            view(wide).expand(B, HKV, SK), wide, dense_gradient.double()
        )
        torch.testing.assert_close(base_gradient, wanted.float(), msg=name)


def test_vmap_equals_loop():
    inputs = [torch.randn(3, *t.shape, requires_grad=True) for t in tensors((B, HKV, SK))]

    def attend(q, k, v, bias):
        return flash_dmattn_func(q, k, v, attn_bias=bias, keep_window_size=W, is_causal=True)

    mapped_out = torch.func.vmap(attend)(*inputs)
    expected = torch.stack([attend(*one) for one in zip(*inputs, strict=True)])
    assert torch.equal(mapped_out, expected)
    gradients = [torch.autograd.grad(out.sin().sum(), inputs) for out in (mapped_out, expected)]
    torch.testing.assert_close(*gradients)


def test_other_selections_use_the_forward_operator():
    q, k, v, bias = tensors((B, HKV, SK))
    every_query_head_for_itself = torch.randn(B, HQ, SK)
    for options in (
        {"selection": "global"},
        {"attn_mask": torch.rand(B, SK) < 0.7},
        {"selection_scores": torch.randn(B, HKV, SK)},
        {"attn_bias": every_query_head_for_itself},
    ):
        with OperatorsCalled() as called:
            flash_dmattn_func(q, k, v, keep_window_size=W, **({"attn_bias": bias} | options))
        assert "forward" in ours(called) and "select_and_attend" not in ours(called)
