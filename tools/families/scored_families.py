"""Compares learned scores in every class of transformers that generates with their definition."""

from __future__ import annotations

import re

import torch

from eager_comparison import TOLERANCE, Verdict
from family_facts import Facts, facts_of
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    remove_learned_scores,
)
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from scores_by_definition import by_definition
from tiny_inputs import inputs_for
from tiny_models import ModelClass, tiny_config, tiny_model

TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
RULE = {"keep_window_size": 4, "recent_window": 2, "sink_tokens": 1}


def compare_scores(model_class: ModelClass, attention: tuple[type, ...] | None = None) -> Verdict:
    """Returns the verdict on learned scores in a class: "equal", "refused", "raises", "wrong" or "untested".

    attention: the classes of attention layers; None: those of the table of families.
    """
    model = None
    try:
        model = tiny_model(model_class, tiny_config(model_class), "eager")
        inputs = inputs_for(model)
        expected = _logits(model, inputs)
    except Exception as error:
        untested = Verdict("untested", _in_words(error))
        return untested if model is None else _add_scores(model, attention) or untested
    refused = _add_scores(model, attention)
    if refused is not None:
        return refused
    errors = []
    try:
        model.set_score_phase("soft")
        errors.append(_difference(_logits(model, inputs), expected))
        torch.manual_seed(2)
        for layer in scored_layers(model):
            for parameter in layer.scorer.parameters():
                torch.nn.init.normal_(parameter)
        for phase in ("soft", "hard"):
            model.set_score_phase(phase)
            logits = _logits(model, inputs)
            with by_definition(model):
                errors.append(_difference(logits, _logits(model, inputs)))
        errors.append(_difference_with_slots(model, inputs, logits))
    except Exception as error:
        return Verdict("raises", _in_words(error))
    if not torch.equal(_logits(model.set_score_phase("off"), inputs), expected):
        return Verdict("wrong", "the phase 'off' differs from the base model")
    remove_learned_scores(model)
    if not torch.equal(_logits(model, inputs), expected):
        return Verdict("wrong", "the model differs after remove_learned_scores")
    return Verdict("equal" if max(errors) <= TOLERANCE else "wrong", "", max(errors))


def facts_of_class(model_class: ModelClass) -> tuple[Facts, tuple[type, ...]]:
    """Returns what the table says of a class, and the classes of its attention layers; nothing if it cannot be built."""
    try:
        model = tiny_model(model_class, tiny_config(model_class), "eager")
        facts = facts_of(model, inputs_for(model))
    except Exception:
        return Facts(), ()
    return facts, tuple({type(m) for m in model.modules() if type(m).__name__ in facts.attention})


def _add_scores(model: torch.nn.Module, attention: tuple[type, ...] | None) -> Verdict | None:
    """Adds scores to a model. Returns a verdict only if the model is refused."""
    try:
        add_learned_scores(model, **RULE, attention=attention)
    except ValueError as error:
        return Verdict("refused", _in_words(error))
    return None


def _logits(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference relative to the largest expected value. NaN counts as the largest difference."""
    error = ((actual - expected).abs().amax() / expected.abs().amax()).item()
    return error if error == error else float("inf")


def _difference_with_slots(model: torch.nn.Module, inputs: dict, logits: torch.Tensor) -> float:
    """Returns the difference of logits of a prompt that fills a `DynamicMaskCache`. 0: such a config has none."""
    try:
        cache = {CACHE: DynamicMaskCache(model.config), "use_cache": True}
    except ValueError as error:
        if re.search("num_kv_shared_layers|without keep_window_size", str(error)):
            return 0.0
        raise
    return _difference(_logits(model, inputs | cache), logits)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
