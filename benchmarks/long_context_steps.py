"""Times training steps of examples/long_context.py by length and number of GPUs, and compares losses on whole sequences and pieces.

    torchrun --nproc_per_node 1 benchmarks/long_context_steps.py --json record.json
    torchrun --nproc_per_node 2 benchmarks/long_context_steps.py --json record.json --losses 40

Each run adds its rows to the record. It ends within `--budget` seconds and prints which length it did not reach. Without a GPU it uses
gloo and small sizes, only to try the program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn

from flash_dmattn.distributed import ContextParallel, exchanged_bytes
from harness import record
from harness.cases.models import draw_score_weights
from harness.clock import Rounds, elapsed_ms, kernel_times
from harness.exchange_table import Model
from harness.options import Different, positive
from harness.ranks import GPU, Ranks, add_options

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import long_context

LENGTHS = [2**p for p in range(15, 21)] if GPU else [512, 1024]
SIZES = {"window": 2048, "layers": 8, "hidden": 1024, "head-dim": 128}
if not GPU:
    SIZES = {"window": 64, "layers": 2, "hidden": 64, "head-dim": 16}
LOSS_LENGTH, LOSS_BATCH = (16384, 4) if GPU else (256, 2)
TIMED = Rounds(3, warm_up=0)  # steps
DTYPE = "bfloat16" if GPU else "float32"
NOTE = (
    "examples/long_context.py with activation checkpointing: forward, forward again, backward and optimizer; one sequence a step; "
    "times of the slowest rank; both: a step; parts: time of attention's and the exchange's kernels in a profiled step; "
    "values: tokens per second and GPU, MB of the busiest rank for a layer and a step, those of ring and Ulysses by formula; "
    "without NVLink multicast"
)
OURS, EXCHANGE = "flash_dmattn", "SendRecv"  # substrings of kernel names


def side_of(ranks: Ranks) -> str:
    one, many = ("GPU", "GPUs") if GPU else ("process", "processes")
    return f"{ranks.size} {one if ranks.size == 1 else many}"


def options_of(length: int, is_compiled: bool, **changes) -> argparse.Namespace:
    words = [f"--{name}={value}" for name, value in {**SIZES, "seq-len": length, **changes}.items()]
    return long_context.parse([*words, "--checkpoint", *["--compile"] * is_compiled])


def title(what: str, length: int) -> str:
    heads = SIZES["hidden"] // SIZES["head-dim"]
    return (
        f"{what} N{length}, Doge L{SIZES['layers']} hidden {SIZES['hidden']} H{heads} Hkv{heads // 2} "
        f"D{SIZES['head-dim']} w{SIZES['window']}"
    )


def formulas(length: int, size: int) -> dict[str, list]:
    """Returns the MB that a rank receives per layer and step with ring and with Ulysses. A step runs forward twice, once again for the
    backward."""
    heads = SIZES["hidden"] // SIZES["head-dim"]
    model = Model(heads, heads // 2, SIZES["head-dim"], SIZES["window"])
    values = {}
    for name, ways in model.exchanges(length, size, node=size).items():
        kind = name.split(" (")[-1].removesuffix(")")
        if kind in ("ring, all-gather", "Ulysses"):
            forward, backward = (sum(hop.bytes() for hop in hops) for hops in ways)
            values[f"{kind} per layer"] = [(2 * forward + backward) / 1e6, "MB"]
    return values


def kernel_ms(step) -> dict[str, float]:
    """Returns the kernel milliseconds of one step for attention and for the exchange."""
    times = kernel_times(step)
    return {
        name: sum(ms for kernel, (_, ms) in times.items() if part in kernel)
        for name, part in (("attention", OURS), ("exchange", EXCHANGE))
    }


def measure(ranks: Ranks, lengths: list[int], is_compiled: bool) -> None:
    options = options_of(max(lengths), is_compiled)
    mesh, device = long_context.make_mesh(options)
    trainee = long_context.make_trainee(options, mesh, device)
    draw_score_weights(trainee.doge)
    cp, every = ContextParallel(mesh["cp"]), ContextParallel(mesh["dp", "cp"]._flatten("dp_cp"))
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-4)
    text = long_context.standard_library().training

    def step(tokens: Tensor) -> None:
        long_context.backward(trainee, tokens, cp, every)
        nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for length in lengths:
        torch._dynamo.reset()  # each length is compiled separately
        if not ranks.has_time_for(12 + 3 * (TIMED.count + 3) * length / 2**20 / ranks.size):
            ranks.print_line(f"N {length}: no time left")
            break
        options.seq_len = length
        tokens = long_context.batch_of(text, 0, options, 0).to(device)
        try:
            measurements = measure_length(ranks, lambda tokens=tokens: step(tokens), mesh)
        except torch.OutOfMemoryError:
            ranks.print_line(f"N {length}: does not fit")
            break
        seconds = measurements["both"] / 1e3
        values = measurements["values"]
        values["throughput per GPU"] = [length / seconds / ranks.size, "tokens/s"]
        if measurements["parts"]:
            values["attention"] = [
                measurements["parts"]["attention"] / measurements["both"],
                "share",
            ]
        if ranks.size > 1:
            values |= formulas(length, ranks.size)
        ranks.add_row(
            record.row(title("training step", length), side_of(ranks), DTYPE, **measurements)
        )


def measure_length(ranks: Ranks, step, mesh) -> dict:
    """Returns the milliseconds of a step on the slowest rank, and the highest peak memory and traffic of any rank."""
    for _ in range(2):
        step()
    ranks.clear_memory()
    group = mesh["cp"]
    before = exchanged_bytes(group)
    ms = TIMED.time_one(lambda: elapsed_ms(step, ranks.device.type))
    after = exchanged_bytes(group)
    moved = max(after.sent - before.sent, after.received - before.received)
    peak, parts, values = ranks.peak_mb(), {}, {}
    if ranks.size > 1:
        ours = max(ranks.gather_values(moved)) / TIMED.count / SIZES["layers"] / 1e6
        values["ours per layer"] = [ours, "MB"]
    if GPU:
        parts = {
            name: statistics.mean(ranks.gather_values(ms)) for name, ms in kernel_ms(step).items()
        }
    return {
        "both": max(ranks.gather_values(ms)),
        **TIMED.fields(),
        "peak_mb": None if peak is None else max(ranks.gather_values(peak)),
        "parts": parts or None,
        "values": values,
    }


def losses(ranks: Ranks, steps: int, is_compiled: bool) -> None:
    """Trains on the same batches as whole sequences and as pieces, and adds the losses to the record."""
    for size in dict.fromkeys((1, ranks.size)):
        torch._dynamo.reset()
        options = options_of(LOSS_LENGTH, is_compiled, steps=steps, cp=size, batch=LOSS_BATCH)
        trained_steps = long_context.train(options)
        values = {"loss of each step": [[step["loss"] for step in trained_steps], "nats/byte"]}
        case = title(f"losses of {LOSS_BATCH} sequences", LOSS_LENGTH)
        side = "whole sequences" if size == 1 else f"{size} pieces"
        ranks.add_row(record.row(case, side, DTYPE, values=values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=100)
    parser.add_argument(
        "--lengths", type=positive, nargs="*", action=Different, default=LENGTHS, help="tokens; none: only losses",
    )  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--losses", type=positive, help="steps of the two trainings")
    options = parser.parse_args()
    ranks = Ranks(options, NOTE)
    if options.lengths:
        measure(ranks, options.lengths, not options.eager)
    if options.losses:
        if ranks.has_time_for(25):
            losses(ranks, options.losses, not options.eager)
        else:
            ranks.print_line("losses: no time left")
    ranks.finish()


if __name__ == "__main__":
    main()
