"""Presses of kvpress by kvpress itself and by `add_press`: the time and memory of a prompt and of the tokens after it.

python benchmarks/presses.py --output presses.json    (a GPU; needs kvpress 0.5.5 and a transformers that it takes; half a minute)

A Llama of random weights: 8 layers, hidden 1,024, 16 heads of 64, 8 key heads, bf16. A KnormPress keeps a quarter of the
prompt's keys, and a DMSPress those whose score passes a threshold, by which about a quarter does. kvpress hides the keys of a
DMSPress in the cache; here they leave it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path

import kvpress
import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from flash_dmattn.integrations.kvpress import add_press
from flash_dmattn.integrations.transformers import DynamicMaskCache, remove_learned_scores
from harness import machine, record

RECENT = 256  # keys of a DMSPress that no threshold takes


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=options.hidden, intermediate_size=11 * options.hidden // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, max_position_embeddings=1 << 20, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(options.device, dtype).eval()


def norm_threshold(model: LlamaForCausalLM, ids: Tensor) -> float:
    """The score of a KnormPress that a quarter of the prompt's keys passes, over all layers and heads."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    norms = torch.cat([layer.keys.float().norm(dim=-1).flatten() for layer in cache.layers])
    return -norms[:: max(1, norms.numel() >> 20)].quantile(0.25).item()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bytes_of(cache: Cache) -> int:
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    return sum(state.numel() * state.element_size() for state in states)


def measure(
    model: LlamaForCausalLM,
    ids: Tensor,
    cache_of: Callable[[], object],
    press: AbstractContextManager,
    options: argparse.Namespace,
) -> dict:
    """A prompt, then tokens one at a time: medians of three prompts, and of all tokens after the first of the last."""
    length, on_gpu = ids.shape[1], options.device == "cuda"
    prompts, tokens = [], []
    before = 0
    with press:
        for turn in range(4):  # the first warms up
            cache = None
            synchronize(options.device)
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            cache = cache_of()
            begin = time.perf_counter()
            model(ids, past_key_values=cache, logits_to_keep=1)
            synchronize(options.device)
            prompts += [time.perf_counter() - begin] * (turn > 0)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        held = torch.cuda.memory_allocated() - before if on_gpu else bytes_of(cache)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        # cuDNN, which torch prefers, makes a plan for every new length of a cache that grows.
        torch.backends.cuda.enable_cudnn_sdp(False)
        for position in range(length, length + options.tokens):
            begin = time.perf_counter()
            place = torch.tensor([position], device=ids.device)
            model(ids[:, :1], past_key_values=cache, cache_position=place, position_ids=place[None])
            synchronize(options.device)
            tokens.append(time.perf_counter() - begin)
        torch.backends.cuda.enable_cudnn_sdp(True)
    of_tokens = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return {
        "forward": statistics.median(prompts) * 1e3,
        "peak_mb": peak / 1e6,
        "cache_mib": held / 2**20,
        "parts": {
            "token": statistics.median(tokens[1:]) * 1e3,
            "peak of tokens MB": of_tokens / 1e6,
            "keys": max(layer.keys.shape[2] for layer in cache.layers),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384])
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="a record")
    parser.add_argument("--commit", default="", help="of the sources, where there is no history")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(options)
    rows = []
    with torch.no_grad():
        for length in options.lengths:
            rows += length_rows(model, length, options)
    if options.output is not None:
        versions = {"transformers": transformers.__version__, "kvpress": version("kvpress")}
        record.write(
            options.output,
            machine.origin(options.device, options.commit, **versions)
            | {
                "note": "forward: a prompt; parts: ms of a token, memory beyond the weights, keys a head holds at the end",
                "rows": rows,
            },
        )


def length_rows(model: LlamaForCausalLM, length: int, options: argparse.Namespace) -> list[dict]:
    ids = torch.randint(1024, (1, length), device=options.device)
    threshold = norm_threshold(model, ids)
    norms, keep = kvpress.KnormPress(compression_ratio=0.75), length // 4

    def dms() -> kvpress.DMSPress:
        return kvpress.DMSPress(kvpress.KnormPress(), threshold, RECENT, decoding=True)

    def slots() -> DynamicMaskCache:
        return DynamicMaskCache(model.config)

    def all_keys() -> DynamicCache:
        return DynamicCache(config=model.config)

    rows = []

    def add_row(kind: str, press: AbstractContextManager, cache_of: Callable[[], object]) -> None:
        case = f"Llama L{options.layers} hidden {options.hidden} N{length} prompt and tokens"
        found = measure(model, ids, cache_of, press, options)
        rows.append(record.row(case, kind, str(model.dtype).removeprefix("torch."), **found))
        print(record.format_row(rows[-1]), flush=True)

    add_row("all keys, SDPA", nullcontext(), all_keys)
    add_row("KnormPress, kvpress", norms(model), all_keys)
    add_row("DMSPress, kvpress", dms()(model), all_keys)
    for name, press, places in (("KnormPress", norms, keep), ("DMSPress", dms(), length // 2)):
        for is_dense in (True, False):
            add_press(model, press, places, dense_prefill=is_dense)
            way = "dense prompt" if is_dense else "prompt by intervals"
            add_row(f"{name}, add_press, {way}", nullcontext(), slots)
            remove_learned_scores(model)
    return rows


if __name__ == "__main__":
    main()
