"""Adding scores runs no forward and, if it fails, leaves the model; afterwards, masks and attention
implementations keep their meaning."""

import inspect

import pytest
import torch

from flash_dmattn.integrations.transformers import (
    add_learned_scores,
    remove_learned_scores,
)
from flash_dmattn.integrations.transformers.learned_scores import add
from scored_models import make_base, make_ids

pytestmark = pytest.mark.transformers


def without_source(base):
    """Returns a subclass whose forward has no source."""
    names = {"Base": base}
    exec(
        "class Own(Base):\n    def forward(self, *args, **k): return super().forward(*args, **k)",
        names,
    )
    names["Own"].forward.__signature__ = inspect.signature(base.forward)
    return names["Own"]


def test_named_attention_class_gets_scores():
    """A family that is in no table, with code that has no source."""
    model = make_base()
    model.model.__class__ = without_source(type(model.model))
    own = without_source(type(model.model.layers[0].self_attn))
    for layer in model.model.layers:
        layer.self_attn.__class__ = own
    ids, expected = make_ids(), add_learned_scores(make_base(), keep_window_size=3)
    add_learned_scores(model, keep_window_size=3, attention=own)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("part", ["make_scorer", "decoder_hooks", "own_config"])
def test_error_while_scores_are_added_leaves_the_model(part, monkeypatch):
    model = make_base()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}

    def fail(*args):
        raise OSError(part)

    monkeypatch.setattr(add, part, fail)
    with pytest.raises(OSError, match=part):
        add_learned_scores(model, keep_window_size=3)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert not hasattr(model.config, "learned_scores")


def test_no_forward_of_the_model_runs_while_scores_are_added():
    model, calls = make_base("Gemma2"), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *args: calls.append(args))
    add_learned_scores(model, keep_window_size=3)
    assert not calls


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("rule", [{}, {"recent_window": 2, "sink_tokens": 1}], ids=str)
def test_prefix_that_sees_itself_stays_visible_in_either_form(form, rule):
    ids, base = make_ids(12), make_base()
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    mask[..., :4, :4] = True
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = base(ids, attention_mask=additive, use_cache=False).logits
    mask = mask if form == "bool" else additive
    add_learned_scores(base, 100, **rule)  # keeps every key
    for phase in ("soft", "hard"):
        logits = base.set_score_phase(phase)(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("phase", ["soft", "hard"])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_dmattn"])
def test_attention_implementation_of_a_model_with_scores_changes_only_in_the_phase_off(name, phase):
    ids = make_ids(1, 30)
    model = make_base("Llama")
    model.set_attn_implementation("sdpa")
    base = model(ids).logits
    add_learned_scores(model, keep_window_size=3).set_score_phase(phase)
    scored = model(ids).logits
    stored = "dynamic_mask_attention" if name == "flash_dmattn" else name
    words = f"attn_implementation: got '{stored}' for a LlamaForCausalLM .* phase '{phase}'"
    with pytest.raises(ValueError, match=words):
        model.set_attn_implementation(name)
    assert torch.equal(model(ids).logits, scored)
    model.set_score_phase("off")
    model.set_attn_implementation(name)
    expected = model(ids).logits
    torch.testing.assert_close(expected, base, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == stored
    model.set_score_phase(phase)
    assert torch.equal(model(ids).logits, scored)
    remove_learned_scores(model)
    assert model.config._attn_implementation == stored
    assert torch.equal(model(ids).logits, expected)
