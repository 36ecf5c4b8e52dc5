"""DynamicMaskCache works as a Cache of transformers."""

import copy

import pytest
import torch

from doge_generation import WINDOW, left_padding, make_ids, make_model
from flash_dmattn._core.numerics import Numerics
from flash_dmattn.integrations._shared.token_order import ScoredTokens
from flash_dmattn.integrations.transformers import DynamicMaskCache, doge, enable_flash_dmattn
from flash_dmattn.integrations.transformers.cache_layer import DynamicMaskLayer
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.keys.rule import SelectionRule
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers

B, S = 2, 40
NUMERICS = Numerics(1.0, 0.0, True, False)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def ours():
    """Makes a Doge whose layers have a window of 9."""
    return enable_flash_dmattn(make_model())


def next_logits(model, cache, tokens=6):
    return torch.cat(
        [
            model(make_ids(B, tokens, seed=9)[:, [i]], past_key_values=cache).logits
            for i in range(tokens)
        ],
        dim=1,
    )


def filled(model, *lengths, **options):
    """Returns a cache that has read prompts of these lengths, one after the other."""
    cache, ids = DynamicMaskCache(model.config, **options), make_ids(B, sum(lengths))
    for part in ids.split(lengths, dim=1):
        model(part, past_key_values=cache)
    return cache


# ---- Methods ---------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_text(ours):
    cache = DynamicMaskCache(ours.config)
    assert len(cache) == 3 and cache.get_seq_length() == 0 and not cache.is_initialized
    ours(make_ids(B, S), past_key_values=cache)
    assert [cache.get_seq_length(i) for i in range(3)] == [S] * 3
    assert cache.is_initialized and not cache.is_compileable and cache.is_sliding == [False] * 3
    assert cache.layers[0].keys.shape == (B, 2, WINDOW, 8)
    if IS_TRANSFORMERS_4:
        assert cache.get_mask_sizes(torch.arange(S, S + 5), 0) == (5, S)
        assert cache.max_batch_size == B and cache.get_max_cache_shape() == -1
    else:
        assert cache.get_mask_sizes(5, 0) == (5, S) and cache.get_query_offset() == S
        assert cache.batch_size == B and cache.get_max_length() == -1
        assert cache.is_croppable and all(layer.supports_early_init for layer in cache.layers)
        assert not any(cache.is_recording_past(i) for i in range(3))
        cache.activate_past_recording()
        assert all(cache.is_recording_past(i) for i in range(3))


# Versions of transformers give either.
@pytest.mark.parametrize(("dropped", "number"), [(0, torch.tensor), (5, int), (5, torch.tensor)])
def test_dropped_tokens_leave_no_trace(dropped, number, ours):
    expected = next_logits(ours, filled(ours, S, 7))
    cache = filled(ours, S)
    cache.activate_past_recording()
    ids = make_ids(B, S + 7)
    ours(torch.cat([ids[:, S:], make_ids(B, dropped, seed=4)], dim=1), past_key_values=cache)
    assert cache.get_seq_length() == S + 7 + dropped
    cache.crop(number(S + 7 if IS_TRANSFORMERS_4 else -dropped))
    assert cache.get_seq_length() == S + 7 and cache.layers[0].slots.pending == 0
    torch.testing.assert_close(next_logits(ours, cache), expected)


def test_every_layer_of_a_static_cache_has_the_length(ours):
    """Only the first layer counts tokens; the others derive the length from their slots and pending tokens."""
    cache = filled(ours, S, 1, static=True)
    for tokens, length in ((1, S + 2), (5, S + 7)):
        ours(make_ids(B, tokens), past_key_values=cache)
        assert [int(cache.get_seq_length(i)) for i in range(3)] == [length] * 3
    cache.activate_past_recording()
    ours(make_ids(B, 4), past_key_values=cache)
    assert cache.layers[2].slots.pending == 4
    assert [int(cache.get_seq_length(i)) for i in range(3)] == [S + 11] * 3
    cache.crop(S + 9 if IS_TRANSFORMERS_4 else -2)
    assert [int(cache.get_seq_length(i)) for i in range(3)] == [S + 9] * 3
    cache.reset()
    assert [cache.get_seq_length(i) for i in range(3)] == [0] * 3


