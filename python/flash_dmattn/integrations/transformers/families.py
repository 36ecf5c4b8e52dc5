"""Lists of families of models: compared ones, refused ones with the reason, and layers that can have scores."""

from __future__ import annotations

import inspect
import warnings

from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import LARGEST_HEAD_DIM
from .compat import (
    CACHE_NAMES,
    FLAG_WITH_EVERY_MASK_IN_4,
    can_set_implementation,
    implementation_of,
)
from .family_table import (
    ATTENTION,
    COMPARED,
    DECODERS_BY_POSITIONS,
    DECODERS_OF_SEVERAL_AXES,
    MASKS_BY_TYPE,
)
from .model_state import NAMES, add_hook

_OTHER_MASKS = "masks of flash_dmattn are key intervals"
# Reasons to refuse models whose layers do more than their config tells, and their `config.model_type` (without "_text").
_TYPES_BY_REASON = {
    "has attention sinks of each token, or an attention of its own with sinks": ("deepseek_v4", "inkling2", "inkling2_loop"),
    f"adds the attention mask to the scores of an indexer; {_OTHER_MASKS}": (
        "axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4", "qwen4_exp",
    ),
    f"computes with the values of the attention mask; {_OTHER_MASKS}": (
        "bigbird_pegasus", "gemma4_assistant", "gemma4_audio", "gemma4_unified_assistant", "longformer", "nemotron3_5_asr",
        "nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "t5gemma2", "t5gemma2_decoder", "t5gemma2_encoder",
    ),
}  # fmt: skip
_REASONS = {name: reason for reason, names in _TYPES_BY_REASON.items() for name in names}
# These models change the masks of their text model, whose family is used elsewhere, too.
_CHANGING_MASKS_OF_TEXT = ("gemma4_assistant", "gemma4_unified_assistant")
# Reasons by `config.model_type` (without "_text") for layers whose keys cannot get scores.
REASONS_AGAINST_SCORES = {
    "diffllama": "attend twice by the same keys, to other values each time",
    "diffusion_gemma": "see later tokens of a block",
    "doge": "have scores of their own; call enable_flash_dmattn",
    "glm5_next": "choose keys by an indexer",
    "inkling": "add a bias of their own",
    "jetmoe": "repeat keys before the attention function gets them",
    "minimax": "count the layers of their cache, which scores would be among",
}
# Types (without "_text") whose causal layers pass is_causal=False with every mask, as their masks include causality.
FLAG_WITH_EVERY_MASK = ("moonshine", "moonshine_streaming", *FLAG_WITH_EVERY_MASK_IN_4)
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
_LOCAL_KINDS = ("sliding", "chunked", "local", "window")


def type_of(config: PretrainedConfig) -> str:
    """Returns the name of a config's type in the lists: `model_type` without "_text"."""
    return config.model_type.removesuffix("_text")


# ---- Attention under the plain name -----------------------------------------------------------------


def watch_text_model(model: PreTrainedModel) -> None:
    """Lets a model refuse this package's name for its text model, now and at each call.

    By the time of a call, the name may have been set for the text model directly.
    """
    if model.config.model_type in _CHANGING_MASKS_OF_TEXT:
        refuse_text_model(model)
        add_hook(model, refuse_text_model)


def refuse_text_model(model: PreTrainedModel, *_) -> None:
    name = implementation_of(model.config.get_text_config())
    if name in NAMES:
        raise error_of(model, name, _REASONS[model.config.model_type])


def error_of(model: PreTrainedModel, name: str, reason: str) -> ValueError:
    return ValueError(
        f"attn_implementation: got {name!r} for {type(model).__name__}, which {reason}. Use another one"
    )


def reason_to_refuse(model: PreTrainedModel, is_named: bool = False) -> str | None:
    """Returns why attention under this package's name would differ from eager attention, or None if it is equal.

    Under this name, as in eager attention, the mask alone decides what a query sees. So a model works if its layers
    take the mask that transformers' mask functions make, pass it to transformers' `AttentionInterface`, and do nothing
    else with it.

    is_named: whether the caller has named the class of its layers, and with it says that they call the interface.
    """
    reason = _REASONS.get(type_of(model.config))
    if reason is not None:
        return reason
    if not (is_named or can_set_implementation(model)):
        return "computes attention itself, without transformers' AttentionInterface"
    channels = _head_dim(model.config)
    if channels > LARGEST_HEAD_DIM:
        return f"has a head dimension of {channels}, expected 1 to {LARGEST_HEAD_DIM}"
    return None


