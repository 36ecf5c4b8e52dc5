"""With a press as scores, the kept keys and the logits equal those of kvpress, and presses that need queries are refused.

Releases of kvpress need transformers before 5.3. Without kvpress, the tests use presses of the same form.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache

from flash_dmattn.integrations.kvpress import add_press
from flash_dmattn.integrations.transformers import DynamicMaskCache, remove_learned_scores
from scored_models import make_base, make_ids
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
PROMPT, NEW = 30, 8


class NormPress:
    """A press with the form of kvpress' KnormPress."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert module.rotary_emb is not None and attentions is None
        return -keys.norm(dim=-1)


class DMSPress(SimpleNamespace):
    """A press with the form of kvpress' DMSPress."""


def distinct_ids(length):
    """Returns tokens without repetition, because in the first layer keys of equal tokens have equal norms."""
    return torch.stack([torch.randperm(62)[:length] + 2 for _ in range(2)])


def steps(model, cache, ids):
    """Returns the logits of a prompt and of the tokens after it, one at a time."""
    with torch.no_grad():
        logits = [model(ids[:, :PROMPT], past_key_values=cache).logits]
        logits += [
            model(ids[:, i : i + 1], past_key_values=cache).logits
            for i in range(PROMPT, PROMPT + NEW)
        ]
    return torch.cat(logits, 1)


def norms_by_definition(model, ids, visible_of):
    """Returns logits of layers that attend to the keys of visible_of(norms [B, H, S]), bool [B, H, S, S]."""

    # kvpress wraps functions that others register, and passes the dropout by position.
    def attend(module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).mT * scaling
        visible = visible_of(key.norm(dim=-1)).repeat_interleave(groups, 1)
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("norms_by_definition", attend)
    model.config._attn_implementation_internal = "norms_by_definition"
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_scored_prompt_is_pruned_and_later_tokens_stay():
    """The prompt is dense. Later tokens see the prompt's keys with the smallest norms and all later keys. Later keys take the
    places of prompt keys."""
    keep, ids = 9, distinct_ids(PROMPT + NEW)

    def visible_of(norms):
        length = norms.shape[-1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        visible = causal.expand(*norms.shape[:2], -1, -1).clone()
        for query in range(PROMPT, length):
            # Keys of the prompt make room for those after it, but none for the query itself.
            later = query - PROMPT
            kept = norms[..., :PROMPT].argsort(-1)[..., : keep - later]
            visible[:, :, query, :PROMPT] = torch.zeros_like(
                norms[..., :PROMPT], dtype=torch.bool
            ).scatter(-1, kept, True)
        return visible

    expected = norms_by_definition(make_base(), ids, visible_of)
    model = add_press(make_base(), NormPress(), keep)
    for cache in (DynamicCache(config=model.config), DynamicMaskCache(model.config)):
        torch.testing.assert_close(steps(model, cache, ids), expected, atol=3e-5, rtol=1e-4)
    assert cache.layers[0].keys.shape[2] == keep + 1  # its own key


@pytest.mark.parametrize("cache", ["all_keys", "slots"])
def test_threshold_keeps_recent_and_good_keys(cache):
    window, ids = 5, distinct_ids(PROMPT + NEW)

    def visible_of(norms):
        length = norms.shape[-1]
        age = torch.arange(length)[:, None] - torch.arange(length)
        recent = (age <= window) | (torch.arange(length)[:, None] < PROMPT)
        return (age >= 0) & (recent | (norms <= 2.5)[:, :, None])

    expected = norms_by_definition(make_base(), ids, visible_of)
    press = DMSPress(press=NormPress(), threshold=-2.5, sliding_window_size=window, decoding=True)
    slots = cache == "slots"
    model = add_press(make_base(), press, PROMPT + NEW if slots else None)
    cache = DynamicMaskCache(model.config) if slots else DynamicCache(config=model.config)
    torch.testing.assert_close(steps(model, cache, ids), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("dense_prefill", [True, False])
def test_prompt_follows_the_rule_unless_dense_prefill(dense_prefill):
    base, ids = make_base(), make_ids(PROMPT)
    expected = base(ids).logits
    model = add_press(base, NormPress(), 4, dense_prefill=dense_prefill)
    logits = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert ((logits - expected).abs().max() < 1e-4) == dense_prefill
    remove_learned_scores(model)
    assert torch.equal(base(ids).logits, expected)
    assert not any(hasattr(layer.self_attn, "rotary_emb") for layer in base.model.layers)


# ---- Against kvpress itself -------------------------------------------------------------------------


@pytest.fixture
def kvpress():
    return pytest.importorskip("kvpress")


@pytest.fixture
def their_steps(kvpress):
    if not IS_TRANSFORMERS_4:
        pytest.skip("kvpress reads the arguments of layers by their names of transformers 4")

    def compute(model, press, ids):
        cache = DynamicCache(config=model.config)
        with press(model):
            logits = steps(model, cache, ids)
        return logits, cache

    return compute


# LagKVPress gives many keys equal scores. topk keeps arbitrary ones among them, and this library the more recent.
PRESSES = (
    "CURPress", "ExpectedAttentionPress", "ExpectedAttentionStatsPress", "KVzapPress", "KeyDiffPress", "KnormPress",
    "LeverageScorePress", "QFilterPress", "RandomPress", "StreamingLLMPress",
)  # fmt: skip


def make_press(kvpress, name):
    """Makes a press. One that loads something from a hub gets random numbers instead."""
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    options = {
        "CURPress": {"local_window_size": 4},
        "ExpectedAttentionPress": {"n_future_positions": 16},
        "ExpectedAttentionStatsPress": {"n_future_positions": 16},
        "RandomPress": {"seed": 0},
    }
    press = getattr(kvpress, name)(compression_ratio=0.6, **options.get(name, {}))
    layers, query_heads, heads, channels, features = 2, 4, 2, 8, 32
    if name == "ExpectedAttentionStatsPress":
        press.mu = torch.randn(layers, query_heads, channels)
        press.cov = torch.eye(channels).expand(layers, query_heads, -1, -1)
    if name == "QFilterPress":
        press.load_q_filters = lambda model_name: filters
        filters = torch.randn(layers, heads, channels)
    if name == "KVzapPress":
        press.kvzap_model_name = "nvidia/KVzap-mlp-"  # that of a model without a name
        config = KVzapConfig(input_dim=features, hidden_dim=8, output_dim=heads, n_modules=layers)
        press.kvzap_model = KVzapModel(config)
    return press


# A press that uses queries projects them as the model's family does.
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Llama", name) for name in PRESSES),
        ("Qwen3", "ExpectedAttentionPress"),
        ("Qwen3", "KnormPress"),
    ],
)
def test_kept_keys_and_next_logits_equal_kvpress(family, name, kvpress, their_steps):
    press = make_press(kvpress, name)
    ids = distinct_ids(PROMPT + NEW)
    theirs = make_base(family)
    theirs.set_attn_implementation("sdpa")  # which kvpress has patched, unlike eager attention
    with torch.no_grad(), press(theirs):
        cache = DynamicCache(config=theirs.config)
        torch.manual_seed(0)  # of random sketches
        theirs(ids[:, :PROMPT], past_key_values=cache)
    kept = [layer.keys.clone() for layer in cache.layers]
    with torch.no_grad():
        expected = theirs(
            ids[:, PROMPT : PROMPT + 1],
            past_key_values=cache,
            cache_position=torch.tensor([PROMPT]),
            position_ids=torch.tensor([[PROMPT]]),
        ).logits
    keep = kept[0].shape[2]
    press.compression_ratio = 0.0  # which has to change nothing
    model = add_press(make_base(family), press, keep)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        torch.manual_seed(0)
        model(ids[:, :PROMPT], past_key_values=cache)
        logits = model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
        slots = DynamicMaskCache(model.config)
        torch.manual_seed(0)
        model(ids[:, :PROMPT], past_key_values=slots)
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)
    for layer, keys in zip(slots.layers, kept, strict=True):
        assert layer.keys.shape[2] == keep + 1  # the last key of the prompt, which is recent
        assert (torch.cdist(keys, layer.keys).amin(-1) < 1e-4).all()


