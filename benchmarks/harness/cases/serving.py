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
from ..sides import Declined
from . import runs_everywhere as expect_case_runs  # noqa: F401
from .models import random_doge, title

_NEW = {"cuda": 128, "cpu": 16}  # generated tokens per request
_LENGTHS = {"cuda": [512, 8192, 32768, 131072], "cpu": [64, 1024]}  # prompt tokens
_CONCURRENCY = {"cuda": (1, 8, 32, 128), "cpu": (1, 8)}  # concurrent requests of a closed loop
_PATIENCE = 600  # seconds to wait for a request to end
# Arrival rates of the open loop, relative to the requests per second of the first side at the highest concurrency.
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


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict | record.Failure]:
    """Yields a row per side, prompt length and concurrency (closed loop), and per side, prompt length and load (open loop).

    In open loops all sides get the same requests per second: shares of the rate that the first side reached at the highest
    concurrency. If that closed loop failed, a line for each open loop says so.
    """
    device, dtype = options.device, _DTYPES[options.device]
    chosen = [side for side in SIDES if side in (options.side or SIDES)]
    most = max(_CONCURRENCY[device])
    for length in options.length or _LENGTHS[device]:
        saturation = None  # requests per second of the first side with `most` at a time
        for side in chosen:
            model = SIDES[side](device, length).eval()
            for arrival in (*_CONCURRENCY[device], *_LOADS):
                is_load = isinstance(arrival, float)
                how = f"{arrival:.0%} load of {chosen[0]}" if is_load else f"{arrival} at a time"
                case = f"serving N{length} + {_NEW[device]}, {how}, {title(device)}"
                if is_load and saturation is None:
                    reason = Declined(f"{chosen[0]} has no rate with {most} requests at a time")
                    yield record.Failure(case, side, dtype, reason)
                    continue
                try:
                    with _started(model, length, most) as manager:
                        if is_load:
                            loop = _open_loop(manager, model, length, arrival * saturation)
                        else:
                            loop = _closed_loop(manager, model, length, arrival)
                    if side == chosen[0] and arrival == most:
                        saturation, _ = loop["values"]["completed"]
                    yield record.row(case, side, dtype, **loop)
                except Exception as error:  # the other sides are worth their time
                    yield record.Failure(case, side, dtype, error)


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
        results.append(_result(manager, _PATIENCE))
        _add(manager, model, next(prompts))
    ends = [result.timestamps[-1] for result in results]
    completed = (len(ends) - concurrency) / (ends[-1] - ends[concurrency - 1])
    return _times(results[concurrency:], completed, model)


def _open_loop(
    manager: ContinuousBatchingManager, model: PreTrainedModel, length: int, rate: float
) -> dict:
    """Adds requests at random times (Poisson), `rate` per second, whether or not earlier ones have ended, until all timed ones have.

    Requests and tokens per second are those of all requests that end between the arrivals of the first timed one and of the one after
    the last.
    """
    prompts, draw = _prompts(model, length), random.Random(0)
    count = max(_COUNTED[0] * max(_CONCURRENCY[model.device.type]), _COUNTED[1])
    before = max(count // 4, 1)
    gaps = [draw.expovariate(1) for _ in range(count + 1)]
    scale = (count - before) / rate / sum(gaps[before + 1 :])  # so that their mean is 1 / rate
    due = last_end = time.perf_counter()
    arrivals, results, timed = [], [], []
    while len(timed) < count - before:
        while due <= time.perf_counter():
            arrivals.append(time.perf_counter())
            _add(manager, model, next(prompts))
            gap = gaps[len(arrivals)] if len(arrivals) < len(gaps) else draw.expovariate(1)
            due += scale * gap
        result = _result(manager, max(due - time.perf_counter(), 1e-3), may_wait=True)
        if result is not None:
            last_end = time.perf_counter()
            results.append(result)
        elif time.perf_counter() > last_end + _PATIENCE:
            raise RuntimeError(f"no result in {_PATIENCE} seconds")
        if len(arrivals) > count:
            begin, end = arrivals[before], arrivals[count]
            timed = [result for result in results if begin <= result.created_time < end]
    completed = sum(begin <= result.timestamps[-1] < end for result in results) / (end - begin)
    loop = _times(timed, completed, model)
    loop["values"]["offered"] = [rate, "requests/s"]
    return loop


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


def _times(results: list[GenerationOutput], completed: float, model: PreTrainedModel) -> dict:
    """Returns milliseconds to the first token (TTFT), between tokens (ITL) and per token after the first (TPOT), and requests and
    tokens per second.

    completed: the requests that ended per second. A request ends with its last token, whose time the engine records.
    """
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
    throughput = completed * _NEW[model.device.type]
    values = {"completed": [completed, "requests/s"], "throughput": [throughput, "tokens/s"]}
    statistic = {"statistic": "quantile", "rounds": len(results)}
    return {"parts": parts, "values": values, **statistic}


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
