"""Measures a Llama with learned scores against attention to all keys: a prompt and a training step in each phase, and tokens.

python benchmarks/scored_llama.py [--lengths 4096 16384 65536 131072] [--output FILE.json]    (a CUDA GPU, under 4 minutes)

8 layers, hidden 1,024, 16 heads of 64, 8 key heads, bf16; the rule keeps 1,024 keys, 256 recent ones and 4 sinks. Weights are
random, which changes no time: scores differ from key to key.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, Cache, DynamicCache, LlamaConfig, LlamaModel

from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.learned_scores.attention import (
    NAME,
    scored_attention_forward,
)
from harness import machine, record

RULE = {"keep_window_size": 1024, "recent_window": 256, "sink_tokens": 4}


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
        self.make_mask = create_block_mask
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


def text_rows(model: LlamaModel, options: argparse.Namespace) -> list[dict]:
    rows = []
    for length in options.lengths:
        ids = torch.randint(1024, (1, length), device=options.device)
        kinds = ["all keys, SDPA", "soft", "hard"]
        if length in options.flex_lengths:  # each is compiled
            kinds.append("soft, FlexAttention")
        for kind in kinds:
            is_flex = kind.endswith("FlexAttention")
            AttentionInterface.register(NAME, FlexSoft() if is_flex else scored_attention_forward)
            set_score_phase(model, {"all": "off", "sof": "soft", "har": "hard"}[kind[:3]])
            for work, run in (
                ("prompt", read),
                ("scores' step", train_scores),
                ("step", train_all),
            ):
                if kind == kinds[0] and work == "scores' step":
                    continue
                case = f"{name_of(options)} N{length} {work}"
                try:
                    seconds, peak = measure(lambda run=run, ids=ids: run(model, ids), options)
                except torch.OutOfMemoryError as error:
                    print(record.declined(case, kind, dtype_of(model), error), flush=True)
                    continue
                finally:
                    model.zero_grad()
                times = {"forward" if run is read else "both": seconds * 1e3}
                parts = {"tokens/s": length / seconds}
                rows.append(
                    record.row(case, kind, dtype_of(model), **times, peak_mb=peak, parts=parts)
                )
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
def token_rows(model: LlamaModel, options: argparse.Namespace) -> list[dict]:
    """One token after a context: slots of the rule, and all keys, whose numbers are random."""
    rows = []
    for context in options.contexts:
        set_score_phase(model, "hard")
        slots = DynamicMaskCache(model.config)
        begin = time.perf_counter()
        model(torch.randint(1024, (1, context), device=options.device), past_key_values=slots)
        if options.device == "cuda":
            torch.cuda.synchronize()
        prompt = time.perf_counter() - begin
        rows.append(token_row(model, "hard, slots", context, slots, prompt, options))
        del slots
        set_score_phase(model, "off")
        every = DynamicCache(config=model.config)
        weight = model.layers[0].self_attn.k_proj.weight
        shape = (1, model.config.num_key_value_heads, context, 64)
        for layer in range(model.config.num_hidden_layers):
            every.update(
                *(torch.randn(shape, device=weight.device, dtype=weight.dtype) for _ in range(2)),
                layer,
            )
        rows.append(token_row(model, "all keys, FlashAttention-2", context, every, None, options))
        del every
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
    # cuDNN, which torch prefers, makes a plan for every new length of a cache that grows.
    torch.backends.cuda.enable_cudnn_sdp(False)
    seconds, _ = measure(lambda: model(token, past_key_values=cache), options)
    torch.backends.cuda.enable_cudnn_sdp(True)
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
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 16384, 65536, 131072])
    parser.add_argument("--flex-lengths", type=int, nargs="*", default=[16384, 65536])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 524288])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="a record")
    parser.add_argument("--commit", default="", help="of the sources, where there is no history")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64
    model = make_model(options).eval()
    rows = text_rows(model, options) + token_rows(model, options)
    if options.output is not None:
        versions = {"transformers": transformers.__version__}
        record.write(
            options.output,
            machine.origin(options.device, options.commit, **versions)
            | {
                "note": f"the rule: {RULE}; both: a training step with checkpointed layers; peak_mb beyond the weights",
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
