"""transformers' attention function equals N x N maths for every form of mask and scores, and reads masks as
intervals if it can."""

import ctypes
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_attention import (
    HKV,
    HQ,
    KEEP,
    LOWEST,
    B,
    D,
    S,
    assert_same,
    attend,
    causal,
    dense_attention,
    make_states,
    padded_causal,
)
from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    packed_documents,
    prefix_lm,
    sliding_window,
)
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)
from flash_dmattn.keys.among_intervals import select_among_intervals
from flash_dmattn.keys.recognise import Memo, intervals_of_mask, mask_of_intervals, split_additive
from flash_dmattn.keys.rule import SelectionRule
from flash_dmattn.utils.mask import topk_mask
from largest_tensor import LargestTensor
from peak_memory import run_measured

# ---- The choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_heads", [1, HKV, HQ])
@pytest.mark.parametrize("mask_shape", [None, (B, S), (B, 1, S), (B, HKV, S), (B, 1, 1, S)])
def test_global_selection_equals_dense_mask(mask_shape, bias_heads):
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
def test_per_query_selection_equals_dense_mask(kind, query_length):
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
def test_4d_scores_equal_dense_mask(mask_shape, heads):
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


@pytest.mark.parametrize("keep", [None, S])
@pytest.mark.parametrize("mask", [None, "padded", "additive"])
def test_window_of_at_least_all_keys_keeps_every_key(mask, keep):
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    allowed = padded_causal()
    attn_mask = {None: None, "padded": allowed, "additive": torch.where(allowed, 0.0, LOWEST)}[mask]
    visible = causal().expand(B, 1, S, S) if mask is None else allowed
    expected = dense_attention(*states, visible, bias)
    assert_same((*states, bias), attend(*states, attn_mask, bias, keep_window_size=keep), expected)


