"""Hooks of decoders with scored layers.

They pass the layers pieces of sequences, and masks of causality or packed texts, which transformers would make as tensors of all
(query, key) pairs: from opaque functions, and in compiled code that reads no values.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ...._core.checks import may_read
from ....keys.recognise import Memo
from ..._shared.layer_call import intervals_of_documents, is_causal_mask
from ..compat import bind_arguments, find_cache, implementation_of
from ..families import is_attention, takes_mask_of_positions, takes_masks_by_type
from ..mask_functions import is_causal_config, mask_kind
from ..model_state import PIECES, SCORED_NAME


class DecoderHook:
    """Runs before and after each forward of a decoder. Its layers then record the scores of that forward for `budget_loss` and
    share a memo, and the decoder's arguments get the pieces of its sequences, or the mask if the arguments determine it.

    layers: those with scores.
    names: the decoder's arguments in order.
    takes_mask: whether the decoder takes a mask of this package. If not, transformers makes its masks.
    by_type: whether some layers have a sliding window and no scores, and the decoder takes a mask for each type of layers.
    """

    def __init__(
        self, layers: list[nn.Module], names: tuple[str, ...], takes_mask: bool, by_type: bool
    ):
        self.layers, self.names = layers, names
        self.takes_mask, self.by_type = takes_mask, by_type

    def begin_forward(
        self, decoder: PreTrainedModel, args: tuple, options: dict
    ) -> tuple[tuple, dict] | None:
        memo = Memo() if may_read() else None
        for layer in self.layers:
            layer.scoring.record.open()
            layer.scoring.memo = memo
        config = decoder.config
        arguments = bind_arguments(self.names, args, options)
        pieces = getattr(decoder, PIECES, None)
        if pieces is not None:
            return (), arguments | pieces.changed_arguments(arguments, config, SCORED_NAME)
        if not self.takes_mask:
            return None
        if implementation_of(config) != SCORED_NAME or find_cache(arguments) is not None:
            return None
        if not self.by_type and not is_causal_config(config):
            return None
        positions = arguments.get("position_ids")
        if not takes_mask_of_positions(config, None if positions is None else positions.dim()):
            return None
        use_cache = arguments.get("use_cache")
        use_cache = bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)
        _, mask = mask_kind(arguments, use_cache)
        if mask is None:
            return None
        if self.by_type:
            mask = _masks_of_types(config, arguments, mask)
        return (), arguments | {"attention_mask": mask}

    def end_forward(self, *_) -> None:
        for layer in self.layers:
            layer.scoring.memo = None


def _masks_of_types(config: PretrainedConfig, arguments: dict, mask: Tensor) -> dict[str, Tensor]:
    intervals = mask
    if is_causal_mask(mask):  # it has no intervals
        tokens = arguments.get("inputs_embeds")
        tokens = arguments["input_ids"] if tokens is None else tokens[..., 0]
        intervals = intervals_of_documents(torch.zeros_like(tokens, dtype=torch.long))
    first, last = intervals.unbind(-1)
    windows = torch.stack([first, torch.minimum(last, first + config.sliding_window)], -1)
    return {"full_attention": mask, "sliding_attention": windows}


def decoder_hooks(
    model: nn.Module, scored: list[nn.Module]
) -> list[tuple[PreTrainedModel, DecoderHook]]:
    """Returns the hooks of the innermost models in `model` that hold layers of `scored`."""
    holders = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(m in scored for m in module.modules())
    ]
    hooks = []
    for decoder in holders:
        modules = list(decoder.modules())
        if any(inner is not decoder and inner in holders for inner in modules):
            continue
        attention = [module for module in modules if is_attention(module)]
        has_plain = any(layer not in scored for layer in attention)
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        # Other layers, of states for example, take masks in a form of their own.
        takes_mask = (
            {"attention_mask", "position_ids"} <= set(names)
            and len(attention) >= decoder.config.num_hidden_layers
            and (not has_plain or takes_masks_by_type(decoder.config))
        )
        own = [module for module in modules if module in scored]
        hooks.append((decoder, DecoderHook(own, names, takes_mask, has_plain)))
    return hooks
