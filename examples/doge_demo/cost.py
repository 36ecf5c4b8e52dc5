"""Measures time and memory of one training step as the sequence grows, for eager attention and for ours."""

import os
import time
from dataclasses import dataclass
from functools import partial

import torch

from flash_dmattn.check.memory import peak_bytes

from .training import make_model, precision_of

LENGTHS = {
    "eager": (512, 1024, 2048, 4096, 8192),
    "flash_dmattn": (512, 1024, 2048, 4096, 8192, 16384),
}
LENGTHS_ON_GPU = {
    "eager": (1024, 2048, 4096, 8192, 16384),
    "flash_dmattn": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
}


LEAST_POINTS = 3  # points that a line has at least, however long they take
_REPEATS = 2  # timed runs; one more run measures the memory


@dataclass
class Cost:
    """The cost of a forward and backward pass over a sequence, with peak memory beyond parameters and their gradients, or of one token
    after a sequence, with its cache."""

    length: int
    seconds: float
    mebibytes: float


def lengths_of(implementation: str, device: str) -> tuple[int, ...]:
    return (LENGTHS if device == "cpu" else LENGTHS_ON_GPU)[implementation]


def measure(implementation: str, window: int, seconds: float, seed: int, device: str) -> list[Cost]:
    """Returns the costs of one implementation at all its lengths, or at as many as fit into `seconds`. At least `LEAST_POINTS` lengths
    are measured, if memory suffices."""
    deadline = time.perf_counter() + seconds
    torch.manual_seed(seed)
    lengths = lengths_of(implementation, device)
    model = make_model(max(lengths), window, layers=1).to(device)
    torch.nn.init.normal_(model.model.layers[0].self_attn.A)
    model.set_attn_implementation(implementation)

    def step(length: int) -> float:
        ids = torch.randint(256, (1, length), device=device)
        began = time.perf_counter()
        with precision_of(model.device):
            loss = model(ids, labels=ids).loss
        loss.backward()
        model.lm_head.weight.grad.sum().item()  # waits for a GPU
        return time.perf_counter() - began

    step(max(2, min(window, lengths[0]) // 2))
    costs: list[Cost] = []
    took = peak = 0
    for length in lengths:
        # Doubling the length costs at most four times as much, so stop before the time is up.
        too_long = time.perf_counter() + (_REPEATS + 1) * 4 * took > deadline
        if (too_long and len(costs) >= LEAST_POINTS) or 4 * peak > 0.7 * available_bytes(device):
            break
        took = min(step(length) for _ in range(_REPEATS))
        peak, _ = peak_bytes(partial(step, length), device)
        costs.append(Cost(length, took, peak / 2**20))
    return costs


def available_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