def test_additive_mask_with_other_values_acts_as_bias():
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    distance = torch.where(padded_causal(), -0.1 * torch.rand(B, HQ, S, S), LOWEST)
    expected = dense_attention(
        *states, padded_causal(), distance + bias.repeat_interleave(HQ // HKV, 1)[:, :, None]
    )
    out = attend(*states, distance, bias.repeat_interleave(HQ // HKV, 1), keep_window_size=None)
    assert_same((*states, bias), out, expected)
    assert_same(
        states, attend(*states, distance, None), dense_attention(*states, padded_causal(), distance)
    )


def test_key_intervals_equal_their_dense_mask():
    states, bias = make_states(), torch.randn(B, HKV, S, requires_grad=True)
    documents = packed_documents(torch.tensor([0, 20, S]))
    chosen = topk_mask(bias, documents.to_mask().expand(B, 1, S, S), KEEP, LOWEST)
    expected = dense_attention(*states, chosen, bias)
    for mask in (documents, documents.intervals, documents.to_mask().expand(B, 1, S, S)):
        assert_same((*states, bias), attend(*states, mask, bias, is_causal=False), expected)


def test_window_size_replaces_keep_window_size():
    states, bias = make_states(), torch.randn(B, HKV, S)
    out = attend(*states, None, bias)
    assert torch.equal(attend(*states, None, bias, keep_window_size=None, window_size=KEEP), out)
    assert torch.equal(attend(*states, None, bias, window_size=KEEP), out)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_selection_equals_dense_mask(by):
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
        recognised_intervals = intervals_of_mask(form.expand(B, HQ, -1, -1))
        # Expanded dimensions are read once.
        assert recognised_intervals.intervals.shape[:2] == (1, 1)
        assert recognised_intervals.query_length == intervals.query_length
        assert torch.equal(recognised_intervals.to_mask(), mask)


def test_other_masks_are_not_recognised():
    mask = prefix_lm(S, 0).to_mask().clone()
    mask[0, 0, 20, 3] = False
    assert intervals_of_mask(mask) is None
    assert intervals_of_mask(torch.where(prefix_lm(S, 0).to_mask(), -1.0, LOWEST)) is None


def test_memo_computes_once_per_tensor():
    memo, mask = Memo(), prefix_lm(S, 0).to_mask()
    first = intervals_of_mask(mask, memo)
    assert intervals_of_mask(mask, memo) is first
    assert intervals_of_mask(mask.clone(), memo) is not first
    assert intervals_of_mask(mask) is not first


# Writes that torch's version counter does not see, like those of collectives, raw pointers and graph replay.
HIDDEN_WRITES = {
    "data": lambda mask, new: mask.data.copy_(new),
    "data_ptr": lambda mask, new: ctypes.memmove(mask.data_ptr(), new.data_ptr(), new.nbytes),
}  # fmt: skip


@pytest.mark.parametrize("write", HIDDEN_WRITES.values(), ids=HIDDEN_WRITES)
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("function", ["function", "transformers"])
def test_rewritten_mask_is_read_again(function, form, write):
    q, k, v = (torch.randn(1, S, 2, 16) for _ in range(3))
    bias = torch.randn(1, 2, S)
    old = prefix_lm(S, 0).to_mask()
    new = old.clone()
    new[..., 3:9] = False
    new[..., 12:, :2] = False
    if form == "additive":
        old, new = (torch.where(mask, 0.0, LOWEST) for mask in (old, new))

    def call(mask):
        if function == "transformers":
            return _flash_dynamic_mask_attention_forward(
                q, k, v, mask, bias, S, S, is_causal=False, keep_window_size=5
            )
        mask_or_bias = {"attn_mask": mask} if form == "bool" else {"attn_bias": mask}
        return flash_dmattn_func(
            q, k, v, **mask_or_bias, is_causal=True, keep_window_size=5, selection_scores=bias
        )

    expected, mask = call(new), old.clone()
    assert not torch.equal(call(mask), expected)
    version = mask._version
    write(mask, new)
    assert mask._version == version
    assert torch.equal(call(mask), expected)


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["prefix", "window", "packed", "bidirectional"])
def test_choice_among_key_intervals_equals_choice_under_mask(name, heads, selection):
    """keep_window_size with key_intervals selects as under their mask, whether or not intervals can describe the result."""
    q = torch.randn(2, S, 4, 16)
    k, v = (torch.randn(2, S, 2, 16) for _ in range(2))
    scores = torch.randn(2, heads, S)
    shown = {
        "prefix": prefix_lm(S, 4),
        "window": sliding_window(S, 11),
        "packed": packed_documents(torch.tensor([0, S // 3, S]), max_seqlen_k=S),
        "bidirectional": packed_documents(torch.tensor([0, S // 3, S]), is_causal=False),
    }[name]
    for is_causal in (False, True):
        options = {
            "keep_window_size": 5, "selection_scores": scores, "is_causal": is_causal, "selection": selection,
        }  # fmt: skip
        out = flash_dmattn_func(q, k, v, key_intervals=shown, **options)
        expected = flash_dmattn_func(q, k, v, attn_mask=shown.to_mask(), **options)
        torch.testing.assert_close(out, expected)
        some = torch.rand(2, 1, 1, S) < 0.8
        out = flash_dmattn_func(q, k, v, some, key_intervals=shown, **options)
        expected = flash_dmattn_func(q, k, v, some & shown.to_mask(), **options)
        torch.testing.assert_close(out, expected)


def test_inference_before_training_changes_nothing():
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


def test_additive_mask_splits_into_mask_and_bias():
    mask = torch.where(torch.rand(1, 1, S, S) < 0.6, 0.0, LOWEST)
    for form in (mask, mask.expand(B, HQ, -1, -1)):
        allowed, adds = split_additive(form)
        assert allowed.shape == form.shape and not adds
        assert allowed.untyped_storage().nbytes() == S * S  # expanded dimensions are made once
        assert torch.equal(allowed, form == 0)
    mask[..., 5] = -1.0
    mask[..., 6] = float("-inf")
    allowed, adds = split_additive(mask)
    assert adds and torch.equal(allowed, mask > LOWEST)


def test_expanded_intervals_become_one_mask():
    window = sliding_window(S, 7)
    shared = window.with_intervals(window.intervals.clone().expand(B, -1, -1, -1))
    for allowed in (window, shared):
        mask = mask_of_intervals(allowed)
        assert mask.untyped_storage().nbytes() == S * S
        assert torch.equal(mask, allowed.to_mask())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_selection_among_intervals_equals_dense_mask(data):
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
    is_ordered = select_among_intervals(scores, allowed, SelectionRule(keep)) is not None
    # An empty interval may begin and end anywhere.
    hidden = torch.tensor([length, data.draw(st.integers(0, length))])
    intervals = torch.where(present[:, None], allowed.intervals, hidden).int()
    allowed = KeyIntervals(intervals, allowed.query_length)
    chosen = select_among_intervals(scores, allowed, SelectionRule(keep))
    assert chosen is not None or not is_ordered
    if chosen is None:
        return
    # If few keys are allowed, all are kept without a selection, and only the bias masks a NaN.
    expected = topk_mask(scores, allowed.to_mask(), keep, LOWEST)
    number = ~scores.isnan()[:, :, None]
    assert torch.equal(chosen.to_mask() & number, expected)


def test_empty_interval_that_ends_before_it_begins_hides_no_other_key_from_a_selection():
    intervals = torch.tensor([[[[3, 0], [1, 3], [2, 3]]]], dtype=torch.int32)
    allowed = KeyIntervals(intervals, 3)
    chosen = select_among_intervals(torch.zeros(1, 1, 3), allowed, SelectionRule(1))
    assert chosen.to_mask().int().tolist() == [[[[0, 0, 0], [0, 1, 0], [0, 0, 1]]]]


def test_masks_that_hide_old_keys_make_selection_without_intervals():
    scores = torch.randn(1, 1, S)
    for allowed in (prefix_lm(S, 0), prefix_lm(S, 5), packed_documents(torch.tensor([0, 14, S]))):
        assert select_among_intervals(scores, allowed, SelectionRule(4)) is not None
    assert select_among_intervals(scores, sliding_window(S, 4), SelectionRule(4)) is not None
    assert select_among_intervals(scores, sliding_window(S, 5), SelectionRule(4)) is None


# ---- Problems of other implementations that led to this package ------------------------------------


def test_topk_mask_gives_finite_gradients():
    """No gradient flows through the selection or to masked keys, and every gradient is finite."""
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


def test_masks_of_three_shapes_need_linear_memory():
    """A 3-d bias without a mask, with a 3-d mask or with a 4-d mask allocates no N x N tensor, neither per head nor for all."""
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
