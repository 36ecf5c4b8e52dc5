"""Training steps: forward, loss and backward of a Doge (`training_step`), and of a Llama with learned scores (`scored_step`)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flash_dmattn.integrations.transformers import (
    add_learned_scores,
    enable_flash_dmattn,
    set_score_phase,
)

from ..clock import Rounds, elapsed_ms
from ..memory import peak_bytes
from ..record import Failure, Row
from ..sides import SDPA_BACKENDS
from . import DTYPES, Numbers, measure_sides, measure_step, models

STEPS = Rounds(9, warm_up=3)
LLAMA_STEPS = Rounds(5)
RULE = {"keep_window_size": 1024, "recent_window": 256, "sink_tokens": 4}
# The sides of a Llama with all keys, by torch's backend.
_ALL_KEYS = {"cuda": SDPA_BACKENDS, "cpu": {"sdpa": None}}
_LENGTHS = {"cuda": [4096, 32768, 131072], "cpu": [4096]}


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    for name in names:
        yield from (_steps_of_doge if name == "training_step" else _steps_of_llama)(options)


def _steps_of_doge(options: argparse.Namespace) -> Iterator[Row | Failure]:
    for length in options.length or [2048, 8192]:
        sides = {
            side: functools.partial(_step_of_doge, side, options.device, length)
            for side in ("ours", "ours_compiled", "eager", "eager_compiled")
        }
        case = f"training step N{length}, {models.doge_title(options.device)}"
        yield from measure_sides(case, DTYPES[options.device], sides, options.side)


def _step_of_doge(side: str, device: str, length: int) -> Numbers:
    torch._dynamo.reset()
    model = models.random_doge(device)
    model.config.use_cache = False
    attention, _, compiled = side.partition("_")
    if attention == "eager":
        model.set_attn_implementation("eager")
    else:
        enable_flash_dmattn(model)
    ids = models.random_ids(device, length)

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    compute = torch.compile(loss, fullgraph=True) if compiled else loss

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        compute(ids).backward()

    return measure_step(step, device, STEPS)


def _steps_of_llama(options: argparse.Namespace) -> Iterator[Row | Failure]:
    """Yields the rows of prompts and of training steps with checkpointed layers.

    The rule keeps 1,024 keys, 256 recent ones and 4 sinks. Scores differ from key to key, so times are those of a trained model.
    """
    device = options.device
    model = add_learned_scores(models.random_llama(device), **RULE)
    for name, parameter in model.named_parameters():
        if ".scorer." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    for length in options.length or _LENGTHS[device]:
        ids = models.random_ids(device, length)
        sides = {
            side: functools.partial(_numbers_of_llama, model, ids, side)
            for side in (*_ALL_KEYS[device], "soft", "hard")
        }
        config = model.config
        case = f"scored step N{length}, Llama L{config.num_hidden_layers} hidden {config.hidden_size} w1024 recent 256 sinks 4"
        yield from measure_sides(case, DTYPES[device], sides, options.side)


def _numbers_of_llama(model, ids: Tensor, side: str) -> Numbers:
    device = ids.device.type
    backend = _ALL_KEYS[device].get(side)
    set_score_phase(model, "off" if side in _ALL_KEYS[device] else side)
    with sdpa_kernel(backend) if backend else nullcontext():
        prompt, step = (
            LLAMA_STEPS.time_one(lambda run=run: elapsed_ms(lambda: run(model, ids), device))
            for run in (_read, _train)
        )
        peak, _ = peak_bytes(lambda: _train(model, ids), device)
    other = {"peak MB": peak / 1e6, "tokens/s": 1e3 * ids.shape[1] / step}
    return {"prompt": prompt, "step": step}, other | {"rounds": LLAMA_STEPS.count}


@torch.no_grad()
def _read(model, ids: Tensor) -> None:
    model(ids, use_cache=False)


def _train(model, ids: Tensor) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, use_cache=False).last_hidden_state.float().square().mean().backward()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    model.eval()
