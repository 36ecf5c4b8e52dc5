"""Dynamic Memory Sparsification (arXiv 2506.05345) as learned scores, by the formulas of NVIDIA's Model-Optimizer,
experimental/dms.

A key further than `dms_window_size` tokens away is evicted if the logit of the token after it is above 0:

    logit = dms_alpha_scale * alpha - dms_initial_alpha_offset

alpha is a projection of the layer's input behind an RMSNorm of its own (the adapter), or the last channel of the first query head
of a group. That channel is then 0 before and after the rotation. The log gate of a key is log sigmoid(-logit).
"""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..._shared.scorers import LayerScorer
from .add import add_learned_scores, scored_layers
from .layers import uses_scores
from .training import ScoreSchedule

# In 510 of 544 steps the compression ratio grows from 1 to 16.
DMS_SCHEDULE = ScoreSchedule(
    narrowing=510 / 544, share=1 / 16, weight=1.0, temperature=0.1, by_ratio=True, sampled=True
)
_HALF_OPEN = -math.log(2) - 1e-7  # log sigmoid(0), less its rounding
_FORM = {  # parts of a config: values, of which the last is the default
    "model_type": ("llama", "qwen3"),  # whose layers read their input behind one RMSNorm
    "dms_disable_eviction": (False,),
    "dms_alpha_per": ("head",),
    "use_sliding_window": (False,),
}
_ADAPTER = "self_attn.dms_proj_alpha"


def add_dms_scores(
    model: nn.Module, keep_window_size=None, window_size: int = 512, **options
) -> nn.Module:
    """Adds scores with the gates of DMS (`add_learned_scores`), which begin at the logit 5, for a training by `DMS_SCHEDULE`.

    NVIDIA's scale of 100 is part of the scorer's weight: a learning rate of Adam has to be 100 times theirs.

    keep_window_size: of `add_learned_scores`, the most old keys of a head. None: no limit, and no `DynamicMaskCache`.
    window_size: the largest distance of a recent key. options: of `add_learned_scores`, but for `late`.
    """
    of_dms = {"recent_window": window_size + 1, "score_threshold": _HALF_OPEN, "first_logit": 5.0}
    return add_learned_scores(model, keep_window_size, late=True, **of_dms | options)


def load_dms(
    model_or_folder: nn.Module | str | PathLike, keep_window_size=None, **options
) -> nn.Module:
    """Loads a DMS checkpoint of a Llama or Qwen3, whose evicted keys leave a `DynamicMaskCache`.

        model = load_dms(folder, keep_window_size=4096, dtype=torch.bfloat16)
        model.generate(**inputs, past_key_values=DynamicMaskCache(model.config))

    An adapter becomes the scorer "hidden". Decisions equal NVIDIA's up to rounding. In the phase "off" a query has all channels.

    Args:
        model_or_folder: a folder of `save_pretrained`, or a model of transformers' own class from one.
        keep_window_size: as in `add_dms_scores`. `cache.layers[i].slots.capped` counts the keys beyond it.
        options: of `from_pretrained`, for a folder.

    Raises:
        TypeError: options for a model.
        ValueError: a checkpoint of another form; the message names the part.
    """
    model = model_or_folder
    if isinstance(model, nn.Module):
        if options:
            raise TypeError(
                f"{next(iter(options))}: got it for a model, expected none of the options of from_pretrained"
            )
    else:
        options = {"trust_remote_code": False, **options}  # transformers' own class
        model = AutoModelForCausalLM.from_pretrained(model, **options)
    config, tensors = model.config, _adapter_tensors(Path(model.config.name_or_path))
    has_adapter = getattr(config, "dms_separate_alpha", False)
    for part in ("dms_window_size", "dms_alpha_scale", "dms_initial_alpha_offset"):
        if not isinstance(getattr(config, part, None), (int, float)):
            raise ValueError(
                f"config.{part}: got none or no number, expected that of a DMS checkpoint"
            )
    for part, values in _FORM.items():
        if (value := getattr(config, part, values[-1])) not in values:
            raise ValueError(f"config.{part}: got {value!r}, expected one of {values}")
    if has_adapter != bool(tensors) or any(_ADAPTER in name for name in model.state_dict()):
        raise ValueError(
            f"model_or_folder: got a {type(model).__name__} with dms_separate_alpha={has_adapter} and {len(tensors)} tensors of "
            f"{_ADAPTER} in {config.name_or_path!r}, expected transformers' own class, and tensors in a folder if True"
        )
    numbers = range(config.num_hidden_layers if has_adapter else 0)
    states = [_state_of_adapter(model, tensors, number) for number in numbers]
    scorer = "hidden" if has_adapter else QueryChannel(config)
    options = {"scorer": scorer, "first_logit": config.dms_initial_alpha_offset}
    add_dms_scores(model, keep_window_size, config.dms_window_size, **options)
    if has_adapter:
        for layer in scored_layers(model):
            layer.scorer.scores.proj.load_state_dict(states[layer.layer_idx])
    return model


