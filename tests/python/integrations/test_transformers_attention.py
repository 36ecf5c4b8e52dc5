"""The calling convention of transformers' attention functions, against N x N maths."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import KeyIntervals, packed_documents, prefix_lm, sliding_window
from flash_dmattn.allowed_keys import (
    intervals_of_mask,
    mask_of_intervals,
    select_among,
    split_additive,
)
from flash_dmattn.integrations import keywords
from flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
    fdma_peft_integration_check,
)
from flash_dmattn.utils.mask import topk_mask
from largest_tensor import LargestTensor
from peak_memory import run_measured

B, S, HQ, HKV, D, KEEP = 2, 37, 4, 2, 16, 9
LOWEST = torch.finfo(torch.float32).min


def make_states(query_length=S, batch=B):
    query = torch.randn(batch, query_length, HQ, D, requires_grad=True)
    key, value = (torch.randn(batch, S, HKV, D, requires_grad=True) for _ in range(2))
    return query, key, value


def causal(query_length=S):
    return torch.ones(query_length, S, dtype=torch.bool).tril(S - query_length)


def padded_causal(query_length=S):
    """[B, 1, Sq, S]: the first row padded on the left, the second on the right."""
    present = torch.ones(B, S, dtype=torch.bool)
    present[0, :8], present[1, -6:] = False, False
    return present[:, None, None] & causal(query_length)


def dense_attention(query, key, value, visible, bias):
    """Softmax over the visible keys; rows without any are 0. Everything [.., H, Sq, Sk]."""
    heads = [t.repeat_interleave(HQ // HKV, dim=2) for t in (key, value)]
    scores = torch.einsum("bqhd,bkhd->bhqk", query, heads[0]) * D**-0.5
    if bias is not None:
        bias = bias[:, :, None] if bias.dim() == 3 else bias
        scores = scores + (bias if bias.shape[1] != HKV else bias.repeat_interleave(HQ // HKV, 1))
    if visible.shape[1] == HKV:
        visible = visible.repeat_interleave(HQ // HKV, dim=1)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights.nan_to_num(0.0), heads[1])


def attend(query, key, value, mask, bias, **kwargs):
    options = {"is_causal": True, "keep_window_size": KEEP, **kwargs}
    return _flash_dynamic_mask_attention_forward(
        query, key, value, mask, bias, query.shape[1], key.shape[1], **options
    )


def assert_same(inputs, actual, expected):
    """Outputs and the gradients of every input that has them."""
    direction = torch.randn_like(expected)
    inputs = [t for t in inputs if t is not None and t.requires_grad]
    gradients = [
        torch.autograd.grad(out, inputs, direction, retain_graph=True) for out in (actual, expected)
    ]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)


# ---- The choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_heads", [1, HKV, HQ])
@pytest.mark.parametrize("mask_shape", [None, (B, S), (B, 1, S), (B, HKV, S), (B, 1, 1, S)])
def test_one_choice_for_all_queries(mask_shape, bias_heads):
    states = make_states()
    bias = torch.randn(B, bias_heads, S, requires_grad=True)
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.3
    allowed = torch.ones(B, 1, S, dtype=torch.bool)
    if mask is not None:
        allowed = mask[:, None] if mask.dim() == 2 else mask.view(B, -1, S)
    if bias_heads == HQ and allowed.shape[1] == HKV:
        allowed = allowed.repeat_interleave(HQ // HKV, dim=1)
    chosen = topk_mask(bias, allowed, KEEP, LOWEST)
    expected = dense_attention(*states, chosen[:, :, None] & causal(), bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)


@pytest.mark.parametrize("query_length", [S, 11, 1])
@pytest.mark.parametrize("kind", ["causal", "padded", "additive", "arbitrary", "per head"])
def test_one_choice_per_query(kind, query_length):
    states = make_states(query_length)
    bias = torch.randn(B, HKV, S, requires_grad=True)
    allowed = padded_causal(query_length)
    if kind == "causal":
        allowed = causal(query_length).expand(B, 1, query_length, S)
    elif kind == "arbitrary":
        allowed = allowed & (torch.rand(B, 1, query_length, S) > 0.3)
    elif kind == "per head":
        allowed = allowed & (torch.rand(B, HQ, query_length, S) > 0.3)
    mask = torch.where(allowed, 0.0, LOWEST) if kind == "additive" else allowed
    if kind == "per head":
        allowed = allowed & causal(query_length)
        by_head = bias.repeat_interleave(HQ // HKV, dim=1)
        chosen = topk_mask(by_head, allowed, KEEP, LOWEST)
    else:
        chosen = topk_mask(bias, allowed, KEEP, LOWEST)
    expected = dense_attention(*states, chosen, bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)


@pytest.mark.parametrize("mask_shape", [None, (B, S), (B, 1, S, S), (B, HQ, S, S)])
@pytest.mark.parametrize("heads", [1, HKV, HQ])
def test_scores_per_pair(mask_shape, heads):
    states = make_states()
    bias = torch.randn(B, heads, S, S, requires_grad=True)
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.3
    allowed = causal()[None, None]
    if mask is not None:
        allowed = allowed & (mask if mask.dim() == 4 else mask[:, None, None])
    scores = bias
    if allowed.dim() == 4 and allowed.shape[1] == HQ and heads == HKV:
        scores = bias.repeat_interleave(HQ // HKV, dim=1)
    chosen = topk_mask(scores, allowed.expand(B, -1, S, S), KEEP, LOWEST)
    expected = dense_attention(*states, chosen, bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)


@pytest.mark.parametrize("keep", [None, S, S + 5])
@pytest.mark.parametrize("mask", [None, "padded", "additive"])
def test_every_key_is_kept_when_the_window_is_not_smaller(mask, keep):
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    allowed = padded_causal()
    given = {None: None, "padded": allowed, "additive": torch.where(allowed, 0.0, LOWEST)}[mask]
    visible = causal().expand(B, 1, S, S) if mask is None else allowed
    expected = dense_attention(*states, visible, bias)
    assert_same((*states, bias), attend(*states, given, bias, keep_window_size=keep), expected)


def test_an_additive_mask_with_other_values_is_a_bias():
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    distance = torch.where(padded_causal(), -0.1 * torch.rand(B, HQ, S, S), LOWEST)
    expected = dense_attention(
        *states, padded_causal(), distance + bias.repeat_interleave(HQ // HKV, 1)[:, :, None]
    )
    out = attend(*states, distance, bias.repeat_interleave(HQ // HKV, 1), keep_window_size=None)
    assert_same((*states, bias), out, expected)
    assert_same(
        states,
        attend(*states, distance, None),
        dense_attention(*states, padded_causal(), distance),
    )


def test_key_intervals_are_a_mask():
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    documents = packed_documents(torch.tensor([0, 20, S]))
    chosen = topk_mask(bias, documents.to_mask().expand(B, 1, S, S), KEEP, LOWEST)
    expected = dense_attention(*states, chosen, bias)
    for mask in (documents, documents.intervals, documents.to_mask().expand(B, 1, S, S)):
        assert_same((*states, bias), attend(*states, mask, bias, is_causal=False), expected)


def test_window_size_is_another_name():
    states, bias = make_states(), torch.randn(B, HKV, S)
    out = attend(*states, None, bias)
    assert torch.equal(attend(*states, None, bias, keep_window_size=None, window_size=KEEP), out)
    assert torch.equal(attend(*states, None, bias, window_size=KEEP), out)
    with pytest.raises(ValueError, match="window_size is 3 and keep_window_size is 9"):
        attend(*states, None, bias, window_size=3)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(by):
    lengths = (20, 1, 16)
    states = make_states(batch=1)
    bias = torch.randn(1, HKV, S, requires_grad=True)
    expected = []
    for start, part in zip((0, 20, 21), lengths, strict=True):
        rows = slice(start, start + part)
        chosen = topk_mask(bias[..., rows], None, KEEP, LOWEST)[:, :, None]
        visible = chosen & torch.ones(part, part, dtype=torch.bool).tril()
        expected.append(dense_attention(*(t[:, rows] for t in states), visible, bias[..., rows]))
    if by == "position_ids":
        packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    else:
        offsets = torch.tensor([0, 20, 21, S], dtype=torch.int32)
        packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        packed |= {"max_length_q": 20, "max_length_k": torch.tensor(20)}
    out = attend(*states, None, bias, **packed)
    assert_same((*states, bias), out, torch.cat(expected, dim=1))
    with pytest.raises(ValueError, match="attention_bias has shape"):
        attend(*states, None, torch.randn(1, HKV, S, S), **packed)


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 30\); expected 37 keys"):
        attend(*make_states(), torch.ones(B, 30, dtype=torch.bool), torch.randn(B, HKV, S))


# ---- Masks as intervals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "intervals",
    [
        prefix_lm(S, 0),
        prefix_lm(S, 0, query_length=9),
        prefix_lm(S, 12),
        sliding_window(S, 7, lookahead=2),
        packed_documents(torch.tensor([0, 4, 20, S])),
        packed_documents(torch.tensor([0, 4, 20, S]), is_causal=False),
    ],
)
def test_masks_made_of_intervals_are_recognised(intervals):
    mask = intervals.to_mask()
    for form in (mask, torch.where(mask, 0.0, float("-inf")), torch.where(mask, 0.0, LOWEST)):
        found = intervals_of_mask(form.expand(B, HQ, -1, -1))
        assert found.intervals.shape[:2] == (1, 1)  # expanded dimensions are read once
        assert found.query_length == intervals.query_length
        assert torch.equal(found.to_mask(), mask)


def test_other_masks_are_not_recognised():
    mask = prefix_lm(S, 0).to_mask().clone()
    mask[0, 0, 20, 3] = False
    assert intervals_of_mask(mask) is None
    assert intervals_of_mask(torch.where(prefix_lm(S, 0).to_mask(), -1.0, LOWEST)) is None


def test_a_mask_is_read_once_until_it_changes():
    mask = prefix_lm(S, 0).to_mask().clone()
    assert intervals_of_mask(mask) is intervals_of_mask(mask)
    mask[..., 5] = False
    assert torch.equal(intervals_of_mask(mask).to_mask(), mask)


def test_what_inference_found_out_about_a_mask_serves_training():
    q, k, v = (torch.randn(1, S, 2, 16, requires_grad=True) for _ in range(3))
    bias, some = torch.randn(1, 2, S), torch.rand(1, 1, S, S) < 0.6
    for allowed in (some, prefix_lm(S, 3).to_mask()):
        mask = torch.where(allowed, 0.0, LOWEST)
        call = partial(
            _flash_dynamic_mask_attention_forward,
            q, k, v, mask, bias, S, S, is_causal=False,
        )  # fmt: skip
        with torch.inference_mode():
            expected = call()
        out = call()
        out.sum().backward()
        assert torch.equal(out, expected)


def test_an_additive_mask_becomes_bool_once_until_it_changes():
    mask = torch.where(torch.rand(1, 1, S, S) < 0.6, 0.0, LOWEST)
    for form in (mask, mask.expand(B, HQ, -1, -1)):
        allowed, adds = split_additive(form)
        assert allowed.shape == form.shape and not adds
        assert allowed.untyped_storage().nbytes() == S * S
        assert torch.equal(allowed, form == 0)
        assert split_additive(form)[0] is allowed
    mask[..., 5] = -1.0
    mask[..., 6] = float("-inf")
    allowed, adds = split_additive(mask)
    assert adds and torch.equal(allowed, mask > LOWEST)


def test_intervals_become_a_mask_once_until_they_change():
    window = sliding_window(S, 7)
    shared = window.with_intervals(window.intervals.clone().expand(B, -1, -1, -1))
    for allowed in (window, shared):
        mask = mask_of_intervals(allowed)
        assert mask is mask_of_intervals(allowed)
        assert mask.untyped_storage().nbytes() == S * S
        assert torch.equal(mask, allowed.to_mask())
    window.intervals[..., 5, :] = 0
    assert torch.equal(mask_of_intervals(window), window.to_mask())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_choice_among_intervals(data):
    """Padding, prefixes and documents, with many equal scores."""
    length = data.draw(st.integers(1, 24))
    keep = data.draw(st.integers(1, 8))
    scores = torch.tensor(
        data.draw(st.lists(st.integers(-1, 2), min_size=length, max_size=length)), dtype=torch.float
    )
    scores = torch.where(scores < 0, float("nan"), scores)[None, None]
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=3)) | {0, length})
    allowed = data.draw(
        st.sampled_from(
            [
                prefix_lm(length, data.draw(st.integers(0, length))),
                packed_documents(torch.tensor(cuts)),
                packed_documents(torch.tensor(cuts), is_causal=False),
                sliding_window(length, data.draw(st.integers(1, length))),
            ]
        )
    )
    present = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    allowed = KeyIntervals(allowed.intervals * present[:, None], allowed.query_length)
    chosen = select_among(scores, allowed, keep)
    if chosen is None:
        return
    # Where few keys are allowed nothing is chosen, and a NaN is left to the bias to mask.
    expected = topk_mask(scores, allowed.to_mask(), keep, LOWEST)
    number = ~scores.isnan()[:, :, None]
    assert torch.equal(chosen.to_mask() & number, expected)


def test_which_masks_keep_the_choice_in_intervals():
    scores = torch.randn(1, 1, S)
    for allowed in (prefix_lm(S, 0), prefix_lm(S, 5), packed_documents(torch.tensor([0, 14, S]))):
        assert select_among(scores, allowed, 4) is not None
    assert select_among(scores, sliding_window(S, 4), 4) is not None
    assert select_among(scores, sliding_window(S, 5), 4) is None


# ---- What brought this package about ---------------------------------------------------------------


def test_topk_gradient_safety():
    """No gradient flows through the choice, none to masked keys, and none is not finite."""
    for fill in (LOWEST, float("-inf")):
        states = make_states()
        raw = torch.randn(B, HKV, S, requires_grad=True)
        hidden = torch.zeros(B, 1, S, dtype=torch.bool)
        hidden[0, :, 3:15], hidden[1] = True, True
        bias = raw.masked_fill(hidden, fill)
        out = attend(*states, padded_causal(), bias)
        out.square().sum().backward()
        for gradient in (t.grad for t in (*states, raw)):
            assert gradient.isfinite().all()
        assert (raw.grad[hidden.expand_as(raw)] == 0).all()
        assert raw.grad[0].abs().sum() > 0
        assert (out[1] == 0).all()  # the second row of the batch sees nothing


MEMORY = """
import torch
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward as attend,
)

