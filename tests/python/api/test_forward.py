"""The forward pass has exact results in simple cases, and accepts all shapes and names of its arguments."""

import math

import pytest
import torch

import flash_dmattn
from flash_dmattn import flash_dmattn_func, triton_dmattn_func
from flash_dmattn.check.oracle import Problem, attention
from problem_calls import assert_close

LOW_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


def qkv(batch=2, seqlen_q=17, seqlen_k=23, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32):
    query = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype)
    key = torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype)
    return query, key, torch.randn_like(key)


@pytest.mark.parametrize("dtype", LOW_AND_FULL)
def test_one_visible_key_is_copied(dtype):
    q, k, v = qkv(dtype=dtype)
    chosen = torch.randint(23, (2, 2, 17))
    mask = torch.nn.functional.one_hot(chosen, 23).bool()
    out, lse = flash_dmattn_func(q, k, v, mask, return_lse=True)
    for b in range(2):
        for h in range(4):
            assert torch.equal(out[b, :, h], v[b, chosen[b, h // 2], h // 2])
    expected = attention(Problem(q, k, v, mask=mask))
    assert_close("lse", lse, expected.lse, expected.lse.float())


@pytest.mark.parametrize("dtype", LOW_AND_FULL)
def test_equal_scores_give_the_mean(dtype):
    q, _, _ = qkv(dtype=dtype)
    k = torch.zeros(2, 16, 2, 16, dtype=dtype)
    v = torch.randint(-8, 8, (2, 16, 2, 16)).to(dtype)
    out, lse = flash_dmattn_func(q, k, v, return_lse=True)
    mean = v.double().mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(q)
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(16)))


@pytest.mark.parametrize("dtype", LOW_AND_FULL)
def test_rows_without_keys_are_zero(dtype):
    q, k, v = qkv(dtype=dtype)
    mask = torch.ones(1, 1, 17, 23, dtype=torch.bool)
    mask[..., 3:6, :] = False
    out, lse = flash_dmattn_func(q, k, v, mask, return_lse=True)
    assert (out[:, 3:6] == 0).all() and (lse[..., 3:6] == -torch.inf).all()
    assert out.isfinite().all() and lse[..., :3].isfinite().all() and lse[..., 6:].isfinite().all()


def test_causal_with_more_queries_than_keys_gives_zero_rows():
    q, k, v = qkv(seqlen_q=9, seqlen_k=4)
    out, lse = flash_dmattn_func(q, k, v, is_causal=True, return_lse=True)
    assert (out[:, :5] == 0).all() and (lse[..., :5] == -torch.inf).all()
    expected = attention(Problem(q, k, v, causal=True))
    assert_close("out", out, expected.out, expected.out.float())


def test_all_forms_of_one_mask_and_bias_agree():
    q, k, v = qkv()
    mask, bias = torch.rand(2, 23) < 0.6, torch.randn(2, 1, 23)
    full = (2, 4, 17, 23)
    expected = flash_dmattn_func(
        q, k, v, mask[:, None, None].expand(full).contiguous(),
        bias[:, :, None].expand(full).contiguous(),
    )  # fmt: skip
    masks = [mask, mask[:, None], mask[:, None, None], mask[:, None, None].expand(full)]
    biases = [
        bias[:, 0],
        bias,
        bias[:, :, None],
        bias.expand(2, 2, 23),
        bias[:, :, None].expand(full),
    ]
    for m, b in [(m, biases[0]) for m in masks] + [(masks[0], b) for b in biases]:
        torch.testing.assert_close(flash_dmattn_func(q, k, v, m, b), expected, rtol=1e-5, atol=1e-6)


def test_strided_masks_and_biases_are_read_where_they_are():
    q, k, v = qkv()
    mask, bias = (torch.rand(23, 17, 4, 2) < 0.6), torch.randn(23, 17, 4, 2)
    out = flash_dmattn_func(q, k, v, mask.permute(3, 2, 1, 0), bias.permute(3, 2, 1, 0))
    expected = flash_dmattn_func(
        q, k, v, mask.permute(3, 2, 1, 0).contiguous(), bias.permute(3, 2, 1, 0).contiguous()
    )
    assert torch.equal(out, expected)
    per_key = torch.randn(2, 23, 2)  # [B, Sk, H], as a projection of the values leaves it
    out = flash_dmattn_func(q, k, v, attn_bias=per_key.transpose(1, 2))
    expected = flash_dmattn_func(q, k, v, attn_bias=per_key.transpose(1, 2).contiguous())
    assert torch.equal(out, expected)


def test_strided_head_dim_equals_contiguous():
    q, k, v = (t.mT.contiguous().mT for t in qkv())
    expected = flash_dmattn_func(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(flash_dmattn_func(q, k, v), expected)


@pytest.mark.parametrize("length", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_give_zeros(length):
    q, k, v = (t.requires_grad_() for t in qkv(seqlen_q=length[0], seqlen_k=length[1]))
    bias = torch.randn(2, 2, length[1], requires_grad=True)
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, keep_window_size=3, return_lse=True
    )
    assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    for t in (q, k, v, bias):
        assert t.grad.shape == t.shape and (t.grad == 0).all()


def test_empty_batch_gives_empty_result():
    q, k, v = qkv(batch=0)
    assert flash_dmattn_func(q, k, v).shape == q.shape


def test_zero_heads_give_empty_result():
    q, k, v = (t.requires_grad_() for t in qkv(heads_q=0, heads_kv=0))
    bias = torch.randn(2, 1, 23, requires_grad=True)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, keep_window_size=3)
    assert out.shape == q.shape
    out.sum().backward()
    assert k.grad.shape == k.shape and (bias.grad == 0).all()


def test_scale_and_softmax_scale_give_same_result():
    q, k, v = qkv()
    expected = attention(Problem(q, k, v, scale=0.3)).out.float()
    for arguments in ({"scale": 0.3}, {"softmax_scale": 0.3}):
        torch.testing.assert_close(flash_dmattn_func(q, k, v, **arguments), expected)


@pytest.mark.parametrize("name", ["flash_dmattn_func", "flash_dmattn_varlen_func"])
def test_return_attn_probs_gives_none_as_third_result(name):
    inputs = [t[:1] for t in qkv()]
    if name == "flash_dmattn_varlen_func":
        inputs = [t[0] for t in inputs]
        inputs += [torch.tensor([0, len(t)]) for t in inputs[:2]]
    function = getattr(flash_dmattn, name)
    out, lse = function(*inputs, return_lse=True)
    *first, third = function(*inputs, return_attn_probs=True)
    assert third is None and all(map(torch.equal, first, (out, lse)))


@pytest.mark.usefixtures("uncompiled_flex")
def test_flex_returns_lse_as_second_result():
    with torch.no_grad():
        results = flash_dmattn.flex_dmattn_func(*qkv(), return_lse=True)
    assert len(results) == 2


@pytest.mark.parametrize("backend", [None, ""])
def test_backend_none_takes_first_that_supports_the_problem(backend):
    q, k, v = qkv()
    expected = flash_dmattn_func(q, k, v)
    assert torch.equal(flash_dmattn_func(q, k, v, backend=backend), expected)
    assert torch.equal(flash_dmattn.flash_dmattn_func_auto(backend)(q, k, v), expected)
    scaled = flash_dmattn.flash_dmattn_func_auto(backend, scale=0.5)
    assert torch.equal(scaled(q, k, v), flash_dmattn_func(q, k, v, scale=0.5))
    assert flash_dmattn.KVSlots(1, 1, 4, 8, backend=backend).backend == ""
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32)
    with torch.no_grad():
        flash_dmattn.flash_dmattn_with_kvcache(
            q[:, -1:], k, v, cache_seqlens=lengths, backend=backend
        )


