"""Models, arguments and scores that learned scores cannot work with are refused with the reason."""

import inspect

import pytest
import torch
import transformers

from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    remove_learned_scores,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.learned_scores import add
from scored_models import make_base, make_config, make_ids

pytestmark = pytest.mark.transformers

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def encoder():
    return transformers.BertModel(transformers.BertConfig(**TINY))


def encoder_decoder():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    )


def without_interface():
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    )


def sliding():
    return make_base("Mistral", sliding_window=4)


def attends_twice():
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**TINY))


def doge():
    return transformers.DogeForCausalLM(transformers.DogeConfig(**TINY))


REFUSED = {
    encoder: "not causal|no layers of a decoder",
    encoder_decoder: "encoder-decoder",
    without_interface: "none has a class that was compared.*attention=MyAttention",
    sliding: "have a sliding window of their own",
    attends_twice: "attend twice by the same keys",
    doge: "have scores of their own; call enable_flash_dmattn",
}


@pytest.mark.parametrize("make", REFUSED)
def test_other_models_are_refused_with_the_reason(make):
    with pytest.raises(
        ValueError,
        match=f"^model: got a .*without an attention layer that can have scores.*({REFUSED[make]})",
    ):
        add_learned_scores(make(), keep_window_size=4)


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


@pytest.mark.parametrize("part", ["make_scorer", "mask_hooks", "own_config"])
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


def test_wrong_arguments_are_refused():
    model = make_base()
    for options, message in {
        (("keep_window_size", 3), ("scorer", "norm")): "^scorer: got 'norm', expected one of",
        (): "^keep_window_size: got None without score_threshold",
        (("recent_window", 3),): "^recent_window: got 3 without keep_window_size",
        (("keep_window_size", -1),): "^keep_window_size: got -1",
        (("keep_window_size", 0),): "^keep_window_size: got 0 .*so that no key is visible",
    }.items():
        with pytest.raises(ValueError, match=message):
            add_learned_scores(model, **dict(options))
    with pytest.raises(TypeError, match="^model: got LlamaConfig|^model: got a? ?LlamaConfig"):
        add_learned_scores(model.config, keep_window_size=2)
    with pytest.raises(ValueError, match="without learned scores"):
        set_score_phase(model, "soft")
    add_learned_scores(model, keep_window_size=3, scorer="random")
    with pytest.raises(ValueError, match="^phase: got 'medium'"):
        model.set_score_phase("medium")
    with pytest.raises(ValueError, match="^phase: got 'soft' with scores that are not log gates"):
        model.set_score_phase("soft")
    with pytest.raises(ValueError, match="with learned scores, expected one without"):
        add_learned_scores(model, keep_window_size=3)


WRONG_OPTIONS = {
    "name of a class": ({"attention": "LlamaAttention"}, TypeError, "attention: got 'LlamaAttention', expected a class"),
    "class of no layer": ({"attention": torch.nn.GRU}, ValueError, "model: got a .*none has a class that attention names.*GRU"),
    "function of one": ({"scorer": lambda hidden: hidden}, TypeError, r"scorer: got a function of \(hidden\), expected one of"),
    "module of one": ({"scorer": torch.nn.Linear(4, 2)}, TypeError, r"scorer: got a function of .*expected one of \(hidden, key, value\)"),
    "number": ({"scorer": 3}, ValueError, "scorer: got 3, expected one of"),
    "windows of three heads": (
        {"keep_window_size": [1, 2, 3]}, ValueError, "keep_window_size: got 3 sizes, expected one, or 2: one for each key head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_option_is_refused_and_leaves_the_model(name):
    options, error, words = WRONG_OPTIONS[name]
    model = make_base()
    config, names = model.config, list(model.state_dict())
    with pytest.raises(error, match=f"^{words}"):
        add_learned_scores(model, **{"keep_window_size": 3} | options)
    assert model.config is config and list(model.state_dict()) == names


def test_scores_of_a_wrong_shape_are_refused():
    model = add_learned_scores(make_base(), keep_window_size=3, scorer=lambda h, k, v: h[..., :1])
    with pytest.raises(ValueError, match=r"^scorer: got torch.float32 of shape \(2, 21, 1\)"):
        model(make_ids())


def test_dropout_in_training_is_refused():
    model = add_learned_scores(make_base(attention_dropout=0.1), keep_window_size=3).train()
    with pytest.raises(ValueError, match="^dropout: got 0.1"):
        model(make_ids())


def test_additive_mask_that_adds_to_visible_keys_is_refused():
    model = add_learned_scores(make_base(), keep_window_size=3)
    ids = make_ids()
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    mask[..., 1, 0] = -2
    with pytest.raises(ValueError, match="^attention_mask: got an additive mask that adds other"):
        model(ids, attention_mask=mask)


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


def test_slots_need_a_config_with_scores():
    with pytest.raises(ValueError, match="without keep_window_size, expected"):
        DynamicMaskCache(make_config("Llama"))


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
