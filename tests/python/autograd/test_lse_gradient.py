"""Tests the gradient of the log-sum-exp, and merged attention and sinks, which are built on it."""

import pytest
import torch
import torch.utils.checkpoint

from cpu_backends import CPU_BACKENDS
from dense_in_double import dense_in_double
from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    merge_attention,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn.check.compare import GRADIENT_LIMIT
from flash_dmattn.keys.intervals import KeyIntervals
from flash_dmattn.merge import add_sink
from rules_by_definition import causal_elements


def inputs(dtype=torch.float32, length=37, heads=(2, 1), batch=2, head_dim=16):
    torch.manual_seed(0)
    shapes = [(batch, length, n, head_dim) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    bias = torch.randn(batch, heads[1], length, dtype=dtype, requires_grad=True)
    return q, k, v, bias


def weights_of(query):
    """Returns random weights for out and lse; a loss is their weighted sum."""
    batch, length, heads, head_dim = query.shape
    sizes = (batch, length, heads, head_dim), (batch, heads, length)
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def gradients(function, tensors, weights):
    results = function(*tensors)
    loss = sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("window, softcap", [(None, 3.0), (5, 0.0)])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_gradient_of_out_and_lse_equals_dense_attention(backend, window, softcap):
    tensors = inputs(heads=(4, 2))
    weights = weights_of(tensors[0])
    seen = causal_elements(37, 37)
    if window is not None:
        seen = select_key_intervals(tensors[3], window).to_mask().repeat_interleave(2, 1)

    def ours(q, k, v, bias):
        options = {"is_causal": True, "keep_window_size": window, "backend": backend}
        return flash_dmattn_func(
            q, k, v, attn_bias=bias, softcap=softcap, return_lse=True, **options
        )

    expected = gradients(lambda *t: dense_in_double(*t, seen, softcap=softcap), tensors, weights)
    for actual, exact in zip(gradients(ours, tensors, weights), expected, strict=True):
        assert torch.allclose(actual.double(), exact.double(), atol=2e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_out_and_lse_pass_gradcheck(window):
    tensors = inputs(torch.float64, length=9, batch=1, head_dim=3)

    def attend(q, k, v, bias):
        options = {"is_causal": True, "keep_window_size": window}
        return flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, **options)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_loss_of_lse_alone_gives_gradients(backend):
    q, k, v, bias = inputs()
    _, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, backend=backend, return_lse=True
    )
    lse.sum().backward()
    # The gradient of a row's lse with respect to its scores is the probabilities, which sum to 1. It does not depend on v.
    assert torch.allclose(bias.grad.sum(), torch.tensor(2.0 * 37 * 2), rtol=1e-5)
    assert (v.grad == 0).all()


@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nonfinite_gradient_of_lse_follows_the_mode(backend, nonfinite):
    tensors = inputs()
    out, lse = flash_dmattn_func(
        *tensors[:3], attn_bias=tensors[3], is_causal=True, backend=backend, nonfinite=nonfinite, return_lse=True
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[0, 1, 5], dlse[0, 1, 9], dlse[1, 0, 3] = torch.inf, torch.nan, 3e38
    grads = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    if nonfinite == "saturate":
        assert all(grad.isfinite().all() for grad in grads)
        return
    dq = grads[0]
    assert not dq[0, 5, 1].isfinite().any() and not dq[0, 9, 1].isfinite().any()
    assert dq[0, :5].isfinite().all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_row_without_keys_has_no_gradient_of_lse(backend):
    q, k, v, bias = inputs()
    hidden = sliding_window(37, 3).intervals.clone()
    hidden[:, :, 10:20] = 0
    shown = KeyIntervals(hidden, 37)
    _, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, key_intervals=shown, backend=backend, return_lse=True
    )
    lse.backward(torch.ones_like(lse))
    assert (lse[:, :, 14] == -torch.inf).all() and (q.grad[:, 14] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, bias))


def test_merged_attention_equals_attention_over_all_keys():
    tensors = inputs()
    weights = weights_of(tensors[0])
    window = sliding_window(37, 6)
    first, last = window.intervals.unbind(-1)
    older = KeyIntervals(torch.stack([last, torch.full_like(last, 37)], -1), 37)

    def whole(q, k, v, bias):
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, return_lse=True)

    def merged(q, k, v, bias):
        parts = [
            flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=keys, return_lse=True)
            for keys in (window, older)
        ]
        return merge_attention(*zip(*parts, strict=True))

    for actual, expected in zip(merged(*tensors), whole(*tensors), strict=True):
        assert torch.allclose(actual, expected, atol=2e-6)
    for actual, expected in zip(
        gradients(merged, tensors, weights), gradients(whole, tensors, weights), strict=True
    ):
        assert torch.allclose(actual, expected, atol=2e-5)