N, H, D, KEEP = 6144, 4, 16, 128
torch.set_num_threads(2)

def step(length, mask):
    q, k, v = (torch.randn(1, length, H, D, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, H, length, requires_grad=True)
    attend(q, k, v, mask, bias, length, length, True, keep_window_size=KEEP).sum().backward()

step(256, None)
three_d = torch.ones(1, 1, N, dtype=torch.bool)
four_d = torch.ones(1, 1, N, N, dtype=torch.bool).tril_()
for mask in (None, three_d, four_d):
    before = peak()
    step(N, mask)
    print(peak() - before)
"""


def test_memory_of_the_three_shape_scenarios():
    """A 3-d bias with no mask, a 3-d and a 4-d mask: nothing of N x N is made, per head or at all."""
    no_mask, three_d, four_d = run_measured(MEMORY)
    pairs = 6144 * 6144  # bytes of one mask for all heads
    assert no_mask < pairs and three_d < pairs, (no_mask, three_d)
    assert four_d < 2 * pairs, four_d  # the mask is given, and read in blocks of 4 MB

    states = [torch.randn(1, 2048, HKV, D) for _ in range(3)]
    bias = torch.randn(1, HKV, 2048)
    for mask in (None, torch.ones(1, 1, 2048, dtype=torch.bool)):
        with LargestTensor() as largest:
            attend(*states, mask, bias)
        assert largest.elements < 2048 * 128


def test_peft_cast():
    tensors = [torch.randn(3) for _ in range(4)]
    assert all(
        t.dtype == torch.bfloat16 for t in fdma_peft_integration_check(*tensors, torch.bfloat16)
    )
    assert fdma_peft_integration_check(*tensors, None) == tuple(tensors)
    query, key, value, bias = fdma_peft_integration_check(
        tensors[0], tensors[1].half(), tensors[2], None, torch.bfloat16
    )
    assert (query.dtype, key.dtype, value.dtype) == (torch.bfloat16, torch.half, torch.bfloat16)
    assert bias is None
    assert fdma_peft_integration_check(None, None, None, None, torch.half) == (None,) * 4


def test_peft_cast_of_a_layer():
    """Float32 inputs of a layer with bfloat16 weights are attended to in bfloat16."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    states = [t.transpose(1, 2) for t in make_states()]
    for bias in (None, torch.randn(B, HKV, S)):
        out, _ = flash_dynamic_mask_attention_forward(layer, *states, None, bias, window_size=KEEP)
        assert out.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = flash_dynamic_mask_attention_forward(layer.float(), *states, None, bias)
        assert out.dtype == torch.bfloat16
        layer.bfloat16()
    out, _ = flash_dynamic_mask_attention_forward(layer.float(), *states, None, None)
    assert out.dtype == torch.float32


# ---- As an attention function of transformers -------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True
    window_size = KEEP


def test_settings_come_from_the_module_or_the_call():
    states, bias = make_states(), torch.randn(B, HKV, S)
    heads_first = [t.transpose(1, 2) for t in states]
    layer = Layer()
    expected = attend(*states, None, bias, softmax_scale=0.3, softcap=5.0)
    for name in ("attention_bias", "position_bias"):
        out, weights = flash_dynamic_mask_attention_forward(
            layer, *heads_first, None, scaling=0.3, softcap=5.0, layer_idx=1, **{name: bias}
        )
        assert weights is None and torch.equal(out, expected)
    out, _ = flash_dynamic_mask_attention_forward(layer, *heads_first, None, bias, window_size=4)
    assert torch.equal(out, attend(*states, None, bias, keep_window_size=4))
    layer.is_causal = False
    out, _ = flash_dynamic_mask_attention_forward(layer, *heads_first, None, bias)
    assert torch.equal(out, attend(*states, None, bias, is_causal=False))


def test_a_mask_with_a_query_dimension_says_everything():
    states = make_states()
    full = torch.ones(B, 1, S, S, dtype=torch.bool)
    out, _ = flash_dynamic_mask_attention_forward(
        Layer(), *(t.transpose(1, 2) for t in states), full
    )
    assert_same(states, out, dense_attention(*states, full, None))


def test_what_cannot_be_done_is_said():
    states = [t.transpose(1, 2) for t in make_states()]
    bias = torch.randn(B, HKV, S)
    with pytest.raises(ValueError, match="dropout is 0.1"):
        flash_dynamic_mask_attention_forward(Layer(), *states, None, bias, dropout=0.1)
    with pytest.raises(ValueError, match="give one"):
        flash_dynamic_mask_attention_forward(Layer(), *states, None, bias, position_bias=bias)
    with pytest.raises(ValueError, match="no dimension of 0"):
        flash_dynamic_mask_attention_forward(Layer(), states[0][:, :, :0], *states[1:], None)
    with pytest.warns(UserWarning, match="output_attentions"):
        flash_dynamic_mask_attention_forward(Layer(), *states, None, bias, output_attentions=True)


def test_availability():
    assert is_flash_dmattn_available() is True


@pytest.mark.transformers
@pytest.mark.parametrize("window", [None, 7])
def test_other_models_by_name(window):
    """attn_implementation="flash_dmattn" is exact attention for models that have no scores."""
    transformers = pytest.importorskip("transformers")
    import flash_dmattn.integrations.transformers  # noqa: F401

    config = transformers.MistralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    models = []
    for name in ("eager", "flash_dmattn"):
        model = transformers.MistralForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=name
        )
        models.append(model.eval())
    eager, ours = models
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 99, (2, 17))
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, atol=1e-5, rtol=1e-5)
    real = padding.bool()
    logits = [m(ids, attention_mask=padding).logits[real] for m in models]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    options = {"attention_mask": padding, "max_new_tokens": 9, "do_sample": False}
    written = [m.generate(ids, pad_token_id=0, **options) for m in models]
    assert torch.equal(*written)


