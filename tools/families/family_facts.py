"""Runs a model to find its rows in the table of families: which layers attend, and which masks its decoder makes and takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "recorded_attention"
_calls: list[tuple[nn.Module, object]] = []  # (layer, mask) of each attention call


class Facts(NamedTuple):
    """kind: the type of the config of the decoder that holds the layers, without "_text"; "" if there is none."""

    attention: tuple[str, ...] = ()
    kind: str = ""
    by_positions: bool = False
    several_axes: bool = False
    by_type: bool = False


def facts_of(model: nn.Module, inputs: dict) -> Facts:
    """Runs a model that generates text."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation_internal = _NAME
    layers = {layer for layer, _ in _calls_of(model, inputs)}
    names = {
        type(layer).__name__ for layer in layers if getattr(layer, "layer_idx", None) is not None
    }
    decoders = [
        m for m in model.modules() if isinstance(m, PreTrainedModel) and layers & set(m.modules())
    ]
    if not decoders:
        return Facts(tuple(sorted(names)))
    decoder = decoders[-1]  # the innermost comes last
    config = decoder.config
    rope = getattr(config, "rope_parameters", None) or {}
    axes = "mrope_section" in rope or any(
        "mrope_section" in r for r in rope.values() if isinstance(r, dict)
    )
    return Facts(
        tuple(sorted(names)),
        config.model_type.removesuffix("_text"),
        _separates_texts(decoder),
        axes,
        _takes_masks_by_type(decoder),
    )


def _calls_of(model: nn.Module, inputs: dict) -> list[tuple[nn.Module, object]]:
    _calls.clear()
    with torch.no_grad():
        model(**inputs)
    return list(_calls)


def _separates_texts(decoder: PreTrainedModel) -> bool:
    """Whether positions that begin again make a mask of two texts."""
    device = next(decoder.parameters()).device
    ids, positions = (
        torch.arange(3, 9, device=device)[None],
        torch.arange(3, device=device).repeat(2)[None],
    )
    try:
        calls = _calls_of(
            decoder, {"input_ids": ids, "position_ids": positions, "use_cache": False}
        )
    except Exception:
        return False
    return any(isinstance(mask, torch.Tensor) and not mask[..., 4, 1].any() for _, mask in calls)


def _takes_masks_by_type(decoder: PreTrainedModel) -> bool:
    """Whether the layers get masks that are passed as a dict by the types of layers."""
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if kinds != {"full_attention", "sliding_attention"}:
        return False
    ids = torch.arange(3, 9)[None]
    masks = {kind: torch.ones(1, 1, 6, 6, dtype=torch.bool).tril() for kind in kinds}
    try:
        calls = _calls_of(decoder, {"input_ids": ids, "attention_mask": masks, "use_cache": False})
    except Exception:
        return False
    return any(mask is masks[kind] for _, mask in calls for kind in kinds)


def _record(module, query, key, value, attention_mask, **kwargs):
    _calls.append((module, attention_mask))
    kwargs = {
        name: kwargs.get(name) for name in ("scaling", "dropout") if kwargs.get(name) is not None
    }
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_NAME, _record)
AttentionMaskInterface.register(
    _NAME, lambda *args, **kwargs: sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
)
