"""A meaningless call of a model with learned scores, or of one that would get them, raises an error that names the argument. A
row has the words of the error, as a regular expression, and the call. The model is unchanged afterwards."""

import contextlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from dense_attention import B
from doge_generation import make_ids
from flash_dmattn.integrations.kvpress import add_press
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    KeyBudgets,
    ScoreSchedule,
    add_learned_scores,
    budget_loss,
    divergence,
    divide_budget,
    freeze_all_but_scores,
    load_dms,
    load_scores,
    save_scores,
    set_key_budgets,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.integrations.transformers.learned_scores.layers import ScoreCall
from scored_models import VOCABULARY, make_base, make_scored

pytestmark = pytest.mark.transformers
ERRORS = (ValueError, TypeError, RuntimeError, FileNotFoundError)
PROMPT = 13

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
T5 = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
REFUSED_MODELS = [
    ("not causal|no layers of a decoder", lambda: transformers.BertModel(transformers.BertConfig(**TINY))),
    ("encoder-decoder", lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))),
    ("none has a class that was compared.*attention=MyAttention",
     lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))),
    ("have a sliding window of their own", lambda: make_base("Mistral", sliding_window=4)),
    ("attend twice by the same keys", lambda: transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**TINY))),
    ("have scores of their own; call enable_flash_dmattn", lambda: transformers.DogeForCausalLM(transformers.DogeConfig(**TINY))),
]  # fmt: skip
WRONG_OPTIONS = [
    ("^scorer: got 'norm', expected one of", {"scorer": "norm"}),
    (r"^scorer: got a function of \(hidden\), expected one of", {"scorer": lambda hidden: hidden}),
    (r"^scorer: got a function of .*expected one of \(hidden, key, value\)", {"scorer": torch.nn.Linear(4, 2)}),
    ("^first_logit: got nan, expected a number within", {"first_logit": math.nan}),
    ("^keep_window_size: got 3 sizes, expected one, or 2: one for each key head", {"keep_window_size": [1, 2, 3]}),
    ("^keep_window_size: got lists for 1 layers, expected 2", {"keep_window_size": [[1, 1]], "recent_window": 1}),
    ("^attention: got 'LlamaAttention', expected a class", {"attention": "LlamaAttention"}),
    ("^model: got a .*none has a class that attention names.*GRU", {"attention": torch.nn.GRU}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "make", "options"),
    [
        *((f"^model: got a .*without .* can have scores.*({w})", m, {}) for w, m in REFUSED_MODELS),
        *((words, make_base, options) for words, options in WRONG_OPTIONS),
    ],
)
def test_scores_that_cannot_be_added_raise_and_leave_the_model(words, make, options):
    model = make()
    config, names = model.config, list(model.state_dict())
    with pytest.raises(ERRORS, match=words):
        add_learned_scores(model, **{"keep_window_size": 3} | options)
    assert model.config is config and list(model.state_dict()) == names


def call_scored(phase="hard", rule="all", tokens=PROMPT, **options):
    """options: functions from the model to arguments of its call."""

    def call():
        model = make_scored(rule=rule).set_score_phase(phase)
        arguments = {name: make(model) for name, make in options.items()}
        model(make_ids(B, tokens) % VOCABULARY, **arguments)

    return call


def slots(model):
    return DynamicMaskCache(model.config)


def static(model):
    return StaticCache(config=model.config, max_cache_len=PROMPT + 3)


