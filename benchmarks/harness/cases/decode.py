"""A token at a time in one layer, over a cache of slots and over all keys, compared with the bandwidth of a copy.

`cold` calls cycle through enough KV caches that each is read from memory; `warm`
calls use one KV cache. On a GPU both are replays of a CUDA graph of at least 24 calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import KVSlots, flash_dmattn_func, flash_dmattn_with_kvcache

from ..clock import Rounds, graph_ms, timed
from ..machine import working_set
from ..record import Failure, Row
from ..sides import SDPA_BACKENDS, expect_memory
from . import Numbers, measure_sides

_GPU_CACHE_BYTES = 240 * 10**6  # four times an L2 of 60 MB
_GPU_COPY_BYTES = 1 << 30
POOL = 2  # states per sequence in the pool of the side "rows"


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A step of one token per sequence.

    keys: keys in the cache of a sequence.
    slots: whether the cache has one slot per key, which hold the best keys of a context of any length.
    recent: how many of the slots hold recent keys; the others hold the best of all keys.
    windows: the number of slots of each head, if these differ; their mean is `keys`.
    """

    keys: int
    slots: bool = False
    recent: int = 0
    batch: int = 1
    heads_q: int = 16
    heads_kv: int = 8
    head_dim: int = 128
    windows: tuple[int, ...] = ()

    def __str__(self) -> str:
        kind = f"slots w{self.keys}, any context" if self.slots else f"all of N{self.keys}"
        if self.recent:
            kind = f"slots w{self.keys - self.recent} + {self.recent} recent, any context"
        if self.windows:
            kind = (
                f"slots w{min(self.windows)} to {max(self.windows)}, mean {self.keys}, any context"
            )
        return f"decode {kind} B{self.batch} H{self.heads_q} Hkv{self.heads_kv} D{self.head_dim}"

    def bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of keys and values, each counted once."""
        return 2 * self.batch * self.heads_kv * self.keys * self.head_dim * dtype.itemsize


# Caps of heads as measured on a model with learned scores.
_CAPS = (1173, 549, 171, 53, 31, 7, 3, 5)
CASES = {
    "cpu": [
        DecodeCase(2048, slots=True),
        DecodeCase(2048, slots=True, recent=512),
        DecodeCase(2048, slots=True, batch=8),
        *(DecodeCase(n) for n in (2048, 8192, 65536)),
    ],
    "cuda": [
        DecodeCase(2048, slots=True),
        DecodeCase(2048, slots=True, recent=512),
        DecodeCase(2048, slots=True, batch=64),
        *(
            DecodeCase(sum(_CAPS) // len(_CAPS), slots=True, batch=batch, windows=windows)
            for batch in (1, 64, 256)
            for windows in ((), _CAPS)
        ),
        *(DecodeCase(n) for n in (1024, 8192, 131072, 524288)),
        DecodeCase(4096, batch=64),
    ],
}


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    device, repeats = options.device, options.repeats
    cases = [
        dataclasses.replace(case, keys=keys)
        for case in CASES[device]
        for keys in _keys_of(case, options)
    ]
    bandwidth = copy_bandwidth(device, 5 * repeats)
    print(f"a copy moves {bandwidth:.1f} GB/s", flush=True)
    for case in dict.fromkeys(cases):
        for dtype in options.dtype:
            sides = {
                side: functools.partial(_numbers, case, dtype, side, make, options, bandwidth)
                for side, make in _sides(case, device).items()
            }
            yield from measure_sides(case, dtype, sides, options.side)


def _keys_of(case: DecodeCase, options: argparse.Namespace) -> list[int]:
    chosen = options.window if case.slots else options.length
    return [case.keys] if case.windows or not chosen else [n for n in chosen if n > case.recent]


def cache_bytes(device: str) -> int:
    """Returns how many bytes of KV caches the cold calls cycle through, so that none is still in the processor's caches."""
    return _GPU_CACHE_BYTES if device == "cuda" else working_set()


def copy_bandwidth(device: str, repeats: int) -> float:
    """Returns the GB/s that a plain copy reads and writes, the best of several. On a GPU this is the faster of a driver copy and
    a kernel."""
    size = _GPU_COPY_BYTES if device == "cuda" else cache_bytes(device)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    if device == "cuda":
        ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
        best = min(graph_ms([way], 8, repeats) for way in ways)
    else:
        rounds = Rounds(max(repeats, 3), is_least=True, warm_up=0)
        best = rounds.time_one(lambda: timed(target.copy_, device, source)[0])
    return 2 * source.nbytes / best * 1e-6


