"""Compares packed sequences of different lengths with one call per sequence."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

LENGTHS = {
    "equal": ([5, 17, 1, 40], None),
    "longer_keys": ([5, 17, 1, 40], [9, 17, 30, 41]),
    "longer_queries": ([9, 17, 30], [5, 17, 1]),
    "empty_sequences": ([0, 12, 0, 7, 0], [3, 12, 0, 0, 0]),
    "one": ([33], [33]),
}


def packed(lengths, heads_bias, dtype):
    lengths_q, lengths_k = lengths[0], lengths[1] or lengths[0]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    leaves = [
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16), (total_k, heads_bias))
    ]
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    return leaves, offsets


def one_by_one(leaves, offsets, **options):
    q, k, v, bias = leaves
    outs = []
    for i in range(len(offsets[0]) - 1):
        rows, keys = (slice(int(o[i]), int(o[i + 1])) for o in offsets)
        outs.append(
            flash_dmattn_func(
                q[None, rows], k[None, keys], v[None, keys], attn_bias=bias[keys].t()[None],
                return_lse=True, **options,
            )
        )  # fmt: skip
    return torch.cat([out[0] for out, _ in outs]), torch.cat([lse[0] for _, lse in outs], 1)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("backend", ["cpu", "reference", "flex"])
def test_named_backend_equals_default(backend):
    (q, k, v, bias), offsets = packed(LENGTHS["longer_keys"], 2, torch.float32)
    options = {"attn_bias": bias.detach(), "is_causal": True, "keep_window_size": 6}
    with torch.no_grad():
        expected = flash_dmattn_varlen_func(q, k, v, *offsets, **options)
        out = flash_dmattn_varlen_func(q, k, v, *offsets, **options, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "heads_bias, options",
    [(2, {}), (1, {"keep_window_size": 6}), (2, {"keep_window_size": 6, "selection": "global"}),
     (4, {"keep_window_size": 6}), (4, {"softcap": 2.0, "softmax_scale": 0.7})],
)  # fmt: skip
def test_packed_equals_one_by_one(name, is_causal, heads_bias, options):
    leaves, offsets = packed(LENGTHS[name], heads_bias, torch.float32)
    expected, expected_lse = one_by_one(leaves, offsets, is_causal=is_causal, **options)
    longest = [int(o.diff().max()) for o in offsets]
    q, k, v, bias = leaves
    out, lse = flash_dmattn_varlen_func(
        q, k, v, *offsets, *longest, attn_bias=bias, is_causal=is_causal, return_lse=True,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    for got, wanted in zip(grads, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_varlen_equals_single_calls(dtype):
    leaves, offsets = packed(LENGTHS["longer_keys"], 2, dtype)
    q, k, v, bias = leaves
    out = flash_dmattn_varlen_func(
        q, k, v, *offsets, attn_bias=bias, is_causal=True, keep_window_size=6
    )
    expected, _ = one_by_one(leaves, offsets, is_causal=True, keep_window_size=6)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_tokens_past_the_last_sequence_are_ignored():
    leaves, offsets = packed(LENGTHS["equal"], 2, torch.float32)
    q, k, v, bias = leaves
    out = flash_dmattn_varlen_func(q, k, v, *(o[:-1] for o in offsets), attn_bias=bias)
    assert (out[int(offsets[0][-2]) :] == 0).all() and (out[:5] != 0).all()


def test_int64_offsets_and_transposed_bias_are_accepted():
    leaves, offsets = packed(LENGTHS["equal"], 2, torch.float32)
    q, k, v, bias = leaves
    options = {"is_causal": True, "keep_window_size": 6}
    expected = flash_dmattn_varlen_func(q, k, v, *offsets, attn_bias=bias, **options)
    strided = bias.t().contiguous().t()
    actual = flash_dmattn_varlen_func(
        q, k, v, *(o.long() for o in offsets), attn_bias=strided, **options
    )
    assert torch.equal(actual, expected)
