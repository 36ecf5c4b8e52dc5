"""Each name of version 1.x is there, with its arguments in their order, and does what 1.x promised."""

import importlib
import inspect

import pytest
import torch

from dense_attention import (
    HKV,
    HQ,
    KEEP,
    LOWEST,
    B,
    S,
    assert_same,
    causal,
    dense_attention,
    make_states,
    padded_causal,
)
from flash_dmattn import packed_documents
from flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
    fdma_peft_integration_check,
)
from flash_dmattn.utils.mask import create_mask, relu_mask, topk_indices, topk_mask
from flash_dmattn.utils.padding import pad_input, unpad_input
from python_process import run_forked

WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # its import raises
import flash_dmattn.integrations.flash_dynamic_mask_attention
import flash_dmattn.integrations.import_utils
import flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils
from flash_dmattn import *
from flash_dmattn._core import availability
assert availability.backends.cache_info().currsize == 0
"""


def test_modules_of_1_x_import_without_transformers_and_do_not_initialise_cuda():
    """Once a process has initialised CUDA, its forked children cannot use the GPU."""
    run_forked(WITHOUT_TRANSFORMERS)


SIGNATURES = [
    ("flash_dmattn_interface", "flash_dmattn_func",
     "query key value attn_mask attn_bias softmax_scale is_causal softcap deterministic return_attn_probs",
     "scale keep_window_size selection selection_scores key_intervals nonfinite"),
    ("flash_dmattn_interface", "flash_dmattn_varlen_func",
     "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale is_causal softcap "
     "deterministic return_attn_probs block_table",
     "attn_bias keep_window_size selection nonfinite"),
    ("keys.select", "select_key_intervals",
     "scores keep_window_size", "selection is_causal key_mask query_length"),
    ("utils.mask", "create_mask",
     "attention_bias attention_mask batch_size query_len key_len window_size min_dtype block_size type", ""),
    ("utils.mask", "topk_indices", "attention_bias window_size", ""),
    ("utils.mask", "topk_mask", "attention_bias attention_mask window_size min_dtype block_size", ""),
    ("utils.mask", "relu_mask", "attention_bias attention_mask min_dtype block_size", ""),
    ("utils.padding", "pad_input", "hidden_states indices batch seqlen", ""),
    ("utils.padding", "unpad_input", "hidden_states attention_mask", ""),
    ("integrations.import_utils", "is_flash_dmattn_available", "", ""),
    ("integrations.modeling_flash_dynamic_mask_attention_utils", "_flash_dynamic_mask_attention_forward",
     "query_states key_states value_states attention_mask attention_bias query_length key_length is_causal "
     "softmax_scale softcap keep_window_size deterministic target_dtype implementation", "window_size"),
    ("integrations.modeling_flash_dynamic_mask_attention_utils", "fdma_peft_integration_check",
     "q k v bias target_dtype", ""),
    ("integrations.flash_dynamic_mask_attention", "flash_dynamic_mask_attention_forward",
     "module query key value attention_mask attention_bias scaling window_size softcap", "position_bias"),
]  # fmt: skip


@pytest.mark.parametrize("module, name, in_order, by_name", SIGNATURES)
def test_arguments_keep_their_names_and_order(module, name, in_order, by_name):
    function = getattr(importlib.import_module(f"flash_dmattn.{module}"), name)
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(in_order.split())] == in_order.split()
    assert set(by_name.split()) <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_pad_input_inverts_unpad_input():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    states = torch.randn(3, 4, 5, 2, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(states, mask)
    assert torch.equal(packed, states[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 5]
    assert cu_seqlens.tolist() == [0, 3, 4, 4] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and used.tolist() == [3, 1, 0] and used.dtype == torch.int32
    padded = pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, states * mask[..., None, None])
    padded.sum().backward()
    assert torch.equal(states.grad, mask[..., None, None].expand_as(states).float())


def test_unpad_drops_unused_tokens():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    unused = torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 1), mask, unused)
    assert indices.tolist() == [0, 1, 3, 4] and cu_seqlens.tolist() == [0, 2, 4]
    assert longest == 2 and used.tolist() == [1, 2] and len(packed) == 4


# ---- utils.mask ----------------------------------------------------------------------------------------

Q, K = 5, 11


def make_scores(*shape):
    """Returns scores with few distinct values, so that many are equal, among them a NaN and both infinities."""
    scores = torch.randint(-2, 4, shape).float()
    scores.view(-1)[[1, 2, 5]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return scores


def best_keys(scores, allowed, count):
    """Returns the kept keys of one row by definition: the highest scores, and of equal scores the last."""
    candidates = [j for j in range(len(scores)) if allowed[j] and scores[j] > LOWEST]
    return sorted(sorted(candidates, key=lambda j: (float(scores[j]), j))[-count:])


@pytest.mark.parametrize("window", [4, K + 3])
@pytest.mark.parametrize(
    "bias_shape, mask_shape, shape",
    [
        ((B, HKV, K), None, (B, HKV, K)),
        ((B, HKV, K), (B, 1, K), (B, HKV, K)),
        ((B, HKV, K), (B, K), (B, HKV, K)),
        ((B, HKV, K), (B, Q), (B, HKV, K)),  # of the last keys
        ((B, HKV, K), (B, HKV, Q, K), (B, HKV, Q, K)),
        ((B, HKV, Q, K), (B, 1, 1, K), (B, HKV, Q, K)),
        ((1, HKV, 1, K), (B, 1, Q, K), (B, HKV, Q, K)),
    ],
)
def test_created_mask_equals_its_definition(bias_shape, mask_shape, shape, window):
    bias = make_scores(*bias_shape).requires_grad_()
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.4
    kept = create_mask(bias, mask, B, Q, K, window, LOWEST)
    assert kept.dtype == torch.bool and kept.shape == shape
    allowed = torch.ones(K, dtype=torch.bool) if mask is None else mask
    if allowed.dim() == 2:
        allowed = torch.nn.functional.pad(mask, (K - mask.shape[1], 0), value=True)[:, None]
    scores = bias.detach()[:, :, None] if len(shape) > bias.dim() else bias.detach()
    scores, allowed = (t.expand(shape) for t in (scores, allowed))
    for row in torch.cartesian_prod(*(torch.arange(n) for n in shape[:-1])).tolist():
        expected = best_keys(scores[tuple(row)], allowed[tuple(row)], window)
        assert kept[tuple(row)].nonzero().flatten().tolist() == expected
    positive = create_mask(bias, mask, B, Q, K, window, LOWEST, type="relu")
    assert torch.equal(positive, (scores > 0) & allowed)
    assert torch.equal(relu_mask(bias, None, LOWEST), bias > 0)


def test_topk_indices_are_ascending_and_prefer_recent_keys():
    bias = torch.tensor([[[1.0, 2.0, 1.0, float("nan"), 1.0, 2.0]]])
    assert topk_indices(bias, 3).tolist() == [[[1, 4, 5]]]
    assert topk_indices(bias, 9).tolist() == [[[0, 1, 2, 3, 4, 5]]]


def test_blocks_follow_the_majority_and_hide_masked_keys():
    bias = torch.tensor([[[9.0, 8.0, 0.0, 0.0, 7.0, 0.0, 0.0, 6.0]]])
    allowed = torch.arange(8)[None, None] != 2
    for mask, third in ((None, True), (allowed, False)):
        kept = topk_mask(bias, mask, 4, LOWEST, block_size=3)
        assert kept[0, 0].tolist() == [True, True, third] + [False] * 5


# ---- The attention functions ---------------------------------------------------------------------------


def attend(query, key, value, mask, bias, **kwargs):
    keep = None if bias is None else KEEP
    options = {"is_causal": True, "keep_window_size": keep, **kwargs}
    return _flash_dynamic_mask_attention_forward(
        query, key, value, mask, bias, query.shape[1], key.shape[1], **options
    )


class Layer(torch.nn.Module):
    is_causal, window_size = True, KEEP


def call(states, mask, *bias, layer=None, **options):
    states = (t.transpose(1, 2) for t in states)
    layer = Layer() if layer is None else layer
    out, weights = flash_dynamic_mask_attention_forward(layer, *states, mask, *bias, **options)
    assert weights is None
    return out


@pytest.mark.parametrize("bias_heads", [1, HKV, HQ])
@pytest.mark.parametrize("mask_shape", [None, (B, S), (B, HKV, S), (B, 1, 1, S)])
def test_bias_of_keys_without_a_mask_of_queries_selects_once_for_all_queries(
    mask_shape, bias_heads
):
    states, bias = make_states(), torch.randn(B, bias_heads, S, requires_grad=True)
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.3
    allowed = torch.ones(B, 1, S).bool() if mask is None else mask.view(B, -1, S)
    if bias_heads == HQ and allowed.shape[1] == HKV:
        allowed = allowed.repeat_interleave(HQ // HKV, dim=1)
    chosen = topk_mask(bias, allowed, KEEP, LOWEST)
    expected = dense_attention(*states, chosen[:, :, None] & causal(), bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)
    assert torch.equal(call(states, mask, bias), attend(*states, mask, bias))


@pytest.mark.parametrize("queries", [S, 11, 1])
@pytest.mark.parametrize("kind", ["padded", "additive", "any", "any of heads", "intervals"])
@pytest.mark.parametrize("dims", [3, 4])
def test_mask_of_queries_or_bias_of_elements_selects_for_each_query(dims, kind, queries):
    shape = (B, HQ, S) if dims == 3 else (B, HQ, queries, S)
    states, bias = make_states(queries), torch.randn(shape, requires_grad=True)
    allowed = padded_causal(queries)
    if kind.startswith("any"):
        allowed = allowed & (torch.rand(B, HQ if "heads" in kind else 1, queries, S) > 0.3)
    elif kind == "intervals":
        allowed = packed_documents(
            torch.tensor([0, 20, S]), query_length=queries, key_length=S
        ).to_mask()
    mask = torch.where(allowed, 0.0, LOWEST) if kind == "additive" else allowed
    if kind == "intervals":
        mask = packed_documents(torch.tensor([0, 20, S]), query_length=queries, key_length=S)
    chosen = topk_mask(bias, allowed.expand(B, -1, -1, -1), KEEP, LOWEST)
    expected = dense_attention(*states, chosen, bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)
    for keep in (None, S):
        expected = dense_attention(*states, allowed.expand(B, -1, -1, -1), bias)
        assert_same((*states, bias), attend(*states, mask, bias, keep_window_size=keep), expected)


DOCUMENTS = torch.tensor([0, 20, 21, S], dtype=torch.int32)
OFFSETS = {"cu_seq_lens_q": DOCUMENTS, "cu_seq_lens_k": DOCUMENTS}
LONGEST = {"max_length_q": 20, "max_length_k": torch.tensor(20)}
POSITIONS = torch.cat([torch.arange(n) for n in (20, 1, 16)])[None]
PACKED = [OFFSETS, OFFSETS | LONGEST, {"position_ids": POSITIONS}, {"position_ids": POSITIONS[0]}]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("mask", [None, torch.ones(1, S).bool(), torch.ones(1, 1, 1, S).long()])
def test_packed_documents_equal_single_calls(mask, packed):
    states, bias = make_states(batch=1), torch.randn(1, HKV, S, requires_grad=True)
    rows = [slice(*pair) for pair in ((0, 20), (20, 21), (21, S))]
    for added in (bias, None):
        expected = [
            attend(*(t[:, r] for t in states), None, None if added is None else added[..., r])
            for r in rows
        ]
        out = attend(*states, mask, added, **packed)
        assert_same((*states, added), out, torch.cat(expected, dim=1))


def test_positions_separate_the_documents_of_each_row():
    states, bias = make_states(), torch.randn(1, HKV, S)
    positions = torch.cat([POSITIONS, torch.arange(S)[None]])
    rows = [attend(*(t[i : i + 1] for t in states), None, bias, position_ids=positions[i])
            for i in range(2)]  # fmt: skip
    out = attend(*states, None, bias, position_ids=positions)
    torch.testing.assert_close(out, torch.cat(rows))
    # Generation with padding counts positions as 1, 1, 1, 0, 1, 2 ...
    padding = torch.arange(S).expand(B, -1) >= 3
    positions = (padding.long().cumsum(1) - 1).masked_fill(~padding, 1)
    out = attend(*states, padding, None, position_ids=positions)
    assert torch.equal(out, attend(*states, padding, None))


def test_compiled_call_with_positions_equals_dense_attention():
    torch._dynamo.reset()
    states, positions = [t.detach() for t in make_states()], POSITIONS.expand(2, -1)
    padding, documents = torch.arange(S).expand(B, -1) < 30, packed_documents(DOCUMENTS).to_mask()
    near = torch.arange(S)[:, None] - torch.arange(S) < 6
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for mask, options, shown in (
        (None, {}, documents),
        (None, {"sliding_window": 6}, documents & near),
        (padding, {}, documents & padding[:, None, None]),
    ):
        out = compiled(*states, mask, None, position_ids=positions, **options)
        expected = dense_attention(*states, shown.expand(B, -1, -1, -1), None)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_settings_come_from_the_layer_or_the_call():
    states, bias, layer = make_states(), torch.randn(B, HKV, S), Layer()
    expected = attend(*states, None, bias, softmax_scale=0.3, softcap=5.0)
    for name in ("attention_bias", "position_bias"):
        options = {"scaling": 0.3, "softcap": 5.0, "layer_idx": 1, name: bias}
        assert torch.equal(call(states, None, **options), expected)
    expected = attend(*states, None, bias, keep_window_size=4)
    assert torch.equal(call(states, None, bias, window_size=4), expected)
    assert torch.equal(attend(*states, None, bias, keep_window_size=None, window_size=4), expected)
    layer.is_causal = False
    expected = attend(*states, None, bias, is_causal=False)
    assert torch.equal(call(states, None, bias, layer=layer), expected)
    full = torch.ones(B, 1, S, S, dtype=torch.bool)  # a mask of queries includes causality
    assert_same(states, call(states, full), dense_attention(*states, full, None))
    with pytest.warns(UserWarning, match="output_attentions"):
        call(states, None, output_attentions=True)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sliding_window_without_mask_is_applied(is_causal):
    states, distance = make_states(), torch.arange(S)[:, None] - torch.arange(S)
    seen = (distance.abs() < 5) & (distance >= 0 if is_causal else True)
    out = call(states, None, sliding_window=5, is_causal=is_causal)
    assert_same(states, out, dense_attention(*states, seen.expand(B, 1, S, S), None))


def test_float32_states_are_cast_to_the_target_dtype():
    assert is_flash_dmattn_available() is True
    tensors = [torch.randn(3), torch.randn(3).half(), None, torch.randn(3)]
    cast = fdma_peft_integration_check(*tensors, torch.bfloat16)
    assert [t if t is None else t.dtype for t in cast] == [
        torch.bfloat16, torch.half, None, torch.bfloat16,
    ]  # fmt: skip
    assert fdma_peft_integration_check(*tensors, None) == tuple(tensors)
    states, layer = make_states(), torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    assert call(states, None, layer=layer).dtype == torch.bfloat16
    assert attend(*states, None, None, target_dtype=torch.half).dtype == torch.half


BIAS = torch.zeros(B, HKV, S)
PADDED = torch.arange(S).expand(B, S) > 4


@pytest.mark.parametrize(
    "words, function, mask, bias, options",
    [
        ("^query_states: got shape", attend, None, None, {"states": [BIAS] * 3}),
        ("query_length, key_length: got", _flash_dynamic_mask_attention_forward, None, None, {"query_length": 1, "key_length": S, "is_causal": True}),
        ("^target_dtype: got torch.int32", attend, None, None, {"target_dtype": torch.int32}),
        ("^dropout: got 0.1", call, None, None, {"dropout": 0.1}),
        ("^keep_windowsize: got an unknown", attend, None, BIAS, {"keep_windowsize": 3}),
        ("^window_size: got 2.5", call, None, BIAS, {"window_size": 2.5}),
        ("^window_size: got 3 without attention_bias", call, None, None, {"window_size": 3}),
        ("^window_size: got 3 together with keep_window_size 9", attend, None, BIAS, {"window_size": 3}),
        ("^sliding_window: got 'a'", call, None, None, {"sliding_window": "a"}),
        ("^sliding_window: got 5 for packed", attend, None, None, {"sliding_window": 5, "position_ids": POSITIONS}),
        ("^position_ids: got list", attend, None, None, {"position_ids": [0, 1]}),
        ("^position_ids: got torch.float32", attend, None, None, {"position_ids": torch.zeros(1, S)}),
        ("^position_ids: got positions that begin again", attend, PADDED, None, {"position_ids": POSITIONS}),
        ("^attention_mask: got .* negative numbers", attend, -PADDED.long(), None, {"position_ids": POSITIONS}),
        ("^attention_bias: got shape", attend, None, torch.zeros(1, HKV, S, S), {"states": [t[:1] for t in make_states()], **OFFSETS}),
    ],
)  # fmt: skip
def test_bad_call_raises_naming_the_argument(words, function, mask, bias, options):
    options = {"states": make_states()} | options
    states = options.pop("states")
    arguments = (states, mask) if function is call else (*states, mask, bias)
    options |= {"attention_bias": bias} if function is call else {}
    with pytest.raises((ValueError, TypeError), match=words):
        function(*arguments, **options)
