"""Attention layers of transformers that give their keys scores.

A layer gets a module `scorer`, `scoring`, which says how the scores are used, and two hooks. Before its forward the first hook
adds a `ScoreCall` to the keywords, which the layer passes on to the attention function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ....budgets import SoftScores
from ....keys.rule import SelectionRule
from ..compat import CACHE_NAMES
from ..model_state import PIECES, SCORED_NAME, SCORES, add_hook, remove_hooks
from .call import ScoreCall

_CACHE_NAMES = (*CACHE_NAMES, "layer_past")


@dataclass
class Scoring:
    """How a layer uses its scores. rule, dense_prefill, late, phase, temperature: as in `add_learned_scores`."""

    rule: SelectionRule
    dense_prefill: bool
    late: bool
    base_layer_idx: int  # before `add_scorer`
    base_attention: str  # the implementation in the phase "off"
    phase: str = "hard"
    temperature: float | None = None
    record: SoftScores = field(default_factory=SoftScores)  # of the phase "soft"


def has_scores(layer: nn.Module) -> bool:
    return "scoring" in vars(layer)


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


def add_scorer(
    layer: nn.Module,
    scorer: nn.Module,
    rule: SelectionRule,
    number: int,
    dense_prefill: bool,
    late: bool,
) -> None:
    """Gives a layer scores. In the phase "off", and under another attention implementation, it acts as without them."""
    base = layer.layer_idx, layer.config._attn_implementation
    layer.scoring = Scoring(rule, dense_prefill, late, *base)
    layer.scorer, layer.layer_idx = scorer, number
    add_hook(layer, _begin_call)
    add_hook(layer, _end_call, after=True)


def uses_scores(layer: nn.Module) -> bool:
    """Whether a layer with scores uses them in this phase and attention implementation."""
    return layer.scoring.phase != "off" and layer.config._attn_implementation == SCORED_NAME


def remove_scorer(layer: nn.Module) -> None:
    hook = getattr(getattr(layer.scorer, "function", None), "query_hook", None)
    if hook is not None:
        hook.remove()
    layer.layer_idx = layer.scoring.base_layer_idx
    del layer.scorer, layer.scoring
    remove_hooks(layer, _begin_call, _end_call)


def _begin_call(layer: nn.Module, args: tuple, keywords: dict) -> tuple[tuple, dict] | None:
    pieces = keywords.pop(PIECES, None)
    if not uses_scores(layer):
        return None
    keywords = dict(zip(_argument_names(type(layer)), args, strict=False)) | keywords
    cache = next((keywords[n] for n in _CACHE_NAMES if keywords.get(n) is not None), None)
    position = keywords.get("cache_position")
    call = ScoreCall(layer, keywords["hidden_states"], cache, position, pieces)
    return (), keywords | {SCORES: call}


def _end_call(layer: nn.Module, args: tuple, keywords: dict, output: object) -> None:
    call = keywords.get(SCORES)
    if call is not None and not call.has_attended:
        raise RuntimeError(
            f"{SCORES}: got no call of transformers' attention function with the keywords of {type(layer).__name__}, "
            "expected one: its layers cannot have learned scores"
        )


@functools.cache
def _argument_names(layer_class: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(layer_class.forward).parameters)[1:]


def sizes_of(layer: nn.Module) -> tuple[int, int, int]:
    """Returns the number of features of the layer's input, of its key heads, and of features of all heads' values."""
    config = layer.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(layer, "v_head_dim", None) or getattr(layer, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    features = getattr(layer, "attention_hidden_size", config.hidden_size)
    return features, heads, heads * head_dim


def device_of(layer: nn.Module) -> torch.device:
    """Returns the device where a layer computes. accelerate's hooks bring parameters there from the CPU or a disk."""
    device = next(layer.parameters()).device
    return device if device.type != "meta" else next(_execution_devices(layer), device)


def _execution_devices(layer: nn.Module) -> Iterator[torch.device]:
    for module in layer.modules():
        hook = getattr(module, "_hf_hook", None)
        for own in getattr(hook, "hooks", (hook,)):
            device = getattr(own, "execution_device", None)
            if device is not None:
                yield torch.device(device)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps parameters of a module on the CPU or a disk, and gives it empty ones on "meta"."""
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    return is_meta and next(_execution_devices(module), None) is not None
