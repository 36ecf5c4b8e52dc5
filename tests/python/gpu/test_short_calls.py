"""A forward with few work tiles and few keys computes key info in its blocks. A longer forward reads it from memory."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, sliding_window
from flash_dmattn.kernels import recorded_kernels

BATCH = 140  # more work tiles than multiprocessors


def inputs(seqlen_q, seqlen_k, head_dim, heads_q=4, heads_kv=2):
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return [
        torch.randn(1, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for length, heads in shapes
    ]


def key_options(kind, seqlen_q, seqlen_k):
    bias = torch.randn(1, 4 if kind == "bias of query heads" else 2, seqlen_k, device="cuda")
    bias[..., ::5] = float("-inf")
    bias[..., 1::7] = float("nan")
    if kind == "mask":
        return {"attn_mask": torch.rand(1, 2, 1, seqlen_k, device="cuda") < 0.7, "attn_bias": bias}
    if kind == "intervals":
        return {"key_intervals": sliding_window(seqlen_k, 60, device="cuda"), "attn_bias": bias}
    if kind == "softcap":
        return {"softcap": 2.0, "attn_bias": bias, "is_causal": True}
    return {"attn_bias": bias.bfloat16(), "is_causal": kind == "causal bias"}


def repeated(value):
    if isinstance(value, torch.Tensor):
        return value.expand(BATCH, *value.shape[1:]).contiguous()
    return value


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(200, 200), (130, 1000), (300, 2048), (200, 2049)])
@pytest.mark.parametrize(
    "kind", ["bias", "causal bias", "bias of query heads", "mask", "intervals", "softcap"]
)
def test_short_call_has_bits_of_same_rows_in_long_call(kind, seqlen_q, seqlen_k, head_dim):
    if kind == "intervals":
        seqlen_q = seqlen_k = min(seqlen_k, 300)
    tensors = inputs(seqlen_q, seqlen_k, head_dim)
    options = key_options(kind, seqlen_q, seqlen_k)
    with recorded_kernels() as kernels:
        short = flash_dmattn_func(*tensors, **options, return_lse=True)
        many = flash_dmattn_func(
            *map(repeated, tensors),
            **{name: repeated(value) for name, value in options.items()},
            return_lse=True,
        )
    assert len(set(kernels)) == 1
    for one, all_of in zip(short, many, strict=True):
        assert torch.equal(one, all_of[:1]) and torch.equal(one, all_of[-1:])


def test_short_call_with_key_bias_takes_no_workspace():
    q, k, v = inputs(128, 128, 64)
    bias = torch.randn(1, 2, 128, device="cuda", dtype=torch.bfloat16)
    flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2  # out and lse
