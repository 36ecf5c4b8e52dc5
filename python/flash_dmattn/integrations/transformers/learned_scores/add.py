"""Adds learned scores to the attention layers of a model, and removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Unpack

from ...._core.checks import resolve_flag
from ...._core.numerics import FLOAT32_MAX, check_number
from ....budgets import check_phase
from ....keys.rule import RuleParts, takes_rule
from ..._shared.config_rules import CONFIG_NAME, LearnedScores, make_rules
from ..._shared.scorers import FIRST_LOGIT, Scorer, check_scorer, make_scorer
from ..compat import (
    allow_continuous_batching,
    device_of,
    implementation_of,
    leave_untied,
    own_config,
    refuse_continuous_batching,
    restore_tied,
    store_name,
)
from ..families import (
    REASONS_AGAINST_SCORES,
    is_attention,
    number_of,
    reason_against_scores,
    reason_to_refuse,
    sizes_of,
    type_of,
)
from ..model_state import NAMES, PIECES, SCORED_NAME, STORED_NAMES, add_hook, remove_hooks
from .decoder_hooks import DecoderHook, decoder_hooks
from .layers import add_scorer, has_scores, remove_scorer

PHASES = ("soft", "hard", "off")
_METHOD = "set_score_phase"  # attributes of a model


@takes_rule
def add_learned_scores(
    model: nn.Module,
    keep_window_size: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    scorer: str | Scorer = "hidden",
    dense_prefill: bool = False,
    late: bool = False,
    first_logit: float = FIRST_LOGIT,
    attention: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    **rule: Unpack[RuleParts],
) -> nn.Module:
    """Gives the attention layers of a pretrained decoder scores, which select the keys that a query keeps.

        model = AutoModelForCausalLM.from_pretrained(...)
        add_learned_scores(model, keep_window_size=1024, recent_window=256, sink_tokens=4)
        model.set_score_phase("soft")  # training; "hard" after this call
        model.generate(..., past_key_values=DynamicMaskCache(model.config))

    Every layer that attends to the whole text gets a module `scorer`, whose parameters are float32 and part of the model's;
    layers with a sliding window of their own stay as they are. The config becomes a copy: no other model changes.
    `remove_learned_scores` undoes it. If this function raises, the model stays as it was.
    Before training, scores are equal and the most recent keys win.

    Phases (`model.set_score_phase` chooses one):

    - "soft": attention to all keys. The log gates of old keys are a bias, through which they learn. Recent keys and
      sinks have no bias. Before training, results equal those of the base model. With a `temperature` the gates are
      sampled while gradients are on.
    - "hard": attention to the keys that the rule keeps. Scores choose keys and change nothing else. If they learn,
      their gradient is the gradient of a bias of old keys.
    - "off": the base model and its attention implementation, bit for bit. Only in this phase can
      `model.set_attn_implementation` choose another implementation.

    Scorers:

    - "hidden": log sigmoid(z), where z is a linear projection of the layer's input. It begins with equal gates, near 1.
    - "mlp": as "hidden", but z comes from two layers.
    - "value": as "hidden", but z is a projection of the values.
    - "key_norm": minus the length of the key. It does not learn.
    - "random": does not learn.
    - a function or module (hidden [B, S, features], key [B, S, Hkv, D], value [B, S, Hkv, Dv]) -> [B, S, Hkv]. For the
      soft phase it has to return log gates, 0 or less. With latent attention, key and value are those of each head.

    Args:
        model: a decoder of transformers, or anything that contains one (a PEFT model, a multimodal model).
        keep_window_size, rule: which keys a query sees, a `flash_dmattn.KeyRule`. A cache then holds sink_tokens +
            keep_window_size + recent_window keys for each key head. keep_window_size may also be one number for each key
            head, or a list of such lists, one for each layer with scores (see `divide_budget`).
        scorer: what gives a key its score, one of the scorers above. A module is copied for every layer.
        dense_prefill: whether the first tokens of a cache attend to all of each other and the rule begins with the
            tokens after them, as in eviction after the prompt. By default the prompt follows the rule, in O(N w) time.
        late: whether a key gets the score of the token after it, as in DMS. Needs recent_window of 2 or more without
            recent_competes.
        first_logit: the logit of every gate before training, of the scorers "hidden", "mlp" and "value".
        attention: the class of the model's attention layers, or several, for layers of a class that was not compared. They
            have to call transformers' attention interface once, with the keywords that they get. None: the classes in
            `family_table.ATTENTION`, and their subclasses.

    Returns:
        The same model.

    Raises:
        ValueError: no layer can have scores, with the reasons; the model has scores already.
        TypeError: the model is not a module; the scorer is a function of other arguments; `attention` is no class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    check_scorer(scorer)
    check_number(first_logit, "first_logit")
    first_logit = float(first_logit)
    if not abs(first_logit) <= FLOAT32_MAX:
        raise ValueError(
            f"first_logit: got {first_logit}, expected a number within the range of float32"
        )
    dense_prefill, late = resolve_flag(dense_prefill, "dense_prefill"), resolve_flag(late, "late")
    # Everything that can raise comes before the first change.
    layers = _layers_to_change(model, attention)
    sizes = [sizes_of(layer) for layer in layers]
    names = {module: name for name, module in model.named_modules()}
    numbers = tuple(number_of(layer, names[layer]) for layer in layers)
    rules = make_rules(len(layers), keep_window_size, rule)
    for own, (_, heads, _) in zip(rules, sizes, strict=True):
        own.check_heads(heads)
    scorers = [
        make_scorer(scorer, *size, device_of(layer), first_logit).train(layer.training)
        for layer, size in zip(layers, sizes, strict=True)
    ]
    hooks = decoder_hooks(model, layers)
    kind = scorer if isinstance(scorer, str) else "custom"
    stored = LearnedScores(rules, kind, numbers, dense_prefill, late, first_logit).as_dict()
    own_config(model)
    for layer, layer_scorer, own, number in zip(layers, scorers, rules, numbers, strict=True):
        add_scorer(layer, layer_scorer, number, rule=own, dense_prefill=dense_prefill, late=late)
        setattr(layer.config, CONFIG_NAME, stored)
    for decoder, hook in hooks:
        add_hook(decoder, hook.begin_forward)
        add_hook(decoder, hook.end_forward, after=True)
    for module in _pretrained_models(model):
        refuse_continuous_batching(module, STORED_NAMES)
        leave_untied(module, "scorer")
    setattr(model, _METHOD, partial(set_score_phase, model))
    return set_score_phase(model, "hard")


