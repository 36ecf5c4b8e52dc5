"""Refuses models for which attention under this package's name would differ from their own attention."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import LARGEST_HEAD_DIM
from .compat import can_set_implementation
from .names import NAMES

_SINKS = "has attention sinks of each token, or an attention of its own with sinks"
_INDEXER = (
    "adds the attention mask to the scores of an indexer; masks of flash_dmattn are key intervals"
)
_ARITHMETIC = (
    "computes with the values of the attention mask; masks of flash_dmattn are key intervals"
)
# Reasons to refuse models whose layers do more than their config tells, by `config.model_type` (without "_text").
_REASONS = {
    **dict.fromkeys(
        (
            "deepseek_v4", "inkling2", "inkling2_loop",
        ),
        _SINKS,
    ),
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4", "qwen4_exp"),
        _INDEXER,
    ),
    **dict.fromkeys(
        (
            "bigbird_pegasus", "gemma4_assistant", "gemma4_audio", "gemma4_unified_assistant", "longformer",
            "nemotron3_5_asr", "nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "t5gemma2", "t5gemma2_decoder",
            "t5gemma2_encoder",
        ),
        _ARITHMETIC,
    ),
}  # fmt: skip
# These models change the masks of their text model, whose family is used elsewhere, too.
_CHANGING_MASKS_OF_TEXT = ("gemma4_assistant", "gemma4_unified_assistant")


def watch_text_model(model: PreTrainedModel) -> None:
    """Lets a model refuse this package's name for its text model, now and at each call.

    By the time of a call, the name may have been set for the text model directly.
    """
    if model.config.model_type in _CHANGING_MASKS_OF_TEXT:
        refuse_text_model(model)
        if refuse_text_model not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(refuse_text_model)


def refuse_text_model(model: PreTrainedModel, *_) -> None:
    name = model.config.get_text_config()._attn_implementation
    if name in NAMES:
        raise error_of(model, name, _REASONS[model.config.model_type])


def error_of(model: PreTrainedModel, name: str, reason: str) -> ValueError:
    return ValueError(
        f"attn_implementation: got {name!r} for {type(model).__name__}, which {reason}. Use another one"
    )


def reason_to_refuse(model: PreTrainedModel) -> str | None:
    """Returns why attention under this package's name would differ from eager attention, or None if it is equal.

    Under this name, as in eager attention, the mask alone decides what a query sees. So a model works if its layers
    take the mask that transformers' mask functions make, pass it to transformers' `AttentionInterface`, and do nothing
    else with it.
    """
    config = model.config
    reason = _REASONS.get(config.model_type.removesuffix("_text"))
    if reason is not None:
        return reason
    if not can_set_implementation(model):
        return "computes attention itself, without transformers' AttentionInterface"
    channels = _head_dim(config)
    if channels > LARGEST_HEAD_DIM:
        return f"has a head dimension of {channels}, expected 1 to {LARGEST_HEAD_DIM}"
    return None


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
