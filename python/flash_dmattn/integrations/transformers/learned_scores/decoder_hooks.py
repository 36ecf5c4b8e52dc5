"""Hooks of decoders with scored layers.

They pass the batch of a step to the layers. In compiled code, which cannot read a mask, they pass the mask as causality
or packed texts.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ...._core.checks import may_read
from ..batching import PagedAttentionCache, batch_of
from ..compat import find_cache, positions_of_texts
from ..mask_functions import intervals_of_documents, is_causal_config, mask_kind
from ..names import BATCH, PIECES, SCORED_NAME, SCORED_NAMES
from .scored_layers import ScoredAttention, is_attention


def add_mask_hooks(model: nn.Module) -> None:
    """Lets the decoders in a model pass the masks that their layers need.

    All layers must have scores, or those without scores must have sliding windows: else transformers makes the masks.
    """
    for decoder in _decoders(model):
        attention = [module for module in decoder.modules() if is_attention(module)]
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        if not {"attention_mask", "position_ids"} <= set(names):
            continue
        if all(isinstance(layer, ScoredAttention) for layer in attention):
            decoder.register_forward_pre_hook(_MaskHook(decoder, names), with_kwargs=True)
        elif _takes_masks_of_windows(decoder):
            decoder.register_forward_pre_hook(_WindowMaskHook(decoder, names), with_kwargs=True)


def remove_mask_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _MaskHook):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


class _MaskHook:
    def __init__(self, decoder: PreTrainedModel, names: tuple[str, ...]):
        self.names = names  # the names of the decoder's arguments, in order
        self.positions = positions_of_texts(decoder)

    def __call__(
        self, decoder: PreTrainedModel, args: tuple, options: dict
    ) -> tuple[tuple, dict] | None:
        """Adds to the decoder's arguments the pieces of its sequences, or the batch of a step of continuous batching.

        In code that may not read values, it also adds the mask if the arguments determine it.
        """
        config, cache = decoder.config, find_cache(options)
        pieces = getattr(decoder, PIECES, None)
        if pieces is not None:
            if config._attn_implementation not in SCORED_NAMES:
                error = ValueError(
                    f"attn_implementation: got {config._attn_implementation!r} with context parallelism (phase 'off', for one), "
                    "expected the phase 'hard': others attend to this rank's piece alone"
                )
                pieces.group.wire.raise_on_all_ranks("forward", error)
            arguments = dict(zip(self.names, args, strict=False)) | options
            return (), arguments | pieces.changed_arguments(arguments)
        if isinstance(cache, PagedAttentionCache) and config._attn_implementation in SCORED_NAMES:
            arguments = dict(zip(self.names, args, strict=False)) | options
            return (), arguments | {BATCH: batch_of(cache, arguments)}
        if may_read() or config._attn_implementation != SCORED_NAME or not is_causal_config(config):
            return None
        return self.with_mask(config, args, options)

    def with_mask(
        self, config: PretrainedConfig, args: tuple, options: dict
    ) -> tuple[tuple, dict] | None:
        arguments = dict(zip(self.names, args, strict=False)) | options
        positions = arguments.get("position_ids")
        if self.positions is None or find_cache(arguments) is not None:
            return None
        if positions is not None and positions.dim() not in self.positions:
            return None
        use_cache = arguments.get("use_cache")
        use_cache = bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)
        kind, mask = mask_kind(arguments, use_cache)
        if mask is None:
            return None
        return (), arguments | {
            "attention_mask": self.masks_of_layers(config, arguments, kind, mask)
        }

    def masks_of_layers(
        self, config: PretrainedConfig, arguments: dict, kind: str, mask: Tensor
    ) -> Tensor | dict[str, Tensor]:
        return mask


class _WindowMaskHook(_MaskHook):
    """Passes masks by layer type, for a decoder in which some layers have a sliding window and no scores."""

    def __call__(
        self, decoder: PreTrainedModel, args: tuple, options: dict
    ) -> tuple[tuple, dict] | None:
        if may_read() or decoder.config._attn_implementation != SCORED_NAME:
            return None
        return self.with_mask(decoder.config, args, options)

    def masks_of_layers(
        self, config: PretrainedConfig, arguments: dict, kind: str, mask: Tensor
    ) -> dict[str, Tensor]:
        intervals = mask
        if kind == "causal":  # `mask` says this without intervals
            tokens = arguments.get("inputs_embeds")
            tokens = arguments["input_ids"] if tokens is None else tokens[..., 0]
            intervals = intervals_of_documents(torch.zeros_like(tokens, dtype=torch.long))
        first, last = intervals.unbind(-1)
        windows = torch.stack([first, torch.minimum(last, first + config.sliding_window)], -1)
        return {"full_attention": mask, "sliding_attention": windows}


def _takes_masks_of_windows(decoder: PreTrainedModel) -> bool:
    """Whether a decoder takes a causal mask and that of a sliding window, by the types of its layers, and itself takes
    packed texts apart by their positions (GPT-OSS does not)."""
    config = decoder.config
    return (
        set(getattr(config, "layer_types", None) or ()) == {"full_attention", "sliding_attention"}
        and bool(config.sliding_window)
        and getattr(config, "is_causal", True)
        and not getattr(config, "use_bidirectional_attention", False)
        and positions_of_texts(decoder) is not None
        and _passes_masks_by_type(decoder)
    )


class _Reached(Exception):
    """Raised when a call of a decoder reaches its first attention layer. It carries this layer's mask."""

    def __init__(self, mask: object):
        self.mask = mask


def _passes_masks_by_type(decoder: PreTrainedModel) -> bool:
    """Whether a decoder passes its layers masks by layer type. Calls the decoder up to its first layer to find out."""

    def end_call(layer: nn.Module, args: tuple, options: dict) -> None:
        raise _Reached(options.get("attention_mask"))

    layer = next(module for module in decoder.modules() if is_attention(module))
    hook = layer.register_forward_pre_hook(end_call, prepend=True, with_kwargs=True)
    device = next(decoder.parameters()).device
    masks = {kind: torch.empty(0, device=device) for kind in set(decoder.config.layer_types)}
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            decoder(token, attention_mask=masks, use_cache=False)
    except _Reached as reached:
        return any(reached.mask is mask for mask in masks.values())
    except Exception:
        # A decoder that takes only a tensor, or whose weights are elsewhere, makes its own masks.
        return False
    finally:
        hook.remove()
    return False


def _decoders(model: nn.Module) -> list[PreTrainedModel]:
    """Returns the innermost models that hold layers with scores."""
    holders = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and any(isinstance(layer, ScoredAttention) for layer in module.modules())
    ]
    return [
        module
        for module in holders
        if not any(inner is not module and inner in holders for inner in module.modules())
    ]
