"""One generated token of a Doge at batch size 1, as the text before it grows.

On a GPU, all sides but `eager` replay a CUDA graph per token; `sdpa_compiled` attends to transformers' StaticCache of all keys.
Our caches have read a text; the others hold random keys.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn

from ..clock import Rounds, capture_graph, elapsed_ms
from ..record import Failure, Row
from . import DTYPES, Numbers, measure_sides, models

# Other programs disturb a CPU more than a GPU.
ROUNDS = {"cuda": Rounds(7, warm_up=0), "cpu": Rounds(7, is_least=True, warm_up=0)}
_TOKENS = {"cuda": 50, "cpu": 12}  # tokens per round, timed together
_ROOM = 2048  # room for tokens after the context in a static cache of all keys
_PART = 16384  # prompt tokens per forward pass of the model
_CHUNK = 1024  # prompt tokens that a DynamicMaskCache attends to at a time
_CONTEXTS = {"cuda": [4096, 524288], "cpu": [256, 1024, 4096, 16384]}  # tokens before the timed one


@torch.no_grad()
def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    device = options.device
    for context in options.length or _CONTEXTS[device]:
        sides = {
            "ours": functools.partial(_our_token, device, context, is_compiled=False),
            "ours_compiled": functools.partial(_our_token, device, context, is_compiled=True),
            "sdpa_compiled": functools.partial(_token_of_all_keys, device, context, "sdpa"),
            "eager": functools.partial(_token_of_all_keys, device, context, "eager"),
        }
        chosen = options.side or (["ours", "eager"] if device == "cpu" else [])
        case = f"token after {context}, {models.doge_title(device)}"
        yield from measure_sides(case, DTYPES[device], sides, chosen)


def _our_token(device: str, context: int, is_compiled: bool) -> Numbers:
    model = enable_flash_dmattn(models.random_doge(device)).eval()
    forward = torch.compile(model, fullgraph=True) if is_compiled else model
    cache = copy.deepcopy(_cache_of_text(device, context))
    return time_of_token(
        forward, cache, models.random_ids(device, 1), device, in_graph=device == "cuda"
    )


@functools.lru_cache(maxsize=1)
def _cache_of_text(device: str, context: int) -> DynamicMaskCache:
    """Reads a text once for both of our sides, whose models have the same weights."""
    model = enable_flash_dmattn(models.random_doge(device)).eval()
    static = {"static": True, "chunk": _CHUNK} if device == "cuda" else {}
    cache = DynamicMaskCache(model.config, **static)
    for part in models.random_ids(device, context)[:, :-1].split(_PART, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def _token_of_all_keys(device: str, context: int, attention: str) -> Numbers:
    model = models.random_doge(device).eval()
    model.set_attn_implementation(attention)
    config, cache, forward = model.config, DynamicCache(), model
    if attention == "sdpa":
        cache = StaticCache(config=config, max_cache_len=context + _ROOM)
        forward = torch.compile(model, fullgraph=True)
    fill_with_random_keys(cache, model, 1, context)
    in_graph = attention == "sdpa" and device == "cuda"
    return time_of_token(forward, cache, models.random_ids(device, 1), device, in_graph)


def fill_with_random_keys(cache: Cache, model: nn.Module, texts: int, length: int) -> None:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (2, texts, config.num_key_value_heads, length, head_dim)
    for index in range(config.num_hidden_layers):
        cache.update(*torch.randn(shape, dtype=model.dtype, device=model.device), index)


def time_of_token(
    forward: Callable, cache: Cache, token: Tensor, device: str, in_graph: bool
) -> Numbers:
    """Feeds the last token of each text, [texts, 1], to the model and overwrites it with the next one, again and again."""

    def step() -> None:
        logits = forward(token, past_key_values=cache, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))

    for _ in range(3):
        step()
    call = capture_graph([step]) if in_graph else step
    call()
    count, rounds = _TOKENS[device], ROUNDS[device]
    ms = rounds.time_one(lambda: elapsed_ms(lambda: [call() for _ in range(count)], device) / count)
    tensors = (
        tensor
        for layer in cache.layers
        for tensor in (
            layer.slots.tensors if hasattr(layer, "slots") else (layer.keys, layer.values)
        )
    )
    # Several tensors may share a storage.
    storages = {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, tensors)}
    return {"token": ms}, {"cache MiB": sum(storages.values()) / 2**20, "rounds": rounds.count}