class QueryChannel(LayerScorer):
    """Log gates [B, Hkv, S] from the last channel of the first query head of each group."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.scale, self.offset = config.dms_alpha_scale, config.dms_initial_alpha_offset
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.channel = None

    def attach(self, layer: nn.Module) -> None:
        self.layer = (layer,)  # a tuple, so that it is no submodule
        module = getattr(layer, "q_norm", layer.q_proj)
        self.query_hook = module.register_forward_hook(self.take)

    def detach(self) -> None:
        self.query_hook.remove()

    def take(self, module: nn.Module, args: tuple, query: Tensor) -> Tensor | None:
        """Keeps the channel of a query [B, S, Hq, D] or [B, S, Hq * D] for `forward`, and returns the query without it."""
        (layer,) = self.layer
        if not uses_scores(layer):
            return None
        if module is not getattr(layer, "q_norm", layer.q_proj):
            # An adapter adds to the query after this hook.
            raise TypeError(
                f"q_proj: got a {type(layer.q_proj).__name__} around the projection, whose last channel decides what is evicted, "
                "expected adapters on other layers"
            )
        by_head = query.view(*query.shape[:2], -1, layer.head_dim).transpose(1, 2)
        self.channel = by_head[:, :: self.group, :, -1].transpose(1, 2)
        return self.clear_query(by_head).transpose(1, 2).reshape(query.shape)

    def clear_query(self, query: Tensor) -> Tensor:
        query = query.clone()
        query[:, :: self.group, :, -1] = 0
        return query

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        channel, self.channel = self.channel, None
        if channel is None:
            raise RuntimeError(
                "scorer: got a copy without the channel of a query, expected the module that load_dms made; it has nothing to "
                "train, so leave it out of PEFT's modules_to_save"
            )
        return F.logsigmoid((self.offset - self.scale * channel).float()).transpose(1, 2)


def _adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of adapters in a folder, by their names from the layer's number on."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if f".{_ADAPTER}" in name]
            tensors |= {name.partition("layers.")[2]: file.get_tensor(name) for name in names}
    return tensors


def _state_of_adapter(model: nn.Module, tensors: dict, number: int) -> dict[str, Tensor]:
    """Returns the parameters of the scorer "hidden" of a layer, whose norm divides by the same root mean square."""
    part, config = f"{number}.{_ADAPTER}", model.config
    norm = model.model.layers[number].input_layernorm.weight.detach().float().cpu()
    shape = (config.num_key_value_heads, len(norm))
    found = [tensors.get(f"{part}{name}.weight", torch.empty(0)) for name in ("", "_norm")]
    if (sizes := [tuple(t.shape) for t in found]) != [shape, shape[1:]]:
        raise ValueError(f"{part}: got weights of shapes {sizes}, expected {[shape, shape[1:]]}")
    weight = found[0].float() * found[1].float()
    if ((norm == 0) & (weight != 0).any(0)).any():
        raise ValueError(f"{part}: got weights for features of which the layer's norm makes 0")
    weight = torch.where(weight == 0, 0.0, weight / norm)
    bias = tensors.get(f"{part}.bias", torch.zeros(shape[0]))
    scale, offset = config.dms_alpha_scale, config.dms_initial_alpha_offset
    return {"weight": -scale * weight, "bias": offset - scale * bias.float()}
