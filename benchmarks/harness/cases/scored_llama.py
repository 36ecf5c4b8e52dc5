"""Compares a Llama with learned scores and one that attends to all keys: prompts and training steps in each phase, and tokens.

The rule keeps 1,024 keys, 256 recent ones and 4 sinks. Weights are random but scores differ from key to key, so times are those of a
trained model. Attention to all keys is torch's SDPA; on a GPU it runs once with each of its fast backends.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache, LlamaModel

from flash_dmattn.check.memory import peak_bytes
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.integrations.transformers.learned_scores.scored_attention import (
    scored_attention_forward,
)
from flash_dmattn.integrations.transformers.names import SCORED_NAME

from ..clock import Rounds, elapsed_ms
from . import all_sides as side_names  # noqa: F401
from . import runs_everywhere as expect_case_runs  # noqa: F401
from .models import cache_mib, fill_with_random_keys, llama_title, random_llama, rows_of_sides

RULE = {"keep_window_size": 1024, "recent_window": 256, "sink_tokens": 4}
FLASH = "all keys, FlashAttention-2"  # torch's implementation
BACKENDS = {"all keys, cuDNN": SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
FLEX = "soft, FlexAttention"
_KINDS = {"cuda": (*BACKENDS, "soft", "hard", FLEX), "cpu": (FLASH, "soft", "hard")}
_LENGTHS = {"cuda": [4096, 32768, 131072], "cpu": [4096]}
_CONTEXTS = {"cuda": [4096, 524288], "cpu": [4096]}  # tokens before the timed one


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    model = add_learned_scores(random_llama(options.device, LlamaModel), **RULE)
    for parameter_name, parameter in model.named_parameters():
        if ".scorer." in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    yield from (_texts if name == "scored_text" else _tokens)(model, options)


class FlexSoft:
    """The soft phase with torch's compiled FlexAttention, whose score function captures a bias that needs a gradient."""

    def __init__(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attend = torch.compile(flex_attention, dynamic=False)
        self.make_mask = torch.compile(create_block_mask)  # eager code would allocate N x N
        self.mask = None

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, **kwargs):
        length, delay = key.shape[2], RULE["recent_window"]
        bias = kwargs["flash_dmattn_scores"].scores_of(key, value)

        def modify(score, b, h, i, j):
            return torch.where(i - j >= delay, score + bias[b, h // 2, j], score)

        if self.mask is None:
            self.mask = self.make_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=query.device
            )
        out = self.attend(
            query, key, value, score_mod=modify, block_mask=self.mask, scale=kwargs["scaling"], enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2), None


def _texts(model: LlamaModel, options: argparse.Namespace) -> Iterator[dict]:
    """Yields the rows of prompts and of training steps with checkpointed layers."""
    for length in options.length or _LENGTHS[options.device]:
        ids = torch.randint(1024, (1, length), device=options.device)
        for work, run in (("prompt", read), ("scores' step", train_scores), ("step", train_all)):
            sides = {
                kind: functools.partial(_text, model, ids, kind, run)
                for kind in _KINDS[options.device]
                if kind not in BACKENDS or run is not train_scores
            }
            yield from rows_of_sides(f"{llama_title(model)} N{length} {work}", sides, options)


def _text(
    model: LlamaModel, ids: Tensor, kind: str, run: Callable[[LlamaModel, Tensor], None]
) -> dict:
    all_keys = kind in BACKENDS
    set_score_phase(model, "off" if all_keys else kind.split(",")[0])
    AttentionInterface.register(
        SCORED_NAME, FlexSoft() if kind == FLEX else scored_attention_forward
    )
    try:
        with sdpa_kernel(BACKENDS[kind]) if all_keys else nullcontext():
            run(model, ids)
            peak, _ = peak_bytes(lambda: run(model, ids), ids.device.type)
            times = _time(lambda: run(model, ids), ids.device.type, run is read)
    finally:
        AttentionInterface.register(SCORED_NAME, scored_attention_forward)
        model.zero_grad()
    ms = times["forward" if run is read else "both"]
    return {**times, "peak_mb": peak / 1e6, "values": {"throughput": [1e3 * ids.shape[1] / ms, "tokens/s"]}}  # fmt: skip


def _time(run: Callable[[], object], device: str, is_forward: bool) -> dict:
    """Returns the time of a run and its statistic as fields of a row.

    There are three rounds, fewer if they would take 5 seconds, and up to 20 if they take less than half a second in all.
    """
    once = elapsed_ms(run, device)
    rounds = Rounds(max(min(3, math.ceil(5e3 / once)), min(20, int(500 / once))), warm_up=0)
    ms = rounds.time_one(lambda: elapsed_ms(run, device))
    return {"forward" if is_forward else "both": ms, **rounds.fields()}


@torch.no_grad()
def read(model: LlamaModel, ids: Tensor) -> None:
    model(ids, use_cache=False)


def train_scores(model: LlamaModel, ids: Tensor) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".scorer." in name)
    step(model, ids)


def train_all(model: LlamaModel, ids: Tensor) -> None:
    model.requires_grad_(True)
    step(model, ids)


def step(model: LlamaModel, ids: Tensor) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, use_cache=False).last_hidden_state.float().square().mean().backward()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    model.eval()


def _tokens(model: LlamaModel, options: argparse.Namespace) -> Iterator[dict]:
    """Yields the rows of one token after a context. The slots have read the context; the cache of all keys has random numbers."""
    for context in options.length or _CONTEXTS[options.device]:
        sides = {
            "hard, slots": functools.partial(_token_of_slots, model, context),
            FLASH: functools.partial(_token_of_all_keys, model, context),
        }
        with torch.no_grad():
            case = f"{llama_title(model)} token after {context}"
            yield from rows_of_sides(case, sides, options)


def _token_of_slots(model: LlamaModel, context: int) -> dict:
    set_score_phase(model, "hard")
    cache = DynamicMaskCache(model.config)
    ids = torch.randint(1024, (1, context), device=model.device)
    prompt = elapsed_ms(lambda: model(ids, **{CACHE: cache}), model.device.type)
    return _token(model, cache) | {"parts": {"prompt": prompt}}


def _token_of_all_keys(model: LlamaModel, context: int) -> dict:
    set_score_phase(model, "off")
    cache = DynamicCache(config=model.config)
    fill_with_random_keys(cache, model, context)
    # cuDNN is not used, because it builds a new plan each time the cache grows.
    with sdpa_kernel(BACKENDS[FLASH]):
        return _token(model, cache)


def _token(model: LlamaModel, cache: DynamicCache) -> dict:
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    def run() -> None:
        model(token, **{CACHE: cache})

    run()
    return _time(run, model.device.type, is_forward=True) | {"cache_mib": cache_mib(cache)}
