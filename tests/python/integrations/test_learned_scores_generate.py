"""A model with learned scores generates the same text as attention over the whole text, with every cache and way
of generating."""

import copy

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from doge_generation import left_padding
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    load_scores,
    remove_learned_scores,
    save_scores,
)
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.integrations.transformers.families import is_attention
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from scored_models import FAMILIES, RULES, make_base, make_ids, make_scored, spread_scores
from scores_by_definition import by_definition
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
PROMPT, NEW = 13, 9
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=PROMPT + NEW + 3),
    "slots": lambda model: DynamicMaskCache(model.config),
    "static_slots": lambda model: DynamicMaskCache(model.config, static=True),
}


PADDING = left_padding(2, PROMPT, 4)


def padded(length):
    return torch.nn.functional.pad(PADDING, (0, length - PROMPT), value=1)


def by_definition_of(model, ids, mask=None):
    with torch.no_grad(), by_definition(model):
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def assert_writes_by_definition(model, written, mask=None):
    logits = by_definition_of(model, written[:, :-1], mask)
    assert torch.equal(logits[:, PROMPT - 1 :].argmax(-1), written[:, PROMPT:])


def generate(model, **options):
    ids = make_ids(PROMPT)
    with torch.no_grad():
        return model.generate(
            ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
        )  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(
    ("rule", "places"),
    [("window", 10), ("all", 18), ("competing", 14), ("heads", 13), ("streaming", 14)],
)
def test_steps_and_chunks_equal_definition(rule, places, name):
    """The slots of two heads hold only the keys of the rule."""
    model = make_scored(rule=rule)
    cache = assert_parts_equal_definition(model, name)
    if name == "slots":
        assert cache.layers[0].keys.shape[1:-1].numel() == places


def own_scores(hidden, key, value):
    return key[..., 0] - value[..., -1]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("scorer", ["hidden", "value", "key_norm", own_scores])
def test_scorer_of_latent_attention_equals_definition(scorer, name):
    """Caches of transformers hold latents, from which the layer makes keys and values."""
    if name == "static" and IS_TRANSFORMERS_4:
        pytest.skip("StaticCache of transformers 4 takes only values of the keys' size")
    assert_parts_equal_definition(make_scored("DeepseekV3", scorer=scorer), name)


def assert_parts_equal_definition(model, name):
    """Reads a left-padded prompt in two parts and then one token at a time. Returns the cache."""
    ids, mask = make_ids(PROMPT + NEW), padded(PROMPT + NEW)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, logits = CACHES[name](model), []
    cuts = [0, 7, PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1)]
    with torch.no_grad():
        for start, stop in zip(cuts, cuts[1:], strict=False):
            out = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            logits.append(out.logits)
    logits, expected = torch.cat(logits, 1), by_definition_of(model, ids, mask)
    tokens = mask.bool()
    torch.testing.assert_close(logits[tokens], expected[tokens], atol=5e-5, rtol=1e-4)
    return cache


@pytest.mark.parametrize(
    ("phase", "name"), [("soft", "none"), ("soft", "dynamic"), ("hard", "none"), *(("hard", name) for name in CACHES)]
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True])
def test_padding_between_turns_equals_texts_alone(phase, name, late):
    """The recent window counts tokens: a short message beside a long one leaves a row its own last tokens. The next token makes a
    late score."""
    model = spread_scores(add_learned_scores(make_base(), **RULES["all"], late=late))
    model, ids = model.set_score_phase(phase), make_ids(PROMPT + NEW)
    mask = torch.ones_like(ids)
    mask[0, 6:11] = mask[0, PROMPT + 2 : PROMPT + 4] = mask[1, 3:5] = mask[1, -1] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = None if name == "none" else CACHES[name](model)
    cuts, logits = [0, PROMPT, PROMPT + 2, PROMPT + 3, PROMPT + NEW], []
    with torch.no_grad():
        for start, stop in zip(cuts, cuts[1:], strict=False) if cache else [(0, PROMPT + NEW)]:
            out = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
                past_key_values=cache, use_cache=cache is not None,
            )  # fmt: skip
            logits.append(out.logits)
        for row, tokens in enumerate(mask.bool()):
            alone = model(ids[row : row + 1, tokens], use_cache=False).logits[0]
            torch.testing.assert_close(
                torch.cat(logits, 1)[row, tokens], alone, atol=5e-5, rtol=1e-4
            )


