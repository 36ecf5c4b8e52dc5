"""Runs flash-attention's own tests on a GPU, with our functions under its names (`make test-peers`)."""

import os
import random
import sys
from unittest import mock

import pytest
import torch

import flash_dmattn.padding

if not torch.cuda.is_available():
    pytest.skip("flash-attention's tests need a GPU", allow_module_level=True)


def alibi(slopes, causal, rows, offsets):
    """Under causality it is a bias per key: it lacks a number that all keys of a query have in common."""
    ends = [begins[1:] for begins in offsets] or [row[-1:] + 1 for row in rows]
    sequences = [torch.bucketize(*pair, right=True) for pair in zip(rows, ends, strict=True)]
    query, key = (row - end[of] for row, end, of in zip(rows, ends, sequences, strict=True))
    slopes = (slopes[sequences[causal]].T[None] if offsets else slopes[..., None])[..., None]
    return slopes.mT * key if causal else -slopes * (query[:, None] - key).abs()


def attend(q, k, v, *args, causal=False, window_size=(-1, -1), alibi_slopes=None, block_table=None, **options):  # fmt: skip
    offsets = args[:2] if len(args) > 1 else ()  # of packed sequences; args may be the dropout
    rows = [torch.arange(t.shape[0 if offsets else 1], device=q.device) for t in (q, k)]
    bias = None if alibi_slopes is None else alibi(alibi_slopes, causal, rows, offsets)
    left, right = (2**30 if size < 0 else int(size) for size in window_size)
    if left == 2**30 and (causal or bias is None or not offsets):
        bias = bias[0, :, 0].T if offsets and bias is not None else bias
        function = flash_dmattn.flash_dmattn_varlen_func if offsets else flash_dmattn.flash_dmattn_func  # fmt: skip
        return function(q, k, v, *offsets, attn_bias=bias, is_causal=causal, **options)
    positions = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False), query_length=len(rows[0]))  # fmt: skip
    shown = flash_dmattn.sliding_window(len(rows[1]), left + 1, lookahead=0 if causal else right, device=q.device, **positions)  # fmt: skip
    q, k, v = (t[None] if offsets else t for t in (q, k, v))
    out = flash_dmattn.flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=shown, **options)
    return ((out[0][0], *out[1:]) if isinstance(out, tuple) else out[0]) if offsets else out


def attend_to_cache(q, k_cache, v_cache, k, v, window_size, alibi_slopes, cache_seqlens, cache_leftpad, **others):  # fmt: skip
    place = torch.arange(k_cache.shape[1], device=q.device)
    slopes = None if alibi_slopes is None else alibi_slopes[..., None]
    bias = None if slopes is None else slopes * (place - cache_seqlens[:, None, None])
    return flash_dmattn.flash_dmattn_with_kvcache(
        q, k_cache, v_cache, bias, k, v, cache_seqlens=cache_seqlens, cache_leftpad=cache_leftpad,
        scores=None if k is None or slopes is None else slopes * place[: k.shape[1]],
        keep_window_size=None if window_size[0] < 0 else 0, recent_window=int(window_size[0]) + 1)  # fmt: skip


with mock.patch.dict(sys.modules, {
    "flash_attn": mock.Mock(
        flash_attn_func=attend, flash_attn_varlen_func=attend, flash_attn_with_kvcache=attend_to_cache,
        flash_attn_qkvpacked_func=lambda qkv, *args, **options: attend(*qkv.unbind(2), *args, **options),
        flash_attn_kvpacked_func=lambda q, kv, *args, **options: attend(q, *kv.unbind(2), *args, **options),
        flash_attn_varlen_kvpacked_func=lambda q, kv, *args, **options: attend(q, *kv.unbind(1), *args, **options),
        flash_attn_varlen_qkvpacked_func=lambda qkv, ends, *args, **options: attend(*qkv.unbind(1), ends, ends, *args, **options)),
    "flash_attn.bert_padding": flash_dmattn.padding, "flash_attn.flash_attn_interface": mock.Mock(), "flash_attn.layers.rotary": mock.Mock(),
}):  # fmt: skip
    import test_flash_attn as theirs
# We have no dropout, paged cache or rotation. The queries of our caches are causal, and a bias has the heads of the keys.
WITHOUT = {"dropout_p": 0.0, "paged_kv_block_size": None, "rotary_fraction": 0.0}
CASES = {}
for name in [name for name in vars(theirs) if name.startswith("test_")]:
    rng = random.Random(name)
    # The tests have half a million cases. So many of each are drawn at random, always the same ones.
    for _ in range(int(os.environ.get("FLASH_ATTN_CASES", "100"))):
        case = {}
        for names, values in (mark.args for mark in vars(theirs)[name].pytestmark):
            value = WITHOUT.get(names, rng.choice(values))
            case |= zip(names.split(","), value if "," in names else [value], strict=True)
        if "new_kv" in case:
            case |= {"causal": True} | ({"mha_type": "mha"} if case["alibi"] else {})
        CASES[f"{name}{list(case.values())}"] = name, case


@pytest.mark.parametrize("name, case", CASES.values(), ids=CASES.keys())
def test_flash_attention(name, case):
    vars(theirs)[name](**case)
