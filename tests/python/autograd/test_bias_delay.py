"""Compares a delayed bias, which applies only to old keys, with dense attention in double."""

import pytest
import torch

from cpu_backends import CPU_BACKENDS
from dense_in_double import dense_in_double
from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    from_padding,
    select_key_intervals,
)
from flash_dmattn.kernels import recorded_kernels
from rules_by_definition import causal_elements


def inputs(length_q=41, length_k=41, bias_heads=2, backend=""):
    torch.manual_seed(0)
    batch = 1 if backend == "triton" else 2  # interpreted, each row of a batch takes as long
    key = (batch, length_k, 2, 16)
    shapes = [(batch, length_q, 4, 16), key, key, (batch, bias_heads, length_k)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def assert_same(ours, expected, tensors, atol=2e-5):
    weight = torch.randn_like(expected(*tensors))
    results = []
    for function in (ours, expected):
        out = function(*tensors)
        grads = torch.autograd.grad((out.double() * weight).sum(), tensors)
        results.append([out, *grads])
    for actual, exact in zip(*results, strict=True):
        assert torch.allclose(actual.double(), exact.double(), atol=atol)


@pytest.mark.parametrize(
    "delay, lengths, bias_heads, softcap",
    [(6, (41, 41), 1, 3.0), (6, (7, 41), 4, 0.0), (100, (7, 41), 2, 0.0)],
)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_delayed_bias_equals_dense_attention(backend, delay, lengths, bias_heads, softcap):
    tensors = inputs(*lengths, bias_heads, backend)

    def ours(q, k, v, bias):
        options = {"is_causal": True, "softcap": softcap, "backend": backend}
        return flash_dmattn_func(q, k, v, attn_bias=bias, bias_delay=delay, **options)

    assert_same(
        ours,
        lambda *t: dense_in_double(*t, causal_elements(*lengths), delay=delay, softcap=softcap)[0],
        tensors,
    )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_delayed_bias_that_all_keys_share_equals_dense_attention(backend):
    q, k, v, _ = inputs(backend=backend)
    bias = torch.randn(len(q), 2, 1, requires_grad=True)

    def ours(q, k, v, bias):
        options = {"is_causal": True, "backend": backend}
        return flash_dmattn_func(q, k, v, attn_bias=bias, bias_delay=3, **options)

    def expected(q, k, v, bias):
        return dense_in_double(q, k, v, bias.expand(-1, -1, 41), causal_elements(41, 41), delay=3)[
            0
        ]

    assert_same(ours, expected, (q, k, v, bias))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_delayed_bias_over_chosen_keys_equals_dense_attention(backend):
    tensors = inputs(backend=backend)
    padding = torch.ones(len(tensors[0]), 41, dtype=torch.bool)
    padding[-1, :6] = False
    rule = {"keep_window_size": 5, "recent_window": 4}
    chosen = select_key_intervals(tensors[3], **rule, key_mask=padding)
    seen = chosen.to_mask().repeat_interleave(2, 1)
    expected = lambda *t: dense_in_double(*t, seen, delay=4)[0]  # noqa: E731
    forms = [
        {"key_intervals": chosen},
        {"attn_mask": padding, "is_causal": True, **rule},
        {"key_intervals": from_padding(padding), "is_causal": True, **rule},
    ]
    for visible in forms[:1] if backend == "triton" else forms:  # keys are selected before the call
        assert_same(
            lambda q, k, v, bias, visible=visible: flash_dmattn_func(
                q, k, v, attn_bias=bias, bias_delay=4, backend=backend, **visible
            ),
            expected,
            tensors,
        )


@pytest.mark.parametrize(
    "choice", [{}, {"keep_window_size": 5}, {"keep_window_size": 5, "recent_window": 4}]
)
def test_delayed_bias_is_one_kernel_in_each_direction(choice):
    q, k, v, bias = inputs()
    with recorded_kernels() as kernels:
        out = flash_dmattn_func(q, k, v, attn_bias=bias, bias_delay=4, is_causal=True, **choice)
        out.sum().backward()
    assert [name.split()[1] for name in kernels] == ["forward", "backward"]


def test_varlen_with_equal_lengths_is_one_kernel():
    q, k, v, bias = (t.detach()[0] for t in inputs())
    offsets = torch.tensor([0, 9, 9, 41], dtype=torch.int32)
    results = []
    for offsets_k, parts in ((offsets, 1), (offsets.clone(), 2)):
        with recorded_kernels() as kernels:
            results.append(
                flash_dmattn_varlen_func(
                    q, k, v, offsets, offsets_k, attn_bias=bias.T, bias_delay=4, is_causal=True
                )
            )
        assert len(kernels) == parts
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("window", [4, 5])
def test_score_of_nan_hides_its_key_before_the_delay_under_any_window(window):
    q, k = torch.randn(2, 5, 1, 8)
    v, scores, offsets = torch.eye(5, 8)[:, None], torch.randn(5, 1), torch.tensor([0, 5]).int()
    scores[2] = float("nan")
    options = {"bias_delay": 2, "keep_window_size": window, "is_causal": True}
    one = flash_dmattn_func(q[None], k[None], v[None], attn_bias=scores.T[None], **options)
    packed = flash_dmattn_varlen_func(q, k, v, offsets, offsets, attn_bias=scores, **options)
    assert not one[..., 2].any() and not packed[..., 2].any()


def test_varlen_with_a_delayed_bias_equals_single_sequences():
    torch.manual_seed(1)
    lengths_q, lengths_k = [9, 0, 14], [13, 4, 14]
    q, k, v = (
        torch.randn(sum(n), h, 16) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    bias = torch.randn(sum(lengths_k), 2)
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    packed = flash_dmattn_varlen_func(
        q, k, v, *offsets, attn_bias=bias, bias_delay=4, is_causal=True
    )
    for a, b, c, d in zip(
        *(o[i:][: len(lengths_q)].tolist() for o in offsets for i in (0, 1)), strict=True
    ):
        single = flash_dmattn_func(
            q[None, a:b], k[None, c:d], v[None, c:d], attn_bias=bias[None, c:d].transpose(1, 2),
            bias_delay=4, is_causal=True,
        )  # fmt: skip
        assert torch.allclose(packed[a:b], single[0], atol=1e-6)
