"""The mask of one decoding step equals that of transformers' own function and takes few operators."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
from transformers import DynamicCache, StaticCache, masking_utils  # noqa: E402

from doge_generation import left_padding, make_ids, make_model  # noqa: E402
from flash_dmattn.integrations._shared.layer_call import is_causal_mask  # noqa: E402
from flash_dmattn.integrations.transformers import (  # noqa: E402
    DynamicMaskCache,
    enable_flash_dmattn,
    key_interval_mask,
)
from operators_called import OperatorsCalled  # noqa: E402

pytestmark = pytest.mark.transformers

B, S, MISSING = 2, 40, 13
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=S + 30),
    "slots": lambda config: DynamicMaskCache(config),
    "static slots": lambda config: DynamicMaskCache(config, static=True),
}


@torch.no_grad()
def make_step(cache, padding):
    """Returns a config, and a cache that holds S tokens."""
    ours = enable_flash_dmattn(make_model(num_hidden_layers=1))
    cache = CACHES[cache](ours.config)
    padding = None if padding is None else padding[:, :S].long()
    ours(make_ids(B, S), attention_mask=padding, past_key_values=cache)
    return ours.config, cache


@pytest.mark.parametrize(
    ("cache", "is_padded", "most"),
    [
        ("dynamic", False, 0),
        ("dynamic", True, 6),
        ("static", False, 7),
        ("static", True, 10),
        ("slots", False, 0),
        ("slots", True, 5),  # 2 compare the mask of earlier tokens, on the CPU alone
        ("static slots", False, 0),
        ("static slots", True, 9),
    ],
)
def test_step_mask_needs_at_most_n_operators(cache, is_padded, most):
    """The host launches each operator for every token, outside the graph of a compiled step. Static caches have their lengths on
    the device, for which the host does not wait."""
    padding = left_padding(B, S + 1, MISSING).bool() if is_padded else None
    is_static = "static" in cache
    config, cache = make_step(cache, padding)
    embeddings = torch.empty(B, 1, 0)
    with OperatorsCalled() as called:
        masking_utils.create_causal_mask(config, embeddings, padding, cache)
    assert len(called.all) <= most, called.all
    assert not is_static or not called.reads()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("padding", [None, "none missing", "left", "too long", "too short"])
@pytest.mark.parametrize("cache", CACHES)
def test_step_mask_equals_mask_of_transformers(cache, padding, tokens):
    if padding is not None:
        more = {"too long": 4, "too short": -1}.get(padding, 0)
        missing = 0 if padding == "none missing" else MISSING
        padding = left_padding(B, S + tokens + more, missing).bool()
        if missing:
            padding[1, S : S + 1] = False  # among the new tokens, too
    config, cache = make_step(cache, padding)
    embeddings = torch.empty(B, tokens, 0)
    mask = masking_utils.create_causal_mask(config, embeddings, padding, cache)
    key_length, key_offset = cache.get_mask_sizes(tokens, 0)
    expected = masking_utils.sdpa_mask(
        batch_size=B,
        q_length=tokens,
        kv_length=key_length,
        q_offset=cache.get_query_offset(),
        kv_offset=key_offset,
        attention_mask=padding,
        allow_is_causal_skip=False,
    )
    rows = torch.arange(tokens)[:, None]
    if mask is None:
        assert tokens == 1  # at the last key
    if mask is None or is_causal_mask(mask):
        shown = torch.arange(key_length) <= rows + key_length - tokens
        shown = shown.expand(B, 1, -1, -1)
    else:
        assert mask.dtype == torch.int32 and mask.shape == (B, 1, key_length, 2)
        first, last = mask[:, :, None].unbind(-1)
        assert ((first >= 0) & (first <= last) & (last <= tokens)).all()
        shown = (first <= rows) & (rows < last)
    assert torch.equal(shown, expected)


def test_positions_with_gaps_give_right_mask():
    """transformers 4 gives the positions of all queries."""
    position, padding = torch.tensor([3, 4, 8]), torch.arange(12)[None] != 5
    intervals = key_interval_mask(1, 12, cache_position=position, attention_mask=padding)
    first, last = intervals[:, :, None].unbind(-1)
    rows = torch.arange(3)[:, None]
    shown = (first <= rows) & (rows < last)
    expected = (torch.arange(12) <= position[:, None]) & padding
    assert torch.equal(shown[0, 0], expected)
    assert is_causal_mask(key_interval_mask(1, 9, cache_position=torch.arange(6, 9)))


@pytest.mark.parametrize("is_padded", [False, True])
def test_length_tensor_of_one_dimension_is_accepted(is_padded):
    """Static caches of transformers 5.4 and 5.5 have such a length."""
    padding = left_padding(B, 8, 3).bool() if is_padded else None
    expected = key_interval_mask(B, 8, 3, torch.tensor(4), 0, attention_mask=padding)
    intervals = key_interval_mask(B, 8, 3, torch.tensor([4]), 0, attention_mask=padding)
    assert intervals.dtype == torch.int32
    assert torch.equal(intervals, expected)


def test_mask_has_batch_of_the_model():
    padding = left_padding(1, 8, 3).bool()
    for queries, offset in ((8, 0), (1, 7)):
        intervals, expected = (
            key_interval_mask(3, 8, queries, offset, attention_mask=mask)
            for mask in (padding, padding.expand(3, -1))
        )
        assert intervals.shape == (3, 1, 8, 2)
        assert torch.equal(intervals, expected)
    assert key_interval_mask(2, 0, 3, attention_mask=torch.ones(2, 0).bool()).shape == (2, 1, 0, 2)