def set_score_phase(model: nn.Module, phase: str, temperature: float | None = None) -> nn.Module:
    """Chooses what the scores of a model do: "soft", "hard" or "off" (see `add_learned_scores`).

    temperature: of gates that the phase "soft" samples while gradients are on (`flash_dmattn.budgets.stochastic_gates`), from
        torch's generator. None: the gates themselves.

    Raises:
        ValueError: another phase, a model without scores, "soft" with scores that are not log gates, or a temperature that is
            not above 0 or belongs to another phase.
    """
    check_phase(phase, PHASES, temperature)
    layers = scored_layers(model)
    if phase == "soft" and not all(layer.scorer.is_gate for layer in layers):
        raise ValueError(
            "phase: got 'soft' with scores that are not log gates, expected 'hard' or 'off'; gates are the scorers 'hidden', "
            "'mlp', 'value' and your own"
        )
    names = [implementation_of(layer.config) for layer in layers]  # before the first is stored
    for layer, name in zip(layers, names, strict=True):
        scoring = layer.scoring
        if scoring.phase == "off" and name != SCORED_NAME:
            scoring.base_attention = name  # it may have been changed in the phase "off"
        scoring.phase, scoring.temperature = phase, temperature
        store_name(layer.config, scoring.base_attention if phase == "off" else SCORED_NAME)
    return model


def remove_learned_scores(model: nn.Module) -> nn.Module:
    """Undoes `add_learned_scores`: restores the layers, the config and the attention implementation.

    Raises:
        ValueError: the model has no scores.
    """
    set_score_phase(model, "off")
    for layer in scored_layers(model):
        vars(layer.config).pop(CONFIG_NAME, None)
        remove_scorer(layer)
    for module in _pretrained_models(model):
        if implementation_of(module.config) not in NAMES:
            allow_continuous_batching(module)
        vars(module).pop(PIECES, None)
        restore_tied(module)
    for module in model.modules():
        remove_hooks(module, DecoderHook.begin_forward, DecoderHook.end_forward)
        vars(module).pop(_METHOD, None)  # of a wrapper (torch.compile, PEFT) or of what it wraps
    return model


def scored_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that have scores. Raises ValueError if no layer has scores."""
    layers = [module for module in model.modules() if has_scores(module)]
    if not layers:
        raise ValueError(
            f"model: got a {type(model).__name__} without learned scores, expected a model prepared by add_learned_scores"
        )
    return layers


def _pretrained_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _layers_to_change(
    model: nn.Module, attention: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> list[nn.Module]:
    """Returns the layers that can have scores."""
    if any(map(has_scores, model.modules())):
        raise ValueError(
            f"model: got a {type(model).__name__} with learned scores, expected one without; call remove_learned_scores first"
        )
    classes = attention if isinstance(attention, tuple) else (attention,)
    if attention is not None and not all(isinstance(kind, type) for kind in classes):
        raise TypeError(
            f"attention: got {attention!r}, expected a class of attention layers, or a tuple of classes"
        )
    reasons, layers = {}, []
    for layer in model.modules():
        if is_attention(layer) if attention is None else isinstance(layer, classes):
            reason = reason_against_scores(layer)
            if reason is None:
                layers.append(layer)
            else:
                reasons.setdefault(reason, type(layer).__name__)
    for decoder in _pretrained_models(model):
        if getattr(decoder.config, "is_encoder_decoder", False):
            reasons, layers = {"are of an encoder-decoder": type(decoder).__name__}, []
        elif (reason := REASONS_AGAINST_SCORES.get(type_of(decoder.config))) is not None:
            reasons.setdefault(reason, type(decoder).__name__)
        if any(layer in layers for layer in decoder.modules()):
            reason = reason_to_refuse(decoder, is_named=attention is not None)
            if reason is not None:
                raise ValueError(f"model: got a {type(decoder).__name__}, which {reason}")
    if not layers:
        # The reasons of image layers come last, because they say the least.
        ordered = sorted(reasons, key=lambda reason: reason.startswith("are no layers"))
        details = "; ".join(f"{reasons[reason]} layers {reason}" for reason in ordered)
        if not reasons:
            named = "was compared" if attention is None else f"attention names, {attention!r}"
            details = (
                f"none has a class that {named}. Name the class of attention layers that call transformers' attention "
                "interface and pass it their keywords: add_learned_scores(model, ..., attention=MyAttention)"
            )
        raise ValueError(
            f"model: got a {type(model).__name__} without an attention layer that can have scores, expected a decoder of "
            f"transformers: {details}"
        )
    return layers
