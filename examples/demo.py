"""Trains transformers' Doge model on the Python standard library, writes text with it, and draws what it learned.

python examples/demo.py [--steps 400] [--output demo-output]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DogeConfig, DogeForCausalLM
from transformers.utils import logging

from command_line import between, device, new_folder
from corpus import Corpus, random_batch, standard_library
from flash_dmattn import is_available, select_key_intervals
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    doge_scores,
    enable_flash_dmattn,
)

_RATE, _WARM_UP_STEPS = 2e-3, 10
_PROMPT, _SAMPLE_BYTES = "import os\n\n\ndef ", 400
LENGTHS = (512, 1024, 2048, 4096, 8192)  # at which a training step is timed
_COST_SECONDS = 15  # for the times of each kind of attention


def make_model(context: int, window: int, layers: int = 4) -> DogeForCausalLM:
    """Returns a Doge model over bytes with 0.8 million parameters per layer and exact selection by intervals."""
    config = DogeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, keep_window_size=window, tie_word_embeddings=True,
        initializer_range=0.06,  # 1 / sqrt(hidden_size): learns faster in so few steps than 0.02
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return enable_flash_dmattn(DogeForCausalLM(config))


def precision_of(device: torch.device) -> AbstractContextManager:
    """Returns autocast to bfloat16 on a GPU, whose attention kernels do not accept float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(model: DogeForCausalLM, text: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """Trains for `options.steps` steps, or fewer when `options.seconds` are over. Returns the bits per byte of every step.

    Raises FloatingPointError if a gradient is not finite.
    """
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    bits: list[float] = []
    began = time.perf_counter()
    for step in tqdm(range(options.steps), desc="training", dynamic_ncols=True):
        progress = max(step / options.steps, (time.perf_counter() - began) / options.seconds)
        if progress >= 1 and step:
            break
        warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * warm_up * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1)))
        batch = random_batch(text, 1, options.context, generator).to(model.device)
        with precision_of(model.device):
            loss = model(batch, labels=batch).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                raise FloatingPointError(f"step {step}: the gradient of {name} is not finite")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bits.append(loss.item() / math.log(2))
    return bits


@torch.no_grad()
def held_out_bits(model: DogeForCausalLM, corpus: Corpus, context: int) -> float:
    """Returns the mean bits per byte of eight sequences of files that are not trained."""
    draw = torch.Generator().manual_seed(0)
    sequences = random_batch(corpus.held_out, 8, context, draw).to(model.device)
    with precision_of(model.device):
        losses = [model.eval()(ids[None], labels=ids[None]).loss.item() for ids in sequences]
    model.train()
    return sum(losses) / len(losses) / math.log(2)


def write_text(model: DogeForCausalLM, length: int) -> str:
    """Returns the prompt and the `length` bytes that the model generates after it."""
    ids = torch.tensor([list(_PROMPT.encode())], device=model.device)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "max_new_tokens": length}
    cache = DynamicMaskCache(model.config)
    with precision_of(model.device):
        written = model.eval().generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)  # fmt: skip
    text = bytes(written[0].tolist()).decode(errors="replace")
    # A character that controls a terminal is replaced.
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def seconds_of_steps(attention: str, window: int, device: str) -> dict[int, float]:
    """Returns the seconds of a training step of one layer by length, for the lengths that fit into the time and memory."""
    model = make_model(max(LENGTHS), window, layers=1).to(device)
    torch.nn.init.normal_(model.model.layers[0].self_attn.A)
    model.set_attn_implementation(attention)
    seconds: dict[int, float] = {}
    deadline = time.perf_counter() + _COST_SECONDS
    for length in LENGTHS:
        ids = torch.randint(256, (1, length), device=device)
        try:
            for _ in range(2):  # the second counts
                began = time.perf_counter()
                with precision_of(model.device):
                    loss = model(ids, labels=ids).loss
                loss.backward()
                model.lm_head.weight.grad.sum().item()  # waits for a GPU
                seconds[length] = time.perf_counter() - began
        except RuntimeError as error:  # out of memory
            print(f"{attention} at {length}: {str(error).splitlines()[0]}")
            break
        if (
            time.perf_counter() + 8 * seconds[length] > deadline
        ):  # the next takes four times as long
            break
    return seconds


