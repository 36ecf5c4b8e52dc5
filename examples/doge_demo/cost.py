"""Time and memory of one training step as the sequence grows, for eager attention and for ours.

Each implementation runs in a process of its own, so that neither sees the memory of the other:

    PYTHONPATH=examples python -m doge_demo.cost eager 512 1024 2048 --window 256
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

LENGTHS = {
    "eager": (512, 1024, 2048, 4096, 8192),
    "flash_dmattn": (512, 1024, 2048, 4096, 8192, 16384),
}
LENGTHS_ON_GPU = {
    "eager": (1024, 2048, 4096, 8192, 16384),
    "flash_dmattn": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
}


LEAST_POINTS = 3  # of a line, however long they take
_REPEATS = 3


@dataclass
class Cost:
    """One forward and backward pass over one sequence."""

    length: int
    seconds: float
    mebibytes: float  # peak memory beyond that of the process (on a GPU, torch) before


def lengths_of(implementation: str, device: str) -> tuple[int, ...]:
    return (LENGTHS if device == "cpu" else LENGTHS_ON_GPU)[implementation]


def measure(implementation: str, window: int, seconds: float, seed: int, device: str) -> list[Cost]:
    """The costs of one implementation in a new process: of all its lengths, or as many as fit into `seconds`, but
    `LEAST_POINTS` at least where there is memory for them."""
    lengths = lengths_of(implementation, device)
    command = [sys.executable, "-m", __name__, implementation, *map(str, lengths)]
    command += ["--window", str(window), "--seconds", str(seconds), "--seed", str(seed)]
    command += ["--device", device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # A session of its own, so that an interrupt at the keyboard reaches this process alone.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as child:
        try:
            costs = [Cost(**json.loads(line)) for line in child.stdout]
        finally:
            child.kill()
    return costs


def main() -> None:
    from .training import make_model, precision_of

    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("implementation", choices=LENGTHS)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds

    torch.manual_seed(options.seed)
    model = make_model(max(options.lengths), options.window, layers=1)
    model.to(options.device)
    memory = _DeviceMemory() if model.device.type == "cuda" else _ProcessMemory()
    torch.nn.init.normal_(model.model.layers[0].self_attn.A)
    model.set_attn_implementation(options.implementation)

    def step(length: int) -> float:
        ids = torch.randint(256, (1, length), device=model.device)
        began = time.perf_counter()
        with precision_of(model.device):
            loss = model(ids, labels=ids).loss
        loss.backward()
        model.lm_head.weight.grad.sum().item()  # waits for a GPU
        return time.perf_counter() - began

    step(max(2, min(options.window, options.lengths[0]) // 2))
    took = growth = 0.0
    before = (
        memory.now()
    )  # not at each length: a process keeps memory of the shorter ones for the longer
    for index, length in enumerate(options.lengths):
        # Doubling the length costs at most four times as much: stop before the time is up.
        too_long = time.perf_counter() + _REPEATS * 4 * took > deadline
        if (too_long and index >= LEAST_POINTS) or 4 * growth > 0.7 * memory.available():
            break
        memory.forget_peak()
        took = min(step(length) for _ in range(_REPEATS))
        growth = memory.peak() - before
        print(json.dumps(vars(Cost(length, took, growth))), flush=True)


class _ProcessMemory:
    """Memory of this process, in MiB."""

    def forget_peak(self) -> None:
        """Resets the peak (man 5 proc, clear_refs)."""
        Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> float:
        return self._status("VmRSS")

    def peak(self) -> float:
        return self._status("VmHWM")

    def available(self) -> float:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20

    def _status(self, field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


class _DeviceMemory:
    """Memory of torch on the GPU, in MiB."""

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> float:
        return torch.cuda.memory_allocated() / 2**20

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20

    def available(self) -> float:
        return torch.cuda.mem_get_info()[0] / 2**20


if __name__ == "__main__":
    main()
