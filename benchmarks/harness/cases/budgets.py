"""A prompt, and a token of many sequences, of a Llama with learned scores: one budget divided over its heads, the same number of
keys for each head, and all keys. Weights and keys are random. On a GPU each token is the replay of a CUDA graph."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

import torch
from torch import nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, StaticCache

from flash_dmattn.integrations.transformers import DynamicMaskCache, add_learned_scores

from ..clock import elapsed_ms
from ..record import Failure, Row
from . import DTYPES, Numbers, measure_sides
from .models import random_ids
from .token import fill_with_random_keys, time_of_token

# Old keys of a head of SmolLM2, by layer, with 4,096 tokens (docs/quality.md). 256 recent keys and 4 sinks are seen in addition.
_OLD_KEYS = (
    91, 78, 40, 30, 61, 36, 45, 562, 309, 23, 24, 3, 3, 3, 327, 149, 7, 549, 1173, 53, 1127, 171, 31, 852, 335, 3, 78, 3, 147, 9,
)  # fmt: skip
_RECENT, _SINKS, _ROOM = 256, 4, 2048
_SIZES = {"cuda": ((8192, 64), (32768, 32)), "cpu": ((512, 2),)}  # (tokens, sequences)
_LLAMA = {  # that of Llama-3.2-1B without its vocabulary, and a small one
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    "cpu": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


@torch.no_grad()
def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    device, sizes = options.device, _LLAMA[options.device]
    heads = f"H{sizes['num_attention_heads']} Hkv{sizes['num_key_value_heads']} D64"
    for length, texts in _SIZES[device]:
        sides = {
            "divided": partial(_with_scores, device, length, texts, is_divided=True),
            "uniform": partial(_with_scores, device, length, texts, is_divided=False),
            "sdpa_compiled": partial(_with_all_keys, device, length, texts),
        }
        case = f"token of {texts} texts of {length}, Llama L{sizes['num_hidden_layers']} {heads}"
        yield from measure_sides(case, DTYPES[device], sides, options.side)


def _with_scores(device: str, length: int, texts: int, is_divided: bool) -> Numbers:
    model = _random_llama(device, length)
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    caps = [_OLD_KEYS[i % len(_OLD_KEYS)] for i in range(layers * heads)]
    if not is_divided:
        caps = [round(fmean(caps))] * len(caps)
    rows = [caps[i : i + heads] for i in range(0, len(caps), heads)]
    add_learned_scores(model, rows, recent_window=_RECENT, sink_tokens=_SINKS)
    for name, parameter in model.named_parameters():
        if name.endswith("scorer.scores.proj.weight"):  # all scores of a new scorer tie
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_score_phase("hard")
    caches = [DynamicMaskCache(model.config, static=device == "cuda") for _ in range(3)]
    prompt = _ms_of_prompt(model, caches, length)
    caches[0].batch_repeat_interleave(texts)
    return _with_token(prompt, model, caches[0], device, texts)


def _with_all_keys(device: str, length: int, texts: int) -> Numbers:
    model = _random_llama(device, length)
    caches = [StaticCache(model.config, max_cache_len=length + _ROOM) for _ in range(4)]
    prompt = _ms_of_prompt(model, caches[:3], length)
    cache = caches.pop()
    fill_with_random_keys(cache, model, texts, length)
    return _with_token(prompt, torch.compile(model, fullgraph=True), cache, device, texts)


def _with_token(prompt: float, forward: Callable, cache: Cache, device: str, texts: int) -> Numbers:
    """Adds a token of each text to the milliseconds of a prompt."""
    token = random_ids(device, texts).T.contiguous()
    ms, other = time_of_token(forward, cache, token, device, in_graph=device == "cuda")
    return {"prompt": prompt} | ms, other


def _random_llama(device: str, length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **_LLAMA[device], vocab_size=32768, max_position_embeddings=length + _ROOM, attn_implementation="sdpa"
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(getattr(torch, DTYPES[device])).eval()


def _ms_of_prompt(model: nn.Module, caches: list[Cache], length: int) -> float:
    """Returns the least time in which the model reads a prompt of `length` tokens into one of these caches."""
    prompt = random_ids(model.device.type, length)
    options = {"logits_to_keep": 1, "use_cache": True}
    times = [
        elapsed_ms(partial(model, prompt, past_key_values=cache, **options), model.device.type)
        for cache in caches
    ]
    return min(times)
