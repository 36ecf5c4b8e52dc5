"""A meaningless argument raises an error that names it, and no argument is silently ignored."""

import re

import numpy as np
import pytest
import torch

from flash_dmattn import (
    DynamicMaskAttention,
    KeyIntervals,
    ScoreBudget,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    forgetting_attention,
    intersect,
    merge_attention,
    packed_documents,
    prefix_lm,
    score_projection,
    select_key_intervals,
    select_keys,
    sliding_window,
    triangle_attention,
)
from flash_dmattn.distributed import linear_with_headroom
from flash_dmattn.kernels import kernel_names
from flash_dmattn.padding import pad_input, unpad_input
from flash_dmattn.scores import make_scores
from flash_dmattn.utils.mask import create_mask, topk_indices, topk_mask

Q, K, V = QKV = tuple(torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
PACKED, OFFSETS = tuple(t[0] for t in QKV), torch.tensor([0, 4, 9])
BIAS, SCORES, STATES = torch.zeros(2, 2, 9), torch.zeros(1, 1, 4), torch.zeros(1, 9, 2, 8)
MASK, MASKS = torch.ones(2, 9, dtype=torch.bool), torch.ones(3, 9, 9, dtype=torch.bool)
INTERVALS = torch.zeros(1, 1, 4, 2, dtype=torch.int32)
HIDDEN, WEIGHT = torch.zeros(1, 4, 12), torch.zeros(6, 12)
OPS, OPTIONS, LSE = (
    torch.ops.flash_dmattn,
    ([], False, 0, 1.0, 0.0, True, False, ""),
    torch.zeros(2, 2, 4, 9),
)
EITHER = (ValueError, RuntimeError)  # errors of the C++ library, depending on the version of torch


def attend(**options):
    return lambda: flash_dmattn_func(**{"query": Q, "key": K, "value": V} | options)


def both(states):
    return {"key": states, "value": states}


def loss(query):
    return flash_dmattn_func(query, K, V).sum()


def varlen(**options):
    offsets = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    return lambda: flash_dmattn_varlen_func(*PACKED, **offsets | options)


def forward(q=Q, k=K, v=V, mask=None, intervals=None):
    return lambda: OPS.forward(q, k, v, mask, None, intervals, *OPTIONS)


def backward(lse=LSE, dlse=None):
    return lambda: OPS.backward(
        Q, Q, K, V, None, None, None, Q, lse, dlse, *OPTIONS, *(True,) * 3, False
    )


def select_and_attend(bias):
    return lambda: OPS.select_and_attend(Q, K, V, bias, 3, *OPTIONS[1:])


def select(**change):
    return lambda: select_key_intervals(BIAS, **{"keep_window_size": 3, **change})


def forget(rows=9, gates=(2, 9, 4), prune=None, keys=9, **options):
    gates = torch.zeros(gates) if isinstance(gates, tuple) else gates
    return lambda: forgetting_attention(
        Q[:, :rows], K[:, :keys], V[:, :keys], gates, prune, **options
    )


def triangle(**change):
    q, k = torch.zeros(2, 3, 2, 5, 8), torch.zeros(2, 3, 2, 7, 8)
    arguments = {"q": q, "k": k, "v": k, "bias": torch.zeros(2, 1, 2, 5, 7)}
    return lambda: triangle_attention(**arguments | change)


def layer(*sizes, positions=None, **options):
    sizes, hidden = sizes or (32, 4, 2, 7), torch.zeros(2, 6, 32)
    return lambda: DynamicMaskAttention(*sizes, **options)(hidden, positions=positions)


def project(hidden=HIDDEN, weight=WEIGHT, bias=WEIGHT[:, 0], **options):
    return lambda: score_projection(hidden, weight, bias, **options)


def old_keys(sink_tokens=2):
    return DynamicMaskAttention(32, 4, 2, 40, recent_window=3, sink_tokens=sink_tokens)


def budget(call):
    return lambda: call(ScoreBudget(torch.nn.Sequential(old_keys(), old_keys())))


def part_of_a_budget():
    layers = torch.nn.ModuleList([old_keys(), old_keys()])
    layers.forward = lambda hidden: layers[0](hidden)
    ScoreBudget(layers).divide([torch.randn(1, 40, 32)], 12)


@torch.no_grad()
def step_in_soft_phase(tokens):
    layer = old_keys()
    cache = layer.make_cache(2)
    if tokens:
        layer(torch.zeros(2, tokens, 32), cache=cache)
    ScoreBudget(layer).set_phase("soft")
    layer(torch.zeros(2, 1, 32), cache=cache)


@pytest.mark.parametrize(
    "error, message, call",
    [
        # Attention.
        (ValueError, "selection_scores: got shape (3, 2, 9)", attend(keep_window_size=3, selection_scores=torch.zeros(3, 2, 9))),
        (TypeError, "selection_scores: got list", attend(keep_window_size=3, selection_scores=[1.0])),
        (ValueError, "selection_scores: got shape (2, 2, 9) without keep_window_size", attend(attn_bias=BIAS, selection_scores=BIAS)),
        (ValueError, "selection: got 'bogus'", attend(selection="bogus")),
        (TypeError, "is_causal: got 'False'", attend(is_causal="False")),
        (TypeError, "deterministic: got 'no'", attend(deterministic="no")),
        (TypeError, "return_attn_probs: got 'no'", attend(return_attn_probs="no")),
        (TypeError, "return_lse: got 'no'", attend(return_lse="no")),
        (ValueError, "keep_window_size: got no scores", attend(keep_window_size=9)),
        (ValueError, "keep_window_size: got attn_bias of shape", attend(keep_window_size=9, attn_bias=torch.zeros(2, 2, 9, 9))),
        (TypeError, "attn_bias: got a torch.sparse_coo tensor", attend(attn_bias=BIAS.to_sparse())),
        (ValueError, "scale: got 0, expected another number", attend(scale=0)),
        (ValueError, "query: got shape (9, 4, 8)", attend(query=torch.zeros(9, 4, 8))),
        (ValueError, "key: got 3 heads", attend(**both(torch.zeros(2, 9, 3, 8)))),
        (ValueError, "value: got shape (2, 8, 2, 8)", attend(value=torch.zeros(2, 8, 2, 8))),
        (ValueError, "key: got shape (1, 9, 2, 8)", attend(**both(torch.zeros(1, 9, 2, 8)))),
        (ValueError, "query: got head dimension 257", attend(query=torch.zeros(2, 9, 4, 257), **both(torch.zeros(2, 9, 2, 257)))),
        (TypeError, "key: got torch.float64", attend(key=torch.zeros(2, 9, 2, 8).double())),
        (TypeError, "query: got torch.int64", attend(**dict.fromkeys(("query", "key", "value"), torch.zeros(2, 9, 2, 8).long()))),
        (TypeError, "query: got a torch.sparse_coo tensor", attend(query=torch.zeros(2, 9, 4, 8).to_sparse())),
        (ValueError, "scale, softmax_scale", attend(scale=1.0, softmax_scale=1.0)),
        (ValueError, "scale: got nan", attend(scale=float("nan"))),
        (TypeError, "softmax_scale: got True", attend(softmax_scale=True)),
        (TypeError, "scale: got a tensor of shape (2,)", attend(scale=torch.ones(2))),
        (ValueError, "softcap: got -1.0", attend(softcap=-1)),
        (ValueError, "nonfinite: got 'ignore'", attend(nonfinite="ignore")),
        (ValueError, "attn_mask: got shape (2, 4, 9, 8)", attend(attn_mask=torch.ones(2, 4, 9, 8).bool())),
        (TypeError, "attn_mask: got torch.float32", attend(attn_mask=torch.zeros(2, 9))),
        (ValueError, "attn_bias: got shape (9,)", attend(attn_bias=torch.ones(9))),
        (ValueError, "attn_bias: got shape (2, 3, 9)", attend(attn_bias=torch.ones(2, 3, 9))),
        (TypeError, "attn_bias: got torch.bool, expected a floating dtype; boolean masks go into attn_mask", attend(attn_bias=BIAS.bool())),
        (TypeError, "attn_bias: got a tensor on meta", attend(attn_bias=BIAS.to("meta"))),
        (ValueError, "keep_window_size: got -1", attend(keep_window_size=-1)),
        (TypeError, "keep_window_size: got 4.5", attend(attn_bias=BIAS, keep_window_size=4.5)),
        (ValueError, "key_intervals: got intervals of shape", attend(key_intervals=sliding_window(10, 2))),
        (TypeError, "key_intervals: got a tensor on meta", attend(key_intervals=sliding_window(9, 2).to("meta"))),
        (TypeError, "key_intervals: got Tensor", attend(key_intervals=torch.zeros(1, 1, 9, 2, dtype=torch.int32))),
        (TypeError, "keep_windw_size: got an unknown argument, expected one in the function's signature; the parts of a rule are keep_window_size", attend(keep_windw_size=3)),
        (ValueError, "recent_window: got 4 without keep_window_size", attend(recent_window=4, is_causal=True)),
        (ValueError, "return_lse, return_attn_probs: got True for both", attend(return_lse=True, return_attn_probs=True)),
        (ValueError, "value: got shape (2, 9, 2, 257)", attend(value=torch.zeros(2, 9, 2, 257))),
        (TypeError, "backend: got 3, expected a name", attend(backend=3)),
        (RuntimeError, "keep_window_size: got a window under torch.func.vmap",
         lambda: torch.func.vmap(lambda mask: attend(attn_mask=mask[None, None], attn_bias=BIAS, keep_window_size=3)())(MASKS)),
        *((RuntimeError, "query: got a tensor of torch.func.grad", lambda transform=transform: transform(Q)) for transform in (
            torch.func.grad(loss), lambda q: torch.func.vjp(loss, q), torch.func.jacrev(loss),
            lambda q: torch.func.vmap(torch.func.grad(loss))(q[None]))),
        (TypeError, "flash_dmattn_func_auto: got 'bogus', expected", lambda: flash_dmattn_func_auto("cpu", bogus=1)),
        (ValueError, "backend: got 'abacus'", lambda: flash_dmattn_func_auto("abacus")),
        # Packed sequences.
        (ValueError, "attn_bias: got shape (2, 9), expected [total_k, H] with total_k = 9 and H = 4, 2", varlen(attn_bias=torch.zeros(2, 9))),
        (ValueError, "attn_bias: got shape (8, 2)", varlen(attn_bias=torch.zeros(8, 2))),
        (ValueError, "attn_bias: got shape (1, 9, 2)", varlen(attn_bias=torch.zeros(1, 9, 2))),
        (ValueError, "keep_window_size: got no scores, expected one score per key in attn_bias or selection_scores: [total_k, H]",
         varlen(keep_window_size=9)),
        (ValueError, "block_table: got", varlen(block_table=torch.zeros(1, 1))),
        # A 0 at the position of FlashAttention's dropout_p.
        (ValueError, "softmax_scale: got 0, expected another number", lambda: flash_dmattn_varlen_func(*PACKED, OFFSETS, OFFSETS, 5, 5, 0.0)),
        # On a GPU a length that is too small loses keys.
        (ValueError, "max_seqlen_k: got 4, expected at least 5, the longest of cu_seqlens_k", varlen(max_seqlen_k=4)),
        (TypeError, "max_seqlen_q: got 'many'", varlen(max_seqlen_q="many")),
        *((ValueError, "cu_seqlens_q: got ", varlen(cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32)))
          for offsets in ([0, 4, 10], [0, 7, 4, 9], [1, 9], [])),
        (ValueError, "cu_seqlens_q: got torch.float32", varlen(cu_seqlens_q=torch.zeros(3))),
        (ValueError, "cu_seqlens", varlen(cu_seqlens_k=torch.zeros(4, dtype=torch.int32))),
        (ValueError, "cu_seqlens_k: got [0, 5, 4, 9]", varlen(cu_seqlens_q=torch.tensor([0, 4, 4, 9]), cu_seqlens_k=torch.tensor([0, 5, 4, 9]))),
        (TypeError, "cu_seqlens_", varlen(cu_seqlens_k=torch.tensor([0, 4, 9], device="meta"))),
        # Operators.
        (EITHER, "v: got", forward(v=V[:, 1:])),
        (EITHER, "k: got torch.float64", forward(k=K.double())),
        (EITHER, "key_intervals: got", forward(intervals=torch.zeros(1, 1, 8, 2, dtype=torch.int32))),
        (EITHER, "mask: got", forward(mask=Q)),
        (EITHER, "problem.mask_shape: got (1, 3, 9, 9)", forward(mask=torch.ones(1, 3, 9, 9).bool())),
        (EITHER, "lse: got torch.float64", backward(LSE.double())),
        (EITHER, "lse: got shape", backward(LSE[:1])),
        (EITHER, "dlse: got torch.float64", backward(dlse=LSE[0].double())),
        (EITHER, "dlse: got shape", backward(dlse=LSE)),
        (EITHER, "bias: got shape (2, 2, 1, 9)", select_and_attend(BIAS[:, :, None])),
        (EITHER, "bias: got shape (2, 2, 8)", select_and_attend(BIAS[:, :, 1:])),
        (EITHER, "bias: got shape (2, 4, 9)", select_and_attend(BIAS.repeat(1, 2, 1))),
        (EITHER, "bias: got shape (4, 2, 9)", select_and_attend(BIAS.repeat(2, 1, 1))),
        (EITHER, "bias: got torch.int32", select_and_attend(BIAS.int())),
        (EITHER, "scores: got", lambda: OPS.select_key_intervals(torch.zeros(9), None, [3], "global", True, 9)),
        (EITHER, "selection", lambda: OPS.select_key_intervals(BIAS[:1, :1, :4], None, [3], "best", True, 4)),
        *((EITHER, f"tile_rows: got {rows}", lambda rows=rows: OPS.build_tile_lists(torch.zeros(1, 1, 9, 2).int(), rows, 9, []))
          for rows in (0, 2**32)),
        # Intervals.
        (ValueError, "bound: got -1", lambda: KeyIntervals(INTERVALS, 4, (-1, 0))),
        (ValueError, "query_length: got -4", lambda: KeyIntervals(INTERVALS, -4)),
        (ValueError, "window: got -1", lambda: sliding_window(5, -1)),
        (TypeError, "prefix_length: got 2.5", lambda: prefix_lm(5, 2.5)),
        (ValueError, "prefix_length: got torch.float32", lambda: prefix_lm(5, torch.tensor([2.0]))),
        (ValueError, "prefix_length: got torch.int64 of shape (1, 2)", lambda: prefix_lm(5, torch.tensor([[2, 3]]))),
        (TypeError, "cu_seqlens_k: got list", lambda: packed_documents([0, 9])),
        (ValueError, "cu_seqlens_k: got [0, 9]", lambda: packed_documents(torch.tensor([0, 9]), key_length=8)),
        (ValueError, "cu_seqlens_q: got [0, 9, 8]", lambda: packed_documents(torch.tensor([0, 5, 9]), cu_seqlens_q=torch.tensor([0, 9, 8]))),
        (TypeError, "intersect: got NoneType", lambda: intersect(sliding_window(5, 2), None)),
        (ValueError, "intersect: got shape (1, 3, 5, 2)",
         lambda: intersect(*(KeyIntervals(torch.zeros(1, heads, 5, 2, dtype=torch.int32), 5) for heads in (2, 3)))),
        (ValueError, "query_length: got -8", select(query_length=-8)),
        (TypeError, "is_causal: got 'False'", select(is_causal="False")),
        (TypeError, "scores: got torch.int64", lambda: select_key_intervals(BIAS.long(), 3)),
        (ValueError, "scores: got shape", lambda: select_key_intervals(BIAS[0, 0], 3)),
        (ValueError, "key_mask: got shape", select(key_mask=torch.ones(1, 2, 8).bool())),
        (TypeError, "key_mask: got torch.float32", select(key_mask=BIAS)),
        (TypeError, "key_mask: got a tensor on meta", select(key_mask=BIAS.bool().to("meta"))),
        # A shorter mask would pack the wrong tokens.
        (ValueError, "attention_mask: got shape (2, 8)", lambda: unpad_input(BIAS.mT, torch.ones(2, 8))),
        (ValueError, "unused_mask: got shape (1, 9)", lambda: unpad_input(BIAS.mT, torch.ones(2, 9), torch.ones(1, 9))),
        (ValueError, "indices: got shape (3,)", lambda: pad_input(BIAS, torch.arange(3), 2, 5)),
        (TypeError, "indices: got torch.float32, expected torch.int64", lambda: pad_input(BIAS, torch.zeros(2), 2, 5)),
        (ValueError, "indices[1]: got 99, expected 0 or more and less than 10", lambda: pad_input(BIAS, torch.tensor([0, 99]), 2, 5)),
        (TypeError, 'backend: got None, expected "cuda", "cpu" or "reference"', lambda: kernel_names(None)),
        (TypeError, "dtype: got torch.int32, expected a floating torch.dtype", lambda: make_scores(8, 2, dtype=torch.int32)),
        (ValueError, "intervals: got torch.float32", lambda: KeyIntervals(torch.zeros(1, 1, 4, 2), 4)),
        (ValueError, "intervals: got torch.int32 of shape (4, 2)", lambda: KeyIntervals(torch.zeros(4, 2, dtype=torch.int32), 4)),
        (TypeError, "consecutive: got 'no'", lambda: KeyIntervals(torch.zeros(1, 1, 9, 2).int(), 9, None, "no")),
        # Query rows are int32, so a larger row would become negative and its keys invisible.
        (ValueError, "query_length: got 2147483648", lambda: sliding_window(9, 2, query_length=2**31)),
        (ValueError, "max_seqlen_k: got 3, expected at least 6", lambda: packed_documents(torch.tensor([0, 3, 9]), max_seqlen_k=3)),
        (ValueError, "intersect: got", lambda: intersect(sliding_window(5, 2), sliding_window(5, 2, query_length=4))),
        (ValueError, "intersect: got", lambda: intersect()),
        (ValueError, "key_mask: got shape (2, 9), expected a batch of 3 or 1",
         lambda: sliding_window(9, 3, key_mask=MASK, cu_seqlens_k=torch.tensor([[0, 9]] * 3))),
        (ValueError, "prefix_length: got shape (3,), expected a batch of 2", lambda: prefix_lm(9, torch.tensor([1, 2, 3]), key_mask=MASK)),
        # Rules.
        (ValueError, "recent_window: got -1", select(recent_window=-1)),
        (ValueError, "recent_window: got 3 with is_causal=False", select(recent_window=3, is_causal=False)),
        (ValueError, "recent_window: got 4 with is_causal=False", attend(recent_window=4, keep_window_size=0)),
        (TypeError, "sink_tokens: got 'two'", select(sink_tokens="two")),
        (ValueError, "score_threshold: got nan", select(score_threshold=float("nan"))),
        (ValueError, "score_threshold: got an integer of 1329 bits", select(score_threshold=10**400)),
        (TypeError, "recent_competes: got None", select(recent_competes=None)),
        (ValueError, "cu_seqlens_k: got shape (3, 2), expected a batch of 2 or 1", select(cu_seqlens_k=torch.tensor([[0, 9]] * 3))),
        (ValueError, "cu_seqlens_k: got [0, 12], expected offsets that begin at 0, never fall and end at 9",
         select(cu_seqlens_k=torch.tensor([0, 12]))),
        (ValueError, "cu_seqlens_q: got [0, 12], expected offsets that begin at 0, never fall and end at 9",
         select(cu_seqlens_k=torch.tensor([0, 9]), cu_seqlens_q=torch.tensor([0, 12]))),
        (ValueError, "cu_seqlens_k: got torch.int64 of shape (1, 1, 1)", select(cu_seqlens_k=torch.zeros(1, 1, 1).long())),
        (ValueError, "cu_seqlens_q: got offsets without cu_seqlens_k", select(cu_seqlens_q=torch.tensor([0, 9]))),
        (ValueError, "key_positions: got shape (2, 3, 9), expected heads of 2 or 1", select(key_positions=torch.arange(9).expand(2, 3, 9))),
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
        # Masks. An additive mask of zeros allows every key, but read as bool it would allow none.
        (ValueError, "type: got 'best'", lambda: create_mask(BIAS, None, 2, 5, 9, 4, None, type="best")),
        (TypeError, "blocksize: got an unknown keyword", lambda: topk_mask(BIAS, None, 4, None, blocksize=2)),
        (TypeError, "window_size: got 2.5", lambda: topk_indices(BIAS, 2.5)),
        (ValueError, "block_size: got 0", lambda: topk_mask(BIAS, None, 4, None, 0)),
        (ValueError, "attention_mask: got shape (2, 7)", lambda: create_mask(BIAS, MASK[:, :7], 2, 5, 9, 4, None)),
        (TypeError, "attention_mask: got torch.float32", lambda: topk_mask(BIAS, BIAS[:, :1], 4, None)),
        (TypeError, "attention_bias: got torch.int64, expected a floating dtype", lambda: create_mask(BIAS.long(), None, 2, 5, 9, 4, None)),
        (ValueError, "attention_bias: got shape", lambda: create_mask(BIAS, None, 2, 5, 10, 4, None)),
        (TypeError, "attention_bias: got torch.int64", lambda: topk_mask(BIAS.long(), None, 4, None)),
        # Delayed biases, sinks and merged results.
        (ValueError, "bias_delay: got -1", attend(bias_delay=-1, attn_bias=BIAS)),
        (ValueError, "bias_delay: got 3 with a bias of shape", attend(bias_delay=3, attn_bias=torch.zeros(2, 2, 9, 9))),
        (ValueError, "sink_logits: got torch.float32 of shape (3,)", attend(sink_logits=torch.zeros(3))),
        (ValueError, "outs, lses: got 1 and 2", lambda: merge_attention([STATES], [STATES, STATES])),
        (TypeError, "outs: got Tensor, expected a sequence", lambda: merge_attention(STATES, [STATES])),
        (ValueError, "nonfinite: got 'drop'", lambda: merge_attention([STATES], [STATES[..., 0].mT], "drop")),
        (ValueError, "lses[0]: got torch.float32 of shape (1, 9, 2, 8)", lambda: merge_attention([STATES], [STATES])),
        # Forgetting attention.
        (ValueError, "log_fgate: got shape (2, 9, 3), expected", forget(gates=(2, 9, 3))),
        (ValueError, "log_fgate: got shape (2, 9, 4, 1), expected [B, Sk, H]", forget(gates=(2, 9, 4, 1))),
        *((ValueError, f"prune: got {prune!r}, expected a number of at most 0", forget(prune=prune))
          for prune in (1.0, float("nan"), "-1", True)),
        (ValueError, "window_size: got 0, expected 1 or more", forget(window_size=0)),
        (ValueError, "query: got 9 queries, expected at most 8", forget(gates=(2, 8, 4), keys=8)),
        (ValueError, "cu_seqlens: got offsets with 5 queries and 9 keys", forget(rows=5, cu_seqlens=torch.tensor([0, 9]))),
        (ValueError, "cu_seqlens: got shape (3, 2), expected a batch of 2", forget(cu_seqlens=torch.tensor([[0, 9]] * 3))),
        # Triangle attention.
        (ValueError, "q: got shape (3, 2, 5, 8), expected five dimensions", triangle(q=torch.zeros(3, 2, 5, 8))),
        (ValueError, "q: got shape (0, 3, 2, 5, 8), expected [B, N, H, Q, D] with B > 0", triangle(q=torch.zeros(0, 3, 2, 5, 8))),
        (ValueError, "k: got shape (2, 3, 1, 7, 8), expected (2, 3, 2, 7, 8)", triangle(k=torch.zeros(2, 3, 1, 7, 8))),
        (ValueError, "bias: got shape (2, 3, 2, 5, 7), expected (2, 1, 2, 5, 7)", triangle(bias=torch.zeros(2, 3, 2, 5, 7))),
        (TypeError, "bias: got NoneType", triangle(bias=None)),
        (ValueError, "mask: got shape (2, 3, 2, 1, 7), expected (2, 3, 1, 1, 7)", triangle(mask=torch.ones(2, 3, 2, 1, 7).bool())),
        (TypeError, "mask: got torch.float32, expected torch.bool", triangle(mask=torch.ones(2, 3, 1, 1, 7))),
        (ValueError, "empty_rows: got 'nan', expected 'zero' or 'mean'", triangle(empty_rows="nan")),
        # Learned scores, and the layer that has them.
        (ValueError, "score: got 'exp', expected one of 'gate', 'linear', 'doge', or a function", lambda: make_scores(12, 3, "exp")),
        (ValueError, "heads: got 0, expected 1 or more", lambda: make_scores(12, 0)),
        (ValueError, "hidden: got shape (2, 7, 13), expected [B, S, 12]", lambda: make_scores(12, 3)(torch.zeros(2, 7, 13))),
        (ValueError, "score: got torch.float32 of shape (2, 7, 12), expected",
         lambda: make_scores(12, 3, lambda hidden: hidden)(torch.zeros(2, 7, 12))),
        (ValueError, "score_input: got 'key', expected one of", layer(score_input="key")),
        (ValueError, "heads_q: got 4, expected a multiple of heads_kv, 3", layer(32, 4, 3)),
        (ValueError, "hidden_size: got 30, expected a multiple of heads_q, 4", layer(30, 4)),
        (ValueError, "keep_window_size: got 0", layer(32, 4, 2, 0)),
        (ValueError, "head_dim: got 257", layer(head_dim=257)),
        (TypeError, "dtype: got 'bf16', expected a floating torch.dtype", layer(dtype="bf16")),
        (TypeError, "rope: got int, expected a function or None", layer(rope=10000)),
        (TypeError, "rope: got tuple, expected", layer(rope=lambda q, k, positions: (q, k, k))),
        (TypeError, "rope's key: got NoneType, expected a torch.Tensor", layer(rope=lambda q, k, positions: (q, None))),
        (ValueError, "rope: got a query of shape", layer(rope=lambda q, k, positions: (q[:, 1:], k))),
        (TypeError, "positions: got torch.float32", layer(positions=torch.rand(2, 6))),
        (ValueError, "positions: got shape (3, 3)", layer(positions=torch.zeros(3, 3, dtype=torch.int64))),
        # Score projections.
        (ValueError, "hidden: got torch.float32 of shape (4, 12), expected floating numbers [B, S, F]", project(HIDDEN[0])),
        (ValueError, "weight: got shape (6, 11), expected [H, 12]", project(weight=WEIGHT[:, 1:])),
        (ValueError, "bias: got shape (5,), expected [6]", project(bias=torch.zeros(5))),
        (TypeError, "weight: got a tensor on meta, expected cpu", project(weight=WEIGHT.to("meta"))),
        (ValueError, "form: got 'gates', expected one of 'projection', 'gelu'", project(form="gates")),
        (TypeError, "A: got NoneType", project(form="doge")),
        (ValueError, "A: got a tensor, expected None with form 'projection'", project(A=torch.ones(6))),
        # Budgets that layers share.
        (ValueError, "model: got a Linear without", lambda: ScoreBudget(torch.nn.Linear(2, 2))),
        (ValueError, "model: got layers with", lambda: ScoreBudget(torch.nn.Sequential(old_keys(), old_keys(sink_tokens=0)))),
        *((ValueError, f"model: got a layer with score='{form}', expected 'gate'", lambda form=form: ScoreBudget(DynamicMaskAttention(32, 4, score=form)))
          for form in ("linear", "doge")),
        *((ValueError, "phase: got 'soft' with a cache, expected 'hard'", lambda tokens=tokens: step_in_soft_phase(tokens)) for tokens in (0, 5)),
        (ValueError, "phase: got 'off'", budget(lambda b: b.set_phase("off"))),
        (ValueError, "temperature: got 0.3 with the phase 'hard'", budget(lambda b: b.set_phase("hard", 0.3))),
        (RuntimeError, "target: got a model without scores", budget(lambda b: b.loss(0.1))),
        (ValueError, "sampled: got True with per_head=True", budget(lambda b: b.loss(0.1, sampled=True, per_head=True))),
        (ValueError, "texts: got shape (40,), expected [1, S, ...]", budget(lambda b: b.divide([torch.zeros(40)]))),
        (ValueError, "texts: got shape (8, 40), expected [1, S, ...]", budget(lambda b: b.divide([torch.zeros(8, 40)]))),
        (ValueError, "texts: got one of 40 tokens, expected 41", budget(lambda b: b.divide([torch.randn(1, 40, 32)], length=41))),
        (ValueError, "texts: got none", budget(lambda b: b.divide([]))),
        (ValueError, "texts: got forwards without scores of layer 1", part_of_a_budget),
        (ValueError, "mean_keys: got 5 for texts of 40", budget(lambda b: b.divide([torch.randn(1, 40, 32)], 5))),
        # A projection whose result has rows for other ranks' keys.
        (ValueError, "hidden, weight: got shapes", lambda: linear_with_headroom(HIDDEN, WEIGHT.t(), 3)),
        (ValueError, "places: got -1", lambda: linear_with_headroom(HIDDEN, WEIGHT, -1)),
        (TypeError, "bias: got float, expected a torch.Tensor", lambda: linear_with_headroom(HIDDEN, WEIGHT, 3, 1.0)),
        (ValueError, "bias: got shape (5,), expected (6,)", lambda: linear_with_headroom(HIDDEN, WEIGHT, 3, torch.zeros(5))),
    ],
)  # fmt: skip
def test_bad_argument_raises_naming_it(error, message, call):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


def test_scale_requiring_a_gradient_raises():
    """Without the error, scale would silently get no gradient."""
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="scale: got a tensor that requires a gradient"):
        flash_dmattn_func(*QKV, scale=scale)
    with torch.no_grad():
        flash_dmattn_func(*QKV, scale=scale)


@pytest.mark.parametrize("flag", [True, np.True_, 1])
def test_numeric_flag_is_accepted(flag):
    expected = flash_dmattn_func(*QKV, is_causal=True)
    assert torch.equal(flash_dmattn_func(*QKV, is_causal=flag), expected)
