"""Attention layers of transformers that give their keys scores, and which layers can."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from ....keys.rule import KeySelection
from ..compat import BATCHED_SCORES, adopt_layer
from ..doge import PIECES
from .call import ScoredCall
from .scored_attention import BATCH_KEYWORD, KEYWORD, NAMES

# Arguments of layers whose keys are not of the layer's own input.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")
# Reasons by `config.model_type` (without "_text") for layers that do more than their arguments tell.
_REASONS = {
    "diffllama": "attend twice by the same keys, to other values each time",
    "diffusion_gemma": "see later tokens of a block",
    "doge": "have scores of their own; call enable_flash_dmattn",
    "glm5_next": "choose keys by an indexer",
    "jetmoe": "repeat keys before the attention function gets them",
}
_LOCAL_KINDS = ("sliding", "chunked", "local", "window")


class ScoredAttention(nn.Module):
    """The part that an attention layer of any family gets for its scores.

    Under another attention implementation than those of `NAMES`, and in the phase "off", it is its base class. Nothing is kept from
    one call to the next: the scores go with the arguments to the attention function.
    """

    batched_name = BATCHED_SCORES
    scorer: nn.Module
    score_rule: KeySelection
    score_phase: str
    dense_prefill: bool  # whether a prompt attends to all of itself
    base_attention: str  # the implementation of the phase "off"

    def forward(self, *args, **kwargs):
        if self.score_phase == "off" or self.config._attn_implementation not in NAMES:
            return super().forward(*args, **kwargs)
        kwargs = dict(zip(self.argument_names, args, strict=False)) | kwargs
        name = next((name for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        steps = kwargs.pop(BATCH_KEYWORD, None), kwargs.pop(PIECES, None)
        call = kwargs[KEYWORD] = ScoredCall(self, kwargs["hidden_states"], kwargs.get(name), *steps)
        if name is not None:
            kwargs[name] = call
        result = super().forward(**kwargs)
        if not call.has_attended:
            raise RuntimeError(
                f"{KEYWORD}: {type(self).__name__} did not pass its keywords to transformers' attention function; its "
                "layers cannot have learned scores"
            )
        return result

    def __reduce__(self):
        return _empty_layer, (base_class(self),), vars(self)


@functools.cache
def scored_class(layer_class: type[nn.Module]) -> type[ScoredAttention]:
    """The subclass of a family's attention layer that has scores."""
    names = tuple(inspect.signature(layer_class.forward).parameters)[1:]
    attributes = {
        "argument_names": names,
        "__module__": __name__,
    }
    return type(f"Scored{layer_class.__name__}", (ScoredAttention, layer_class), attributes)


def base_class(layer: ScoredAttention) -> type[nn.Module]:
    classes = type(layer).__mro__
    return classes[classes.index(ScoredAttention) + 1]


def with_scorer(
    layer: nn.Module, scorer: nn.Module, rule: KeySelection, dense_prefill: bool
) -> ScoredAttention:
    """The layer with scores, which takes over everything that it has."""
    scored = adopt_layer(layer, scored_class(type(layer)))
    scored.base_attention = layer.config._attn_implementation
    scored.score_rule, scored.score_phase, scored.dense_prefill = rule, "hard", dense_prefill
    scored.scorer = scorer
    return scored


def without_scorer(layer: ScoredAttention) -> nn.Module:
    plain = adopt_layer(layer, base_class(layer))
    del plain.scorer
    for name in ("score_rule", "score_phase", "dense_prefill", "base_attention"):
        delattr(plain, name)
    return plain


def _empty_layer(layer_class: type[nn.Module]) -> ScoredAttention:
    scored = scored_class(layer_class)
    return scored.__new__(scored)


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention interface."""
    if isinstance(module, ScoredAttention):
        return True
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def reason_against_scores(layer: nn.Module) -> str | None:
    """Why an attention layer gets no scores; None where it can have them."""
    parameters = inspect.signature(type(layer).forward).parameters
    has_keywords = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    config = getattr(layer, "config", None)
    if getattr(layer, "layer_idx", None) is None or config is None:
        return "are no layers of a decoder (no layer_idx)"
    if not getattr(layer, "is_causal", True):
        return "are not causal"
    has_other_sources = any(name in parameters for name in _OTHER_SOURCES)
    if has_other_sources and getattr(layer, "is_cross_attention", True):
        return "can attend to another input than their own"
    if "hidden_states" not in parameters or not has_keywords:
        return "do not pass keywords from their input to the attention function"
    if not set(_CACHE_NAMES) & set(parameters):
        return "have no cache"
    if "position_bias=" in inspect.getsource(type(layer).forward):
        return "add a bias of their own"
    if config.model_type.removesuffix("_text") in _REASONS:
        return _REASONS[config.model_type.removesuffix("_text")]
    if getattr(layer, "is_kv_shared_layer", False):
        return "take their keys from another layer"
    if _window_of_its_own(layer):
        return "have a sliding window of their own"
    return None


def _window_of_its_own(layer: nn.Module) -> bool:
    kinds = getattr(layer.config, "layer_types", None)
    if kinds:
        return any(kind in kinds[layer.layer_idx] for kind in _LOCAL_KINDS)
    return any(getattr(owner, "sliding_window", None) for owner in (layer, layer.config))


def sizes_of(layer: nn.Module) -> tuple[int, int, int]:
    """Features of the layer's input, its key heads, and features of the values of all heads."""
    config = layer.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(layer, "v_head_dim", None) or getattr(layer, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    features = getattr(layer, "attention_hidden_size", config.hidden_size)
    return features, heads, heads * head_dim


def device_of(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device