def test_merged_attention_of_no_keys_is_zero_with_zero_gradients():
    outs = [torch.zeros(1, 2, 1, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), -torch.inf, requires_grad=True) for _ in range(2)]
    out, lse = merge_attention(outs, lses)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    assert all((t.grad == 0).all() for t in (*outs, *lses))


def test_sink_equals_a_key_without_a_value():
    tensors = (*inputs(), torch.randn(2, requires_grad=True))
    weights = weights_of(tensors[0])

    def ours(q, k, v, bias, sinks):
        options = {"is_causal": True, "sink_logits": sinks, "return_lse": True}
        return flash_dmattn_func(q, k, v, attn_bias=bias, **options)

    def by_softmax(q, k, v, bias, sinks):
        return dense_in_double(q, k, v, bias, causal_elements(37, 37), sinks=sinks)

    expected = gradients(by_softmax, tensors, weights)
    for actual, exact in zip(gradients(ours, tensors, weights), expected, strict=True):
        assert torch.allclose(actual.double(), exact.double(), atol=2e-5)


def test_sink_of_no_weight_changes_nothing():
    out, lse = torch.zeros(1, 2, 1, 4), torch.tensor([[[0.5, -torch.inf]]], requires_grad=True)
    sink = torch.tensor([-torch.inf], requires_grad=True)
    changed, changed_lse = add_sink(out, lse, sink)
    assert torch.equal(changed, out) and torch.equal(changed_lse, lse)
    (changed.sum() + changed_lse[..., 0].sum()).backward()
    assert lse.grad.isfinite().all()


def add_sink_by_softmax(out, lse, sink):
    share = torch.sigmoid(lse - sink[:, None])
    return share.mT[..., None] * out, torch.logaddexp(lse, sink[:, None])


def merge_two_by_softmax(*tensors):
    outs, lses = tensors[:2], torch.stack(tensors[2:])
    shares = lses.softmax(0).mT[..., None]
    return sum(share * out for share, out in zip(shares, outs, strict=True)), lses.logsumexp(0)


