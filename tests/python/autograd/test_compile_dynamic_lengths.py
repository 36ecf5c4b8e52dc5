"""With torch.compile(fullgraph=True, dynamic=True), one graph serves all lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    from_padding,
    intersect,
    prefix_lm,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn.utils.mask import create_mask

LENGTHS = (11, 12, 33)


def choice(q, k, v, bias):
    options = {"attn_bias": bias, "keep_window_size": 4, "is_causal": True, "return_lse": True}
    out, lse = flash_dmattn_func(q, k, v, **options)
    return out + lse.mT[..., None]


RULE = {"recent_window": 3, "sink_tokens": 1, "score_threshold": -1.5}


def rule_in_documents(q, k, v, bias):
    offsets = torch.tensor([0, 5, 0]) + torch.tensor([0, 0, 1]) * q.shape[1]
    options = {"selection_scores": bias[0].t(), "keep_window_size": [3, 2], "is_causal": True}
    return flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, **options, **RULE)


def rule_at_positions(q, k, v, bias):
    positions = torch.arange(q.shape[1]).flip(0)
    chosen = select_key_intervals(bias, 4, key_positions=positions, query_position=0, **RULE)
    return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=chosen)


def global_choice(q, k, v, bias):
    options = {"keep_window_size": 4, "selection": "global", "softcap": 3.0}
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


def padding(q, k, v, bias):
    present = torch.arange(q.shape[1])[None] >= 3
    return flash_dmattn_func(q, k, v, present, bias, keep_window_size=9)


def value_of_more_columns(q, k, v, bias):
    wide = torch.cat([v, v.sin()], -1)
    return flash_dmattn_func(q, k, wide, attn_bias=bias, is_causal=True)[..., 4:12]


def delayed_bias(q, k, v, bias):
    delay = q.shape[1] // 4
    return flash_dmattn_func(q, k, v, attn_bias=bias, bias_delay=delay, is_causal=True)


def delayed_bias_of_a_choice(q, k, v, bias):
    options = {"keep_window_size": 4, "bias_delay": 3, "is_causal": True}
    return flash_dmattn_func(q, k, v, attn_bias=bias, **options)


def intersection(q, k, v, bias):
    length = q.shape[1]
    chosen = select_key_intervals(bias, 4, query_length=length)
    window = sliding_window(length, 7, device=q.device)
    return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=intersect(chosen, window))


def intersection_with_padding(q, k, v, bias):
    """Attends with padding, whose bound is the length."""
    chosen, padding = select_key_intervals(bias, 4), from_padding(bias[:, 0] > -1)
    return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=intersect(chosen, padding))


def packed_with_longest(q, k, v, bias):
    """Attends to packed documents, whose bound follows from the longest."""
    offsets = torch.tensor([0, 5, 0]) + torch.tensor([0, 0, 1]) * q.shape[1]
    longest = q.shape[1] - 3  # at least 5, the first one, and more than the other
    return flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, longest, longest)


def parts_of_the_length(q, k, v, bias):
    length = q.shape[1]
    third = flash_dmattn_func(q, k, v, attn_bias=bias, keep_window_size=length // 3)
    window = flash_dmattn_func(q, k, v, key_intervals=sliding_window(length, length // 2))
    return third + window + flash_dmattn_func(q, k, v, key_intervals=prefix_lm(length, length // 2))


def choice_under_a_mask(q, k, v, bias):
    length = q.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    return flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias, keep_window_size=4)


def made_mask(q, k, v, bias):
    length = q.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    mask = create_mask(bias, causal, 1, length, length, 4, None)
    return flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias)


# AOTAutograd traces the operators in both directions. That of the others is the same, and what they do besides needs no gradient.
FUNCTIONS = {
    "aot_eager": [choice, global_choice, padding, value_of_more_columns, delayed_bias, delayed_bias_of_a_choice],
    "eager": [
        rule_in_documents, rule_at_positions, intersection_with_padding, packed_with_longest, parts_of_the_length, choice_under_a_mask,
    ],
}  # fmt: skip


def tensors(length, requires_grad=False):
    shapes = [(1, length, 4, 8), (1, length, 2, 8), (1, length, 2, 8), (1, 2, length)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


# One function per operator that is called if nothing requires a gradient.
WITHOUT_GRADIENT = [choice, global_choice, intersection_with_padding, made_mask]


@pytest.mark.parametrize("function", WITHOUT_GRADIENT)
def test_lengths_share_one_graph(function):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in LENGTHS:
        inputs = tensors(length)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert counter.frame_count == 1


def out_and_gradients(function, inputs, weight):
    """Returns out and gradients. A function that does not add the bias gives it no gradient."""
    out = function(*inputs)
    return out, *torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)


@pytest.mark.parametrize(
    "backend, function", [(backend, f) for backend in FUNCTIONS for f in FUNCTIONS[backend]]
)
def test_training_lengths_share_one_graph(backend, function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            inputs = tensors(length, requires_grad=True)
            weight = torch.randn(1, length, 4, 8)
            actual, expected = (out_and_gradients(f, inputs, weight) for f in (compiled, function))
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", [choice, intersection, packed_with_longest])
def test_exported_program_equals_eager(function):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return function(q, k, v, bias)

    length = torch.export.Dim("length", min=8, max=4096)
    shapes = [{1: length}, {1: length}, {1: length}, {2: length}]
    exported = torch.export.export(Layer(), tuple(tensors(16)), dynamic_shapes=shapes).module()
    for n in (8, 33):
        inputs = tensors(n)
        torch.testing.assert_close(exported(*inputs), function(*inputs))


def test_each_scale_compiles_its_own_graph():
    """A float argument of an operator is a constant of its graph, also for torch's own attention."""
    compiled = torch.compile(
        lambda q, scale: flash_dmattn_func(q, q, q, scale=scale),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    q = torch.randn(1, 12, 2, 8)
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(q, scale), flash_dmattn_func(q, q, q, scale=scale))
