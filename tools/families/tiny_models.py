"""Tiny random models of every family of transformers.

A default config is shrunk by the names of its attributes, which most families share; `tiny_sizes` has the sizes, and the
differences of single families.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Container
from inspect import signature
from typing import NamedTuple

import torch
import transformers
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny_sizes import EVEN_IF_NONE, FAMILIES, FIRST_SPECIAL, PARTS, REQUIRED, SIZES, VOCABULARY

_LARGEST = 30_000_000  # parameters


class ModelClass(NamedTuple):
    """One class of one family, and the tasks for which transformers lists it."""

    family: str
    name: str
    tasks: tuple[str, ...]

    @property
    def is_decoder(self) -> bool:
        return "CAUSAL_LM" in self.tasks


class CannotBeBuilt(Exception):
    """Raised if a class has no tiny model, for a reason that has nothing to do with attention."""


TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "IMAGE_TEXT_TO_TEXT",
)  # fmt: skip


def model_classes() -> list[ModelClass]:
    """Returns all classes of `TASKS`, and for the task "BASE" the classes of `PARTS` and the base models of other families."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for family, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault((family, name), []).append(task)
    families = {family for family, _ in tasks}
    for family, names in {**modeling_auto.MODEL_MAPPING_NAMES, **PARTS}.items():
        if family not in families:
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault((family, name), []).append("BASE")
    return [ModelClass(*key, tuple(class_tasks)) for key, class_tasks in tasks.items()]


def class_named(name: str) -> ModelClass:
    return next(model_class for model_class in model_classes() if model_class.name == name)


def tiny_config(model_class: ModelClass) -> PretrainedConfig:
    """Returns the config that the class takes, which for the text model of a composite family is the text config."""
    config = shrink(CONFIG_MAPPING[model_class.family](**REQUIRED.get(model_class.family, {})))
    wanted = getattr(transformers, model_class.name).config_class
    if wanted is not None and not isinstance(config, wanted):
        parts = [getattr(config, name) for name in config.sub_configs]
        config = next((part for part in parts if isinstance(part, wanted)), config)
    if model_class.is_decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def shrink(config: PretrainedConfig, special: list[str] | None = None) -> PretrainedConfig:
    """Returns a config of the same class with small sizes. `special` collects the names of special tokens, whose ids follow the
    words'."""
    special = [] if special is None else special
    cls = type(config)
    alias = {real: name for name, real in cls.attribute_map.items()}
    if hasattr(cls, "__dataclass_fields__"):
        defaults = {name: f.default for name, f in cls.__dataclass_fields__.items() if f.init}
    else:  # transformers 4
        defaults = {p.name: p.default for p in signature(cls.__init__).parameters.values()}
    counter, kept, per_layer = _kept_layers(config, alias)
    arguments = {}
    for name, value in vars(config).items():
        common = name if name in SIZES else alias.get(name, name)
        if isinstance(value, PretrainedConfig):
            arguments[name] = shrink(value, special)
        elif name not in defaults or isinstance(value, bool):
            continue
        elif name in per_layer:
            arguments[name] = type(value)(list(value)[i] for i in kept)
        elif name == counter and isinstance(value, int):
            arguments[name] = len(kept)
        elif common == "rope_parameters" and isinstance(value, dict):
            has_sections = "mrope_section" in getattr(cls, "ignore_keys_at_rope_validation", ())
            arguments[name] = _small_rope(value, _rotary_dim(defaults), has_sections)
        elif _IS_TOKEN.search(common):
            arguments[name] = _token(common, value, special)
        elif common.endswith("vocab_size") and isinstance(value, int):
            arguments[name] = min(value, VOCABULARY)
        elif common == "num_key_value_heads" and "kv_lora_rank" in defaults:
            arguments[name] = SIZES["num_attention_heads"]
        elif common in EVEN_IF_NONE and not isinstance(value, (list, tuple)):
            arguments[name] = SIZES[common]
        elif (
            common in SIZES and isinstance(value, int) and value > 0 and defaults[name] is not None
        ):
            arguments[name] = SIZES[common]
        elif value == 0 and isinstance(value, int):
            arguments[name] = 0  # of a part, where the default of its class is another number
    return cls(**{**arguments, **FAMILIES.get(cls.model_type, {})})