@pytest.mark.parametrize("make", [torch.from_numpy, torch.from_dlpack])
def test_masks_over_foreign_memory_are_read_at_every_call(make):
    """Whoever owns the memory may write to it without torch's counting it."""
    memory = np.ones((1, 1, 4, 4), dtype=np.float32)
    mask = make(memory)
    q, k, v = (torch.randn(1, 4, 1, 8) for _ in range(3))
    options = {"query_length": 4, "key_length": 4, "is_causal": False}
    memory[:] = 0
    everything = _flash_dynamic_mask_attention_forward(q, k, v, mask, None, **options)
    memory[..., 1:] = -np.inf
    first_key = _flash_dynamic_mask_attention_forward(q, k, v, mask, None, **options)
    assert not torch.equal(everything, first_key)
    assert torch.equal(first_key, v[:, :1].expand_as(first_key))


def heads_first():
    return [t.transpose(1, 2) for t in make_states()]


@pytest.mark.parametrize(
    "error, name, value",
    [
        (ValueError, "cache", object()),
        (ValueError, "block_table", torch.zeros(1, 1)),
        (ValueError, "cu_seq_lens_k", {"full_attention": torch.zeros(2)}),
        (ValueError, "max_length_k", {"full_attention": 3}),
        (ValueError, "s_aux", torch.zeros(HQ)),
        (ValueError, "sinks", torch.zeros(HQ)),
        (ValueError, "head_mask", torch.ones(HQ)),
        (ValueError, "block_indices", torch.zeros(1)),
        (TypeError, "softcapp", 3.0),
        (TypeError, "keep_windowsize", 3),
    ],
)
def test_keywords_that_could_change_the_result_raise(error, name, value):
    with pytest.raises(error, match=f"^{name}: got"):
        flash_dynamic_mask_attention_forward(Layer(), *heads_first(), None, **{name: value})
    lengths = {"query_length": S, "key_length": S, "is_causal": True}
    with pytest.raises(error, match=f"^{name}: got"):
        _flash_dynamic_mask_attention_forward(
            *make_states(), None, None, **lengths, **{name: value}
        )


