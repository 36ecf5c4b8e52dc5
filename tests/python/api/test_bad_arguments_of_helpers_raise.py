"""A meaningless argument of a function that makes intervals, masks, scores or layers, or that calls attention, raises an error that names it."""

import re

import pytest
import torch

from flash_dmattn import (
    DynamicMaskAttention,
    KeyIntervals,
    flash_dmattn_func,
    forgetting_attention,
    from_padding,
    intersect,
    merge_attention,
    packed_documents,
    prefix_lm,
    select_key_intervals,
    select_keys,
    sliding_window,
    triangle_attention,
)
from flash_dmattn.distributed import linear_with_headroom
from flash_dmattn.kernels import kernel_names
from flash_dmattn.padding import pad_input, unpad_input
from flash_dmattn.scores import make_scores
from flash_dmattn.utils.mask import create_mask, relu_mask, topk_indices, topk_mask

BIAS = torch.zeros(2, 2, 9)


def attend(**options):
    q = torch.zeros(1, 9, 2, 8)
    return lambda: flash_dmattn_func(q, q, q, **options)


def select(**change):
    return lambda: select_key_intervals(BIAS, **{"keep_window_size": 3, **change})


def forget(rows=9, gates=(2, 9, 4), prune=None, keys=9, **options):
    q, k, v = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
    gates = torch.zeros(gates) if isinstance(gates, tuple) else gates
    return lambda: forgetting_attention(
        q[:, :rows], k[:, :keys], v[:, :keys], gates, prune, **options
    )


def triangle(**change):
    q, k = torch.zeros(2, 3, 2, 5, 8), torch.zeros(2, 3, 2, 7, 8)
    arguments = {"q": q, "k": k, "v": k, "bias": torch.zeros(2, 1, 2, 5, 7)}
    return lambda: triangle_attention(**arguments | change)


def layer(*sizes, positions=None, **options):
    sizes, hidden = sizes or (32, 4, 2, 7), torch.zeros(2, 6, 32)
    return lambda: DynamicMaskAttention(*sizes, **options)(hidden, positions=positions)