@pytest.mark.parametrize("size", [1e15, 3e38])
@pytest.mark.parametrize("logit", [0.0, -20.0, -3e38])
def test_products_beyond_float32_give_finite_gradients(size, logit):
    """A gradient within the range of float32 is exact, and one beyond it saturates."""
    torch.manual_seed(4)
    outs = [(torch.rand(2, 9, 3, 16) * 2 - 1) * size for _ in range(2)]
    lses = [torch.randn(2, 3, 9), torch.randn(2, 3, 9) + logit]
    for ours, exact, tensors in (
        (add_sink, add_sink_by_softmax, (outs[0], lses[0], torch.randn(3) + logit)),
        (lambda a, b, c, d: merge_attention([a, b], [c, d]), merge_two_by_softmax, (*outs, *lses)),
    ):
        leaves = [t.clone().requires_grad_() for t in tensors]
        wide_leaves = [t.double().requires_grad_() for t in tensors]
        results, expected = ours(*leaves), exact(*wide_leaves)
        weights = [(torch.rand_like(r) * 2 - 1) * size for r in results]
        grads = torch.autograd.grad(results, leaves, weights)
        for actual, right in zip(
            grads,
            torch.autograd.grad(expected, wide_leaves, [w.double() for w in weights]),
            strict=True,
        ):
            assert actual.isfinite().all()
            # Smaller elements are differences of larger numbers, so they are less exact.
            certain = right.abs() > 1e-3 * right.abs().max()
            limit = torch.finfo(torch.float32).max
            right = right.clamp(-limit, limit)[certain]
            torch.testing.assert_close(actual.double()[certain], right, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
def test_nonfinite_gradient_of_sinks_and_parts_follows_the_mode(nonfinite):
    q, k, v, _ = inputs()
    sinks = torch.zeros(2, requires_grad=True)
    out = flash_dmattn_func(q, k, v, is_causal=True, sink_logits=sinks, nonfinite=nonfinite)
    outs = [torch.ones(1, 2, 1, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.zeros(1, 1, 2, requires_grad=True) for _ in range(2)]
    merged, _ = merge_attention(outs, lses, nonfinite)
    for result, leaf in ((out, sinks), (merged, lses[0])):
        dout = torch.ones_like(result)
        dout[0, 1, 0, 2] = torch.inf
        (gradient,) = torch.autograd.grad(result, leaf, dout, retain_graph=True)
        dout[0, 1, 0, 2] = 0
        (counts_as_zero,) = torch.autograd.grad(result, leaf, dout)
        if nonfinite == "saturate":
            assert torch.equal(gradient, counts_as_zero)
        else:
            assert not gradient.isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_gradients_of_huge_and_tiny_numbers_equal_double(seed):
    generator = torch.Generator().manual_seed(seed)
    magnitude = lambda: 10.0 ** torch.randint(-30, 38, (), generator=generator).item()  # noqa: E731
    outs = [torch.randn(2, 3, 2, 8, generator=generator) * magnitude() for _ in range(2)]
    lses = [torch.randn(2, 2, 3, generator=generator) * 3 for _ in range(2)]
    sink, dlse = torch.randn(2, generator=generator), torch.randn(2, 2, 3, generator=generator)
    lses[1][0, 0, 0] = -torch.inf
    dout = torch.randn(2, 3, 2, 8, generator=generator) * magnitude()
    limit = torch.finfo(torch.float32).max

    def gradients_in(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (*lses, sink)]
        wide = [out.to(dtype) for out in outs]
        results = add_sink(*merge_attention(wide, leaves[:2]), leaves[2])
        (merged, lse), weights = results, (dout.to(dtype), dlse.to(dtype))
        return torch.autograd.grad((merged, lse), leaves, weights)

    for actual, exact in zip(gradients_in(torch.float32), gradients_in(torch.float64), strict=True):
        error = (actual.double() - exact.clamp(-limit, limit)).abs()
        terms = 8 * max(out.abs().max().double() for out in outs) * dout.abs().max() + 4
        assert (error <= 1e-6 * 6 * terms.clamp(max=limit)).all()
    assert actual.isfinite().all()


@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
def test_row_without_keys_has_no_gradient_under_a_loss_of_its_lse(nonfinite):
    lses = [torch.tensor([[[-torch.inf, 0.5]]], requires_grad=True) for _ in range(2)]
    _, lse = merge_attention([torch.ones(1, 2, 1, 4)] * 2, lses, nonfinite)
    (gradient,) = torch.autograd.grad((lse**2).sum(), lses[0])
    assert gradient[0, 0, 0] == 0 and gradient[0, 0, 1].isfinite() and gradient[0, 0, 1] != 0
    sink = torch.tensor([-torch.inf], requires_grad=True)
    _, lse = add_sink(torch.ones(1, 2, 1, 4), lses[0].detach(), sink, nonfinite == "saturate")
    assert torch.autograd.grad((lse**2).sum(), sink)[0] == 0


def test_row_without_keys_has_no_second_derivative():
    lses = [torch.tensor([[[-torch.inf, 0.5]]], requires_grad=True) for _ in range(2)]
    out, lse = merge_attention([torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)], lses)
    loss = (out**2).sum() + lse[0, 0, 1]
    (gradient,) = torch.autograd.grad(loss, lses[0], create_graph=True)
    (second,) = torch.autograd.grad((gradient**2).sum(), lses[0])
    assert second.isfinite().all() and second[0, 0, 0] == 0 and second[0, 0, 1] != 0


@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
def test_infinite_sink_is_visible_where_numbers_propagate(nonfinite):
    q, k, v, _ = inputs()
    sinks = torch.tensor([torch.inf, 0])
    out, lse = flash_dmattn_func(
        q, k, v, is_causal=True, sink_logits=sinks, nonfinite=nonfinite, return_lse=True
    )
    assert (lse[:, 0].isfinite() == (nonfinite == "saturate")).all()
    assert (out[:, :, 0] == 0).all() and lse[:, 1:].isfinite().all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nan_sink_saturates_like_a_nan_score_or_propagates(backend):
    """By the table of docs/numerics.md, a NaN score becomes the lowest finite number."""
    q, k, v, bias = inputs()

    def results(nan, nonfinite):
        sinks = torch.tensor([nan, 0.5], requires_grad=True)
        options = {
            "is_causal": True,
            "return_lse": True,
            "nonfinite": nonfinite,
            "backend": backend,
        }
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, sink_logits=sinks, **options)
        loss = out.sum() + lse.sum()
        return out, lse, *torch.autograd.grad(loss, (q, k, v, bias, sinks))

    expected = results(torch.finfo(torch.float32).min, "saturate")
    for result, right in zip(results(torch.nan, "saturate"), expected, strict=True):
        assert torch.equal(result, right)
    assert expected[-1][0] == 0 and expected[-1][1] != 0
    out, lse, *gradients = results(torch.nan, "propagate")
    assert out[:, :, 0].isnan().all() and lse[:, 0].isnan().all()
    assert out[:, :, 1:].isfinite().all() and lse[:, 1:].isfinite().all()
    assert all(gradient.isnan().any() for gradient in gradients)
    assert gradients[-1][0].isnan() and gradients[-1][1].isfinite()