def test_tokens_of_a_recorded_prompt_can_be_dropped(ours):
    expected = next_logits(ours, filled(ours, S))
    for options in ({}, {"static": True}, {"static": True, "chunk": 4}):
        cache = DynamicMaskCache(ours.config, **options)
        cache.activate_past_recording()
        ours(torch.cat([make_ids(B, S), make_ids(B, 3, seed=4)], dim=1), past_key_values=cache)
        cache.crop(S if IS_TRANSFORMERS_4 else -3)
        assert int(cache.get_seq_length()) == S
        torch.testing.assert_close(next_logits(ours, cache), expected)


def test_failed_call_leaves_recorded_tokens(ours):
    expected = next_logits(ours, filled(ours, S, 5))
    cache, ids = filled(ours, S), make_ids(B, S + 5)[:, S:]
    cache.activate_past_recording()
    ours(ids[:, :3], past_key_values=cache)
    states = torch.zeros(B, 2, 2, 8)
    for present in (None, torch.tensor([[True, True], [False, True]])):
        with pytest.raises(ValueError, match="scores: got shape"):
            tokens = ScoredTokens(states, states, torch.zeros(B, 3, 2), present)
            cache.layers[0].attend(torch.zeros(B, 2, 4, 8), tokens, NUMERICS)
    ours(ids[:, 3:], past_key_values=cache)
    torch.testing.assert_close(next_logits(ours, cache), expected)


@pytest.mark.parametrize("tokens", [1, 3])
def test_tokens_after_the_end_of_recording_commit_the_recorded_ones(tokens, ours):
    expected = next_logits(ours, filled(ours, S, 3, tokens))
    cache, ids = filled(ours, S), make_ids(B, S + 3 + tokens)[:, S:]
    cache.activate_past_recording()
    ours(ids[:, :3], past_key_values=cache)
    for layer in cache.layers:
        layer.record_past = False
    ours(ids[:, 3:], past_key_values=cache)
    assert cache.layers[0].slots.pending == 0
    torch.testing.assert_close(next_logits(ours, cache), expected)


def test_recording_without_a_crop_changes_nothing(ours):
    """If assisted decoding adds more tokens than there are places, the oldest are committed."""
    expected = next_logits(ours, filled(ours, S, 200))
    for lengths in ([S, 200], [S, 100, 1, 99], [S, 127, 73]):
        cache, ids = DynamicMaskCache(ours.config, static=True), make_ids(B, S + 200)
        cache.activate_past_recording()
        for part in ids.split(lengths, dim=1):
            ours(part, past_key_values=cache)
        torch.testing.assert_close(next_logits(ours, cache), expected, rtol=1e-5, atol=1e-5)


def test_prefetch_restores_offloaded_slots(ours):
    cache = filled(ours, S)
    expected = next_logits(ours, copy.deepcopy(cache))
    for which in ((0,), (2,), ()):
        cache.offload(*which)
        assert all(layer.keys.device.type == "cpu" for layer in cache.layers)
        cache.prefetch(*which)
    assert torch.equal(next_logits(ours, cache), expected)


@pytest.mark.parametrize("use", ["attend", "fill", "prefetch"])
def test_offloaded_slots_come_back_with_the_next_tokens(use):
    """The slots only appear to be on another device here; tests on a GPU move them."""
    states, scores = torch.randn(B, 1, 2, 8), torch.randn(B, 2, 1)
    layer, moves = DynamicMaskLayer(SelectionRule(4)), []
    tokens = ScoredTokens(states, states, scores)
    layer.fill(tokens)
    layer._move_slots, layer.device = moves.append, torch.device("cuda")
    if use == "attend":
        layer.attend(states, tokens, NUMERICS)
    elif use == "fill":
        layer.reset()
        layer.fill(tokens)
    else:
        layer.prefetch()
    assert set(moves) == {torch.device("cuda")}


def test_row_operations_work_on_offloaded_slots(ours):
    """Operations without new tokens run on the slots' device."""
    caches = [DynamicMaskCache(ours.config) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
        ours(make_ids(B, S), past_key_values=cache)
    caches[1].offload()
    for cache in caches:
        cache.crop(S - 3 if IS_TRANSFORMERS_4 else -3)
        cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(*(next_logits(ours, cache) for cache in caches))


@pytest.mark.parametrize("static", [False, True])
def test_reset_begins_a_new_text_of_as_many_rows_and_ends_recording(static, ours):
    expected = next_logits(ours, filled(ours, S, static=static))
    cache = DynamicMaskCache(ours.config, static=static)
    cache.activate_past_recording()
    ours(make_ids(B, 13, seed=4), past_key_values=cache)
    assert cache.layers[0].slots.pending == 13
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=f"{CACHE}: got tokens of 3 rows, expected 2"):
        ours(make_ids(3, S), past_key_values=cache)
    ours(make_ids(B, S), past_key_values=cache)
    assert torch.equal(next_logits(ours, cache), expected)
    for layer in cache.layers:
        assert layer.slots.pending == 0 and layer.slots.chunk == layer.chunk