def warn_of_unknown(model: PreTrainedModel) -> None:
    """Warns of a model whose type was not compared with eager attention."""
    if type_of(model.config) not in COMPARED:
        warnings.warn(
            f"attn_implementation: got this package's name for a model of type {model.config.model_type!r}, which nobody has "
            "compared with eager attention",
            stacklevel=3,
        )


def _head_dim(config: PretrainedConfig) -> int:
    """Returns the largest head dimension that a config names."""
    try:
        layers = list(config.per_layer_config)
    except AttributeError:  # earlier versions, and configs without layers of their own
        layers = [config]
    values = [
        getattr(layer, name, None) for layer in layers for name in ("head_dim", "global_head_dim")
    ]
    return max([value for value in values if isinstance(value, int)], default=0)


# ---- Layers with scores -----------------------------------------------------------------------------


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer of a class of transformers that was compared, or of a subclass of it."""
    return any(
        base.__name__ in ATTENTION and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def reason_against_scores(layer: nn.Module) -> str | None:
    """Returns why an attention layer cannot have scores, or None if it can."""
    parameters = inspect.signature(type(layer).forward).parameters
    has_keywords = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    config = getattr(layer, "config", None)
    if getattr(layer, "layer_idx", None) is None or config is None:
        return "are no layers of a decoder (no layer_idx)"
    if type_of(config) in REASONS_AGAINST_SCORES:
        return REASONS_AGAINST_SCORES[type_of(config)]
    if not getattr(layer, "is_causal", True):
        return "are not causal"
    has_other_sources = any(name in parameters for name in _OTHER_SOURCES)
    if has_other_sources and getattr(layer, "is_cross_attention", True):
        return "can attend to another input than their own"
    if "hidden_states" not in parameters or not has_keywords:
        return "do not pass keywords from their input to the attention function"
    if not set(CACHE_NAMES) & set(parameters):
        return "have no cache"
    if getattr(layer, "is_kv_shared_layer", False):
        return "take their keys from another layer"
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        return "attend to keys of another loop"
    if _window_of_its_own(layer):
        return "have a sliding window of their own"
    if any(base.__name__ == "FSDPModule" for base in type(layer).__mro__):
        return "are sharded themselves; call add_learned_scores before fully_shard"
    return None


def number_in_name(name: str) -> int:
    """Returns the layer's number in a name such as "model.layers.3.self_attn". Raises ValueError if it has none."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise ValueError(
            f"model: got a layer {name!r}, expected one with a number, such as layers.3"
        )
    return int(numbers[-1])


def number_of(layer: nn.Module, name: str) -> int:
    """Returns the layer's number in caches and files. Zamba 2 numbers all its attention layers -1 and passes the
    number to forward."""
    return layer.layer_idx if layer.layer_idx >= 0 else number_in_name(name)


def config_of(layer: nn.Module) -> PretrainedConfig:
    """Returns the config of a layer, which differs from layer to layer in Gemma 4."""
    is_own = getattr(layer.config, "is_heterogeneous", False)
    return layer.config.per_layer_config[layer.layer_idx] if is_own else layer.config


def sizes_of(layer: nn.Module) -> tuple[int, int, int]:
    """Returns the number of features of the layer's input, of its key heads, and of features of all heads' values."""
    config = config_of(layer)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(layer, "v_head_dim", None) or getattr(layer, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    features = getattr(layer, "attention_hidden_size", config.hidden_size)
    return features, heads, heads * head_dim


def _window_of_its_own(layer: nn.Module) -> bool:
    kinds = getattr(layer.config, "layer_types", None)
    if kinds:
        return any(kind in kinds[layer.layer_idx] for kind in _LOCAL_KINDS)
    return any(getattr(owner, "sliding_window", None) for owner in (layer, layer.config))


# ---- Masks that a decoder takes ---------------------------------------------------------------------


def takes_mask_of_positions(config: PretrainedConfig, dimensions: int | None) -> bool:
    """Whether a decoder separates packed texts by its positions.

    dimensions: of the positions that it is given, None for none. Positions of several axes make masks in ways of their own.
    """
    kind = type_of(config)
    if kind in DECODERS_OF_SEVERAL_AXES:
        return dimensions is None
    return kind in DECODERS_BY_POSITIONS and dimensions in (None, 1, 2)


def takes_masks_by_type(config: PretrainedConfig) -> bool:
    """Whether a decoder takes a causal mask and that of a sliding window, by the types of its layers."""
    return (
        type_of(config) in MASKS_BY_TYPE
        and set(getattr(config, "layer_types", None) or ())
        == {"full_attention", "sliding_attention"}
        and bool(config.sliding_window)
        and getattr(config, "is_causal", True)
        and not getattr(config, "use_bidirectional_attention", False)
    )
