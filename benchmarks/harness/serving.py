"""Many requests at once through transformers' engine (continuous batching): a Doge with slots, and with all keys a Llama of
the same sizes. Weights are random: time depends on shapes alone."""

from __future__ import annotations

import argparse
import itertools
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

from . import record
from .models import random_doge, title

_NEW = {"cuda": 128, "cpu": 16}  # tokens of a request
_LENGTHS = {"cuda": [512, 8192, 32768], "cpu": [64, 1024]}  # of a prompt
_CONCURRENCY = {"cuda": (1, 8, 32), "cpu": (1, 8)}  # requests at any time
_COUNTED = (
    2,
    8,
)  # requests whose times count: for each at a time, and at least; as many as run at a time come before them
_STEP_TOKENS = {"cuda": 8192, "cpu": 256}  # of prompts, in a step of the engine
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def _slots(device: str) -> DogeForCausalLM:
    return enable_flash_dmattn(random_doge(device))


def _all_keys(device: str) -> LlamaForCausalLM:
    doge = random_doge(device).config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    config = LlamaConfig(**{name: getattr(doge, name) for name in names})
    with torch.device(device):
        return LlamaForCausalLM(config).to(getattr(torch, _DTYPES[device]))


SIDES = {"slots": _slots, "all_keys": _all_keys}


def side_names(name: str, device: str) -> tuple[str, ...]:
    return tuple(SIDES)


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """A row for each length of prompts and number of requests at a time, by each side."""
    device, dtype = options.device, _DTYPES[options.device]
    chosen = [side for side in SIDES if side in (options.side or SIDES)]
    for length in options.length or _LENGTHS[device]:
        for side in chosen:
            model = SIDES[side](device).eval()
            for concurrency in _CONCURRENCY[device]:
                case = (
                    f"serving N{length} + {_NEW[device]}, {concurrency} at a time, {title(device)}"
                )
                try:
                    yield record.row(
                        case, side, dtype, parts=_closed_loop(model, length, concurrency)
                    )
                except Exception as error:  # the other sides are worth their time
                    print(record.declined(case, side, dtype, error), flush=True)


def _closed_loop(model: PreTrainedModel, length: int, concurrency: int) -> dict:
    """Requests of which a new one begins when one ends: ms to the first token, and between later ones; tokens a second."""
    device = model.device.type
    engine = ContinuousBatchingConfig(max_batch_tokens=_STEP_TOKENS[device], max_memory_percent=0.7)
    if device == "cpu":  # room for the prompts, and no more
        engine.num_blocks = 2 * concurrency * (length + _NEW[device]) // engine.page_size + 8
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, engine)
    manager.warmup()
    manager.start()
    try:
        results = list(_requests(manager, model, length, concurrency))
    finally:
        manager.stop(block=True)
        manager.destroy()
    counted = [result for _, result in results[concurrency:]]
    seconds = results[-1][0] - results[concurrency - 1][0]
    first = [result.timestamps[0] - result.created_time for result in counted]
    between = [b - a for result in counted for a, b in itertools.pairwise(result.timestamps)]
    return {
        "first token p50": 1e3 * _quantile(first, 0.5),
        "p99": 1e3 * _quantile(first, 0.99),
        "next token p50": 1e3 * _quantile(between, 0.5),
        "its p99": 1e3 * _quantile(between, 0.99),
        "tokens/s": len(counted) * _NEW[device] / seconds,
    }


def _requests(
    manager: ContinuousBatchingManager, model: PreTrainedModel, length: int, concurrency: int
) -> Iterator[tuple[float, GenerationOutput]]:
    """The results, and when they came."""
    device = model.device.type
    drawn = torch.Generator().manual_seed(0)

    def add() -> None:
        prompt = torch.randint(model.config.vocab_size, (length,), generator=drawn).tolist()
        manager.add_request(prompt, max_new_tokens=_NEW[device], record_timestamps=True)

    left = concurrency + max(_COUNTED[0] * concurrency, _COUNTED[1])
    for _ in range(concurrency):
        add()
    for number in range(left):
        result = manager.get_result(timeout=600)
        if result is None or result.error is not None:
            raise RuntimeError(result.error if result else "no result in ten minutes")
        if number + concurrency < left:
            add()
        yield time.perf_counter(), result


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
