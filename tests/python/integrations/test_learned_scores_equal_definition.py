"""Layers of other families with learned scores equal their definition, forward and backward, padded and packed.

In the soft phase they attend to all keys with gates, in the hard phase to the keys of the rule.
"""

import pytest
import torch

from doge_generation import left_padding
from flash_dmattn.integrations.transformers import add_learned_scores, remove_learned_scores
from scored_models import FAMILIES, RULES, make_base, make_ids, make_scored
from scores_by_definition import by_definition
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
S = 21


INPUTS = {
    "no_mask": {},
    "left": {"attention_mask": left_padding(2, S, 6)},
    "right": {"attention_mask": left_padding(2, S, 6).flip(1)},
    "packed": {"position_ids": torch.cat([torch.arange(8), torch.arange(S - 8)]).repeat(2, 1)},
}


def tokens_of(name):
    return INPUTS[name].get("attention_mask", torch.ones(2, S, dtype=torch.long)).bool()


def logits_and_gradients(model, name):
    logits = model(make_ids(S), use_cache=False, **INPUTS[name]).logits[tokens_of(name)]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [logits, *torch.autograd.grad(logits, parameters, direction, allow_unused=True)]


def assert_equals_definition(model, name, phase):
    model.set_score_phase(phase)
    results = logits_and_gradients(model, name)
    with by_definition(model):
        expected = logits_and_gradients(model, name)
    for ours, theirs in zip(results, expected, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(
                ours, theirs, atol=3e-5 * theirs.abs().amax().item(), rtol=1e-4
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_definition(family):
    model = make_scored(family)
    for phase in ("soft", "hard"):
        assert_equals_definition(model, "left", phase)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_definition(rule, name):
    model = make_scored(rule=rule)
    for phase in ("soft", "hard"):
        assert_equals_definition(model, name, phase)


@pytest.mark.parametrize("scorer", ["mlp", "value", "key_norm"])
def test_scorers_equal_definition(scorer):
    model = make_scored(scorer=scorer)
    for phase in ("soft", "hard") if scorer != "key_norm" else ("hard",):
        assert_equals_definition(model, "no_mask", phase)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_without_effect_keep_the_logits(family):
    """New soft scores and a hard window of all keys change nothing beyond rounding; scores that are off or removed
    change no bit."""
    model, ids = make_base(family), make_ids()
    expected, names = model(ids).logits, set(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    add_learned_scores(model, **RULES["all"])
    assert set(model.state_dict()) > names
    assert (model(ids).logits - expected).abs().max() > 1e-2
    model.set_score_phase("soft")
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)
    model.set_score_phase("off")
    assert torch.equal(model(ids).logits, expected)
    remove_learned_scores(model)
    assert torch.equal(model(ids).logits, expected) and set(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds
    assert not hasattr(model.config, "learned_scores") and not hasattr(model, "set_score_phase")
    add_learned_scores(model, keep_window_size=len(ids[0]))
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="tiny models are those of transformers 5")
def test_text_decoder_of_a_multimodal_model_equals_definition():
    from scored_families import compare_scores
    from tiny_models import class_named

    assert compare_scores(class_named("Qwen2VLForConditionalGeneration")).kind == "equal"


def test_custom_scorers_get_hidden_keys_and_values():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(32 + 2 * 8 + 2 * 8, 2)

        def forward(self, hidden, key, value):
            return -self.mix(torch.cat([hidden, key.flatten(2), value.flatten(2)], -1)).square()

    model = add_learned_scores(make_base(), **RULES["all"], scorer=Own())
    first, second = (layer.self_attn.scorer for layer in model.model.layers)
    assert first.function.mix.weight is not second.function.mix.weight
    for phase in ("soft", "hard"):
        assert_equals_definition(model, "left", phase)


def test_scores_of_minus_infinity_have_finite_gradients():
    """The scorer closes some gates completely, with a score of -inf."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(32, 2)

        def forward(self, hidden, key, value):
            z = self.proj(hidden)
            return torch.where(z > 0, z.sigmoid().log(), float("-inf"))

    model = add_learned_scores(make_base(), **RULES["all"], scorer=Own())
    for phase in ("soft", "hard"):
        model.set_score_phase(phase)
        for result in logits_and_gradients(model, "left"):
            assert result is None or result.isfinite().all()
