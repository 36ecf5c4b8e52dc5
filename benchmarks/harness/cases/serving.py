"""A step of a serving engine over one layer: one call of `extend_ragged` with prompts, later chunks and decoding sequences."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from flash_dmattn import KVSlots, RaggedBatch, extend_ragged

from ..clock import Rounds
from ..record import Failure, Row
from . import DTYPES, Numbers, measure_sides, measure_step

_ROUNDS = Rounds(20, warm_up=3)
_POOL = 64  # states in the pool
_HEADS = {"cuda": (8, 4, 128), "cpu": (4, 2, 64)}  # (query heads, key heads, head dimension)
# {title: (tokens of each sequence, how many of the first sequences begin a prompt)}
STEPS = {
    "29 decode": ([1] * 29, 0),
    "a prompt of 2000": ([2000], 1),
    "a later chunk of 2000": ([2000], 0),
    "3 prompts + 29": ([512, 77, 2000] + [1] * 29, 3),
    "3 later chunks + 29": ([512, 77, 2000] + [1] * 29, 0),
    "8 later chunks of 309 + 32": ([309] * 8 + [1] * 32, 0),
    "8 later chunks of 8 lengths + 32": ([100, 160, 220, 280, 340, 400, 460, 512] + [1] * 32, 0),
}


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    heads_q, heads_kv, head_dim = _HEADS[options.device]
    for window in options.window or [1024]:
        for title, (lengths, begins) in STEPS.items():
            case = f"ragged step, {title}, H{heads_q} Hkv{heads_kv} D{head_dim} w{window}"
            sides = {"ours": lambda: _measure(lengths, begins, window, options.device)}
            yield from measure_sides(case, DTYPES[options.device], sides, options.side)


@torch.no_grad()
def _measure(lengths: list[int], begins: int, window: int, device: str) -> Numbers:
    return measure_step(_step(lengths, begins, window, device), device, _ROUNDS)


def _step(lengths: list[int], begins: int, window: int, device: str) -> Callable[[], object]:
    """Returns a call that extends one sequence per length. The first `begins` sequences start empty; the states of the others are
    full."""
    heads_q, heads_kv, head_dim = _HEADS[device]
    dtype = getattr(torch, DTYPES[device])

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    pool = KVSlots(_POOL, heads_kv, window, head_dim, dtype=dtype, device=device)
    prompt = [normal(_POOL, window, heads_kv, head_dim) for _ in range(2)]
    pool.fill(*prompt, normal(_POOL, heads_kv, window, dtype=torch.float32))
    rows = torch.randperm(_POOL, device=device)[: len(lengths)].int()
    offsets = list(accumulate(lengths, initial=0))
    batch = RaggedBatch(offsets, rows, [i < begins for i in range(len(lengths))])
    q = normal(offsets[-1], heads_q, head_dim)
    k, v = (normal(offsets[-1], heads_kv, head_dim) for _ in range(2))
    scores = normal(heads_kv, offsets[-1], dtype=torch.float32)
    return lambda: extend_ragged(pool, batch, q, k, v, scores)