@pytest.mark.parametrize("decoding", [True, False])
@pytest.mark.parametrize(("name", "threshold"), [("KnormPress", -2.5), ("KVzapPress", 0.0)])
def test_thresholds_equal_kvpress(name, threshold, decoding, kvpress, their_steps):
    press = make_press(kvpress, name)
    press = kvpress.DMSPress(press, threshold, sliding_window_size=5, decoding=decoding)
    ids = distinct_ids(PROMPT + NEW)
    theirs = make_base()
    theirs.set_attn_implementation("sdpa")
    expected, _ = their_steps(theirs, press, ids)
    model = add_press(make_base(), press)
    logits = steps(model, DynamicCache(config=model.config), ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_sinks_of_a_streaming_press_stay(kvpress):
    press, ids = kvpress.StreamingLLMPress(), distinct_ids(PROMPT + NEW)
    with pytest.raises(ValueError, match="^keep_window_size: got 4 with a StreamingLLMPress"):
        add_press(make_base(), press, 4)
    model = add_press(make_base(), press, 9)
    every, cache = DynamicCache(config=model.config), DynamicMaskCache(model.config)
    steps(model, every, ids), steps(model, cache, ids)
    equal = every.layers[0].keys[:, :, :, None] == cache.layers[0].keys[:, :, None]
    is_held = equal.all(-1).any(-1)  # in the cache
    kept = [0, 1, 2, 3, *range(PROMPT + NEW - 6, PROMPT + NEW)]  # 9, and the last token's own
    assert is_held[..., kept].all() and is_held.sum() == 2 * 2 * len(kept)


@pytest.mark.parametrize("name", ["SnapKVPress", "TOVAPress", "ObservedAttentionPress"])
def test_presses_that_need_queries_are_refused(name, kvpress):
    with pytest.raises(ValueError, match=f"^press: got {name}, whose choice depends on queries"):
        add_press(make_base(), getattr(kvpress, name)(), 4)


def test_own_press_with_a_score_of_queries_is_refused(kvpress):
    class Own(kvpress.SnapKVPress):
        pass

    with pytest.raises(ValueError, match="^press: got Own, whose choice depends on queries"):
        add_press(make_base(), Own(), 4)


def test_every_scorer_press_is_served_or_refused(kvpress):
    """This test fails for a new release until its new presses are listed as served or refused."""
    from flash_dmattn.integrations.kvpress import WITHOUT_QUERIES

    scorers = {
        name
        for name, press in vars(kvpress).items()
        if isinstance(press, type) and issubclass(press, kvpress.ScorerPress)
    }
    refused = {
        "CapPress", "CompactorPress", "CriticalKVPress", "NonCausalAttnPress", "ObservedAttentionPress",
        "PyramidKVPress", "ScorerPress", "SnapKVPress", "TOVAPress",
    }  # fmt: skip
    assert scorers == WITHOUT_QUERIES | refused
