"""Context parallelism on the GPUs of one host, compared with the whole sequence on one of them.

    torchrun --nproc_per_node 2 benchmarks/bench.py run --case context_parallel --json record.json

Without a GPU the ranks use gloo and small sizes, only to try the program. Rank 0 prints and writes.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import boundary_places, context_parallel_dmattn, exchanged_bytes

from ..case import PER_QUERY, Case
from ..clock import Rounds, timed
from ..record import Failure, Row
from ..sides import Declined
from . import DTYPES

_SIZES = {  # query heads, key heads, head dimension, window, lengths
    "cuda": (16, 8, 128, 2048, (65536, 262144, 1048576)),
    "cpu": (4, 2, 16, 64, (512, 1024)),
}
_ROUNDS = Rounds(5, warm_up=0)
_WARM_UP_CALLS = 3


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    if "LOCAL_RANK" not in os.environ:
        program = "torchrun --nproc_per_node 2 benchmarks/bench.py run --case context_parallel"
        yield Failure(names[0], "", "", Declined(f"needs ranks: {program}"))
        return
    device = torch.device(options.device)
    if options.device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a host may refuse multicast
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=100))
    *heads, head_dim, window, lengths = _SIZES[options.device]
    dtype = DTYPES[options.device]
    for length in options.length or lengths:
        case = Case(PER_QUERY, length, head_dim, window, *heads)
        sides = {"one GPU": lambda inputs: _whole(inputs, case)}
        sides |= {
            name: lambda inputs, name=name: _pieces(inputs, case, name)
            for name in ("direct", "two_hops")
        }
        for side, measure in sides.items():
            if options.side and side not in options.side:
                continue
            ranks = 1 if side == "one GPU" else dist.get_world_size()
            inputs = _draw(case, dtype, device, ranks)
            ms, other = measure(inputs)
            if dist.get_rank() == 0:
                name = side if ranks == 1 else f"{ranks} GPUs, {side}"
                other["rounds"] = _ROUNDS.count
                yield Row(f"context parallel {case}", name, dtype, ms, other)
            del inputs
            gc.collect()


def _draw(case: Case, dtype: str, device: torch.device, ranks: int) -> list[Tensor]:
    """Returns q, k, v and scores as leaves, and dout, of this rank's piece of the sequence."""
    n = case.seqlen // ranks
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def normal(*shape, dtype=dtype):
        drawn = torch.randn(shape, generator=generator, device=device)
        return drawn.to(getattr(torch, dtype))

    q, dout = (normal(1, n, case.heads_q, case.head_dim) for _ in range(2))
    k, v = (normal(1, n, case.heads_kv, case.head_dim) for _ in range(2))
    scores = normal(1, case.heads_kv, n, dtype="float32")
    return [*(t.requires_grad_() for t in (q, k, v, scores)), dout]


def _whole(inputs: list[Tensor], case: Case) -> tuple[dict, dict]:
    """Times the whole sequence on every rank at the same time, without collectives between them."""
    *leaves, dout = inputs

    def attend() -> Tensor:
        q, k, v, s = leaves
        return flash_dmattn_func(q, k, v, attn_bias=s, is_causal=True, keep_window_size=case.window)

    return _times(attend, leaves, dout), {}


def _pieces(inputs: list[Tensor], case: Case, exchange: str) -> tuple[dict, dict]:
    """Times a piece per rank. Keys and values are laid out after free rows, into which those of other ranks are received."""
    *leaves, dout = inputs
    group = dist.group.WORLD
    places = boundary_places(group, leaves[0].shape[1], case.window)
    for i in (1, 2):
        batch, n, *rest = leaves[i].shape
        wide = leaves[i].new_zeros(batch, places + n, *rest)
        wide[:, places:] = leaves[i].detach()
        leaves[i] = wide.requires_grad_()

    def attend() -> Tensor:
        return context_parallel_dmattn(
            *leaves, group=group, keep_window_size=case.window, exchange=exchange, headroom=True
        )

    ms = _times(attend, leaves, dout)
    before = exchanged_bytes(group)
    torch.autograd.grad(attend(), leaves, dout)
    after = exchanged_bytes(group)
    moved = max(after.sent - before.sent, after.received - before.received)
    return ms, {"exchanged MB": _largest(moved / 1e6, leaves[0].device)}


def _times(attend: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> dict[str, float]:
    """Returns the milliseconds of the slowest rank."""
    device = leaves[0].device

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        torch.autograd.grad(attend(), leaves, dout)

    ms = {}
    for name, body in (("forward", forward), ("both", both)):
        for _ in range(_WARM_UP_CALLS):
            body()
        once = _largest(timed(body, device.type)[0], device)
        count = max(2, min(30, int(120 / once)))

        def one_round(body=body, count=count) -> float:
            dist.barrier()
            return timed(lambda: [body() for _ in range(count)], device.type)[0] / count

        ms[name] = _largest(_ROUNDS.time_one(one_round), device)
    return ms


def _largest(number: float, device: torch.device) -> float:
    """Returns the largest number of all ranks."""
    numbers = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.item()