def offloaded(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # a stream of a GPU copies its keys
    return cache


def keys_without_scores(model):
    cache = DynamicCache(config=model.config)
    model.set_score_phase("off")(make_ids(B, 3), past_key_values=cache)
    model.set_score_phase("hard")
    return cache


def shared_keys():
    """A model with the config of one whose last layer attends to the keys of an earlier one, as in Gemma 3n and 4."""
    model = make_scored()
    model.config.num_kv_shared_layers = 1
    return model


def mask_of_texts(extra):
    documents = torch.cat([torch.zeros(5), torch.ones(PROMPT - 5)])
    mask = (documents[:, None] == documents).tril().expand(B, 1, -1, -1)
    return lambda model: torch.nn.functional.pad(mask, (0, extra))


def intervals_of(extra, image):
    """Intervals of two texts of 5 and 8 tokens, or of one whose first 5 tokens are an image and see each other."""
    first, last = torch.arange(PROMPT), torch.full((PROMPT,), PROMPT)
    (first if image else last)[:5] = 0 if image else 5
    intervals = torch.nn.functional.pad(torch.stack([first, last], -1), (0, 0, 0, extra))
    return lambda model: intervals.int().expand(B, 1, -1, -1)


def additive(model):
    mask = torch.zeros(1, 1, PROMPT, PROMPT)
    mask[..., 1, 0] = -2
    return mask


def call_new(base=None, **options):
    """Calls a model in training whose scores were added with `options`."""
    return lambda: add_learned_scores(make_base(**base or {}), 3, **options).train()(
        make_ids(B, PROMPT) % VOCABULARY
    )


def attend(times=1, cache=lambda _: None):
    """Attention of a layer that never calls the cache's `update`."""

    def call():
        model = make_scored()
        layer = model.model.layers[0].self_attn
        call = ScoreCall(layer, 0, torch.randn(1, 3, 32), cache(model), None, None)
        for _ in range(times):
            call.scores_of(*torch.randn(2, 1, 2, 3, 8))

    return call


def go_on_without_scores():
    """Goes on with a cache after a call that raised between the layer's hook and its `update`."""
    model, ids = make_scored(num_hidden_layers=1), make_ids(B, PROMPT) % VOCABULARY
    cache = slots(model)
    failure = model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(ids, past_key_values=cache)
    failure.remove()
    model.set_score_phase("off")(ids, past_key_values=cache)


def phase(*arguments, model=make_scored):
    return lambda: model().set_score_phase(*arguments)


def random_scores():
    return add_learned_scores(make_base(), keep_window_size=3, scorer="random")


def dms(**change):
    def call():
        model = make_base("Qwen3")
        given = {
            "dms_window_size": 4,
            "dms_alpha_scale": 3.0,
            "dms_initial_alpha_offset": 0.5,
            **change,
        }
        for name, value in given.items():
            setattr(model.config, name, value)
        load_dms(model)

    return call


def divide(texts, *arguments, **options):
    return lambda: divide_budget(make_scored(), texts, *arguments, progress=False, **options)


class DMSPress(SimpleNamespace):
    threshold, sliding_window_size, decoding = None, 4, True
    press = SimpleNamespace(score=lambda *_: None)


def budgets(*windows):
    return lambda: set_key_budgets(make_scored(), KeyBudgets(0.0, windows))


def loss(mask):
    def call():
        model = make_scored().set_score_phase("soft")
        model(make_ids(B, PROMPT) % VOCABULARY)
        budget_loss(model, 0.4, mask=mask)

    return call


def adapted():
    model = make_scored()
    model.model.layers[0].self_attn.scorer.get_base_layer = id  # as in a layer of PEFT
    return model


CALLS_OF_SCORES = [
    ("^model: got a? ?LlamaConfig", lambda: add_learned_scores(make_base().config, keep_window_size=2)),
    ("with learned scores, expected one without", lambda: add_learned_scores(make_scored(), keep_window_size=3)),
    ("without learned scores", lambda: set_score_phase(make_base(), "soft")),
    ("^phase: got 'medium'", phase("medium")),
    ("^phase: got 'soft' with scores that are not log gates", phase("soft", model=random_scores)),
    ("^temperature: got 0.3 with the phase 'hard'", phase("hard", 0.3)),
    (r"^scorer: got torch.float32 of shape \(2, 13, 1\)", call_new(scorer=lambda h, k, v: h[..., :1])),
    ("^scorer: got a second attention call in layer 0", attend(times=2)),
    ("^dropout: got 0.1", call_new({"attention_dropout": 0.1})),
    ("^attention_mask: got an additive mask that adds other", call_scored(attention_mask=additive)),
    # Caches that do not fit.
    (f"^{CACHE}: got keys without scores in layer 0", call_scored(past_key_values=keys_without_scores, tokens=1)),
    (f"^{CACHE}: got a DynamicCache with offloading=True", call_scored(past_key_values=offloaded)),
    ("^scores: got none.*add_learned_scores.* in the phase 'hard'", call_scored(past_key_values=slots, phase="off")),
    ("^scores: got none", go_on_without_scores),
    (f"^{CACHE}: got a DynamicMaskCache whose layer 0 got no keys", attend(cache=slots)),
    (f"^{CACHE}: got 1 layers, expected more than 1", call_scored(past_key_values=lambda _: slots(make_scored(num_hidden_layers=1)))),
    ("^phase: got 'soft' with a DynamicMaskCache", call_scored(past_key_values=slots, phase="soft")),
    (f"^{CACHE}: got keep_window_size", call_scored(past_key_values=lambda _: slots(make_scored(rule="window")))),
    (f"^{CACHE}: got a static one", call_scored(past_key_values=static, phase="soft")),
    *((r"^attention_mask: got torch.bool of shape \(2, 1, 13, ", call_scored(past_key_values=cache, attention_mask=mask_of_texts(extra)))
      for cache, extra in ((slots, 0), (static, 3))),
    *((r"^attention_mask: got torch.int32 of shape \(2, 1, 1[36], 2\)", call_scored(past_key_values=cache, attention_mask=intervals_of(extra, image)))
      for cache, extra in ((slots, 0), (static, 3)) for image in (False, True)),
    # Budgets.
    ("^target: got a model without scores of a forward", lambda: budget_loss(make_scored(), 0.4)),
    ("^texts: got one of 9 tokens", divide(make_ids(B, 9), length=10)),
    ("^least: got 1.5, expected 0 to 1", divide(make_ids(B, 40), 15, least=1.5)),
    (r"^budgets: got caps for \[2\] heads of the layers, expected \[2, 2\]", budgets((1, 1))),
    (r"^budgets: got caps for \[1, 1\] heads of the layers, expected \[2, 2\]", budgets((1,), (1,))),
    ("^caps: got int 3, expected a list of numbers for each layer", lambda: KeyBudgets(0.0, 3)),
    ("^caps: got Tensor", lambda: KeyBudgets(0.0, torch.ones(2, 2))),
    *((f"^texts: got {type(texts).__name__}, expected a list", divide(texts)) for texts in (None, {"input_ids": []})),
    (r"^mask: got shape \(2, 1, 13\), expected \(2, 13\)", loss(torch.ones(B, 1, PROMPT))),
    ("^mask: got list", loss([[1]])),
    (r"^teacher: got shape \(1, 3, 5\), expected \(2, 3, 5\)", lambda: divergence(torch.ones(2, 3, 5), torch.ones(1, 3, 5))),
    (r"^mask: got shape \(2, 1\), expected \(2, 3\)", lambda: divergence(*torch.ones(2, 2, 3, 5), torch.ones(2, 1))),
    ("^model: got a LlamaForCausalLM without learned scores", lambda: freeze_all_but_scores(make_base())),
    # Checkpoints of DMS, and presses.
    ("^config.model_type: got 'qwen2'", dms(model_type="qwen2")),
    ("^config.dms_disable_eviction: got True", dms(dms_disable_eviction=True)),
    ("^config.dms_window_size: got none", dms(dms_window_size=None)),
    ("^config.num_kv_shared_layers: got 1", lambda: slots(shared_keys())),
    ("^late: got True with recent_window=1", dms(dms_window_size=0)),
    ("^dtype: got it for a model", lambda: load_dms(make_base("Qwen3"), dtype=torch.bfloat16)),
    ("with dms_separate_alpha=True and 0 tensors", dms(dms_separate_alpha=True)),
    ("^press: got dict, expected a ScorerPress", lambda: add_press(make_base(), {}, 4)),
    ("^press: got a DMSPress without threshold", lambda: add_press(make_base(), DMSPress())),
    ("^narrowing: got 2, expected a number from 0 to 1", lambda: ScoreSchedule(narrowing=2)),
    ("^share: got 'half', expected a number", lambda: ScoreSchedule(share="half")),
    ("^share: got 0, expected a number from 1e-06 to 1", lambda: ScoreSchedule(share=0, by_ratio=True)),
    # Files.
    ("^model: got a scorer in layer 0 that an adapter of PEFT changes", lambda: save_scores(adapted(), "unused")),
    *(("^folder: got int, expected a path", call) for call in (
        lambda: load_scores(make_base(), 3), lambda: save_scores(make_scored(), 3))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), CALLS_OF_SCORES)
def test_bad_call_of_a_model_with_scores_raises_naming_the_argument(words, call):
    with pytest.raises(ERRORS, match=words):
        call()


def write(text):
    return lambda folder: (folder / "learned_scores.json").write_text(text)


def remove(name):
    return lambda folder: (folder / name).unlink()


NO_SETTINGS = " without learned_scores.json"
BAD_FOLDERS = [  # words, what happens to a saved folder, the name that is loaded
    ("/learned_scores.json without 'scorer', expected a file of save_scores", write('{"layers": [0]}'), ""),
    ("/learned_scores.json without 'keep_window_size', expected a file",
     write('{"layers": [0], "scorer": "hidden", "dense_prefill": false}'), ""),
    ("/learned_scores.json with .*line 1 column.*, expected JSON", write('{"layers": [0'), ""),
    ("/learned_scores.json with a list, expected an object", write("[]"), ""),
    ("/learned_scores.safetensors with .*, expected safetensors",
     lambda folder: (folder / "learned_scores.safetensors").write_bytes(b"1"), ""),
    (f"{NO_SETTINGS} and without learned_scores in.* of save_scores", remove("learned_scores.json"), ""),
    (f"{NO_SETTINGS}.* of save_scores", lambda folder: (folder / "empty").mkdir(), "empty"),
    (f", which is not a folder,{NO_SETTINGS}.* of save_scores", id, "missing"),
    (f", which is not a folder,{NO_SETTINGS}.* of save_scores", id, "learned_scores.json"),
    (" with learned_scores.json but without learned_scores.safetensors, expected both.* of save_scores",
     remove("learned_scores.safetensors"), ""),
]  # fmt: skip


@pytest.mark.parametrize(("words", "spoil", "name"), BAD_FOLDERS)
def test_bad_folder_raises_naming_it(words, spoil, name, tmp_path):
    make_base().save_pretrained(tmp_path)
    save_scores(make_scored(), tmp_path)
    spoil(tmp_path)
    with pytest.raises(ERRORS, match=f"^folder: got {re.escape(str(tmp_path / name))}{words}"):
        load_scores(make_base(), tmp_path / name)


@pytest.mark.parametrize(
    ("words", "options", "scorer"),
    [
        ("^scorer: got None for the scores in", {}, lambda h, k, v: k[..., 0]),
        (r"^model: got one with scores in layers \(0, 1, 2\)", {"num_hidden_layers": 3}, "hidden"),
        (r"^folder: got .* of layer 0 of shape \(2,\), expected \(1,\)", {"num_key_value_heads": 1}, "hidden"),
    ],
)  # fmt: skip
def test_scores_of_another_model_raise_and_leave_the_model(words, options, scorer, tmp_path):
    save_scores(make_scored(scorer=scorer), tmp_path)
    model = make_base(**options)
    names = list(model.state_dict())
    model.config.learned_scores = before = make_scored().config.learned_scores | {"late": True}
    with pytest.raises(ERRORS, match=words):
        load_scores(model, tmp_path)
    assert list(model.state_dict()) == names and not hasattr(model, "set_score_phase")
    assert model.config.learned_scores == before


@pytest.mark.parametrize("options", [{"late": True}, {"scorer": "value"}])
def test_scores_of_another_form_raise(options, tmp_path):
    save_scores(add_learned_scores(make_base(), 4, recent_window=3, **options), tmp_path)
    [part] = options
    with pytest.raises(
        ValueError, match=f"^model: got one with {part} .*, expected {options[part]!r}"
    ):
        load_scores(add_learned_scores(make_base(), 4, recent_window=3), tmp_path)
