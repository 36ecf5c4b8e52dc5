"""The scorers of a model in files of their own."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._shared.config_rules import CONFIG_NAME, LearnedScores
from ..._shared.scorers import TRAINABLE, Scorer
from ..compat import is_offloaded
from .add import add_learned_scores, remove_learned_scores, scored_layers
from .layers import has_scores

_TENSORS, _RULE = "learned_scores.safetensors", "learned_scores.json"
_PART = "scorer"  # the name of a layer's scorer in the names of its parameters


def save_scores(model: nn.Module, folder: str | Path) -> None:
    """Writes the scorers of a model, and nothing else of it.

    Every process that calls it writes, and a file is complete as soon as it has its name: processes may share a folder,
    and none waits for another. If the model is sharded, all processes have to call, since the parameters are gathered.

    folder: gets learned_scores.safetensors (the parameters) and learned_scores.json (the rule, the kind of scorer, the
        layers, and the name of the base model).

    Raises ValueError for a model without scores, and for scorers that are offloaded or changed by an adapter of PEFT.
    """
    folder = _checked_folder(folder)
    layers = scored_layers(model)
    _check_scorers(layers)
    tensors = {}
    for key, layer in zip(_keys([layer.layer_idx for layer in layers]), layers, strict=True):
        for name, tensor in _scorer_in_use(layer).state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # if sharded
            tensors[f"{key}.{name}"] = whole.detach().contiguous()
    bases = (m.config.name_or_path for m in model.modules() if isinstance(m, PreTrainedModel))
    stored = {**getattr(layers[0].config, CONFIG_NAME), "base_model": next(bases, "")}
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(folder / _TENSORS, save(tensors))
    _write_file(folder / _RULE, (json.dumps(stored, indent=2) + "\n").encode())


def _write_file(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it, so that nobody reads a part of it."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def load_scores(model: nn.Module, folder: str | Path, scorer: Scorer | None = None) -> nn.Module:
    """Gives a model the scorers that `save_scores` or `save_pretrained` has written.

    model: a model with the same layers. If it has no scores, they are added by the rule in the folder.
    folder: of either function. In a folder of both, what `save_scores` wrote is loaded; a warning names other settings.
    scorer: the function or module that `add_learned_scores` got. The folder has only its parameters.

    Returns the same model. Raises FileNotFoundError if the folder has no such file, and ValueError if the file is
    another one or the model has other layers or sizes. The model then stays unchanged.
    """
    folder = _checked_folder(folder)
    stored, tensors, has_names = _read_scores(folder)
    scores = LearnedScores.from_dict(stored)
    if scores.scorer == "custom" and scorer is None:
        raise ValueError(
            f"scorer: got None for the scores in {folder}, which a function or module made; expected it"
        )
    is_new = not any(map(has_scores, model.modules()))
    configured = [m for m in model.modules() if hasattr(getattr(m, "config", None), CONFIG_NAME)]
    former = [(module, getattr(module.config, CONFIG_NAME)) for module in configured]
    if is_new:
        kind = scorer if scores.scorer == "custom" else scores.scorer
        rule = scores.rule_arguments()
        options = ("dense_prefill", "late", "first_logit")
        rule |= {name: getattr(scores, name) for name in options}
        add_learned_scores(model, scorer=kind, **rule)
    try:
        layers = scored_layers(model)
        # Older files do not have the first logit, which baselines and functions do not use.
        has_logit = "first_logit" in stored and scores.scorer in TRAINABLE
        parts = ("scorer", "late", "first_logit") if has_logit else ("scorer", "late")
        _check_form(LearnedScores.from_config(layers[0].config), scores, parts, folder)
        keys = _keys(scores.layers)
        if has_names:
            names = {module: name for name, module in model.named_modules()}
            keys = [names[layer] for layer in layers]
            tensors = _named_as_in(keys, tensors, folder)
        states = _states_of_layers(layers, scores.layers, keys, tensors, folder)
    except ValueError:
        if is_new:
            remove_learned_scores(model)
            for module, settings in former:
                setattr(module.config, CONFIG_NAME, settings)
        raise
    for module, state in states:
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        module.load_state_dict(state, assign=is_meta)
    return model


def _keys(numbers: Sequence[int]) -> list[str]:
    """Returns the key of each layer in a file: its number, or for a later layer of the same number also its place among them."""
    places = [numbers[:i].count(number) for i, number in enumerate(numbers)]
    return [f"{n}-{place}" if place else str(n) for n, place in zip(numbers, places, strict=True)]


def _named_as_in(names: list[str], tensors: dict[str, dict], folder: Path) -> dict[str, dict]:
    """Returns tensors by the names of a model's layers, which another class or version may have given another beginning."""
    if set(names) <= tensors.keys():
        return {name: tensors[name] for name in names}
    own, stored = (
        sorted(each, key=lambda name: ([int(n) for n in name.split(".") if n.isdigit()], name))
        for each in (names, tensors)
    )
    if stored and len(stored) != len(own):
        raise ValueError(
            f"folder: got {folder} with scorers of {len(stored)} layers, expected {len(own)}"
        )
    return {name: tensors[other] for name, other in zip(own, stored, strict=False)}


def _checked_folder(folder: object) -> Path:
    if not isinstance(folder, (str, PathLike)):
        raise TypeError(f"folder: got {type(folder).__name__}, expected a path")
    return Path(folder)


def _check_form(
    own: LearnedScores, stored: LearnedScores, parts: Sequence[str], folder: Path
) -> None:
    """Raises ValueError for scores of another kind, which differ in a part. Their parameters may have the same shapes."""
    for part in parts:
        if getattr(own, part) != getattr(stored, part):
            raise ValueError(
                f"model: got one with {part} {getattr(own, part)!r}, expected {getattr(stored, part)!r}, that of {folder}"
            )


