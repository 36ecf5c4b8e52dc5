"""Measures how far the gradients of a 16-bit Doge are from those of the float32 model."""

from __future__ import annotations

import copy
import statistics

import torch
from transformers import DogeConfig, DogeForCausalLM

from flash_dmattn.integrations.transformers import enable_flash_dmattn

LENGTH, WINDOW = 400, 96
# The gradients of these parameters depend most on which keys are selected.
SCORED = ("dt_proj", "A", "q_proj", "k_proj", "v_proj")
_VOCABULARY = 401


def make_doge(seed: int, window: int = WINDOW) -> tuple[DogeForCausalLM, torch.Tensor]:
    """Returns an eager float32 model whose weights are exact in bf16, and tokens without repetition."""
    torch.manual_seed(seed)
    config = DogeConfig(
        vocab_size=_VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        keep_window_size=window, pad_token_id=0,
    )  # fmt: skip
    model = DogeForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.06 if "dt_proj" in name else 0.02)
            parameter.copy_(parameter.bfloat16())
    return model, (torch.randperm(_VOCABULARY - 1)[:LENGTH] + 1)[None]


def median_distances(
    dtype: torch.dtype,
    device: str,
    *,
    autocast: bool = False,
    window: int = WINDOW,
    seeds: int,
) -> dict[str, dict[str, float]]:
    """Returns, for "eager" and "ours", the relative error of each kind of parameter's gradient in the worst layer.

    The error is the median over the seeds, relative to eager attention in float32 on the CPU.
    """
    samples = {"eager": {}, "ours": {}}
    for seed in range(seeds):
        exact, ids = make_doge(seed, window)
        low = copy.deepcopy(exact).to(device, torch.float32 if autocast else dtype)
        models = {"eager": copy.deepcopy(low), "ours": enable_flash_dmattn(low)}
        _backward(exact, ids)
        for side, model in models.items():
            with torch.autocast(device, dtype, enabled=autocast):
                loss = model(ids.to(device), labels=ids.to(device)).loss
            loss.backward()
            for kind, distance in _distances(model, exact).items():
                samples[side].setdefault(kind, []).append(distance)
    return {
        side: {kind: statistics.median(distances) for kind, distances in kinds.items()}
        for side, kinds in samples.items()
    }


def _backward(model: DogeForCausalLM, ids: torch.Tensor) -> None:
    model(ids, labels=ids).loss.backward()


def _distances(model: DogeForCausalLM, exact: DogeForCausalLM) -> dict[str, float]:
    """Returns the largest distance of any layer for each parameter's name without the layer's number."""
    worst: dict[str, float] = {}
    expected = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name].grad
        if wanted is None:
            continue
        distance = (parameter.grad.cpu().double() - wanted).norm() / wanted.norm()
        path = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        kind = path[-1]
        worst[kind] = max(worst.get(kind, 0.0), distance.item())
    return worst
