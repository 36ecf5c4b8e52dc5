"""Masks are read as intervals if they can be, and keys are selected among intervals as under their mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_attention import HQ, LOWEST, B, S
from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    packed_documents,
    prefix_lm,
    sliding_window,
)
from flash_dmattn.keys.among_intervals import select_among_intervals
from flash_dmattn.keys.recognise import Memo, intervals_of_mask, mask_of_intervals, split_additive
from flash_dmattn.keys.rule import SelectionRule
from flash_dmattn.utils.mask import topk_mask


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
