"""The name of an attention implementation: how it is set for a model, and where it is stored."""

import copy
import functools
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig


def wrap_implementation_setter(
    resolve: Callable[[PreTrainedModel, str], str | None], aliases: Mapping[str, str]
) -> None:
    """Lets `resolve(model, name)` replace the name of an attention implementation when it is set for a model.

    4.57 to 5.24: the registries of transformers never see the model for which a name is set, so that no
    implementation can refuse one. 5.x also takes every name with "flash" in it for a package of FlashAttention
    and tries to load it, before it asks a model that lists its own such packages (GPT-OSS, #44177): `aliases` are names without
    that word. #38974 made the setter public, so that models can refuse a name, but not implementations; #36609 (open)
    asks for attention functions that wrap others. Remove when `AttentionInterface` has a hook that gets the model.
    """
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        return check(self, aliases.get(attn_implementation, attn_implementation), *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        name = resolve(self, requested_attention)
        return name or original(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Whether transformers lets the layers of a model have another implementation than eager attention, 4.57 to 5.24: they look it up
    in the registry. No issue is known to us. Remove when a public function says it."""
    return model._can_set_attn_implementation()


def store_name(config: PretrainedConfig, name: str) -> None:
    """Sets the name of an implementation in one config alone.

    4.57 to 5.24: the setter of `config._attn_implementation` reaches the configs of its parts. No issue is known to us. Remove when the name
    is in the layers that it is for.
    """
    config._attn_implementation_internal = name


def own_config(model: torch.nn.Module) -> None:
    """Copies the configs that modules of a model hold. Another model may share them, and would change with them.

    4.57 to 5.24: the name of an implementation is in the config. No issue is known to us. Remove when it is in the model.
    """
    copies: dict[int, object] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            module.config = copy.deepcopy(config, copies)
