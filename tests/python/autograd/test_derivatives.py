"""Requested derivatives are computed correctly for any strides, and unsupported ones raise."""

import itertools
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, prefix_lm
from gpu import devices


def inputs(seqlen_q=29, seqlen_k=37, dtype=torch.float32, bias_shape=(2, 2, 37)):
    shapes = [(2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16), bias_shape]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(q, k, v, bias, **options):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


@devices
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
def test_any_subset_of_inputs_may_require_gradients(wanted, device):
    on_gpu, leaves = device == "cuda", inputs(300, 300, bias_shape=(2, 2, 300))
    if on_gpu:
        leaves = [t.detach().to(device, torch.bfloat16).requires_grad_() for t in leaves]
    dout = torch.randn_like(leaves[0])
    attend(*leaves, keep_window_size=7).backward(dout)
    chosen = [t.detach().clone().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
    out = attend(*chosen, keep_window_size=7)
    assert out.requires_grad == any(wanted)
    if any(wanted):
        out.backward(dout)
    # On a GPU the order of additions varies.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if on_gpu else {"rtol": 0, "atol": 0}
    for leaf, one, w in zip(leaves, chosen, wanted, strict=True):
        assert (one.grad is not None) == w
        if w:
            torch.testing.assert_close(one.grad, leaf.grad, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strided_output_gradient_equals_contiguous(dtype):
    leaves = inputs(dtype=dtype)
    dense = torch.randn(2, 29, 4, 16, dtype=dtype)
    gaps = torch.full((2, 29, 5, 40), torch.nan, dtype=dtype)
    gaps[:, :, :4, 1:17] = dense
    forms = [dense, dense.transpose(1, 2).contiguous().transpose(1, 2), gaps[:, :, :4, 1:17],
             dense.mT.contiguous().mT]  # fmt: skip
    grads = [torch.autograd.grad(attend(*leaves), leaves, form) for form in forms]
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_sum_gives_an_expanded_output_gradient():
    leaves = inputs()
    expanded = torch.autograd.grad(attend(*leaves).sum(), leaves)
    dense = torch.autograd.grad(attend(*leaves), leaves, torch.ones(2, 29, 4, 16))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_gradient_of_an_expanded_bias_is_its_sum():
    q, k, v, bias = inputs()
    dout = torch.randn(2, 29, 4, 16)
    (kept,) = torch.autograd.grad(attend(q, k, v, bias), bias, dout)
    expanded = bias[:, :, None].expand(2, 2, 29, 37)
    (summed,) = torch.autograd.grad(attend(q, k, v, expanded), bias, dout)
    torch.testing.assert_close(summed, kept, rtol=1e-4, atol=1e-5)


def test_selection_has_no_gradient():
    q, k, v, bias = inputs()
    scores = torch.randn(2, 2, 37, requires_grad=True)
    attend(q, k, v, bias, keep_window_size=5, selection_scores=scores).sum().backward()
    assert scores.grad is None and bias.grad is not None


def test_second_derivative_raises():
    leaves = inputs()
    grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph: got True, expected False"):
        grads[0].sum().backward()


@pytest.mark.parametrize("index, name", list(enumerate(["query", "key", "value", "attn_bias"])))
def test_forward_mode_raises_naming_the_tensor(index, name):
    leaves = [t.detach() for t in inputs()]

    def of_one(tensor):
        return attend(*leaves[:index], tensor, *leaves[index + 1 :])

    with pytest.raises(RuntimeError, match=f"{name}: got a tensor with a tangent"):
        torch.func.jvp(of_one, (leaves[index],), (leaves[index],))


GRADCHECKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "softcap": {"is_causal": True, "softcap": 1.5, "scale": 0.7},
    "per_query": {"is_causal": True, "keep_window_size": 3},
    "global": {"keep_window_size": 4, "selection": "global"},
    "intervals": {"key_intervals": prefix_lm(7, 2, query_length=5)},
    "mask": {"attn_mask": torch.tensor([[1, 1, 0, 1, 0, 1, 1]], dtype=torch.bool)},
}


@pytest.mark.parametrize("bias_shape", [(1, 2, 7), (2, 1, 5, 7)])
@pytest.mark.parametrize("name", GRADCHECKS)
def test_attention_passes_gradcheck(name, bias_shape):
    options = GRADCHECKS[name]
    if len(bias_shape) == 4 and "keep_window_size" in options:
        options = {**options, "selection_scores": torch.randn(1, 2, 7, dtype=torch.float64)}
    shapes = [(2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3), bias_shape]
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    torch.autograd.gradcheck(
        lambda q, k, v, bias: flash_dmattn_func(q, k, v, attn_bias=bias, **options),
        leaves,
        fast_mode=True,
    )


def test_varlen_passes_gradcheck():
    shapes = [(9, 4, 3), (11, 2, 3), (11, 2, 3), (11, 2)]
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    offsets_q, offsets_k = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 3, 6, 11])
    torch.autograd.gradcheck(
        lambda q, k, v, bias: flash_dmattn_varlen_func(
            q, k, v, offsets_q, offsets_k, attn_bias=bias, is_causal=True, keep_window_size=2
        ),
        leaves,
        fast_mode=True,
    )


RAW = {
    "forward": lambda q, k, v, bias: torch.ops.flash_dmattn.forward(
        q, k, v, None, bias, None, [], True, 0, 0.25, 0.0, True, False, ""
    )[0],
    "select_and_attend": lambda q, k, v, bias: torch.ops.flash_dmattn.select_and_attend(
        q, k, v, bias, 7, True, 0, 0.25, 0.0, True, False, ""
    )[0],
}
COMPILED = {"compiled": {}, "compiled with a choice": {"keep_window_size": 7}}


def forms_of_attention():
    """Returns functions of the query whose errors do not name arguments; compiled ones have the transform inside or outside."""
    q, *others = (t.detach() for t in inputs())
    for name, raw in RAW.items():
        yield name, lambda q, raw=raw: raw(q, *others), lambda f: f
    for name, options in COMPILED.items():
        for inside in (True, False):
            call = lambda q, options=options: attend(q, *others, **options)  # noqa: E731
            compiled = partial(torch.compile, backend="aot_eager")
            if inside:  # the transform is compiled, too
                yield f"{name}, with the transform", call, compiled
            else:
                yield name, compiled(call), lambda f: f


def test_transforms_of_compiled_and_raw_calls_are_refused():
    """Without the error, torch would silently make forward-mode derivatives 0."""
    q = inputs()[0].detach()
    transforms = {
        "with a tangent": lambda f: lambda q: torch.func.jvp(f, (q,), (q,))[1],
        "of torch.func.grad": lambda f: torch.func.grad(lambda q: f(q).sum()),
    }
    for name, function, compiled in forms_of_attention():
        for message, transform in transforms.items():
            torch._dynamo.reset()
            with pytest.raises(RuntimeError) as caught:
                compiled(transform(function))(q)
            assert f"got a tensor {message}" in str(caught.value), (name, message)


def test_dual_tensor_in_a_compiled_call_is_refused():
    q, *others = (t.detach() for t in inputs())
    compiled = torch.compile(attend, backend="aot_eager")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="got a tensor with a tangent"):
        compiled(forward_ad.make_dual(q, q), *others, keep_window_size=7)
