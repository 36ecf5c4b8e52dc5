"""The scorers of a model in files of their own."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from ...config_rules import CONFIG_NAME, LearnedScores
from ...scorers import Scorer
from .add import add_learned_scores, scored_layers
from .scored_layers import ScoredAttention

_TENSORS, _RULE = "learned_scores.safetensors", "learned_scores.json"
_PART = "scorer"  # the name of a layer's scorer in the names of its parameters


def save_scores(model: nn.Module, folder: str | Path) -> None:
    """Writes the scorers of a model, and nothing else of it. Of a sharded model every process calls it, and the first writes.

    folder: gets learned_scores.safetensors, the parameters, and learned_scores.json: the rule, the kind of the scorer, the
        layers, and the name of the base model.

    Raises ValueError for a model without scores.
    """
    folder = Path(folder)
    layers = scored_layers(model)
    tensors = {
        f"{layer.layer_idx}.{name}": _whole_tensor(tensor.detach()).contiguous()
        for layer in layers
        for name, tensor in _scorer_in_use(layer).state_dict().items()
    }
    is_distributed = distributed.is_available() and distributed.is_initialized()
    if not is_distributed or distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _TENSORS)
        config = layers[0].config
        stored = {**getattr(config, CONFIG_NAME), "base_model": _base_name(model)}
        (folder / _RULE).write_text(json.dumps(stored, indent=2) + "\n")
    if is_distributed:
        distributed.barrier()  # then every rank can load them


def load_scores(model: nn.Module, folder: str | Path, scorer: Scorer | None = None) -> nn.Module:
    """Gives a model the scorers of `save_scores`, or those in a folder of `save_pretrained`.

    model: one with the same layers; where it has no scores, they are added by the rule of the folder.
    scorer: the function or module that was given to `add_learned_scores`, of which the folder has parameters alone.

    Returns the same model. Raises FileNotFoundError without such a file, and ValueError for a model of other layers.
    """
    folder = Path(folder)
    stored, tensors = _read_scores(folder)
    scores = LearnedScores.from_dict(stored)
    if scores.scorer == "custom" and scorer is None:
        raise ValueError(
            f"scorer: got None for the scores in {folder}, which a function or module made; expected it"
        )
    try:
        layers = scored_layers(model)
    except ValueError:
        kind = scorer if scores.scorer == "custom" else scores.scorer
        rule = scores.rule._asdict()
        del rule["selection"]
        add_learned_scores(model, scorer=kind, dense_prefill=scores.dense_prefill, **rule)
        layers = scored_layers(model)
    found = tuple(layer.layer_idx for layer in layers)
    if found != scores.layers:
        raise ValueError(
            f"model: got one with scores in layers {found}, expected {scores.layers}, those in {folder}"
        )
    for layer in layers:
        prefix = f"{layer.layer_idx}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        _scorer_in_use(layer).load_state_dict(own)
    return model


def _scorer_in_use(layer: ScoredAttention) -> nn.Module:
    """The scorer of a layer; of one that PEFT has wrapped, for `modules_to_save`, the one that the active adapter trains."""
    copies = getattr(layer.scorer, "modules_to_save", None)
    if copies is None:
        return layer.scorer
    if not layer.scorer.active_adapters:
        raise ValueError(
            "model: got no active adapter of PEFT, expected one, whose scorers are in use"
        )
    return copies[layer.scorer.active_adapters[0]]


def _whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _base_name(model: nn.Module) -> str:
    names = (m.config._name_or_path for m in model.modules() if isinstance(m, PreTrainedModel))
    return next(names, "")


def _read_scores(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """The settings and the scorers' parameters, by "layer.name"."""
    if (folder / _RULE).exists():
        with safe_open(folder / _TENSORS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return json.loads((folder / _RULE).read_text()), tensors
    stored = _settings_of_config(json.loads((folder / "config.json").read_text()))
    if stored is None:
        raise FileNotFoundError(
            f"folder: got {folder} without {_RULE} and without {CONFIG_NAME} in its config.json, expected a folder of "
            "save_scores, or of save_pretrained of a model with learned scores"
        )
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                before, found, after = name.partition(f".{_PART}.")
                if found:
                    tensors[f"{_layer_number(before)}.{after}"] = file.get_tensor(name)
    return stored, tensors


def _settings_of_config(config: dict) -> dict | None:
    """The settings in a config or in one of its parts."""
    if CONFIG_NAME in config:
        return config[CONFIG_NAME]
    parts = (_settings_of_config(part) for part in config.values() if isinstance(part, dict))
    return next((part for part in parts if part is not None), None)


def _layer_number(name: str) -> int:
    """The number in "model.layers.3.self_attn"."""
    return int(next(part for part in name.split(".") if part.isdigit()))