@torch.no_grad()
def kept_keys(model: DogeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns which keys each query of a sequence [N] keeps in the first head of the last layer, bool [N, N]."""
    attention = model.model.layers[-1].self_attn
    steps = []
    hook = attention.dt_proj.register_forward_hook(lambda *call: steps.append(call[-1]))
    with precision_of(ids.device):
        model.eval()(ids[None], use_cache=False)
    hook.remove()
    scores = doge_scores(attention, steps[0])[:, :1].float().cpu()
    return select_key_intervals(scores, attention.keep_window_size).to_mask()[0, 0]


def draw(path: Path, bits: list[float], seen: torch.Tensor, costs: dict[str, dict]) -> None:
    """Draws the loss, the kept keys and the cost, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(bits)
    left.set(xlabel="step", ylabel="bits per byte", ylim=(0, None), title="training batch")
    n = len(seen)
    middle.imshow(seen[-256:], cmap="Blues", interpolation="nearest", aspect="auto", extent=(0, n, n, max(0, n - 256)))  # fmt: skip
    middle.set(xlabel="key", ylabel="query", title="kept keys, last layer, first head")
    for name, seconds in costs.items():
        right.loglog(seconds.keys(), seconds.values(), "o-", base=2, label=name)
    right.set(xlabel="sequence length N", ylabel="seconds", title="a training step of one layer")
    right.legend()
    figure.savefig(path, dpi=130)


def run(options: argparse.Namespace) -> None:
    corpus = standard_library()
    if options.context > len(corpus.held_out):
        options.fail(f"--context: got {options.context}, expected at most {len(corpus.held_out)}")
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # about the name past_key_values
    torch.manual_seed(options.seed)
    device = options.device
    model = make_model(options.context, options.window).to(device)
    print(f"{corpus.files} files of Python's library; every query keeps {options.window} of {options.context} bytes, on {device}")  # fmt: skip
    before = held_out_bits(model, corpus, options.context)
    bits = train(model, corpus.training, options)
    after = held_out_bits(model, corpus, options.context)
    print(f"held-out bits per byte: {before:.3f} -> {after:.3f}, after {len(bits)} of {options.steps} steps; all gradients finite")  # fmt: skip
    sample = write_text(model, min(_SAMPLE_BYTES, options.context))
    (options.output / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"the model writes:\n{sample}")
    costs = {
        name: seconds_of_steps(name, options.window, device) for name in ("eager", "flash_dmattn")
    }
    for name, seconds in costs.items():
        steps = ", ".join(f"N {length}: {s:.3f} s" for length, s in seconds.items())
        print(f"a training step of one layer, {name}: {steps}")
    held_out = corpus.held_out[: options.context].long().to(device)
    draw(options.output / "demo.png", bits, kept_keys(model, held_out), costs)
    print(f"wrote {options.output}/sample.txt and demo.png")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=between(1), default=400, help="training steps")
    add("--seconds", type=between(1), default=150, help="training ends after this time")
    add("--context", type=between(2, 32768), default=2048, help="bytes per sequence")
    add("--window", type=between(1, 32768), default=256, help="keys that a query keeps")
    add("--device", type=device, default="cuda" if is_available("cuda") else "cpu", help="of torch; a GPU computes in bfloat16")  # fmt: skip
    add("--output", type=new_folder, default="demo-output", help="folder for text and picture")
    add("--seed", type=between(0), default=0, help="of initial weights, batches and generated text")
    options = parser.parse_args(arguments)
    options.fail = parser.error
    try:
        run(options)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