@pytest.mark.parametrize("name", ["slots", "static"])
def test_dense_prompt_equals_that_of_a_growing_cache(name):
    model = spread_scores(add_learned_scores(make_base(), **RULES["all"], dense_prefill=True))
    ids, logits = make_ids(PROMPT + NEW), []
    with torch.no_grad():
        for cache in (CACHES["dynamic"](model), CACHES[name](model)):
            parts = ids.split([PROMPT, 1, NEW - 1], 1)
            logits.append(torch.cat([model(x, past_key_values=cache).logits for x in parts], 1))
    torch.testing.assert_close(*logits, atol=5e-5, rtol=1e-4)


def test_scores_of_padded_rows_get_gradients_of_texts_alone():
    model, ids = make_scored(rule="all"), make_ids(PROMPT, batch=1)
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0
    tokens, gradients = mask.bool(), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    for inputs, kept in ((padded, tokens[0]), ({"input_ids": ids[tokens][None]}, slice(None))):
        model(**inputs, use_cache=False).logits[:, kept].square().sum().backward()
        gradients.append([next(layer.scorer.parameters()).grad for layer in scored_layers(model)])
        model.zero_grad()
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_generates_tokens_of_the_definition(family):
    """Each family generates with one kind of cache. Families with sliding layers, which keep their own caches, use every kind."""
    model = make_scored(family)
    slides = len(model.config.learned_scores["layers"]) < model.config.num_hidden_layers
    names = ("dynamic", "static", "slots") if slides else ("static", "slots")
    # Its StaticCache takes only values of the keys' size.
    if IS_TRANSFORMERS_4 and family == "DeepseekV3":
        names = ("dynamic", "slots")
    for name in names:
        assert_writes_by_definition(model, generate(model, past_key_values=CACHES[name](model)))


WAYS = {
    "padded": {"attention_mask": PADDING},
    "sampling": {"do_sample": True, "top_k": 8, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_generation_mode_gives_tokens_of_the_definition(way):
    """Every way works with each cache, and without one, when each token recomputes the whole text."""
    model = make_scored(rule="divided")
    torch.manual_seed(3)
    with by_definition(model):
        expected = generate(model, **WAYS[way], use_cache=False)
    for name in ("none", "dynamic", "static", "slots"):
        if name == "static" and way in ("sampling", "beams"):
            continue  # for another number of rows
        cache = {"past_key_values": CACHES[name](model)} if name != "none" else {}
        torch.manual_seed(3)
        written = generate(model, **WAYS[way], **cache, use_cache=name != "none")
        assert torch.equal(written, expected), name


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="transformers 4 needs a token that ends a text")
@pytest.mark.parametrize("assistant", ["prompt", "model"])
def test_assisted_decoding_gives_tokens_of_the_definition(assistant):
    """Drafts come from the prompt or from the model without its scores. The model is a GPT-2, whose first layer knows positions.
    In other families equal tokens tie in that layer, and the last digit of a score depends on the number of tokens in a call."""
    model = make_scored("GPT2", rule="divided", num_attention_heads=2)
    ids = make_ids(PROMPT, batch=1)
    cache = DynamicMaskCache(model.config)
    options = {"prompt_lookup_num_tokens": 3}
    if assistant == "model":
        options = {"assistant_model": make_base("GPT2")}
    with torch.no_grad():
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW, do_sample=False,
            **options,
        )  # fmt: skip
    assert_writes_by_definition(model, written)


def test_sliding_layers_keep_their_own_cache():
    model = make_scored("Gemma3", "window")
    kinds = [type(layer).__name__ for layer in DynamicMaskCache(model.config).layers]
    assert kinds == ["DynamicMaskLayer", "DynamicSlidingWindowLayer"]


@pytest.mark.skipif(
    IS_TRANSFORMERS_4, reason="hybrid models of transformers 4 have caches of their own"
)
def test_states_of_a_hybrid_model_follow_the_rows_of_slots():
    model = make_scored("FalconH1")
    expected, cache = generate(model, num_beams=3), DynamicMaskCache(model.config)
    for _ in range(2):
        assert torch.equal(generate(model, num_beams=3, past_key_values=cache), expected)
        cache.reset()


def test_soft_phase_generates_with_gates():
    model = make_scored(rule="all").set_score_phase("soft")
    assert_writes_by_definition(model, generate(model))


# ---- Packed prompts ---------------------------------------------------------------------------------

POSITIONS = torch.cat([torch.arange(5), torch.arange(PROMPT - 5)]).repeat(2, 1)