def test_nan_sink_of_a_row_without_keys_takes_all_weight():
    out, lse = add_sink(
        torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -torch.inf), torch.tensor([torch.nan])
    )
    assert (out == 0).all() and (lse == torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["outs", "lses"])
def test_nonfinite_parts_under_saturation_give_lses_finite_gradients(name, value):
    parts = {
        "outs": [torch.ones(1, 2, 1, 4) for _ in range(2)],
        "lses": [torch.zeros(1, 1, 2) for _ in range(2)],
    }
    parts[name][0].view(-1)[0] = value
    leaves = [t.requires_grad_() for t in (*parts["outs"], *parts["lses"])]
    out, lse = merge_attention(**parts)
    assert lse.isfinite().all()
    assert name == "outs" or out.isfinite().all()
    gradients = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_float64_gradient_of_a_sink_under_the_largest_dout_is_exact():
    q, k, v, _ = (t.detach().double() for t in inputs())
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    # The factor keeps sums within double.
    out = flash_dmattn_func(q, k, 1e-3 * v, is_causal=True, sink_logits=sinks)
    signs = torch.ones_like(out)
    signs[:, 1::2] = -1
    (gradient,) = torch.autograd.grad(out, sinks, 1.7e308 * signs, retain_graph=True)
    (expected,) = torch.autograd.grad(out, sinks, signs)
    torch.testing.assert_close(gradient / 1.7e308, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_a_sink_saturates_in_16_bits(dtype):
    sink = torch.zeros(2, dtype=dtype, requires_grad=True)
    _, lse = add_sink(torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4), sink)
    lse.backward(torch.full_like(lse, 3e38))
    assert torch.equal(sink.grad, torch.full_like(sink, GRADIENT_LIMIT[dtype]))


def test_lse_alone_is_differentiated_under_checkpointing():
    q, k, v, bias = inputs()
    attend = lambda q: flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)[1]  # noqa: E731
    torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False).sum().backward()
    assert q.grad.isfinite().all() and q.grad.abs().sum() > 0


def test_varlen_has_a_gradient_of_lse_and_sinks():
    q, k, v, _ = inputs(batch=1)
    sinks = torch.randn(2, requires_grad=True)
    offsets = torch.tensor([0, 20, 20, 37]).int()
    options = {"is_causal": True, "return_lse": True, "sink_logits": sinks}
    packed = flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, **options)
    singles = [
        flash_dmattn_func(*(t[:, a:b] for t in (q, k, v)), **options)
        for a, b in ((0, 20), (20, 37))
    ]
    expected = (
        torch.cat([out[0] for out, _ in singles]),
        torch.cat([lse[0] for _, lse in singles], 1),
    )
    leaves = (q, k, v, sinks)
    for actual, exact in zip(packed, expected, strict=True):
        assert torch.allclose(actual, exact, atol=2e-6)
    for actual, exact in zip(
        torch.autograd.grad(sum(r.sum() for r in packed), leaves, retain_graph=True),
        torch.autograd.grad(sum(r.sum() for r in expected), leaves),
        strict=True,
    ):
        assert torch.allclose(actual, exact, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_outs_at_the_limit_of_their_dtype_stay_finite(dtype):
    torch.manual_seed(0)
    outs = [torch.full((1, 64, 2, 8), torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
    out, _ = merge_attention(outs, list(torch.randn(3, 1, 2, 64)))
    assert out.isfinite().all()
    torch.testing.assert_close(out, outs[0])
