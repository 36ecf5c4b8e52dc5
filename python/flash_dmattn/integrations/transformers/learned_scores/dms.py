"""Dynamic Memory Sparsification (arXiv 2506.05345) as learned scores, by the formulas of NVIDIA's Model-Optimizer, experimental/dms.

A key is evicted once `dms_window_size` keys are between it and the query, if the logit of the token after it is above 0:

    logit = dms_alpha_scale * alpha - dms_initial_alpha_offset

alpha is a projection of the RMS norm of the layer's input (the adapter), or the last channel of the first query head of a
group before its rotation. That channel is then 0 before and after the rotation. The log gate of a key is log sigmoid(-logit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .add import add_learned_scores, remove_learned_scores, scored_layers
from .layers import uses_scores
from .training import ScoreSchedule

# 544 steps: the compression ratio grows from 1 to 16 in 510.
DMS_SCHEDULE = ScoreSchedule(
    narrowing=510 / 544, share=1 / 16, weight=1.0, temperature=0.1, by_ratio=True, sampled=True
)
# A gate of 1/2, less the rounding of log sigmoid(0). The next logit of an offset of 5 lies 5e-7 above 0.
_HALF_OPEN = -math.log(2) - 1e-7
_FAMILIES = ("llama", "qwen3")  # whose layers read their input through one RMSNorm
_ADAPTER = "dms_proj_alpha"


def add_dms_scores(
    model: nn.Module,
    keep_window_size: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    window_size: int = 512,
    offset: float = 5.0,
    **options,
) -> nn.Module:
    """Adds learned scores (`add_learned_scores`) with the gates of DMS, for a training by `DMS_SCHEDULE`.

    NVIDIA's adapter has a scale of 100, which `scorer="hidden"` has in its weight: Adam's learning rate is 100 times theirs.

    Args:
        keep_window_size: the most old keys that gates may keep in a head, for a `DynamicMaskCache`. None: no limit, and no
            such cache.
        window_size: the largest distance of a recent key.
        offset: the first logit of an open gate.
        options: as in `add_learned_scores`.
    """
    options = {"recent_window": window_size + 1, "score_threshold": _HALF_OPEN, **options}
    add_learned_scores(model, keep_window_size, late=True, **options)
    for layer in scored_layers(model):
        if hasattr(layer.scorer, "scores"):
            nn.init.constant_(layer.scorer.scores.proj.bias, offset)
    return model


def load_dms(
    model_or_folder: nn.Module | str | PathLike,
    keep_window_size: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    **options,
) -> nn.Module:
    """Loads a DMS checkpoint of a Llama or Qwen3, whose evicted keys leave a `DynamicMaskCache`.

        model = load_dms(folder, keep_window_size=4096, dtype=torch.bfloat16)
        model.generate(**inputs, past_key_values=DynamicMaskCache(model.config))

    A checkpoint with an adapter gives scores of the kind "hidden", which can be trained and saved. The RMS norms of adapter
    and layer differ in their weights, which become part of the scorer's. Scores of a query's channel have no parameters;
    in the phase "off" that channel is part of the query. Decisions equal NVIDIA's except for rounding at a logit of 0.

    Args:
        model_or_folder: a folder of `save_pretrained`, or a model that transformers' own class has loaded from one. Its
            config has `dms_window_size`.
        keep_window_size: as in `add_dms_scores`. While no more old keys are kept, nothing differs from a cache of all keys;
            `cache.layers[i].slots.capped` counts those beyond it.
        options: of `from_pretrained`, for a folder.

    Raises:
        ValueError: a config or tensors of another form, which the message names.
    """
    model = model_or_folder
    if isinstance(model_or_folder, (str, PathLike)):
        options = {"trust_remote_code": False, **options}
        model = AutoModelForCausalLM.from_pretrained(model_or_folder, **options)
    elif options or not isinstance(model, nn.Module):
        raise TypeError(
            f"model_or_folder: got {type(model).__name__} with options {sorted(options)}, expected a folder, or a model without "
            "options"
        )
    config = model.config
    tensors = _adapter_tensors(Path(config.name_or_path))
    _check_form(model, tensors)
    settings = [getattr(config, f"dms_{name}", default) for name, default in (
        ("alpha_scale", 100.0), ("initial_alpha_offset", 5.0), ("alpha_per", "head"))]  # fmt: skip
    has_adapter = getattr(config, "dms_separate_alpha", False)
    kind = {"scorer": "hidden" if has_adapter else _no_scores}
    add_dms_scores(model, keep_window_size, window_size=config.dms_window_size, **kind)
    try:
        for number, block in enumerate(model.model.layers):
            layer = block.self_attn
            if has_adapter:
                part = f"layers.{number}.self_attn.{_ADAPTER}"
                _load_adapter(layer, block.input_layernorm.weight, tensors, part, *settings)
            else:
                layer.scorer.function = QueryChannel(layer, *settings)
    except ValueError:
        remove_learned_scores(model)
        raise
    return model


class QueryChannel(nn.Module):
    """Reads scores from the last channel of the first query head of each group: log gates [B, S, Hkv]."""

    def __init__(self, layer: nn.Module, scale: float, offset: float, per: str):
        super().__init__()
        config = layer.config
        self.scale, self.offset, self.per = scale, offset, per
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.head_dim, self.channel = layer.head_dim, None
        module = getattr(layer, "q_norm", layer.q_proj)
        self.handle = module.register_forward_hook(_ChannelHook(layer))

    def take(self, query: Tensor) -> Tensor:
        """Keeps the channel of a query [B, S, Hq, D] or [B, S, Hq * D] for `forward`. Returns the query without it."""
        by_head = query.view(*query.shape[:2], -1, self.head_dim).transpose(1, 2)
        self.channel = by_head[:, :: self.group, :, -1].transpose(1, 2)
        return self.clear(by_head).transpose(1, 2).reshape(query.shape)

    def clear(self, query: Tensor) -> Tensor:
        """Returns a query [B, Hq, S, D] without the channel."""
        query = query.clone()
        query[:, :: self.group, :, -1] = 0
        return query

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        channel, self.channel = self.channel, None
        gates = F.logsigmoid(self.offset - self.scale * channel.float())
        return gates[..., :1].expand_as(gates) if self.per == "layer" else gates

    def release(self) -> None:
        self.handle.remove()


class _ChannelHook:
    """A forward hook of the module that makes a layer's queries."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple, query: Tensor) -> Tensor:
        return self.layer.scorer.function.take(query) if uses_scores(self.layer) else query


