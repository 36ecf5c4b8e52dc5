"""Measures a Llama with learned scores against attention to all keys: a prompt and a training step in each phase, and tokens.

python benchmarks/scored_llama.py [--lengths 4096 32768 131072] [--output FILE.json]    (a CUDA GPU, under 4 minutes)

8 layers, hidden 1,024, 16 heads of 64, 8 key heads, bf16; the rule keeps 1,024 keys, 256 recent ones and 4 sinks. Weights are
random, which changes no time: scores differ from key to key. Attention to all keys is torch's SDPA, once with each of its fast
backends alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, Cache, DynamicCache, LlamaConfig, LlamaModel

from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.learned_scores.scored_attention import (
    NAME,
    scored_attention_forward,
)
from harness import machine, record

RULE = {"keep_window_size": 1024, "recent_window": 256, "sink_tokens": 4}
FLASH = "all keys, FlashAttention-2"  # the one in torch
BACKENDS = {"all keys, cuDNN": SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
FLEX = "soft, FlexAttention"


def make_model(options: argparse.Namespace) -> LlamaModel:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=options.hidden, intermediate_size=11 * options.hidden // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, max_position_embeddings=1 << 20, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = LlamaModel(config).to(options.device, dtype)
    add_learned_scores(model, **RULE)
    for name, parameter in model.named_parameters():
        if ".scorer." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


class FlexSoft:
    """The soft phase by torch's FlexAttention, compiled, with a captured bias that takes a gradient."""

    def __init__(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attend = torch.compile(flex_attention, dynamic=False)
        self.make_mask = torch.compile(create_block_mask)  # else N x N in memory
        self.masks = {}

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, **kwargs):
        length, delay = key.shape[2], RULE["recent_window"]
        bias = kwargs["flash_dmattn_scores"].scores_of(key, value)

        def modify(score, b, h, i, j):
            return torch.where(i - j >= delay, score + bias[b, h // 2, j], score)

        if length not in self.masks:
            self.masks[length] = self.make_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=query.device
            )
        out = self.attend(
            query, key, value, score_mod=modify, block_mask=self.masks[length], scale=kwargs["scaling"],
            enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2), None


def name_of(options: argparse.Namespace) -> str:
    return f"Llama L{options.layers} hidden {options.hidden}"


def dtype_of(model: LlamaModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def measure(run: Callable[[], object], options: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of some runs after one that warms up, and the peak of memory in MB that a run adds."""
    is_gpu = options.device == "cuda"

    def once() -> float:
        begin = time.perf_counter()
        run()
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    before = 0
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds, spent = [], 0.0
    while (len(seconds) < 3 and spent < 5) or (spent < 0.5 and len(seconds) < 20):
        seconds.append(once())
        spent += seconds[-1]
    peak = torch.cuda.max_memory_allocated() - before if is_gpu else 0
    return statistics.median(seconds), peak / 1e6


def text_rows(model: LlamaModel, length: int, kind: str, options: argparse.Namespace) -> list[dict]:
    """A prompt and training steps of one kind of attention."""
    ids = torch.randint(1024, (1, length), device=options.device)
    all_keys = kind in BACKENDS
    set_score_phase(model, "off" if all_keys else kind.split(",")[0])
    AttentionInterface.register(NAME, FlexSoft() if kind == FLEX else scored_attention_forward)
    rows = []
    for work, run in (("prompt", read), ("scores' step", train_scores), ("step", train_all)):
        if all_keys and run is train_scores:
            continue
        case = f"{name_of(options)} N{length} {work}"
        try:
            with sdpa_kernel(BACKENDS[kind]) if all_keys else nullcontext():
                seconds, peak = measure(lambda run=run: run(model, ids), options)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            print(record.declined(case, kind, dtype_of(model), error), flush=True)
            continue
        finally:
            model.zero_grad()
        times = {"forward" if run is read else "both": seconds * 1e3}
        parts = {"tokens/s": length / seconds}
        rows.append(record.row(case, kind, dtype_of(model), **times, peak_mb=peak, parts=parts))
        print(record.format_row(rows[-1]), flush=True)
    AttentionInterface.register(NAME, scored_attention_forward)
    return rows


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


@torch.no_grad()
def token_rows(model: LlamaModel, context: int, options: argparse.Namespace) -> list[dict]:
    """One token after a context: slots of the rule, and all keys, whose numbers are random."""
    set_score_phase(model, "hard")
    slots = DynamicMaskCache(model.config)
    begin = time.perf_counter()
    model(torch.randint(1024, (1, context), device=options.device), past_key_values=slots)
    if options.device == "cuda":
        torch.cuda.synchronize()
    prompt = time.perf_counter() - begin
    rows = [token_row(model, "hard, slots", context, slots, prompt, options)]
    set_score_phase(model, "off")
    every = DynamicCache(config=model.config)
    weight = model.layers[0].self_attn.k_proj.weight
    shape = (1, model.config.num_key_value_heads, context, 64)
    for layer in range(model.config.num_hidden_layers):
        every.update(
            *(torch.randn(shape, device=weight.device, dtype=weight.dtype) for _ in range(2)), layer
        )
    # Not cuDNN, which makes a plan for every new length of a cache that grows.
    with sdpa_kernel(BACKENDS[FLASH]):
        rows.append(token_row(model, FLASH, context, every, None, options))
    return rows


def token_row(
    model: LlamaModel,
    kind: str,
    context: int,
    cache: Cache,
    prompt: float | None,
    options: argparse.Namespace,
) -> dict:
    """prompt: seconds that the context took."""
    token = torch.zeros(1, 1, dtype=torch.long, device=options.device)
    seconds, _ = measure(lambda: model(token, past_key_values=cache), options)
    held = sum(t.numel() * t.element_size() for x in cache.layers for t in (x.keys, x.values))
    parts = None if prompt is None else {"prompt": prompt * 1e3}
    row = record.row(
        f"{name_of(options)} token after {context}", kind, dtype_of(model), seconds * 1e3,
        cache_mib=held / 2**20, parts=parts,
    )  # fmt: skip
    print(record.format_row(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--flex-lengths", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 524288])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="a record")
    parser.add_argument("--commit", default="", help="of the sources, where there is no history")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64
    model = make_model(options).eval()
    kinds = (*BACKENDS, "soft", "hard") if options.device == "cuda" else (FLASH, "soft", "hard")
    texts = [(length, kind) for length in options.lengths for kind in kinds]
    texts += [(length, FLEX) for length in options.flex_lengths]  # each is compiled
    rows = []
    for context in options.contexts:
        rows += token_rows(model, context, options)
    for length, kind in texts:
        rows += text_rows(model, length, kind, options)
        if options.output is not None:  # after each, so that an end before the last loses none
            write(rows, options)


def write(rows: list[dict], options: argparse.Namespace) -> None:
    origin = machine.origin(options.device, options.commit, transformers=transformers.__version__)
    note = f"the rule: {RULE}; both: a training step with checkpointed layers; peak_mb beyond the weights"
    record.write(options.output, origin | {"note": note, "rows": rows})


if __name__ == "__main__":
    main()
