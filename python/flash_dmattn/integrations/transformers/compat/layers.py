"""Layers that take over the parameters and hooks of others."""

import functools
import types

import torch


def adopt_layer(layer: torch.nn.Module, layer_class: type[torch.nn.Module]) -> torch.nn.Module:
    """Makes a layer of another class that takes over the parameters, modules, buffers and hooks of `layer`.

    Do not use `layer` afterwards.
    Every version: torch's modules have no such conversion. Remove when models get their attention layers from a registry.
    """
    adopted = layer_class.__new__(layer_class)
    vars(adopted).update(vars(layer))
    _adopt_hooked_forward(adopted, layer)
    return adopted


def _adopt_hooked_forward(layer: torch.nn.Module, replaced: torch.nn.Module) -> None:
    """Replaces the `forward` that accelerate's hooks (`device_map`) call by the `forward` of `layer`.

    The hooks keep a layer's own `forward` under another name, and `layer` has taken over the attributes of `replaced`.
    huggingface/accelerate#1971 does so for copies. Remove when accelerate hooks modules without replacing `forward`.
    """
    if "_old_forward" not in vars(replaced):
        return
    layer._old_forward = types.MethodType(type(layer).forward, layer)
    hooked = vars(replaced)["forward"].func
    layer.forward = functools.update_wrapper(functools.partial(hooked, layer), layer._old_forward)
