"""Time and memory of one training step as the sequence grows, for eager attention and for ours.

Each implementation runs in a process of its own, so that neither sees the memory of the other:

    python -m flash_dmattn.demo.cost eager 512 1024 2048 --window 256
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LENGTHS = {
    "eager": (512, 1024, 2048, 4096, 8192),
    "flash_dmattn": (512, 1024, 2048, 4096, 8192, 16384),
}


@dataclass
class Cost:
    """One forward and backward pass over one sequence."""

    length: int
    seconds: float
    mebibytes: float  # peak memory beyond what the process held before


def measure(implementation: str, window: int, seconds: float, seed: int) -> list[Cost]:
    """The costs of one implementation in a new process: of all its lengths, or as far as `seconds` go."""
    command = [sys.executable, "-m", __name__, implementation, *map(str, LENGTHS[implementation])]
    command += ["--window", str(window), "--seconds", str(seconds), "--seed", str(seed)]
    # A session of its own, so that an interrupt at the keyboard reaches this process alone.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            costs = [Cost(**json.loads(line)) for line in child.stdout]
        finally:
            child.kill()
    return costs


def main() -> None:
    import torch

    from .training import make_model

    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("implementation", choices=LENGTHS)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds

    torch.manual_seed(options.seed)
    model = make_model(max(options.lengths), options.window, layers=1)
    torch.nn.init.normal_(model.model.layers[0].self_attn.A)
    model.set_attn_implementation(options.implementation)

    def step(length: int) -> float:
        ids = torch.randint(256, (1, length))
        began = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        return time.perf_counter() - began

    step(options.window // 2)
    took = growth = 0.0
    for length in options.lengths:
        # Doubling the length costs at most four times as much: stop before it is too much.
        too_long = time.perf_counter() + 2 * 4 * took > deadline
        if too_long or 4 * growth > 0.7 * _available_mebibytes():
            break
        _forget_peak()
        before = _mebibytes("VmRSS")
        took = min(step(length) for _ in range(2))
        growth = _mebibytes("VmHWM") - before
        print(json.dumps(vars(Cost(length, took, growth))), flush=True)


def _forget_peak() -> None:
    """Lets the peak of this process's memory begin anew (man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _mebibytes(field: str) -> float:
    """VmRSS: the memory of this process now; VmHWM: its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def _available_mebibytes() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
