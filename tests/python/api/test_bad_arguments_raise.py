"""Arguments that mean nothing raise an error that names them; none is silently ignored."""

import numpy as np
import pytest
import torch

import flash_dmattn
from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    from_padding,
    intersect,
    packed_documents,
    prefix_lm,
    select_key_intervals,
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
        (TypeError, "unexpected keyword argument", {"keep_windw_size": 3}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "function", ["flash_dmattn_func", "triton_dmattn_func", "flex_dmattn_func"]
)
def test_bad_attention_argument_raises_naming_it(function, error, message, options):
    with pytest.raises(error) as caught, torch.no_grad():
        getattr(flash_dmattn, function)(*qkv(), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", [True, np.True_, 1])
def test_flag_given_as_number_is_accepted(flag):
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
        (ValueError, "keep_window_size: got no scores", {"keep_window_size": 9}),
        (TypeError, "is_causal: got 'False'", {"is_causal": "False"}),
        (ValueError, "selection: got 'bogus'", {"selection": "bogus"}),
        (ValueError, "block_table: got", {"block_table": torch.zeros(1, 1)}),
        (ValueError, "softmax_scale: got 0", {"softmax_scale": 0}),
        (TypeError, "backend: got 3, expected a name", {"backend": 3}),
    ],
)  # fmt: skip
def test_bad_varlen_argument_raises_naming_it(error, message, options):
    offsets = torch.tensor([0, 4, 9])
    with pytest.raises(error) as caught:
        flash_dmattn_varlen_func(*(t[0] for t in qkv()), offsets, offsets, **options)
    assert message in str(caught.value)


def test_zero_in_the_place_of_flash_attentions_dropout_raises():
    offsets = torch.tensor([0, 4, 9])
    packed = (*(t[0] for t in qkv()), offsets, offsets, 5, 5)
    with pytest.raises(ValueError, match="softmax_scale: got 0.*dropout_p.*leave it out"):
        flash_dmattn_varlen_func(*packed, 0.0, is_causal=True)


@pytest.mark.parametrize(
    "error, message, make",
    [
        (TypeError, "intervals: got list", lambda: KeyIntervals([[0, 1]], 1)),
        (TypeError, "bound: got 'ab'",
         lambda: KeyIntervals(torch.zeros(1, 1, 4, 2, dtype=torch.int32), 4, "ab")),
        (ValueError, "bound: got -1",
         lambda: KeyIntervals(torch.zeros(1, 1, 4, 2, dtype=torch.int32), 4, (-1, 0))),
        (ValueError, "query_length: got -4",
         lambda: KeyIntervals(torch.zeros(1, 1, 4, 2, dtype=torch.int32), -4)),
        (TypeError, "window: got 2.5", lambda: sliding_window(5, 2.5)),
        (ValueError, "window: got -1", lambda: sliding_window(5, -1)),
        (ValueError, "lookahead: got -1", lambda: sliding_window(5, 2, lookahead=-1)),
        (ValueError, "query_length: got -8", lambda: sliding_window(5, 2, query_length=-8)),
        (TypeError, "prefix_length: got 2.5", lambda: prefix_lm(5, 2.5)),
        (ValueError, "prefix_length: got torch.float32", lambda: prefix_lm(5, torch.tensor([2.0]))),
        (ValueError, "of shape (1, 2)", lambda: prefix_lm(5, torch.tensor([[2, 3]]))),
        (ValueError, "query_length: got -8", lambda: prefix_lm(5, 2, query_length=-8)),
        (TypeError, "cu_seqlens_k: got list", lambda: packed_documents([0, 9])),
        (ValueError, "cu_seqlens_k: got [0, 5, 3, 9]",
         lambda: packed_documents(torch.tensor([0, 5, 3, 9]))),
        (ValueError, "cu_seqlens_k: got [2, 5, 9]",
         lambda: packed_documents(torch.tensor([2, 5, 9]))),
        (ValueError, "cu_seqlens_k: got torch.float32",
         lambda: packed_documents(torch.tensor([0.0, 9.0]))),
        (ValueError, "cu_seqlens_k: got [0, 9]",
         lambda: packed_documents(torch.tensor([0, 9]), key_length=8)),
        (ValueError, "cu_seqlens_q: got [0, 9, 8]",
         lambda: packed_documents(torch.tensor([0, 5, 9]), cu_seqlens_q=torch.tensor([0, 9, 8]))),
        (TypeError, "key_mask: got list", lambda: from_padding([[True]])),
        (TypeError, "intersect: got NoneType", lambda: intersect(sliding_window(5, 2), None)),
        (ValueError, "intersect: got shape (1, 3, 5, 2)",
         lambda: intersect(*(
             KeyIntervals(torch.zeros(1, heads, 5, 2, dtype=torch.int32), 5) for heads in (2, 3)))),
        (TypeError, "scores: got list", lambda: select_key_intervals([1.0], 2)),
        (TypeError, "scores: got a torch.sparse_coo tensor",
         lambda: select_key_intervals(BIAS.to_sparse(), 2)),
        (ValueError, "query_length: got -8",
         lambda: select_key_intervals(BIAS, 2, query_length=-8)),
        (TypeError, "is_causal: got 'False'",
         lambda: select_key_intervals(BIAS, 2, is_causal="False")),
    ],
)  # fmt: skip
def test_bad_interval_argument_raises_naming_it(error, message, make):
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


KEY, VALUE = qkv()[1:]


def attend(query):
    return flash_dmattn_func(query, KEY, VALUE).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda q: torch.func.grad(attend)(q),
        lambda q: torch.func.vjp(attend, q),
        lambda q: torch.func.jacrev(attend)(q),
        lambda q: torch.func.vmap(torch.func.grad(attend))(q[None]),
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