def _states_of_layers(
    layers: list[nn.Module], stored: tuple[int, ...], keys: list[str], tensors: dict[str, dict], folder: Path
) -> list[tuple[nn.Module, dict[str, Tensor]]]:  # fmt: skip
    """Returns (scorer, state) of each layer. keys: of the layers in `tensors`.

    Raises ValueError if the layers or their parameters' shapes differ, or if scorers are offloaded.
    """
    _check_scorers(layers)
    layer_indices = tuple(layer.layer_idx for layer in layers)
    if layer_indices != stored:
        raise ValueError(
            f"model: got one with scores in layers {layer_indices}, expected {stored}, those in {folder}"
        )
    states = []
    for key, layer in zip(keys, layers, strict=True):
        module, state = _scorer_in_use(layer), tensors.get(key, {})
        own_shapes, stored_shapes = (
            {name: tuple(tensor.shape) for name, tensor in s.items()}
            for s in (module.state_dict(), state)
        )
        for name in sorted(own_shapes.keys() | stored_shapes.keys()):
            if own_shapes.get(name) != stored_shapes.get(name):
                raise ValueError(
                    f"folder: got {folder} with {name} of layer {key} of shape {stored_shapes.get(name)}, expected "
                    f"{own_shapes.get(name)}"
                )
        states.append((module, state))
    return states


def _check_scorers(layers: list[nn.Module]) -> None:
    for layer in layers:
        scorer = _scorer_in_use(layer)
        if any(hasattr(module, "get_base_layer") for module in scorer.modules()):
            raise ValueError(
                f"model: got a scorer in layer {layer.layer_idx} that an adapter of PEFT changes, expected parameters of its own: "
                "call merge_and_unload before, or train it by modules_to_save=['scorer']"
            )
        if is_offloaded(scorer):
            raise ValueError(
                f"model: got a scorer in layer {layer.layer_idx} that is offloaded, expected one with parameters: call load_scores "
                "after the base model is offloaded, or before the scored model is"
            )


def _scorer_in_use(layer: nn.Module) -> nn.Module:
    """Returns a layer's scorer. If PEFT has wrapped it for `modules_to_save`, it is the active adapter's scorer."""
    copies = getattr(layer.scorer, "modules_to_save", None)
    if copies is None:
        return layer.scorer
    if not layer.scorer.active_adapters:
        raise ValueError(
            "model: got no active adapter of PEFT, expected one, whose scorers are in use"
        )
    return copies[layer.scorer.active_adapters[0]]


def _read_scores(folder: Path) -> tuple[dict, dict[str, dict[str, Tensor]], bool]:
    """Returns the settings, the parameters of each layer's scorer, and whether the layers have their names in a model, or else
    `_keys`."""
    config = folder / "config.json"
    stored = _settings_of_config(_read_json(config)) if config.exists() else None
    if (folder / _RULE).exists():
        if not (folder / _TENSORS).exists():
            raise FileNotFoundError(
                f"folder: got {folder} with {_RULE} but without {_TENSORS}, expected both files of save_scores"
            )
        own = _checked_settings(_read_json(folder / _RULE), folder / _RULE)
        if stored and LearnedScores.from_dict(stored) != LearnedScores.from_dict(own):
            warnings.warn(
                f"folder: got {folder} with a {_RULE} of other settings than those of its config.json; those of {_RULE} are loaded",
                stacklevel=3,
            )
        tensors = _tensors_by_layer([folder / _TENSORS], ".")
        return own, tensors, False
    if stored is None:
        kind = "" if folder.is_dir() else ", which is not a folder,"
        raise FileNotFoundError(
            f"folder: got {folder}{kind} without {_RULE} and without {CONFIG_NAME} in a config.json, expected a folder of "
            "save_scores, or of save_pretrained of a model with learned scores"
        )
    tensors = _tensors_by_layer(sorted(folder.glob("*.safetensors")), f".{_PART}.")
    return _checked_settings(stored, config), tensors, True


def _tensors_by_layer(paths: Iterable[Path], separator: str) -> dict[str, dict[str, Tensor]]:
    """Returns tensors whose names have a separator, by what stands before it, and by what stands after it."""
    tensors = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    layer, separated, parameter = name.partition(separator)
                    if separated:
                        tensors.setdefault(layer, {})[parameter] = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"folder: got {path} with {error}, expected safetensors") from None
    return tensors


def _read_json(path: Path) -> dict:
    try:
        stored = json.loads(path.read_text(), object_hook=_decode_float)
    except ValueError as error:  # of JSON or UTF-8
        raise ValueError(f"folder: got {path} with {error}, expected JSON") from None
    if not isinstance(stored, dict):
        raise ValueError(f"folder: got {path} with a {type(stored).__name__}, expected an object")
    return stored


def _decode_float(stored: dict) -> dict | float:
    """Returns the number inf or -inf, which transformers writes into a config as {"__float__": "Infinity"}."""
    return float(stored["__float__"]) if stored.keys() == {"__float__"} else stored


def _checked_settings(stored: dict, path: Path) -> dict:
    missing = [
        name
        for name in ("scorer", "layers", "dense_prefill", "keep_window_size")
        if name not in stored
    ]
    if missing:
        raise ValueError(
            f"folder: got {path} without {missing[0]!r}, expected a file of save_scores or of save_pretrained"
        )
    return stored


def _settings_of_config(config: dict) -> dict | None:
    """Returns the settings in a config or in one of its parts, or None."""
    if CONFIG_NAME in config:
        return config[CONFIG_NAME]
    parts = (_settings_of_config(part) for part in config.values() if isinstance(part, dict))
    return next((part for part in parts if part is not None), None)
