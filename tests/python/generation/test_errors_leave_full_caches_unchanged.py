"""A meaningless argument of flash_dmattn_with_kvcache raises an error that names it and leaves the caches unchanged."""

import re

import pytest
import torch

from flash_dmattn import flash_dmattn_with_kvcache
from small_caches import HKV, HQ, PLACES, WINDOW, B, D

SLOTS = {
    "slot_positions": torch.zeros(B, HKV, PLACES, dtype=torch.int32),
    "slot_counts": torch.zeros(B, HKV, 8, dtype=torch.int32),
}


def all_keys(**spoiled):
    """Returns the arguments of a correct call on a cache of all keys, with those in `spoiled` replaced."""
    return {
        "query": torch.randn(B, 2, HQ, D),
        "k_cache": torch.zeros(B, PLACES, HKV, D),
        "v_cache": torch.zeros(B, PLACES, HKV, D),
        "score_cache": torch.zeros(B, HKV, PLACES),
        "key": torch.randn(B, 2, HKV, D),
        "value": torch.randn(B, 2, HKV, D),
        "scores": torch.randn(B, HKV, 2),
        "cache_seqlens": torch.tensor([3, 7], dtype=torch.int32),
        "keep_window_size": WINDOW,
    } | spoiled


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("scores: got None, expected the new tokens': key and value are given", {"scores": None}),
        ("key: got None, expected the new tokens': scores is given", {"key": None, "value": None}),
        ("value: got None, expected the new tokens': key is given", {"value": None, "score_cache": None, "scores": None}),
        ("scores: got scores without score_cache, expected both or none", {"score_cache": None}),
        ("slot_positions: got None, expected int32 [B, Hkv, S]", {"slot_counts": torch.zeros(B, HKV, 8).int()}),
        ("slot_counts: got None, expected int32 [B, Hkv, 8]", {"slot_positions": torch.zeros(B, HKV, PLACES).int()}),
        ("keep_window_size: got None, expected the window of the slots' rule", SLOTS | {"keep_window_size": None}),
        ("score_cache: got None, expected float32 [B, Hkv, S]", SLOTS | {"score_cache": None, "scores": None}),
        ("key: got None, expected the new tokens, [B, m, Hkv, D]", SLOTS | {"key": None, "value": None, "scores": None}),
        ("key_mask: got a mask for a cache of all keys", {"key_mask": torch.ones(B, 2).bool()}),
        ("score_cache: got None", {"score_cache": None, "scores": None}),
        ("keep_window_size: got -1", {"keep_window_size": -1}),
        ("cache_seqlens: got list", {"cache_seqlens": [1, 2]}),
        ("scale: got 0", {"scale": 0.0}),
        ("query: got shape (1, 2, 4, 8)", {"query": torch.randn(1, 2, HQ, D)}),
        ("query: got shape (2, 2, 3, 8)", {"query": torch.randn(B, 2, 3, D)}),
        ("query: got torch.bfloat16", {"query": torch.randn(B, 2, HQ, D).bfloat16()}),
        ("key: got shape (1, 2, 2, 8)", {"key": torch.randn(1, 2, HKV, D)}),
        ("key: got shape (2, 2, 1, 8)", {"key": torch.randn(B, 2, 1, D)}),
        ("value: got shape (2, 1, 2, 8)", {"value": torch.randn(B, 1, HKV, D)}),
        ("value: got torch.bfloat16", {"value": torch.randn(B, 2, HKV, D).bfloat16()}),
        ("scores: got shape (2, 1, 2)", {"scores": torch.randn(B, 1, 2)}),
        ("v_cache: got shape (2, 9, 1, 7), expected (2, 9, 2, 7)", {"v_cache": torch.zeros(B, PLACES, 1, 7)}),
        ("value_dim: got 9, expected 1 to 8, the head_dim", {"v_cache": torch.zeros(B, PLACES, HKV, 9)}),
        ("score_cache: got shape (2, 2, 8)", {"score_cache": torch.zeros(B, HKV, PLACES - 1)}),
        ("score_cache: got torch.bfloat16", {"score_cache": torch.zeros(B, HKV, PLACES).bfloat16()}),
        ("cache_seqlens: got shape (1,)", {"cache_seqlens": torch.zeros(1).int()}),
        ("cache_seqlens: got torch.float32", {"cache_seqlens": torch.zeros(B)}),
        ("cache_seqlens[1]: got 8, expected 0 to 7", {"cache_seqlens": torch.tensor([0, 8]).int()}),
        ("cache_seqlens[0]: got -1", {"cache_seqlens": torch.tensor([-1, 0]).int()}),
        ("cache_leftpad: got shape (2, 1)", {"cache_leftpad": torch.zeros(B, 1).int()}),
        ("cache_leftpad[1]: got 10", {"cache_leftpad": torch.tensor([0, 10]).int()}),
        ("keep_window_size: got 2.5", {"keep_window_size": 2.5}),
        ("backend: got 'abacus', expected one of 'cuda', 'triton', 'flex', 'cpu', 'reference', or None for the first",
         {"backend": "abacus"}),
        ("scores_are_bias: got 'no'", {"scores_are_bias": "no"}),
        ("return_lse: got 'no'", {"return_lse": "no"}),
        ("k_cache: got an expanded tensor", {"k_cache": torch.zeros(1, PLACES, HKV, D).expand(B, -1, -1, -1)}),
        ("k_cache: got a tensor that requires a gradient",
         {"k_cache": torch.zeros(B, PLACES, HKV, D, requires_grad=True)}),
    ],
)  # fmt: skip
def test_bad_full_cache_argument_leaves_cache_unchanged(message, spoiled):
    arguments = all_keys(**spoiled)
    names = ("k_cache", "v_cache", "score_cache", "cache_seqlens")
    caches = [arguments[name] for name in names if torch.is_tensor(arguments[name])]
    before = [t.clone() for t in caches]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(message)):
        flash_dmattn_with_kvcache(**arguments)
    assert all(map(torch.equal, before, caches))


def test_tokens_aliasing_the_cache_are_written_correctly():
    """The new tokens lie in the cache's own memory, and their source and destination overlap."""
    arguments = all_keys(
        k_cache=torch.randn(B, PLACES, HKV, D), cache_seqlens=torch.tensor([1, 1]).int()
    )
    arguments["key"] = arguments["k_cache"][:, :2]
    expected = arguments["key"].clone()
    flash_dmattn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"][:, 1:3], expected)


def test_double_cache_accepts_float32_scores():
    arguments = all_keys()
    wide = {
        name: t.double() if name in ("query", "key", "value", "k_cache", "v_cache") else t
        for name, t in all_keys(**arguments).items()
    }
    torch.testing.assert_close(
        flash_dmattn_with_kvcache(**wide).float(), flash_dmattn_with_kvcache(**arguments)
    )