def _no_scores(hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Raises RuntimeError. It is the scorer of a layer until the layer exists, which QueryChannel needs."""
    raise RuntimeError("a query's channel gives scores only once the layer is known")


def _adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of adapters in a folder, by their names from "layers" on."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if f".{_ADAPTER}" in name:
                    tensors[name[name.index("layers.") :]] = file.get_tensor(name)
    return tensors


def _check_form(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    config, name = model.config, type(model).__name__
    if any(_ADAPTER in name for name, _ in model.named_parameters()):
        raise ValueError(
            f"model_or_folder: got a {name} that computes DMS itself, expected the folder, or transformers' own class"
        )
    for part, default, values in (
        ("model_type", None, _FAMILIES),
        ("dms_separate_alpha", False, (True, bool(tensors))),  # tensors are checked for each layer
        ("dms_disable_eviction", False, (False,)),
        ("dms_alpha_per", "head", ("head", "layer")),
    ):
        value = getattr(config, part, default)
        if value not in values:
            raise ValueError(f"config.{part}: got {value!r} in {name}, expected one of {values}")
    window = getattr(config, "dms_window_size", None)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"config.dms_window_size: got {window!r}, expected 1 or more")


@torch.no_grad()
def _load_adapter(
    layer: nn.Module, norm: Tensor, tensors: dict, part: str, scale: float, offset: float, per: str
) -> None:
    """Gives a layer's scorer the weights of an adapter."""
    projection, heads = layer.scorer.scores.proj, layer.config.num_key_value_heads
    shape = (heads, norm.shape[0])
    names = (f"{part}.weight", f"{part}_norm.weight")
    got = [tuple(tensors[name].shape) if name in tensors else None for name in names]
    if got != [shape, shape[1:]]:
        raise ValueError(f"{names}: got shapes {got}, expected {shape} and {shape[1:]}")
    weight, own_norm = (tensors[name].to(norm.device).float() for name in names)
    weight = weight * own_norm
    bias = tensors.get(f"{part}.bias", torch.zeros(heads)).to(norm.device).float()
    if ((norm == 0) & (weight != 0).any(0)).any():
        raise ValueError(
            f"{part}: got a weight for a feature that the layer's norm sets to 0, expected none: the scorer reads the normed input"
        )
    weight = torch.where(weight == 0, 0, weight / norm.float())
    if per == "layer":
        weight, bias = weight[:1].expand_as(weight), bias[:1].expand_as(bias)
    projection.weight.copy_(-scale * weight)
    projection.bias.copy_(offset - scale * bias)