def _kept_layers(
    config: PretrainedConfig, alias: dict[str, str]
) -> tuple[str | None, list[int], list[str]]:
    """Returns the attribute that counts layers, the layers to keep, and the attributes with a value per layer. At least two
    layers stay, with every kind of layer among them."""
    common = {alias.get(name, name): name for name in reversed(vars(config))}
    counter = next((common[name] for name in _COUNTERS if name in common), None)
    count = getattr(config, counter, None) if counter is not None else None
    if not isinstance(count, int) or count < 3:
        return counter, [0, 1], []
    lists = {
        name: [str(item) for item in value]
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    kinds = [values for values in lists.values() if len(set(values)) <= 5]
    kept = {values.index(kind) for values in kinds for kind in values}
    kept |= set([i for i in range(count) if i not in kept][: max(0, 2 - len(kept))])
    return counter, sorted(kept), list(lists)


_COUNTERS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "decoder_layers")
_IS_TOKEN = re.compile(r"_token_id$|_token_index$|^(pad|bos|eos|unk|mask|sep)_(idx|index)$")
_FIRST_TOKENS = {
    "pad": 0, "bos": 1, "cls": 1, "forced_bos": 1, "eos": 2, "sep": 2, "decoder_start": 2, "forced_eos": 2, "mask": 3,
    "unk": 4,
}  # fmt: skip


def _token(name: str, value: int | list[int] | None, special: list[str]) -> int | list[int] | None:
    if value is None or (isinstance(value, int) and value < 0):
        return value
    if isinstance(value, (list, tuple)):
        return [2]
    first = _FIRST_TOKENS.get(re.sub(r"_(token_)?(id|idx|index)$", "", name.lstrip("_")))
    if first is not None:
        return first
    special.append(name)
    return FIRST_SPECIAL + len(special) - 1


def _rotary_dim(names: Container[str]) -> int:
    return SIZES["qk_rope_head_dim" if "qk_rope_head_dim" in names else "head_dim"]


def _small_rope(rope: dict, dim: int, has_sections: bool) -> dict:
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: _small_rope(value, dim, has_sections) for kind, value in rope.items()}
    small = dict(rope)
    half = int(dim * rope.get("partial_rotary_factor", 1)) // 2
    if has_sections:
        third = round(half / 3)
        small["mrope_section"] = [third, third, half - 2 * third]
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = 32
    for name in ("long_factor", "short_factor"):
        if name in rope:
            small[name] = [1 + i / half for i in range(half)]
    return small


def tiny_model(
    model_class: ModelClass, config: PretrainedConfig, attn_implementation: str
) -> torch.nn.Module:
    """Returns a model with weights of one seed, large enough for attention to matter.

    Raises:
        CannotBeBuilt: the config is not small.
    """
    cls = getattr(transformers, model_class.name)
    with torch.device("meta"):
        skeleton = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    size = sum(p.numel() for p in skeleton.parameters())
    if size > _LARGEST:
        raise CannotBeBuilt(f"{size:,} parameters")
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter.dim() > 1:
                fan_in = parameter.shape[-1] if parameter.dim() < 4 else parameter[0].numel()
                parameter.normal_(std=min(0.3, 1.5 / math.sqrt(fan_in)))
            else:  # gates that begin at 0 and scales that begin at 1e-5 would hide attention
                noise = 0.2 * torch.randn_like(parameter)
                parameter.add_(torch.where(parameter.abs() < 0.01, noise, parameter * noise))
    if model_class.name == "Llama4ForConditionalGeneration":
        # Under every attention, its forward in 5.24.0 reads an attribute that this output lacks.
        model.language_model.register_forward_hook(
            lambda module, inputs, output: setattr(output, "image_outputs", None)
        )
    return model.eval()