@pytest.mark.parametrize("static", [False, True])
def test_weights_of_scores_are_multiplied_once_for_each_text(static, ours, monkeypatch):
    multiply, calls = doge.weights_of_product, []
    monkeypatch.setattr(doge, "weights_of_product", lambda *own: calls.append(1) or multiply(*own))
    reused, parts = DynamicMaskCache(ours.config, static=static), [30, 1, 2, 7]
    for _ in range(3):
        logits = []
        for cache in (reused, DynamicMaskCache(ours.config, static=static)):
            calls.clear()
            steps = make_ids(2, sum(parts)).split(parts, 1)
            logits.append([ours(step, past_key_values=cache).logits for step in steps])
            assert len(calls) == len(ours.model.layers)
        assert all(map(torch.equal, *logits))
        reused.reset()
        for layer in ours.model.layers:
            torch.nn.init.normal_(layer.self_attn.dt_proj.weight)


@pytest.mark.parametrize(
    "method", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"]
)
def test_row_operations_on_empty_cache_do_nothing(method, ours):
    cache = DynamicMaskCache(ours.config)
    getattr(cache, method)(3 if "repeat" in method else torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="transformers 4 has one config for all layers")
def test_each_layer_keeps_its_window():
    model = make_model()
    model.config.per_layer_config = {0: {"keep_window_size": 20}}
    cache = DynamicMaskCache(model.config)
    assert [layer.rule.keep_window_size for layer in cache.layers] == [20, WINDOW, WINDOW]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
    ],
)
def test_cache_saved_after_row_operations_continues_with_its_bits(
    method, argument, rows, static, ours, tmp_path
):
    cache, ids = filled(ours, S, static=static), make_ids(B, 6, seed=9)[rows]
    getattr(cache, method)(argument)
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    for token in ids.split(1, dim=1):
        expected, got = (ours(token, past_key_values=c).logits for c in (cache, loaded))
        assert torch.equal(got, expected)


# ---- Precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_scores_are_float32_in_16_bits(precision, ours):
    """The remaining keys are those of attention over all keys, which the model's own test compares with float32."""
    ours = ours if precision == "autocast" else ours.to(getattr(torch, precision))
    ids = make_ids(B, S + 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        whole = ours(ids, use_cache=False).logits[:, S:]
        cache = DynamicMaskCache(ours.config)
        ours(ids[:, :S], past_key_values=cache)
        steps = [ours(ids[:, [i]], past_key_values=cache).logits for i in range(S, S + 6)]
    assert cache.layers[0].slots.scores.dtype == torch.float32
    assert cache.layers[0].keys.dtype == (
        torch.float16 if precision == "float16" else torch.bfloat16
    )
    error = (torch.cat(steps, dim=1) - whole).abs().max()
    assert error < 0.02 * whole.abs().max()


def test_cached_keys_have_no_gradient(ours):
    with torch.enable_grad():
        cache = DynamicMaskCache(ours.config)
        ours(make_ids(B, S), labels=make_ids(B, S), past_key_values=cache).loss.backward()
        with pytest.raises(RuntimeError, match="requires a gradient"):
            ours(make_ids(B, 1), past_key_values=cache)


def test_earlier_masks_hide_tokens_in_later_calls(ours):
    """A later mask says which new tokens are padding, and has to cover the text."""
    padding, ids = left_padding(B, S + 1, 7), make_ids(B, S + 1)
    results = []
    for later in (padding, None):
        cache = DynamicMaskCache(ours.config)
        ours(ids[:, :S], attention_mask=padding[:, :S], past_key_values=cache)
        with pytest.raises(ValueError, match=f"^attention_mask: got 1 positions, expected {S + 1}"):
            ours(ids[:, S:], attention_mask=padding[:, S:], past_key_values=cache)
        positions = padding.cumsum(1)[:, S:] - 1
        results.append(
            ours(ids[:, S:], attention_mask=later, position_ids=positions, past_key_values=cache)
        )
    assert torch.equal(results[0].logits, results[1].logits)
