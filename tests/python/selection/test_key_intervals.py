"""Tests the constructors of key intervals, and compares selection with its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    from_padding,
    intersect,
    packed_documents,
    prefix_lm,
    select_key_intervals,
    sliding_window,
)
from rules_by_definition import causal_elements, select


def test_repr_shows_shape_without_values():
    assert repr(sliding_window(4096, 8)) == (
        "KeyIntervals(intervals=<torch.int32 (1, 1, 4096, 2) on cpu>, query_length=4096, bound=(8, 1), consecutive=True)"
    )


# There are few distinct values, so that ties are common, and values that compare in unusual ways.
SCORE_VALUES = [-1e38, -1.5, -0.0, 0.0, 0.25, 0.5, 3e38, -torch.inf, torch.inf, torch.nan]


@st.composite
def selection_problems(draw):
    seqlen_k = draw(st.integers(1, 40))
    seqlen_q = draw(st.integers(1, 44))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        values = torch.tensor(
            draw(st.lists(st.sampled_from(SCORE_VALUES), min_size=1, max_size=10))
        )
        picks = torch.randint(len(values), (batch, heads, seqlen_k), generator=generator)
        scores = values[picks]
    else:
        scores = torch.randn(batch, heads, seqlen_k, generator=generator)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    mask = None
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), seqlen_k)
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.8]))
    return scores.to(dtype), mask, draw(st.integers(0, seqlen_k + 2)), seqlen_q


@settings(max_examples=400, deadline=None)
@given(selection_problems(), st.sampled_from(["per_query", "global"]), st.booleans())
def test_selection_matches_definition(problem, selection, is_causal):
    scores, mask, window, seqlen_q = problem
    seqlen_k = scores.shape[-1]
    intervals = select_key_intervals(
        scores, window, selection=selection, is_causal=is_causal, key_mask=mask,
        query_length=seqlen_q,
    )  # fmt: skip
    causal = (
        causal_elements(seqlen_q, seqlen_k) if is_causal else torch.ones(seqlen_q, seqlen_k).bool()
    )
    keys = torch.ones(scores.shape, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    keys = keys[:, :, None].expand(-1, -1, seqlen_q, -1)
    if selection == "per_query":
        expected = select(scores, window, keys & causal)
    else:
        expected = select(scores, window, keys) & causal
    assert torch.equal(intervals.to_mask(), expected)


def test_equal_scores_make_a_sliding_window():
    chosen = select_key_intervals(torch.zeros(1, 1, 50), 8)
    assert torch.equal(chosen.to_mask(), sliding_window(50, 8).to_mask())


def test_selection_of_a_prefix_ignores_later_keys():
    scores = torch.randn(1, 2, 300)
    whole = select_key_intervals(scores, 20).to_mask()
    part = select_key_intervals(scores[..., :200], 20).to_mask()
    assert torch.equal(whole[:, :, :200, :200], part)
    last = select_key_intervals(scores, 20, query_length=1).to_mask()
    assert torch.equal(whole[:, :, -1:], last)


def test_selection_reads_strided_scores():
    scores = torch.randn(60, 3, 2).permute(2, 1, 0)
    expected = select_key_intervals(scores.contiguous(), 9).intervals
    assert torch.equal(select_key_intervals(scores, 9).intervals, expected)
    assert torch.equal(select_key_intervals(scores[:, :, None], 9).intervals, expected)


# ---- Constructors ------------------------------------------------------------------------------------

LENGTHS = [(1, 1), (7, 7), (5, 12), (12, 5)]


def positions(seqlen_q, seqlen_k):
    return torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("window, lookahead", [(1, 0), (3, 0), (3, 2), (0, 2), (50, 50)])
def test_sliding_window_matches_definition(seqlen_q, seqlen_k, window, lookahead):
    query, key = positions(seqlen_q, seqlen_k)
    expected = (key > query - window) & (key <= query + lookahead)
    actual = sliding_window(seqlen_k, window, lookahead=lookahead, query_length=seqlen_q)
    assert torch.equal(actual.to_mask()[0, 0], expected)


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("prefix", [0, 3, torch.tensor([0, 2, 40])])
def test_prefix_lm_matches_definition(seqlen_q, seqlen_k, prefix):
    query, key = positions(seqlen_q, seqlen_k)
    actual = prefix_lm(seqlen_k, prefix, query_length=seqlen_q).to_mask()
    for row, length in zip(actual, torch.as_tensor(prefix).reshape(-1), strict=True):
        assert torch.equal(row[0], (key < length) | (key <= query))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "lengths_k, lengths_q",
    [([3, 5, 1], None), ([3, 0, 4], [3, 0, 4]), ([4, 2, 6], [2, 5, 6]), ([0], [3]), ([3], [0]), ([], [])],
)  # fmt: skip
def test_packed_documents_match_definition(lengths_k, lengths_q, is_causal):
    cu_k = torch.tensor([0, *lengths_k]).cumsum(0).int()
    cu_q = None if lengths_q is None else torch.tensor([0, *lengths_q]).cumsum(0).int()
    lengths_q = lengths_k if lengths_q is None else lengths_q
    blocks = [
        causal_elements(q, k) if is_causal else torch.ones(q, k, dtype=torch.bool)
        for q, k in zip(lengths_q, lengths_k, strict=True)
    ]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    expected = torch.zeros(total_q, total_k + 2, dtype=torch.bool)
    if blocks:
        expected[:, :total_k] = torch.block_diag(*(block.int() for block in blocks)).bool()
    actual = packed_documents(cu_k, cu_seqlens_q=cu_q, is_causal=is_causal)
    assert torch.equal(actual.to_mask()[0, 0], expected[:, :total_k])
    actual = packed_documents(cu_k, cu_seqlens_q=cu_q, is_causal=is_causal, key_length=total_k + 2)
    assert torch.equal(actual.to_mask()[0, 0], expected)


def test_intersection_with_padding_matches_definition():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    padding = from_padding(mask, query_length=4)
    assert torch.equal(padding.to_mask(), mask[:, None, None].expand(3, 1, 4, 5))
    window = sliding_window(5, 2, query_length=4)
    both = intersect(padding, window)
    assert torch.equal(both.to_mask(), padding.to_mask() & window.to_mask())
    empty = both.intervals[..., 0] >= both.intervals[..., 1]
    assert (both.intervals[empty] == 0).all()


def test_intervals_keep_their_properties():
    window = sliding_window(9, 4)
    chosen = select_key_intervals(torch.randn(1, 1, 9), 4)
    assert window.consecutive and not chosen.consecutive
    assert intersect(window, prefix_lm(9, 2)).consecutive
    assert not intersect(window, chosen).consecutive
    for known in (window, chosen):
        mapped = torch.utils._pytree.tree_map(torch.clone, known)
        for other in (mapped, known.to("cpu"), known.measured()):
            assert (other.bound, other.consecutive) == (known.bound, known.consecutive)
    unknown = KeyIntervals(window.intervals, 9, consecutive=True)
    assert unknown.bound is None and unknown.measured().consecutive


@pytest.mark.parametrize(
    "make, consecutive",
    [
        (lambda: sliding_window(1000, 200), True),
        (lambda: sliding_window(700, 5, query_length=300), True),
        (lambda: packed_documents(torch.tensor([0, 400, 410, 1000])), True),
        (lambda: from_padding(torch.arange(900)[None] >= 100), True),
        (lambda: select_key_intervals(torch.randn(2, 2, 2000), 100), False),
        (lambda: select_key_intervals(torch.randn(1, 1, 0), 5), True),
    ],
)
def test_consecutive_intervals_are_detected(make, consecutive):
    known = make()
    assert KeyIntervals(known.intervals, known.query_length).measured().consecutive == consecutive


# ---- keep_window_size in the attention function ------------------------------------------------------


N = 40
CAUSAL = causal_elements(N, N)
MASKS = {
    "none": lambda: None,
    "padding": lambda: torch.arange(N) >= torch.tensor([[7], [0]]),
    "causal_4d": lambda: CAUSAL[None, None],
    "left_4d": lambda: CAUSAL & (torch.arange(N) >= torch.tensor([[7], [0]]))[:, None, None],
    "packed_4d": lambda: packed_documents(torch.tensor([0, 11, 30, N])).to_mask(),
    "packed_heads_4d": lambda: torch.cat(
        [packed_documents(torch.tensor([0, end, N])).to_mask() for end in (11, 25)], 1
    ),
    "prefix_4d": lambda: prefix_lm(N, 15).to_mask(),
    "random_4d": lambda: torch.rand(2, 1, N, N) < 0.5,
    "random_heads_4d": lambda: torch.rand(1, 2, N, N) < 0.5,
    "window_4d": lambda: sliding_window(N, 13).to_mask(),
}


def of_query_heads(tensor):
    return tensor.repeat_interleave(4 // tensor.shape[1], 1)


def assert_keeps_what_the_definition_keeps(
    mask, bias, scores=None, *, window=9, selection="per_query", is_causal=True
):
    """Compares a call with the same call under a mask of the elements that each query head keeps."""
    q, k, v = (torch.randn(2, N, heads, 16) for heads in (4, 2, 2))
    allowed = torch.ones(2, 4, N, N, dtype=torch.bool)
    if mask is not None:
        allowed &= of_query_heads(mask[:, None, None] if mask.dim() == 2 else mask)
    if bias is not None:
        elements = bias if bias.dim() == 4 else bias[:, :, None]
        allowed &= of_query_heads(elements > torch.finfo(torch.float32).min)
    causal = CAUSAL if is_causal else torch.ones_like(CAUSAL)
    chosen_by = of_query_heads(bias if scores is None else scores).expand(2, -1, -1)
    if selection == "per_query":
        shown = select(chosen_by, window, allowed & causal)
    else:
        keys = allowed.any(2, keepdim=True).expand_as(allowed)
        shown = select(chosen_by, window, keys) & allowed & causal
    actual = flash_dmattn_func(
        q, k, v, mask, bias, is_causal=is_causal, keep_window_size=window, selection=selection,
        selection_scores=scores,
    )  # fmt: skip
    expected = flash_dmattn_func(q, k, v, shown, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_keeps_the_keys_of_the_definition(selection, mask, is_causal):
    bias = torch.randint(6, (2, 2, N)).float()
    options = {"selection": selection, "is_causal": is_causal}
    assert_keeps_what_the_definition_keeps(MASKS[mask](), bias, **options)


def test_every_query_head_chooses_for_itself():
    assert_keeps_what_the_definition_keeps(None, torch.randn(2, 4, N))
    assert_keeps_what_the_definition_keeps(None, torch.randn(2, 2, N), torch.randn(2, 4, N))


@pytest.mark.parametrize("mask", ["packed_4d", "packed_heads_4d", "random_heads_4d"])
def test_mask_and_scores_with_broadcast_heads_equal_definition(mask):
    for shape in [(1, 1, N), (2, 1, N), (1, 2, N)]:
        assert_keeps_what_the_definition_keeps(MASKS[mask](), torch.randn(shape))


def masking_bias(*shape):
    bias = torch.randn(shape)
    return bias.masked_fill(torch.rand(shape) < 0.4, torch.finfo(torch.float32).min)


def test_keys_that_the_bias_masks_are_not_chosen():
    for shape in ((2, 2, N), (2, 2, N, N)):
        assert_keeps_what_the_definition_keeps(None, masking_bias(*shape), torch.randn(2, 2, N))


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 1, 2), (1, 2, 4), (2, None, 1)])
def test_selection_under_dense_mask_and_bias_matches_definition(heads, selection):
    """Bias, mask and scores may have different numbers of heads."""
    bias_heads, mask_heads, scores_heads = heads
    mask = None if mask_heads is None else torch.rand(2, mask_heads, N, N) < 0.7
    assert_keeps_what_the_definition_keeps(
        mask,
        masking_bias(1, bias_heads, N, N),
        torch.randn(2, scores_heads, N),
        selection=selection,
    )


@pytest.mark.parametrize("window", [3, 30, N])
@pytest.mark.parametrize("mask", ["none", "padding", "causal_4d", "random_4d"])
def test_nonfinite_scores_choose_by_definition(mask, window):
    """A score of -inf is the worst, but still a score; NaN is no score. This holds for any window and form of call."""
    values = torch.tensor([-torch.inf, -torch.inf, torch.nan, torch.inf, 1.0, 2.0])
    scores = values[torch.randint(len(values), (2, 2, N))]
    assert_keeps_what_the_definition_keeps(MASKS[mask](), None, scores, window=window)


@pytest.mark.parametrize("window", [40, 1000])
def test_window_of_all_keys_selects_all(window):
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    bias = torch.randn(1, 1, 40)
    actual = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window)
    assert torch.equal(actual, flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True))


@pytest.mark.parametrize(
    "mask", [None, torch.ones(1, 1, 40, 40).bool(), torch.rand(1, 1, 40, 40) < 0.5]
)
def test_window_of_zero_keys_shows_none(mask):
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    out = flash_dmattn_func(q, k, v, mask, torch.randn(1, 1, 40), keep_window_size=0)
    assert (out == 0).all()