def mask_of_texts():
    documents = (POSITIONS == 0).cumsum(1)
    return (documents[..., None] == documents[:, None]).tril()[:, None]


def test_static_cache_takes_a_dense_mask_of_padding():
    model, ids, padding = make_scored(), make_ids(PROMPT), PADDING
    causal = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    mask = torch.nn.functional.pad(causal & padding[:, None, None].bool(), (0, NEW + 3))
    with torch.no_grad():
        logits, expected = (
            model(
                ids, attention_mask=attention_mask, past_key_values=CACHES["static"](model)
            ).logits
            for attention_mask in (mask, padding)
        )
    torch.testing.assert_close(logits[padding.bool()], expected[padding.bool()])


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="tiny models are those of transformers 5")
def test_packed_texts_stay_apart_in_a_multimodal_model():
    """The masks of Gemma 3 with images are made before its text decoder makes a cache, by positions."""
    from tiny_models import class_named, tiny_config, tiny_model

    multimodal = class_named("Gemma3ForConditionalGeneration")
    model = tiny_model(multimodal, tiny_config(multimodal), "eager")
    ids = make_ids(PROMPT)
    with torch.no_grad():
        expected = model(ids, position_ids=POSITIONS, use_cache=True).logits
        add_learned_scores(model, keep_window_size=PROMPT)
        logits = model(ids, position_ids=POSITIONS, use_cache=True).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def tiny_scored_model(name, **sizes):
    pytest.importorskip("transformers", minversion="5.24")
    from tiny_models import class_named, tiny_config, tiny_model

    config = tiny_config(class_named(name))
    config.update(sizes)
    model = tiny_model(class_named(name), config, "eager")
    add_learned_scores(model, keep_window_size=4, recent_window=2)
    for layer in scored_layers(model):
        for parameter in layer.scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("kind", [DynamicMaskCache, DynamicCache])
@pytest.mark.parametrize(
    "name, cut, atol, rtol",
    [
        ("HrmTextForCausalLM", [7, 1, 1, 4], 5e-5, 1e-4),
        ("DoryForCausalLM", [7, 1, 1, 4], 5e-5, 1e-4),
        ("Zamba2ForCausalLM", [7, 6], 2e-4, 2e-4),
    ],
)
def test_layers_get_numbers_of_their_own_in_a_cache(name, cut, atol, rtol, kind):
    """HRM and Dory run a layer under several numbers. Zamba 2 numbers all its attention layers -1."""
    model = tiny_scored_model(name)
    ids = make_ids(PROMPT)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = kind(config=model.config)
        parts = [model(part, **{CACHE: cache}).logits for part in ids.split(cut, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=atol, rtol=rtol)


def test_cache_without_the_layers_of_all_loops_raises():
    with torch.no_grad(), pytest.raises(ValueError, match="expected one that has all layers"):
        tiny_scored_model("DoryForCausalLM")(make_ids(PROMPT), cache=DynamicCache())


def test_steps_of_layers_without_numbers_are_equal_in_both_caches():
    """Without scores, too, Zamba 2's steps differ by 1e-3 from the whole text."""
    model = tiny_scored_model("Zamba2ForCausalLM")
    ids, logits = make_ids(PROMPT), []
    with torch.no_grad():
        for kind in (DynamicMaskCache, DynamicCache):
            cache = kind(config=model.config)
            parts = ids.split([7, 1, 1, 4], 1)
            logits.append(torch.cat([model(x, past_key_values=cache).logits for x in parts], 1))
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "sizes", "numbers"),
    [
        ("Zamba2ForCausalLM", {}, [-1, -1]),
        ("LongcatFlashForCausalLM", {"num_layers": 2}, [0, 1, 2, 3]),
        ("HrmTextForCausalLM", {}, [0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("save", [save_scores, PreTrainedModel.save_pretrained])
def test_scores_of_layers_with_other_names_than_numbers_are_restored(
    save, name, sizes, numbers, tmp_path
):
    """LongCat's layer layers.1.self_attn.0 has the number 2."""
    model = tiny_scored_model(name, **sizes)
    base = remove_learned_scores(copy.deepcopy(model))
    assert [layer.layer_idx for layer in base.modules() if is_attention(layer)] == numbers
    model.tie_weights()  # of whole blocks, but not of their scorers
    save(model, tmp_path)
    ids = make_ids(PROMPT)
    with torch.no_grad():
        restored = load_scores(base, tmp_path)(ids, use_cache=False).logits
        assert torch.equal(restored, model(ids, use_cache=False).logits)