SCORES, STATES = torch.zeros(1, 1, 4), torch.zeros(1, 9, 2, 8)
MASK = torch.ones(2, 9, dtype=torch.bool)
HIDDEN, WEIGHT = torch.zeros(1, 4, 12), torch.zeros(6, 12)


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
        (ValueError, "keep_window_size: got -1", lambda: select_key_intervals(BIAS, -1)),
        (ValueError, "selection: got 'best'", lambda: select_key_intervals(BIAS, 3, selection="best")),
        (TypeError, "scores: got torch.int64", lambda: select_key_intervals(BIAS.long(), 3)),
        (ValueError, "scores: got shape", lambda: select_key_intervals(BIAS[0, 0], 3)),
        (ValueError, "key_mask: got shape",
         lambda: select_key_intervals(BIAS, 3, key_mask=torch.ones(1, 2, 8).bool())),
        (TypeError, "key_mask: got torch.float32", lambda: select_key_intervals(BIAS, 3, key_mask=BIAS)),
        (TypeError, "key_mask: got a tensor on meta",
         lambda: select_key_intervals(BIAS, 3, key_mask=BIAS.bool().to("meta"))),
        # A shorter mask would pack the wrong tokens.
        (ValueError, "attention_mask: got shape (2, 8)", lambda: unpad_input(BIAS.mT, torch.ones(2, 8))),
        (ValueError, "attention_mask: got shape (3, 9)", lambda: unpad_input(BIAS.mT, torch.ones(3, 9))),
        (ValueError, "unused_mask: got shape (1, 9)",
         lambda: unpad_input(BIAS.mT, torch.ones(2, 9), torch.ones(1, 9))),
        (TypeError, "attention_mask: got list", lambda: unpad_input(BIAS.mT, [1])),
        (ValueError, "indices: got shape (3,)", lambda: pad_input(BIAS, torch.arange(3), 2, 5)),
        (ValueError, "batch: got -2", lambda: pad_input(BIAS, torch.arange(2), -2, -5)),
        (TypeError, "indices: got torch.float32, expected torch.int64",
         lambda: pad_input(BIAS, torch.zeros(2), 2, 5)),
        (ValueError, "indices[1]: got 99, expected 0 or more and less than 10",
         lambda: pad_input(BIAS, torch.tensor([0, 99]), 2, 5)),
        (ValueError, "indices[0]: got -1, expected 0 or more",
         lambda: pad_input(BIAS, torch.tensor([-1, 3]), 2, 5)),
        (TypeError, 'backend: got None, expected "cuda", "cpu" or "reference"', lambda: kernel_names(None)),
        (TypeError, "dtype: got torch.int32, expected a floating torch.dtype",
         lambda: make_scores(8, 2, dtype=torch.int32)),
        (TypeError, "dtype: got 'bf16', expected a floating torch.dtype",
         lambda: make_scores(8, 2, lambda hidden: hidden, dtype="bf16")),
        # Intervals.
        (ValueError, "intervals: got torch.float32", lambda: KeyIntervals(torch.zeros(1, 1, 4, 2), 4)),
        (ValueError, "intervals: got torch.int32 of shape (4, 2)", lambda: KeyIntervals(torch.zeros(4, 2, dtype=torch.int32), 4)),
        (TypeError, "consecutive: got 'no'", lambda: KeyIntervals(torch.zeros(1, 1, 9, 2).int(), 9, None, "no")),
        # Query rows are int32, so a larger row would become negative and its keys invisible.
        (ValueError, "query_length: got 2147483648", lambda: sliding_window(9, 2, query_length=2**31)),
        (ValueError, "query_length: got 2147483648", lambda: from_padding(MASK, 2**31)),
        (ValueError, "query_length: got 2147483648", lambda: packed_documents(torch.tensor([0, 9]), query_length=2**31)),
        (ValueError, "max_seqlen_k: got 3, expected at least 6", lambda: packed_documents(torch.tensor([0, 3, 9]), max_seqlen_k=3)),
        (ValueError, "intersect: got", lambda: intersect(sliding_window(5, 2), sliding_window(5, 2, query_length=4))),
        (ValueError, "intersect: got", lambda: intersect()),
        (ValueError, "key_mask: got shape (2, 9), expected a batch of 3 or 1",
         lambda: sliding_window(9, 3, key_mask=MASK, cu_seqlens_k=torch.tensor([[0, 9]] * 3))),
        (ValueError, "prefix_length: got shape (3,), expected a batch of 2",
         lambda: prefix_lm(9, torch.tensor([1, 2, 3]), key_mask=MASK)),
        # Rules.
        (ValueError, "recent_window: got -1", select(recent_window=-1)),
        (ValueError, "recent_window: got 3 with is_causal=False", select(recent_window=3, is_causal=False)),
        (ValueError, "recent_window: got 3 with is_causal=False",
         select(recent_window=3, is_causal=False, cu_seqlens_k=torch.tensor([0, 4, 9]))),
        (ValueError, "recent_window: got 4 with is_causal=False", attend(recent_window=4, keep_window_size=0)),
        (TypeError, "sink_tokens: got 'two'", select(sink_tokens="two")),
        (ValueError, "score_threshold: got nan", select(score_threshold=float("nan"))),
        (TypeError, "score_threshold: got '0.5'", select(score_threshold="0.5")),
        (ValueError, "score_threshold: got an integer of 1329 bits", select(score_threshold=10**400)),
        (TypeError, "recent_competes: got None", select(recent_competes=None)),
        (ValueError, "cu_seqlens_k: got shape (3, 2), expected a batch of 2 or 1", select(cu_seqlens_k=torch.tensor([[0, 9]] * 3))),
        (ValueError, "cu_seqlens_k: got [0, 12], expected offsets that begin at 0, never fall and end at 9",
         select(cu_seqlens_k=torch.tensor([0, 12]))),
        (ValueError, "cu_seqlens_q: got [0, 12], expected offsets that begin at 0, never fall and end at 9",
         select(cu_seqlens_k=torch.tensor([0, 9]), cu_seqlens_q=torch.tensor([0, 12]))),
        (ValueError, "cu_seqlens_k: got torch.int64 of shape (1, 1, 1)", select(cu_seqlens_k=torch.zeros(1, 1, 1).long())),
        (ValueError, "cu_seqlens_q: got offsets without cu_seqlens_k", select(cu_seqlens_q=torch.tensor([0, 9]))),
        (ValueError, "key_positions: got shape (3, 9), expected a batch of 2 or 1", select(key_positions=torch.arange(9).expand(3, 9))),
        (ValueError, "key_positions: got shape (2, 3, 9), expected heads of 2 or 1",
         select(key_positions=torch.arange(9).expand(2, 3, 9))),
        (ValueError, "key_positions: got torch.float32", select(key_positions=torch.zeros(9))),
        (ValueError, "key_positions: got torch.int64 of shape (8,)", select(key_positions=torch.arange(8))),
        (ValueError, "key_positions: got a value together with cu_seqlens_q",
         select(key_positions=torch.arange(9), cu_seqlens_k=torch.tensor([0, 9]), cu_seqlens_q=torch.tensor([0, 8]))),
        (ValueError, "query_position: got shape (3,), expected a batch of 2 or 1", select(query_position=torch.tensor([1, 2, 3]))),
        (ValueError, "query_position: got -2", select(query_position=-2)),
        (ValueError, "keep_window_size: got 3 sizes, expected one, or 2", select(keep_window_size=[1, 2, 3])),
        (ValueError, "keep_window_size: got no sizes", select(keep_window_size=[])),
        (ValueError, "keep_window_size: got -1", select(keep_window_size=[1, -1])),
        (TypeError, "keep_window_size: got None", select(keep_window_size=None)),
        (TypeError, "keep_window_size: got b'12'", select(keep_window_size=b"12")),
        (TypeError, "keep_window_size: got None", lambda: select_keys(SCORES, None)),
        (ValueError, "keep_window_size: got 3 sizes", lambda: select_keys(BIAS, (1, 2, 3))),
        (ValueError, "scores: got shape", lambda: select_keys(torch.zeros(4), 2)),
        (TypeError, "scores: got torch.int32", lambda: select_keys(SCORES.int(), 2)),
        (TypeError, "key_mask: got torch.float32", lambda: select_keys(SCORES, 2, torch.ones(1, 4))),
        (ValueError, "key_mask: got shape", lambda: select_keys(SCORES, 2, torch.ones(1, 5).bool())),
        # Masks. An additive mask of zeros allows every key, but read as bool it would allow none.
        (ValueError, "type: got 'best'", lambda: create_mask(BIAS, None, 2, 5, 9, 4, None, type="best")),
        (TypeError, "blocksize: got an unknown keyword", lambda: topk_mask(BIAS, None, 4, None, blocksize=2)),
        (TypeError, "blocksize: got an unknown keyword", lambda: relu_mask(BIAS, None, 0.0, blocksize=2)),
        (TypeError, "blocksize: got an unknown keyword", lambda: topk_indices(BIAS, 4, blocksize=2)),
        (TypeError, "window_size: got 2.5", lambda: topk_indices(BIAS, 2.5)),
        (ValueError, "window_size: got -1", lambda: topk_mask(BIAS, None, -1, None)),
        (ValueError, "block_size: got 0", lambda: topk_mask(BIAS, None, 4, None, 0)),
        (ValueError, "attention_mask: got shape (2, 7)", lambda: create_mask(BIAS, MASK[:, :7], 2, 5, 9, 4, None)),
        (TypeError, "attention_mask: got torch.float32", lambda: topk_mask(BIAS, BIAS[:, :1], 4, None)),
        (TypeError, "attention_mask: got torch.float32", lambda: create_mask(BIAS, BIAS[:, 0], 2, 5, 9, 4, None)),
        (TypeError, "attention_mask: got list", lambda: topk_mask(BIAS, [True], 4, None)),
        (ValueError, "attention_bias: got shape", lambda: create_mask(BIAS, None, 2, 5, 10, 4, None)),
        (ValueError, "attention_bias: got shape", lambda: create_mask(BIAS, None, 5, 5, 9, 4, None)),
        (TypeError, "attention_bias: got torch.int64", lambda: topk_mask(BIAS.long(), None, 4, None)),
        (TypeError, "attention_bias: got list", lambda: create_mask([1.0], None, 2, 5, 9, 4, None)),
        # Delayed biases, sinks and merged results.
        (ValueError, "bias_delay: got -1", attend(bias_delay=-1, attn_bias=torch.zeros(1, 2, 9))),
        (TypeError, "bias_delay: got 0.5", attend(bias_delay=0.5, attn_bias=torch.zeros(1, 2, 9))),
        (ValueError, "bias_delay: got 3 with a bias of shape", attend(bias_delay=3, attn_bias=torch.zeros(1, 1, 9, 9))),
        (ValueError, "sink_logits: got torch.float32 of shape (3,)", attend(sink_logits=torch.zeros(3))),
        (TypeError, "sink_logits: got list", attend(sink_logits=[0.0] * 2)),
        (ValueError, "outs, lses: got 1 and 2", lambda: merge_attention([STATES], [STATES, STATES])),
        (TypeError, "outs: got Tensor, expected a sequence", lambda: merge_attention(STATES, [STATES])),
        (TypeError, "lses: got NoneType, expected a sequence", lambda: merge_attention([STATES], None)),
        (ValueError, "nonfinite: got 'drop'", lambda: merge_attention([STATES], [STATES[..., 0].mT], "drop")),
        (ValueError, "lses[0]: got torch.float32 of shape (1, 9, 2, 8)", lambda: merge_attention([STATES], [STATES])),
        # Forgetting attention.
        (ValueError, "log_fgate: got shape (2, 8, 4), expected", forget(gates=(2, 8, 4))),
        (ValueError, "log_fgate: got shape (2, 9, 3), expected", forget(gates=(2, 9, 3))),
        (ValueError, "log_fgate: got shape (2, 9, 4, 1), expected [B, Sk, H]", forget(gates=(2, 9, 4, 1))),
        (TypeError, "log_fgate: got torch.int64", forget(gates=torch.zeros(2, 9, 4).long())),
        *((ValueError, f"prune: got {prune!r}, expected a number of at most 0", forget(prune=prune))
          for prune in (1.0, float("nan"), "-1", True)),
        (ValueError, "window_size: got 0, expected 1 or more", forget(window_size=0)),
        (ValueError, "query: got 9 queries, expected at most 8", forget(gates=(2, 8, 4), keys=8)),
        (ValueError, "cu_seqlens: got offsets with 5 queries and 9 keys", forget(rows=5, cu_seqlens=torch.tensor([0, 9]))),
        (ValueError, "cu_seqlens: got shape (3, 2), expected a batch of 2", forget(cu_seqlens=torch.tensor([[0, 9]] * 3))),
        # Triangle attention.
        (TypeError, "q: got list", triangle(q=[1])),
        (ValueError, "q: got shape (3, 2, 5, 8), expected five dimensions", triangle(q=torch.zeros(3, 2, 5, 8))),
        (ValueError, "q: got shape (0, 3, 2, 5, 8), expected [B, N, H, Q, D] with B > 0", triangle(q=torch.zeros(0, 3, 2, 5, 8))),
        (ValueError, "k: got shape (2, 3, 1, 7, 8), expected (2, 3, 2, 7, 8)", triangle(k=torch.zeros(2, 3, 1, 7, 8))),
        (ValueError, "v: got shape (2, 3, 2, 6, 8), expected (2, 3, 2, 7, 8)", triangle(v=torch.zeros(2, 3, 2, 6, 8))),
        (ValueError, "bias: got shape (2, 3, 2, 5, 7), expected (2, 1, 2, 5, 7)", triangle(bias=torch.zeros(2, 3, 2, 5, 7))),
        (TypeError, "bias: got NoneType", triangle(bias=None)),
        (TypeError, "bias: got torch.int64", triangle(bias=torch.zeros(2, 1, 2, 5, 7).long())),
        (TypeError, "bias: got a tensor on meta", triangle(bias=torch.zeros(2, 1, 2, 5, 7, device="meta"))),
        (ValueError, "mask: got shape (2, 3, 2, 1, 7), expected (2, 3, 1, 1, 7)", triangle(mask=torch.ones(2, 3, 2, 1, 7).bool())),
        (TypeError, "mask: got torch.float32, expected torch.bool", triangle(mask=torch.ones(2, 3, 1, 1, 7))),
        (ValueError, "scale: got 0", triangle(scale=0)),
        (ValueError, "empty_rows: got 'nan', expected 'zero' or 'mean'", triangle(empty_rows="nan")),
        (TypeError, "backend: got 3, expected a name", triangle(backend=3)),
        # Learned scores, and the layer that has them.
        (ValueError, "score: got 'exp', expected one of 'gate', 'linear', 'doge', or a function", lambda: make_scores(12, 3, "exp")),
        (ValueError, "heads: got 0, expected 1 or more", lambda: make_scores(12, 0)),
        (ValueError, "hidden: got shape (2, 7, 13), expected [B, S, 12]", lambda: make_scores(12, 3)(torch.zeros(2, 7, 13))),
        (ValueError, "score: got torch.float32 of shape (2, 7, 12), expected",
         lambda: make_scores(12, 3, lambda hidden: hidden)(torch.zeros(2, 7, 12))),
        (ValueError, "score_input: got 'key', expected one of", layer(score_input="key")),
        (ValueError, "heads_q: got 4, expected a multiple of heads_kv, 3", layer(32, 4, 3)),
        (ValueError, "hidden_size: got 30, expected a multiple of heads_q, 4", layer(30, 4)),
        (TypeError, "hidden_size: got 32.0", layer(32.0, 4)),
        (ValueError, "keep_window_size: got 0", layer(32, 4, 2, 0)),
        (ValueError, "head_dim: got 257", layer(head_dim=257)),
        (TypeError, "dtype: got 'bf16', expected a floating torch.dtype", layer(dtype="bf16")),
        (TypeError, "rope: got int, expected a function or None", layer(rope=10000)),
        (TypeError, "rope: got Tensor, expected (query, key)", layer(rope=lambda q, k, positions: q)),
        (TypeError, "rope: got tuple, expected", layer(rope=lambda q, k, positions: (q, k, k))),
        (TypeError, "rope's key: got NoneType, expected a torch.Tensor", layer(rope=lambda q, k, positions: (q, None))),
        (ValueError, "rope: got a query of shape", layer(rope=lambda q, k, positions: (q[:, 1:], k))),
        (ValueError, "rope: got a key of shape", layer(rope=lambda q, k, positions: (q, q))),
        (TypeError, "positions: got torch.float32", layer(positions=torch.rand(2, 6))),
        (ValueError, "positions: got shape (3, 3)", layer(positions=torch.zeros(3, 3, dtype=torch.int64))),
        # A projection whose result has rows for other ranks' keys.
        (ValueError, "hidden, weight: got shapes", lambda: linear_with_headroom(HIDDEN, WEIGHT.t(), 3)),
        (ValueError, "places: got -1", lambda: linear_with_headroom(HIDDEN, WEIGHT, -1)),
        (TypeError, "hidden: got list, expected a torch.Tensor", lambda: linear_with_headroom([1], WEIGHT, 3)),
        (TypeError, "weight: got NoneType, expected a torch.Tensor", lambda: linear_with_headroom(HIDDEN, None, 3)),
        (TypeError, "bias: got float, expected a torch.Tensor", lambda: linear_with_headroom(HIDDEN, WEIGHT, 3, 1.0)),
        (ValueError, "bias: got shape (5,), expected (6,)", lambda: linear_with_headroom(HIDDEN, WEIGHT, 3, torch.zeros(5))),
    ],
)  # fmt: skip
def test_bad_argument_of_a_helper_raises_naming_it(error, message, make):
    with pytest.raises(error, match=re.escape(message)):
        make()
