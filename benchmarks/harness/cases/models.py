"""The models of transformers that cases measure, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM, LlamaConfig, LlamaModel

from . import DTYPES

_DOGE = {
    "cuda": {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "keep_window_size": 1024,
    },
    "cpu": {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "keep_window_size": 256,
    },
}  # fmt: skip


def random_doge(device: str) -> DogeForCausalLM:
    torch.manual_seed(0)
    config = DogeConfig(**_DOGE[device], max_position_embeddings=1 << 20, eos_token_id=None)
    with torch.device(device):
        model = DogeForCausalLM(config).to(getattr(torch, DTYPES[device]))
    # All scores of a new Doge tie.
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A, std=0.1)
        torch.nn.init.normal_(layer.self_attn.dt_proj.weight, std=0.1)
    return model


def doge_title(device: str) -> str:
    sizes = _DOGE[device]
    return (
        f"Doge L{sizes['num_hidden_layers']} hidden {sizes['hidden_size']} H{sizes['num_attention_heads']} "
        f"Hkv{sizes['num_key_value_heads']} w{sizes['keep_window_size']}"
    )


def random_llama(device: str) -> LlamaModel:
    """Returns a Llama with 8 layers of width 1,024 on a GPU, or 2 layers of width 256 on a CPU. The head dimension is 64, with
    half as many key heads as query heads."""
    hidden, layers = (1024, 8) if device == "cuda" else (256, 2)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaModel(config).to(device, getattr(torch, DTYPES[device])).eval()


def random_ids(device: str, length: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(256, (1, length), generator=generator, device=device)