def test_one_query_against_a_cache_equals_the_last_row():
    q, k, v = qkv(seqlen_q=23)
    bias = torch.randn(2, 2, 23)
    options = {"attn_bias": bias, "is_causal": True, "keep_window_size": 6}
    whole = flash_dmattn_func(q, k, v, **options)
    last = flash_dmattn_func(q[:, -1:], k, v, **options)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", ["per_query", "global"])
def test_selection_without_queries_gives_empty_result(selection):
    """Without queries, a bias with a query dimension has no elements."""
    q, k, v = qkv(seqlen_q=0)
    q.requires_grad_()
    options = {"attn_bias": torch.randn(2, 2, 0, 23), "selection_scores": torch.randn(2, 2, 23)}
    out = flash_dmattn_func(q, k, v, keep_window_size=5, selection=selection, **options)
    out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_bias_with_float64_inputs_is_exact(dtype):
    q, k, v = qkv(dtype=torch.float64)
    bias = torch.randn(2, 2, 23).to(dtype)
    expected = attention(Problem(q, k, v, bias=bias[:, :, None])).out
    torch.testing.assert_close(
        flash_dmattn_func(q, k, v, attn_bias=bias), expected, rtol=1e-6, atol=1e-6
    )


def test_meta_tensors_give_shapes():
    """Masks on the meta device have no values, so nothing may read them."""
    q, k, v = (t.to("meta") for t in qkv())
    mask = torch.ones(2, 1, 17, 23, dtype=torch.bool, device="meta")
    bias = torch.randn(2, 2, 23, device="meta")
    options = {"is_causal": True, "keep_window_size": 5, "return_lse": True}
    for attn_mask in (None, mask):
        out, lse = flash_dmattn_func(q, k, v, attn_mask, bias, **options)
        assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 17)


@pytest.mark.parametrize("dtype", LOW_AND_FULL)
def test_float32_bias_with_16_bit_inputs_keeps_its_dtype(dtype):
    q, k, v = qkv(dtype=dtype)
    bias = torch.randn(2, 2, 23)
    problem = Problem(q, k, v, bias=bias[:, :, None])
    expected, yardstick = attention(problem), attention(problem, dtype)
    assert_close("out", flash_dmattn_func(q, k, v, attn_bias=bias), expected.out, yardstick.out)
    out = flash_dmattn_func(q, k, v, attn_bias=bias.double())  # taken as float32
    assert_close("out", out, expected.out, yardstick.out)


@pytest.mark.parametrize("function", [flash_dmattn_func, triton_dmattn_func])
def test_values_may_have_a_smaller_head_dimension(function):
    q, k, v = (torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    expected = function(q, k, v, is_causal=True)[..., :5]
    out = function(q, k, v[..., :5], is_causal=True)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad(t, (q, k, v), dout) for t in (out, expected))
    torch.testing.assert_close(gradients, wanted)