def test_bookkeeping_of_transformers_passes():
    states = heads_first()
    expected, _ = flash_dynamic_mask_attention_forward(Layer(), *states, None)
    bookkeeping = dict.fromkeys(keywords.BOOKKEEPING, True) | {"cache": None, "s_aux": None}
    actual, _ = flash_dynamic_mask_attention_forward(Layer(), *states, None, **bookkeeping)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_sliding_window_holds_where_no_mask_says_it(is_causal):
    states, window = make_states(), 5
    actual, _ = flash_dynamic_mask_attention_forward(
        Layer(),
        *(t.transpose(1, 2) for t in states),
        None,
        sliding_window=window,
        is_causal=is_causal,
    )
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = distance.abs() < window
    mask = (seen & (distance >= 0) if is_causal else seen).expand(B, 1, S, S)
    assert_same(states, actual, dense_attention(*states, mask, None))
    packed = {"position_ids": (torch.arange(S) % 20)[None], "sliding_window": window}
    with pytest.raises(ValueError, match="sliding_window is 5 for packed sequences"):
        flash_dynamic_mask_attention_forward(
            Layer(), *(t[:1].transpose(1, 2) for t in states), None, **packed
        )


@pytest.mark.parametrize("shape", [(B, S), (B, 1, S)])
def test_additive_masks_without_a_query_dimension_are_refused(shape):
    with pytest.raises(TypeError, match="attention_mask is torch.float32 of shape"):
        flash_dynamic_mask_attention_forward(Layer(), *heads_first(), torch.zeros(shape))


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["flash_dmattn", "paged|flash_dmattn"])
@pytest.mark.parametrize("family", ["Llama", "Doge"])
def test_continuous_batching_is_refused(family, name):
    transformers = pytest.importorskip("transformers")
    import flash_dmattn.integrations.transformers  # noqa: F401

    config = getattr(transformers, f"{family}Config")(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if not hasattr(model, "generate_batch"):
        pytest.skip("this version of transformers has no continuous batching")
    if "|" in name and transformers.__version__ < "5":
        pytest.skip("transformers 4 itself refuses this name for an implementation")
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch(inputs=[[3, 4, 5]] * 4)


def test_values_may_have_a_smaller_head_dimension():
    query, key, value = heads_first()
    out, _ = flash_dynamic_mask_attention_forward(Layer(), query, key, value[..., :5], None)
    expected, _ = flash_dynamic_mask_attention_forward(Layer(), query, key, value, None)
    assert torch.equal(out, expected[..., :5])
