"""Selection and tile lists in torch's operators equal those of the library. GPUs without kernels of the library use them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import select_key_intervals
from flash_dmattn._core import ops as _ops
from flash_dmattn.keys import in_torch
from largest_tensor import LargestTensor
from rules_by_definition import causal_elements, select

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@settings(max_examples=300, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70)),
    query_length=st.integers(1, 80),
    window=st.integers(0, 75),
    levels=st.sampled_from([2, 9, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    special=st.sampled_from([None, torch.nan, -torch.inf, torch.inf, -0.0]),
    masked=st.booleans(),
    selection=st.sampled_from(["per_query", "global"]),
    is_causal=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_torch_selection_equals_library(
    shape, query_length, window, levels, dtype, special, masked, selection, is_causal, seed
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, shape, generator=generator).to(dtype)
    if special is not None:
        scores[torch.rand(shape, generator=generator) < 0.3] = special
    key_mask = torch.rand(1, *shape[1:], generator=generator) < 0.7 if masked else None
    options = {"selection": selection, "is_causal": is_causal, "query_length": query_length}
    expected = select_key_intervals(scores, window, key_mask=key_mask, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "has_kernels_for", lambda _: False)
        selected = select_key_intervals(scores, window, key_mask=key_mask, **options)
    assert torch.equal(selected.intervals, expected.intervals)
    assert selected.bound == expected.bound


def test_selection_by_torch_matches_definition(monkeypatch):
    scores = torch.randint(6, (2, 3, 90)).float()
    monkeypatch.setattr(_ops, "has_kernels_for", lambda _: False)
    selected = select_key_intervals(scores, 11)
    assert torch.equal(selected.to_mask(), select(scores, 11, causal_elements(90, 90)))


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70)),
    query_length=st.integers(1, 80),
    tile_rows=st.sampled_from([1, 3, 16, 128]),
    bound_known=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_torch_tile_lists_equal_library(shape, query_length, tile_rows, bound_known, seed):
    generator = torch.Generator().manual_seed(seed)
    intervals = torch.randint(0, query_length + 1, (*shape, 2), generator=generator).int()
    bound = [shape[2], 0] if bound_known else []
    expected = _ops.build_tile_lists(intervals, tile_rows, query_length, [])
    assert_same_lists(
        in_torch.build_tile_lists(intervals, tile_rows, query_length, bound), expected
    )


def assert_same_lists(tile_lists, expected):
    for actual, wanted in zip(tile_lists[2:], expected[2:], strict=True):
        assert torch.equal(actual, wanted)
    for one, other in zip(lists_of(tile_lists), lists_of(expected), strict=True):
        assert torch.equal(one, other)


def lists_of(tile_lists):
    keys, begin, count, _ = tile_lists
    return [keys[b : b + n] for b, n in zip(begin.flatten(), count.flatten(), strict=True)]


@pytest.mark.parametrize("device", DEVICES)
def test_tile_lists_of_a_selection_equal_library(device):
    scores = torch.randn(1, 2, 1000, device=device)
    chosen = select_key_intervals(scores, 60)
    arguments = (chosen.intervals, 128, 1000, list(chosen.bound))
    assert_same_lists(in_torch.build_tile_lists(*arguments), _ops.build_tile_lists(*arguments))


def test_broken_bound_loses_keys_and_reads_no_others():
    intervals = torch.tensor([0, 300]).expand(1, 1, 400, 2).int()
    keys, begin, count, full = in_torch.build_tile_lists(intervals, 128, 300, [10, 0])
    assert keys.shape[0] == 30 and (full <= count).all()
    assert ((begin + count)[count > 0] <= 30).all()
    assert ((keys >= 0) & (keys < 400)).all()


def test_selection_and_tile_lists_make_no_quadratic_tensor(monkeypatch):
    length, window = 4096, 64
    scores = torch.randn(1, 1, length)
    monkeypatch.setattr(_ops, "has_kernels_for", lambda _: False)
    with LargestTensor() as largest:
        intervals = select_key_intervals(scores, window).intervals
        in_torch.build_tile_lists(intervals, 128, length, [window, 1])
    assert largest.elements <= 2 * length * (1 + window // 128 + 2)
