"""A meaningless argument raises an error that names it, and no argument is silently ignored."""

import re

import numpy as np
import pytest
import torch

import flash_dmattn
from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    sliding_window,
)


def qkv():
    return tuple(torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))


BIAS = torch.zeros(2, 2, 9)


@pytest.mark.parametrize(
    "error, message, options",
    [
        (ValueError, "selection_scores: got shape (2, 3, 9)",
         {"keep_window_size": 3, "selection_scores": torch.zeros(2, 3, 9)}),
        (TypeError, "selection_scores: got list", {"keep_window_size": 3, "selection_scores": [1.0]}),
        (TypeError, "selection_scores: got torch.int64",
         {"keep_window_size": 3, "selection_scores": BIAS.long()}),
        (TypeError, "selection_scores: got str", {"selection_scores": "nonsense"}),
        (ValueError, "selection_scores: got shape (2, 2, 9) without keep_window_size",
         {"attn_bias": BIAS, "selection_scores": BIAS}),
        (ValueError, "selection: got 'bogus'", {"selection": "bogus"}),
        (TypeError, "is_causal: got 'False'", {"is_causal": "False"}),
        (TypeError, "deterministic: got 'no'", {"deterministic": "no"}),
        (TypeError, "return_attn_probs: got 'no'", {"return_attn_probs": "no"}),
        (TypeError, "return_lse: got 'no'", {"return_lse": "no"}),
        (ValueError, "keep_window_size: got no scores", {"keep_window_size": 9}),
        (ValueError, "keep_window_size: got no scores", {"keep_window_size": 100}),
        (ValueError, "keep_window_size: got attn_bias of shape",
         {"keep_window_size": 9, "attn_bias": torch.zeros(2, 2, 9, 9)}),
        (TypeError, "attn_mask: got a torch.sparse_coo tensor, expected a dense one",
         {"attn_mask": torch.ones(2, 9).bool().to_sparse()}),
        (TypeError, "attn_bias: got a torch.sparse_coo tensor", {"attn_bias": BIAS.to_sparse()}),
        (TypeError, "selection_scores: got a torch.sparse_coo tensor",
         {"keep_window_size": 3, "selection_scores": BIAS.to_sparse()}),
        (ValueError, "scale: got 1e+300", {"scale": 1e300}),
        (ValueError, "scale: got 0, expected another number", {"scale": 0}),
        (ValueError, "softmax_scale: got 0, expected another number", {"softmax_scale": -0.0}),
        (ValueError, "softcap: got 1e+300", {"softcap": 1e300}),
        (ValueError, "query: got shape (9, 4, 8)", {"query": torch.zeros(9, 4, 8)}),
        (ValueError, "key: got 3 heads", dict.fromkeys(("key", "value"), torch.zeros(2, 9, 3, 8))),
        (ValueError, "value: got shape (2, 8, 2, 8)", {"value": torch.zeros(2, 8, 2, 8)}),
        (ValueError, "key: got shape (1, 9, 2, 8)", dict.fromkeys(("key", "value"), torch.zeros(1, 9, 2, 8))),
        (ValueError, "query: got head dimension 257",
         {"query": torch.zeros(2, 9, 4, 257), **dict.fromkeys(("key", "value"), torch.zeros(2, 9, 2, 257))}),
        (TypeError, "key: got torch.float64", {"key": torch.zeros(2, 9, 2, 8).double()}),
        (TypeError, "query: got torch.int64",
         dict.fromkeys(("query", "key", "value"), torch.zeros(2, 9, 2, 8).long())),
        (TypeError, "query: got list", {"query": [1]}),
        (TypeError, "query: got a torch.sparse_coo tensor", {"query": torch.zeros(2, 9, 4, 8).to_sparse()}),
        (ValueError, "scale, softmax_scale", {"scale": 1.0, "softmax_scale": 1.0}),
        (ValueError, "scale: got nan", {"scale": float("nan")}),
        (TypeError, "scale: got True", {"softmax_scale": True}),
        (TypeError, "scale: got a tensor of shape (2,)", {"scale": torch.ones(2)}),
        (ValueError, "softcap: got -1.0", {"softcap": -1}),
        (TypeError, "softcap: got '3'", {"softcap": "3"}),
        (TypeError, "softcap: got a tensor of shape (2,)", {"softcap": torch.ones(2)}),
        (ValueError, "nonfinite: got 'ignore'", {"nonfinite": "ignore"}),
        (ValueError, "attn_mask: got shape (2, 4, 9, 8)", {"attn_mask": torch.ones(2, 4, 9, 8).bool()}),
        (TypeError, "attn_mask: got torch.float32", {"attn_mask": torch.zeros(2, 9)}),
        (TypeError, "attn_mask: got list", {"attn_mask": [True]}),
        (ValueError, "attn_bias: got shape (9,)", {"attn_bias": torch.ones(9)}),
        (ValueError, "attn_bias: got shape (2, 3, 9)", {"attn_bias": torch.ones(2, 3, 9)}),
        (TypeError, "attn_bias: got torch.int64", {"attn_bias": BIAS.long()}),
        (TypeError, "attn_bias: got torch.bool", {"attn_bias": BIAS.bool()}),
        (TypeError, "attn_bias: got a tensor on meta", {"attn_bias": BIAS.to("meta")}),
        (ValueError, "keep_window_size: got -1", {"keep_window_size": -1}),
        (TypeError, "keep_window_size: got 4.5", {"attn_bias": BIAS, "keep_window_size": 4.5}),
        (ValueError, "key_intervals: got intervals of shape", {"key_intervals": sliding_window(10, 2)}),
        (TypeError, "key_intervals: got a tensor on meta", {"key_intervals": sliding_window(9, 2).to("meta")}),
        (TypeError, "key_intervals: got Tensor",
         {"key_intervals": torch.zeros(1, 1, 9, 2, dtype=torch.int32)}),
        (TypeError, "unexpected keyword argument", {"keep_windw_size": 3}),
        (ValueError, "recent_window: got 4 without keep_window_size", {"recent_window": 4, "is_causal": True}),
        (ValueError, "return_lse, return_attn_probs: got True for both", {"return_lse": True, "return_attn_probs": True}),
        (ValueError, "value: got shape (2, 9, 2, 257)", {"value": torch.zeros(2, 9, 2, 257)}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(
    "function", ["flash_dmattn_func", "triton_dmattn_func", "flex_dmattn_func"]
)
def test_bad_attention_argument_raises_naming_it(function, error, message, options):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | options
    with pytest.raises(error, match=re.escape(message)), torch.no_grad():
        getattr(flash_dmattn, function)(**arguments)


def test_backend_of_wrong_type_raises():
    with pytest.raises(TypeError, match="backend: got 3, expected a name"):
        flash_dmattn_func(*qkv(), backend=3)


def test_scale_requiring_a_gradient_raises():
    """Without the error, scale would silently get no gradient."""
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="scale: got a tensor that requires a gradient"):
        flash_dmattn_func(*qkv(), scale=scale)
    with torch.no_grad():
        flash_dmattn_func(*qkv(), scale=scale)


@pytest.mark.parametrize("flag", [True, np.True_, 1])
def test_numeric_flag_is_accepted(flag):
    q, k, v = qkv()
    expected = flash_dmattn_func(q, k, v, is_causal=True)
    assert torch.equal(flash_dmattn_func(q, k, v, is_causal=flag), expected)


@pytest.mark.parametrize(
    "error, message, options",
    [
        (TypeError, "attn_bias: got list", {"attn_bias": [1]}),
        (TypeError, "attn_bias: got a torch.sparse_coo tensor",
         {"attn_bias": torch.zeros(9, 2).to_sparse()}),
        (ValueError, "attn_bias: got shape (2, 9), expected [total_k, H] with total_k = 9 and H = 4, 2",
         {"attn_bias": torch.zeros(2, 9)}),
        (ValueError, "attn_bias: got shape (8, 2)", {"attn_bias": torch.zeros(8, 2)}),
        (ValueError, "attn_bias: got shape (1, 9, 2)", {"attn_bias": torch.zeros(1, 9, 2)}),
        (TypeError, "keep_window_size: got 'a'",
         {"attn_bias": torch.zeros(9, 2), "keep_window_size": "a"}),
        (ValueError, "keep_window_size: got no scores, expected one score per key in attn_bias or selection_scores: [total_k, H]",
         {"keep_window_size": 9}),
        (TypeError, "is_causal: got 'False'", {"is_causal": "False"}),
        (ValueError, "selection: got 'bogus'", {"selection": "bogus"}),
        (ValueError, "block_table: got", {"block_table": torch.zeros(1, 1)}),
        (ValueError, "softmax_scale: got 0", {"softmax_scale": 0}),
        (TypeError, "backend: got 3, expected a name", {"backend": 3}),
        (ValueError, "keep_window_size: got -1", {"attn_bias": torch.zeros(9, 2), "keep_window_size": -1}),
        (ValueError, "return_lse, return_attn_probs: got True for both", {"return_lse": True, "return_attn_probs": True}),
        # On a GPU a length that is too small loses keys.
        (ValueError, "max_seqlen_k: got 4, expected at least 5, the longest of cu_seqlens_k", {"max_seqlen_k": 4}),
        (ValueError, "max_seqlen_k: got -1", {"max_seqlen_k": -1}),
        (TypeError, "max_seqlen_q: got 'many'", {"max_seqlen_q": "many"}),
        *((ValueError, "cu_seqlens_q: got ", {"cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32)})
          for offsets in ([0, 4, 10], [0, 7, 4, 9], [1, 9], [])),
        (ValueError, "cu_seqlens_q: got torch.float32", {"cu_seqlens_q": torch.zeros(3)}),
        (ValueError, "cu_seqlens", {"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)}),
        (ValueError, "cu_seqlens_k: got [0, 5, 4, 9]",
         {"cu_seqlens_q": torch.tensor([0, 4, 4, 9]), "cu_seqlens_k": torch.tensor([0, 5, 4, 9]),
          "attn_bias": torch.zeros(9, 2), "keep_window_size": 3}),
        (TypeError, "cu_seqlens_", {"cu_seqlens_k": torch.tensor([0, 4, 9], device="meta")}),
        (TypeError, "cu_seqlens_",
         {"cu_seqlens_k": torch.tensor([0, 4, 9], device="meta"), "attn_bias": torch.zeros(9, 2), "keep_window_size": 3}),
    ],
)  # fmt: skip
def test_bad_varlen_argument_raises_naming_it(error, message, options):
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 4, 9]))
    with pytest.raises(error, match=re.escape(message)):
        flash_dmattn_varlen_func(*(t[0] for t in qkv()), **offsets | options)


def test_zero_at_position_of_flash_attention_dropout_raises():
    offsets = torch.tensor([0, 4, 9])
    packed = (*(t[0] for t in qkv()), offsets, offsets, 5, 5)
    with pytest.raises(ValueError, match="softmax_scale: got 0.*dropout_p.*leave it out"):
        flash_dmattn_varlen_func(*packed, 0.0, is_causal=True)


# Errors of the C++ library arrive as ValueError or RuntimeError, depending on the version of torch.
OPS, (Q, K, V) = torch.ops.flash_dmattn, qkv()
OPTIONS, LSE = ([], False, 0, 1.0, 0.0, True, False, ""), torch.zeros(2, 2, 4, 9)


def forward(q=Q, k=K, v=V, mask=None, intervals=None):
    return lambda: OPS.forward(q, k, v, mask, None, intervals, *OPTIONS)


def backward(lse=LSE, dlse=None):
    return lambda: OPS.backward(
        Q, Q, K, V, None, None, None, Q, lse, dlse, *OPTIONS, *(True,) * 3, False
    )


def select_and_attend(bias):
    return lambda: OPS.select_and_attend(Q, K, V, bias, 3, *OPTIONS[1:])


@pytest.mark.parametrize(
    "message, call",
    [
        ("v: got", forward(v=V[:, 1:])),
        ("k: got torch.float64", forward(k=K.double())),
        ("key_intervals: got", forward(intervals=torch.zeros(1, 1, 8, 2, dtype=torch.int32))),
        ("mask: got", forward(mask=Q)),
        ("mask", forward(mask=torch.ones(1, 3, 9, 9).bool())),
        ("lse: got torch.uint8", backward(LSE.byte())),
        ("lse: got torch.float64", backward(LSE.double())),
        ("lse: got shape", backward(LSE.flatten())),
        ("lse: got shape", backward(LSE[:1])),
        ("dlse: got torch.float64", backward(dlse=LSE[0].double())),
        ("dlse: got shape", backward(dlse=LSE)),
        ("bias: got shape (2, 2, 1, 9)", select_and_attend(BIAS[:, :, None])),
        ("bias: got shape (2, 2, 8)", select_and_attend(BIAS[:, :, 1:])),
        ("bias: got shape (2, 4, 9)", select_and_attend(BIAS.repeat(1, 2, 1))),
        ("bias: got shape (4, 2, 9)", select_and_attend(BIAS.repeat(2, 1, 1))),
        ("bias: got torch.int32", select_and_attend(BIAS.int())),
        ("scores: got", lambda: OPS.select_key_intervals(torch.zeros(9), None, [3], "global", True, 9)),
        ("selection", lambda: OPS.select_key_intervals(BIAS[:1, :1, :4], None, [3], "best", True, 4)),
        *((f"tile_rows: got {rows}", lambda rows=rows: OPS.build_tile_lists(torch.zeros(1, 1, 9, 2).int(), rows, 9, []))
          for rows in (0, 2**32)),
    ],
)  # fmt: skip
def test_operator_with_bad_argument_raises_naming_it(message, call):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        call()


def loss(query):
    return flash_dmattn_func(query, K, V).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda q: torch.func.grad(loss)(q),
        lambda q: torch.func.vjp(loss, q),
        lambda q: torch.func.jacrev(loss)(q),
        lambda q: torch.func.vmap(torch.func.grad(loss))(q[None]),
    ],
)
def test_torch_func_transform_raises(transform):
    with pytest.raises(RuntimeError, match="query: got a tensor of torch.func.grad"):
        transform(qkv()[0])


def test_vmap_over_a_mask_of_a_choice_is_refused_by_name():
    q, k, v = qkv()

    def choose(mask):
        return flash_dmattn_func(q, k, v, mask[None, None], BIAS, keep_window_size=3)

    with pytest.raises(RuntimeError, match="keep_window_size: got a window under torch.func.vmap"):
        torch.func.vmap(choose)(torch.ones(3, 9, 9, dtype=torch.bool))


def test_unknown_argument_of_func_auto_raises():
    with pytest.raises(TypeError, match="flash_dmattn_func_auto: got 'nonfinit', expected"):
        flash_dmattn_func_auto(nonfinit="saturate")
    with pytest.raises(TypeError, match="flash_dmattn_func_auto: got 'bogus', expected"):
        flash_dmattn_func_auto("cpu", bogus=1)
    with pytest.raises(ValueError, match="backend: got 'abacus'"):
        flash_dmattn_func_auto("abacus")
