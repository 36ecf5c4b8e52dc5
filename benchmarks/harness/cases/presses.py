"""Compares kvpress with `add_press`: time and memory of a prompt, and of the tokens generated after it.

Needs kvpress 0.5.5 and a version of transformers that it supports. KnormPress keeps a quarter of the prompt's keys. DMSPress keeps the
keys whose score passes a threshold, chosen so that about a quarter pass. kvpress masks the dropped keys of a DMSPress, which stay in
the cache; `add_press` removes them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import kvpress
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, LlamaForCausalLM

from flash_dmattn.check.memory import peak_bytes
from flash_dmattn.integrations.kvpress import add_press
from flash_dmattn.integrations.transformers import DynamicMaskCache, remove_learned_scores
from flash_dmattn.integrations.transformers.compat import CACHE

from ..clock import Rounds, elapsed_ms
from . import all_sides as side_names  # noqa: F401
from . import runs_everywhere as expect_case_runs  # noqa: F401
from .models import cache_mib, llama_title, random_llama, rows_of_sides

RECENT = 256  # most recent keys, which a DMSPress keeps whatever their score
_PROMPTS = Rounds(3)
_TOKENS = Rounds(64)  # generated tokens per prompt


@torch.no_grad()
def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    model = random_llama(options.device, LlamaForCausalLM)
    for length in options.length or [16384]:
        ids = torch.randint(1024, (1, length), device=options.device)
        norms = kvpress.KnormPress(compression_ratio=0.75)
        threshold = _norm_threshold(model, ids)
        dms = kvpress.DMSPress(kvpress.KnormPress(), threshold, RECENT, decoding=True)
        run_kvpress = functools.partial(_measure, model, ids, DynamicCache)
        sides = {
            "all keys, SDPA": run_kvpress,
            "KnormPress, kvpress": functools.partial(run_kvpress, norms),
        }
        sides["DMSPress, kvpress"] = functools.partial(run_kvpress, dms)
        for press, places in ((norms, length // 4), (dms, length // 2)):
            for way in ("dense prompt", "prompt by intervals"):
                side = f"{type(press).__name__}, add_press, {way}"
                sides[side] = functools.partial(_with_scores, model, ids, press, places, way)
        case = f"{llama_title(model)} N{length} prompt and tokens"
        yield from rows_of_sides(case, sides, options)


def _norm_threshold(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Returns the KnormPress score that a quarter of the prompt's keys exceed, over all layers and heads."""
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache}, logits_to_keep=1)
    norms = torch.cat([layer.keys.float().norm(dim=-1).flatten() for layer in cache.layers])
    return -norms[:: max(1, norms.numel() >> 20)].quantile(0.25).item()


def _with_scores(
    model: LlamaForCausalLM, ids: Tensor, press: object, places: int, way: str
) -> dict:
    add_press(model, press, places, dense_prefill=way == "dense prompt")
    try:
        return _measure(model, ids, DynamicMaskCache)
    finally:
        remove_learned_scores(model)


def _measure(
    model: LlamaForCausalLM,
    ids: Tensor,
    cache_class: type[Cache],
    press: Callable[[object], AbstractContextManager] = nullcontext,
) -> dict:
    """Times a prompt and then one token at a time. Returns the medians of the prompts and of the tokens after the first."""
    device = model.device.type

    def read() -> Cache:
        cache = cache_class(config=model.config)
        model(ids, **{CACHE: cache}, logits_to_keep=1)
        return cache

    def write(cache: Cache, first: int) -> float:
        positions = itertools.count(first)

        def token() -> float:
            at = torch.tensor([next(positions)], device=ids.device)
            places = {"cache_position": at, "position_ids": at[None]}
            step = functools.partial(model, ids[:, :1], **{CACHE: cache}, **places)
            return elapsed_ms(step, device)

        return _TOKENS.time_one(token)

    with press(model):
        prompt = _PROMPTS.time_one(lambda: elapsed_ms(read, device))
        peak, cache = peak_bytes(read, device)
        held = cache_mib(cache)
        # torch prefers cuDNN, which builds a new plan each time the cache grows.
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            token = write(cache, ids.shape[1])
            more, _ = peak_bytes(lambda: write(cache, ids.shape[1] + _TOKENS.count + 1), device)
    keys = max(layer.keys.shape[2] for layer in cache.layers)
    values = {"peak of tokens": [more / 1e6 + held * 1.048576, "MB"], "keys": [keys, "keys"]}
    return {
        "forward": prompt, **_PROMPTS.fields(), "peak_mb": peak / 1e6, "cache_mib": held,
        "parts": {"token": token}, "values": values,
    }  # fmt: skip
