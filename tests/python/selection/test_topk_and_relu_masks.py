"""Compares flash_dmattn.utils.mask with loops over its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn.utils.mask import create_mask, relu_mask, topk_indices, topk_mask

LOWEST = torch.finfo(torch.float32).min


def best_keys(scores, allowed, count):
    """Returns the kept keys of one row by definition: the highest scores, and of equal scores the last."""
    candidates = [j for j in range(len(scores)) if allowed[j] and scores[j] > LOWEST]
    candidates.sort(key=lambda j: (float(scores[j]), j), reverse=True)
    return sorted(candidates[:count])


def by_definition(scores, allowed, count):
    scores, allowed = torch.broadcast_tensors(scores, allowed)
    kept = torch.zeros_like(allowed)
    for row in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape[:-1])).tolist():
        kept[tuple(row)][best_keys(scores[tuple(row)], allowed[tuple(row)], count)] = True
    return kept


def make_scores(*shape, seed=0):
    """Returns scores with few distinct values, so that many are equal, among them a NaN and both infinities."""
    scores = torch.randint(-2, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
    flat = scores.view(-1)
    flat[1], flat[2], flat[5] = float("nan"), float("inf"), float("-inf")
    return scores


def make_mask(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


B, H, Q, K = 2, 3, 5, 11


@pytest.mark.parametrize(
    "bias_shape, mask_shape, result_shape",
    [
        ((B, H, K), None, (B, H, K)),
        ((B, H, K), (B, H, K), (B, H, K)),
        ((B, H, K), (B, 1, K), (B, H, K)),
        ((B, H, K), (B, H, Q, K), (B, H, Q, K)),
        ((B, H, K), (B, 1, Q, K), (B, H, Q, K)),
        ((B, H, Q, K), (B, H, Q, K), (B, H, Q, K)),
        ((B, H, Q, K), (B, 1, 1, K), (B, H, Q, K)),
        ((B, H, Q, K), None, (B, H, Q, K)),
        ((1, H, 1, K), (B, 1, Q, K), (B, H, Q, K)),
    ],
)
@pytest.mark.parametrize("window", [1, 4, K, K + 3])
def test_topk_mask_matches_torch_topk(bias_shape, mask_shape, result_shape, window):
    bias = make_scores(*bias_shape)
    mask = None if mask_shape is None else make_mask(*mask_shape)
    kept = create_mask(bias, mask, B, Q, K, window, LOWEST)
    assert kept.dtype == torch.bool and kept.shape == result_shape
    allowed = torch.ones(K, dtype=torch.bool) if mask is None else mask
    four_d = len(result_shape) == 4
    scores = bias[:, :, None] if four_d and bias.dim() == 3 else bias
    assert torch.equal(kept, by_definition(scores, allowed, window).expand(result_shape))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-2, 2), min_size=1, max_size=24),
    st.integers(1, 26),
    st.integers(0, 2**24 - 1),
)
def test_topk_mask_matches_definition(scores, window, mask_bits):
    row = torch.tensor(scores, dtype=torch.float32)[None, None]
    allowed = torch.tensor([bool(mask_bits >> j & 1) for j in range(len(scores))])[None, None]
    kept = topk_mask(row, allowed, window, LOWEST)
    assert kept[0, 0].nonzero().flatten().tolist() == best_keys(row[0, 0], allowed[0, 0], window)


def test_relu_keeps_positive_allowed_keys():
    bias, mask = make_scores(B, H, Q, K), make_mask(B, 1, Q, K)
    kept = create_mask(bias, mask, B, Q, K, 4, LOWEST, type="relu")
    assert torch.equal(kept, (bias > 0) & mask)
    assert torch.equal(relu_mask(bias[:, :, 0], None, LOWEST), bias[:, :, 0] > 0)


def test_topk_indices_are_ascending_and_prefer_recent_keys():
    bias = torch.tensor([[[1.0, 2.0, 1.0, float("nan"), 1.0, 2.0]]])
    assert topk_indices(bias, 3).tolist() == [[[1, 4, 5]]]
    assert topk_indices(bias, 9).tolist() == [[[0, 1, 2, 3, 4, 5]]]


def test_blocks_follow_the_majority_and_hide_masked_keys():
    bias = torch.tensor([[[9.0, 8.0, 0.0, 0.0, 7.0, 0.0, 0.0, 6.0]]])
    kept = topk_mask(bias, None, 4, LOWEST, block_size=3)
    assert kept[0, 0].tolist() == [True] * 3 + [False] * 5
    allowed = torch.tensor([True, True, False, True, True, True, True, True])[None, None]
    kept = topk_mask(bias, allowed, 4, LOWEST, block_size=3)
    assert kept[0, 0].tolist() == [True, True, False] + [False] * 5


def test_padding_mask_equals_its_mask_of_keys():
    bias, mask = make_scores(B, H, K), make_mask(B, K)
    expected = create_mask(bias, mask[:, None], B, Q, K, 4, LOWEST)
    assert torch.equal(create_mask(bias, mask, B, Q, K, 4, LOWEST), expected)
    query_mask = make_mask(B, Q, seed=3)
    whole_mask = torch.cat([torch.ones(B, K - Q, dtype=torch.bool), query_mask], dim=1)
    expected = create_mask(bias, whole_mask, B, Q, K, 4, LOWEST)
    assert torch.equal(create_mask(bias, query_mask, B, Q, K, 4, LOWEST), expected)


def test_masks_have_no_gradient():
    bias = torch.randn(B, H, K, requires_grad=True)
    for kind in ("topk", "relu"):
        assert not create_mask(bias, None, B, Q, K, 4, LOWEST, type=kind).requires_grad
    assert not topk_indices(bias, 4).requires_grad
