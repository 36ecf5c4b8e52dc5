"""select_keys lists the best keys of a row as its definition says."""

import pytest
import torch

from flash_dmattn import select_key_intervals, select_keys
from flash_dmattn.keys.select import indices_of_true


def by_definition(scores, window, present):
    """Returns the keys of one row that are beaten by fewer than `window` others, with two loops."""
    chosen = []
    for j, score in enumerate(scores.tolist()):
        beaten = sum(
            bool(present[i]) and (other_score > score or (other_score == score and i > j))
            for i, other_score in enumerate(scores.tolist())
        )
        if present[j] and score == score and beaten < window:
            chosen.append(j)
    return chosen


@pytest.mark.parametrize("window", [0, 1, 7, 39, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_selected_keys_equal_definition(window, dtype):
    scores = (torch.randn(2, 3, 40) * 2).round().to(dtype)
    scores[0, 1, ::3] = torch.nan
    scores[1, 0, 5:9] = torch.tensor([0.0, -0.0, -torch.inf, torch.inf])
    mask = torch.rand(2, 40) < 0.7
    for key_mask in (None, mask, mask[:, None].expand(2, 3, 40)):
        keys, counts = select_keys(scores, window, key_mask)
        assert keys.dtype == counts.dtype == torch.int32
        assert keys.shape == (2, 3, min(window, 40)) and counts.shape == (2, 3)
        for b in range(2):
            present = torch.ones(40) if key_mask is None else mask[b]
            for h in range(3):
                wanted = by_definition(scores[b, h], window, present)
                assert counts[b, h] == len(wanted)
                missing = keys.shape[2] - len(wanted)
                assert keys[b, h].tolist() == wanted + [-1] * missing


@pytest.mark.parametrize("heads", [1, 3])
def test_window_for_each_head_selects_as_single_windows_do(heads):
    scores, windows = torch.randn(2, heads, 40), (3, 0, 50)
    keys, counts = select_keys(scores, windows)
    assert keys.shape == (2, 3, 40)
    for h, window in enumerate(windows):
        alone, count = select_keys(scores[:, [min(h, heads - 1)]], window)
        assert torch.equal(counts[:, [h]], count)
        assert torch.equal(keys[:, [h], : alone.shape[2]], alone)
        assert (keys[:, h, alone.shape[2] :] == -1).all()


def test_selected_keys_are_those_the_last_query_sees():
    scores = torch.randn(2, 2, 300)
    keys, counts = select_keys(scores, 64)
    seen = select_key_intervals(scores, 64).to_mask()[:, :, -1]
    assert (counts == 64).all()
    assert torch.equal(torch.zeros_like(seen).scatter_(-1, keys.long(), True), seen)


def test_scores_of_two_dimensions_have_one_head():
    scores = torch.randn(2, 30)
    keys, _ = select_keys(scores, 5)
    assert torch.equal(keys, select_keys(scores[:, None], 5)[0])
    assert torch.equal(keys, select_keys(scores[:, None, None], 5)[0])


def test_row_without_visible_keys_selects_none():
    keys, counts = select_keys(torch.empty(2, 3, 0), 4)
    assert keys.shape == (2, 3, 0) and not counts.any()
    keys, counts = select_keys(torch.full((1, 1, 9), torch.nan), 4)
    assert keys.tolist() == [[[-1] * 4]] and counts.tolist() == [[0]]


def test_indices_of_true_are_cut_or_padded_to_the_size():
    mask = torch.tensor([[False, True, True, False, True], [False] * 5])
    places, counts = indices_of_true(mask, 2)
    assert places.tolist() == [[1, 2], [-1, -1]] and counts.tolist() == [3, 0]
    places, counts = indices_of_true(mask, 4)
    assert places.tolist() == [[1, 2, 4, -1], [-1] * 4] and counts.tolist() == [3, 0]