def _normal(dtype: torch.dtype, device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _slots(
    case: DecodeCase, dtype: torch.dtype, device: str, states: int = 1
) -> Callable[[], Tensor]:
    """Returns a step that inserts a token and attends. About half of the tokens score high enough to evict a key.

    states: states in the pool per row of the batch. With more than one, the rows are a random choice of the pool's states.
    """
    pool = states * case.batch
    window = case.windows or case.keys - case.recent
    sizes = (pool, case.heads_kv, window, case.head_dim)
    rule = {"recent_window": case.recent, "recent_competes": True}
    cache = KVSlots(*sizes, **rule, dtype=dtype, device=device)
    # Long enough for all slots to be taken.
    length = max(case.windows, default=case.keys) + 2 * case.recent
    prompt = (pool, length, case.heads_kv, case.head_dim)
    scores = torch.randn(pool, case.heads_kv, length, device=device)
    cache.fill(_normal(dtype, device, *prompt), _normal(dtype, device, *prompt), scores)
    if states > 1:
        cache = cache.over(torch.randperm(pool, device=device)[: case.batch].int())
    q = _normal(dtype, device, case.batch, 1, case.heads_q, case.head_dim)
    k = _normal(dtype, device, case.batch, 1, case.heads_kv, case.head_dim)
    score = torch.randn(case.batch, case.heads_kv, 1, device=device)
    return lambda: cache.step(q, k, k, score)


def _all_keys(case: DecodeCase, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    shape = (case.batch, case.heads_kv, case.keys, case.head_dim)
    k, v = (_normal(dtype, device, *shape).transpose(1, 2) for _ in range(2))
    q = _normal(dtype, device, case.batch, 1, case.heads_q, case.head_dim)
    if device == "cuda":
        # SDPA gets no lengths either, and with lengths other kernels would first turn them into intervals.
        return lambda: flash_dmattn_func(q, k, v)
    lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=device)
    return lambda: flash_dmattn_with_kvcache(q, k, v, cache_seqlens=lengths)


def _sdpa(
    case: DecodeCase, dtype: torch.dtype, device: str, backend: SDPBackend | None = None
) -> Callable[[], Tensor]:
    shape = (case.batch, case.heads_kv, case.keys, case.head_dim)
    k, v = (_normal(dtype, device, *shape) for _ in range(2))
    q = _normal(dtype, device, case.batch, case.heads_q, 1, case.head_dim)
    grouped = case.heads_q != case.heads_kv

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    return attend if backend is None else sdpa_kernel(backend)(attend)


def _sides(case: DecodeCase, device: str) -> dict[str, Callable[..., Callable[[], Tensor]]]:
    if case.slots:
        return {"ours": _slots, "rows": functools.partial(_slots, states=POOL)}
    if device == "cpu":
        return {"ours": _all_keys, "sdpa": _sdpa}
    rivals = {name: functools.partial(_sdpa, backend=one) for name, one in SDPA_BACKENDS.items()}
    return {"ours": _all_keys} | rivals


def _numbers(case, dtype_name, side, make, options, bandwidth) -> Numbers:
    dtype, device, repeats = getattr(torch, dtype_name), options.device, options.repeats
    size = case.bytes(dtype)
    count = cache_bytes(device) // size + 2
    expect_memory(count * size * (POOL if side == "rows" else 1), "caches take", device)
    steps = [make(case, dtype, device) for _ in range(count)]
    if device == "cuda":
        rounds = Rounds(repeats)
        cold, warm = (graph_ms(some, 24, repeats) for some in (steps, steps[:1]))
    else:
        rounds, turns = Rounds(repeats * count, warm_up=count), itertools.cycle(steps)
        cold = rounds.time_one(lambda: timed(next(turns), device)[0])
        again = Rounds(19 * repeats, warm_up=repeats)
        warm = again.time_one(lambda: timed(steps[0], device)[0])
    share = size / cold * 1e-6 / bandwidth
    other = {"share of copy bandwidth": share, "cache MiB": size / 2**20, "rounds": rounds.count}
    return {"cold": cold, "warm": warm}, other
