"""Times many concurrent requests in transformers' continuous batching engine.

Compares a Doge with slots, the same Doge with slots for all keys, and a Llama of the same size with transformers' own cache. Weights
are random, because time depends only on shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Iterator

import torch
from transformers import (
    ContinuousBatchingConfig,
    DogeForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from flash_dmattn.integrations.transformers import enable_flash_dmattn

from .. import record
from . import runs_everywhere as expect_case_runs  # noqa: F401
from .models import random_doge, title

_NEW = {"cuda": 128, "cpu": 16}  # generated tokens per request
_LENGTHS = {"cuda": [512, 8192, 32768, 131072], "cpu": [64, 1024]}  # prompt tokens
_CONCURRENCY = {"cuda": (1, 8, 32, 128), "cpu": (1, 8)}  # concurrent requests of a closed loop
# Arrival rates of the open loop, relative to the requests per second at the highest concurrency.
_LOADS = (0.5, 0.8, 0.95)
# Timed requests: 2 per concurrent request, and at least 8. In a closed loop, one warm-up request per concurrent request precedes them.
_COUNTED = (2, 8)
_STEP_TOKENS = {"cuda": 8192, "cpu": 256}  # most tokens in a step of the engine
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def _slots(device: str, length: int) -> DogeForCausalLM:
    return enable_flash_dmattn(random_doge(device))


def _all_slots(device: str, length: int) -> DogeForCausalLM:
    """Returns a model whose window is as long as a request. It runs the same kernels and holds all keys."""
    model = random_doge(device)
    model.config.keep_window_size = length + _NEW[device]
    for layer in model.model.layers:
        layer.self_attn.keep_window_size = model.config.keep_window_size
    return enable_flash_dmattn(model)


def _all_keys(device: str, length: int) -> LlamaForCausalLM:
    doge = random_doge(device).config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    config = LlamaConfig(**{name: getattr(doge, name) for name in names})
    with torch.device(device):
        return LlamaForCausalLM(config).to(getattr(torch, _DTYPES[device]))


SIDES = {"slots": _slots, "all_slots": _all_slots, "all_keys": _all_keys}


def side_names(name: str, device: str) -> tuple[str, ...]:
    return tuple(SIDES)


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """Yields a row per side, prompt length and concurrency (closed loop), and per side, prompt length and load (open loop)."""
    device, dtype = options.device, _DTYPES[options.device]
    chosen = [side for side in SIDES if side in (options.side or SIDES)]
    for length in options.length or _LENGTHS[device]:
        for side in chosen:
            model = SIDES[side](device, length).eval()
            saturation = 0.0
            arrivals = [*_CONCURRENCY[device], *_LOADS]
            for number, arrival in enumerate(arrivals):
                is_load = number >= len(_CONCURRENCY[device])
                how = f"{arrival:.0%} load" if is_load else f"{arrival} at a time"
                case = f"serving N{length} + {_NEW[device]}, {how}, {title(device)}"
                try:
                    with _started(model, length, max(_CONCURRENCY[device])) as manager:
                        if is_load:
                            loop = _open_loop(manager, model, length, arrival * saturation)
                        else:
                            loop = _closed_loop(manager, model, length, arrival)
                            saturation, _ = loop["values"]["completed"]
                    yield record.row(case, side, dtype, **loop)
                except Exception as error:  # the other sides are worth their time
                    print(record.failed(case, side, dtype, error), flush=True)


@contextlib.contextmanager
def _started(model: PreTrainedModel, length: int, most: int) -> Iterator[ContinuousBatchingManager]:
    """Starts an engine with room for `most` requests, or on a GPU for as many as fit into its memory."""
    device = model.device.type
    engine = ContinuousBatchingConfig(max_batch_tokens=_STEP_TOKENS[device], max_memory_percent=0.7)
    if device == "cpu":  # room for the requests and little more
        engine.num_blocks = 2 * most * (length + _NEW[device]) // engine.page_size + 8
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, engine)
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()


def _closed_loop(
    manager: ContinuousBatchingManager, model: PreTrainedModel, length: int, concurrency: int
) -> dict:
    """Keeps `concurrency` requests running: a new one starts whenever one ends, also while the last timed request runs."""
    prompts = _prompts(model, length)
    results = []
    for _ in range(concurrency):
        _add(manager, model, next(prompts))
    for _ in range(concurrency + max(_COUNTED[0] * concurrency, _COUNTED[1])):
        results.append(_result(manager, 600))
        _add(manager, model, next(prompts))
    ends = [result.timestamps[-1] for result in results]
    return _times(results, ends, concurrency, model)


def _open_loop(
    manager: ContinuousBatchingManager, model: PreTrainedModel, length: int, rate: float
) -> dict:
    """Adds requests at random times, `rate` per second (Poisson), whether or not earlier ones have ended."""
    if not rate:
        raise ValueError("rate: got 0, as no number of requests at a time could be measured")
    prompts, draw = _prompts(model, length), random.Random(0)
    count = max(_COUNTED[0] * max(_CONCURRENCY[model.device.type]), _COUNTED[1])
    start = time.perf_counter()
    due = list(itertools.accumulate((draw.expovariate(rate) for _ in range(count)), initial=start))
    results = []
    while len(results) < count:
        while due and len(due) > 1 and due[0] <= time.perf_counter():
            due.pop(0)
            _add(manager, model, next(prompts))
        wait = max(due[0] - time.perf_counter(), 1e-3) if len(due) > 1 else 600
        result = _result(manager, wait, may_wait=len(due) > 1)
        if result is not None:
            results.append(result)
    results.sort(key=lambda result: result.created_time)
    begins = [result.created_time for result in results]
    return _times(results, begins, max(count // 4, 1), model)


def _prompts(model: PreTrainedModel, length: int) -> Iterator[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(model.config.vocab_size, (length,), generator=drawn).tolist()


def _add(manager: ContinuousBatchingManager, model: PreTrainedModel, prompt: list[int]) -> None:
    manager.add_request(prompt, max_new_tokens=_NEW[model.device.type], record_timestamps=True)


def _result(
    manager: ContinuousBatchingManager, timeout: float, may_wait: bool = False
) -> GenerationOutput | None:
    """Waits for the next request that ends. If none ends within `timeout` seconds, returns None with `may_wait` and raises without."""
    result = manager.get_result(timeout=timeout)
    if result is not None and result.error is not None or result is None and not may_wait:
        raise RuntimeError(result.error if result else f"no result in {timeout} seconds")
    return result


def _times(
    results: list[GenerationOutput], moments: list[float], before: int, model: PreTrainedModel
) -> dict:
    """Returns milliseconds to the first token (TTFT), between tokens (ITL) and per token after the first (TPOT), and requests and
    tokens per second.

    moments: one time per result, from which the rate is computed.
    before: how many of the first results are a warm-up.
    """
    seconds = moments[-1] - moments[before - 1]
    results = results[before:]
    first = [result.timestamps[0] - result.created_time for result in results]
    between = [b - a for result in results for a, b in itertools.pairwise(result.timestamps)]
    each = [
        (result.timestamps[-1] - result.timestamps[0]) / (len(result.timestamps) - 1)
        for result in results
    ]
    parts = {}
    for name, values in (("TTFT", first), ("TPOT", each), ("ITL", between)):
        parts[f"{name} p50"] = 1e3 * _quantile(values, 0.5)
        parts[f"{name} p99"] = 1e3 * _quantile(values, 0.99)
    rate = len(results) / seconds
    throughput = rate * _NEW[model.device.type]
    values = {"completed": [rate, "requests/s"], "throughput": [throughput, "tokens/s"]}
    statistic = {"statistic": "quantile", "rounds": len(results)}
    return {"parts": parts, "values": values, **statistic}


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
