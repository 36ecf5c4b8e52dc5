"""`--case decode`: a token at a time, from a cache of slots and from all keys, beside the bandwidth of a copy."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..flash_dmattn_interface import flash_dmattn_func
from ..kv_cache import KVSlots, flash_dmattn_with_kvcache
from ..usage import is_out_of_memory
from . import working_set
from .clock import graph_ms, timed
from .sides import Declined, expect_memory

NAME = "decode"
METHOD = (
    "medians; cold: calls go through so many caches in turn that each comes from memory, warm: one cache; on a GPU from "
    "replays of a CUDA graph of at least 24 calls; bytes of keys and values count once, those of a copy read and written"
)
# Of a GPU: four times an L2 of 60 MB, and what a copy reads.
_GPU_CACHE_BYTES = 240 * 10**6
_GPU_COPY_BYTES = 1 << 30
# torch's ways to compute attention on a GPU.
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One token of every row. keys: those that a cache holds; slots: they are the w best of any context."""

    keys: int
    slots: bool = False
    batch: int = 1
    heads_q: int = 16
    heads_kv: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        kind = f"slots w{self.keys}, any context" if self.slots else f"all of N{self.keys}"
        return f"{kind} B{self.batch} H{self.heads_q} Hkv{self.heads_kv} D{self.head_dim}"

    def bytes(self, dtype: torch.dtype) -> int:
        """Of keys and values, each counted once."""
        return 2 * self.batch * self.heads_kv * self.keys * self.head_dim * dtype.itemsize


CASES = {
    "cpu": [
        DecodeCase(2048, slots=True),
        DecodeCase(2048, slots=True, batch=8),
        *(DecodeCase(n) for n in (2048, 8192, 65536)),
    ],
    "cuda": [
        DecodeCase(2048, slots=True),
        DecodeCase(2048, slots=True, batch=64),
        *(DecodeCase(n) for n in (1024, 8192, 131072, 524288)),
        DecodeCase(4096, batch=64),
    ],
}


def cases_of(device: str, lengths: list[int] | None, windows: list[int] | None) -> list[DecodeCase]:
    """`lengths` and `windows` replace the sizes of the caches of all keys and of slots."""
    found = []
    for case in CASES.get(device, []):
        sizes = windows if case.slots else lengths
        found += [dataclasses.replace(case, keys=n) for n in sizes or [case.keys]]
    return list(dict.fromkeys(found))


def cache_bytes(device: str) -> int:
    """Of the caches that are visited in turn: the last one read is then long out of the processor's caches."""
    if device == "cuda":
        return _GPU_CACHE_BYTES
    return working_set.beyond_cache(working_set.last_level_cache(), working_set.available_memory())


def copy_bytes(device: str) -> int:
    """Of the array that a copy reads."""
    return _GPU_COPY_BYTES if device == "cuda" else cache_bytes(device)


def _normal(dtype: torch.dtype, device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _slots(case: DecodeCase, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """With insertion; half of the tokens are good enough to evict a key."""
    sizes = (case.batch, case.heads_kv, case.keys, case.head_dim)
    cache = KVSlots(*sizes, dtype=dtype, device=device)
    prompt = (case.batch, case.keys, case.heads_kv, case.head_dim)
    scores = torch.randn(case.batch, case.heads_kv, case.keys, device=device)
    cache.fill(_normal(dtype, device, *prompt), _normal(dtype, device, *prompt), scores)
    q = _normal(dtype, device, case.batch, 1, case.heads_q, case.head_dim)
    k = _normal(dtype, device, case.batch, 1, case.heads_kv, case.head_dim)
    score = torch.randn(case.batch, case.heads_kv, 1, device=device)
    return lambda: cache.step(q, k, k, score)


def _all_keys(case: DecodeCase, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    shape = (case.batch, case.heads_kv, case.keys, case.head_dim)
    k, v = (_normal(dtype, device, *shape).transpose(1, 2) for _ in range(2))
    q = _normal(dtype, device, case.batch, 1, case.heads_q, case.head_dim)
    if device == "cuda":
        # Without lengths, as SDPA: intervals would be made from them by kernels of their own.
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
        return {"slots": _slots}
    if device == "cpu":
        return {"ours": _all_keys, "sdpa": _sdpa}
    rivals = {name: functools.partial(_sdpa, backend=one) for name, one in SDPA.items()}
    return {"ours": _all_keys} | rivals


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes read and written by a plain copy, in GB/s: the best of several; on a GPU the better of a copy by the driver
    and one by a kernel."""
    source = torch.ones(copy_bytes(device) // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    if device == "cuda":
        ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
        best = min(graph_ms([way], 8, repeats) for way in ways)
    else:
        best = min(timed(target.copy_, device, source)[0] for _ in range(max(repeats, 3)))
    return 2 * source.nbytes / best * 1e-6


def measured(
    cases: list[DecodeCase], dtypes: list[str], device: str, repeats: int, say=print
) -> Iterator[dict]:
    """A row for every case, dtype and side, said as it is found."""
    total = cache_bytes(device)
    bandwidth = copy_bandwidth(device, 5 * repeats)
    if total < 4 * working_set.last_level_cache() and device == "cpu":
        say(
            f"too little memory is available: caches of {total / 1e6:.0f} MB stay in the processor's in part"
        )
    say(f"a copy moves {bandwidth:.1f} GB/s\n{HEADER}")
    for case in cases:
        for name in dtypes:
            dtype = getattr(torch, name)
            for who, make in _sides(case, device).items():
                try:
                    row = _row(case, dtype, name, who, make, device, repeats, bandwidth, total)
                except (Declined, MemoryError, RuntimeError) as reason:
                    ours = who not in SDPA
                    if ours and not (isinstance(reason, Declined) or is_out_of_memory(reason)):
                        raise
                    text = (str(reason) or type(reason).__name__).splitlines()[0]
                    say(f"{case!s:<46} {name:<9}{who:<10}  declined: {text}")
                    continue
                say(line(row))
                yield row


def _row(case, dtype, dtype_name, who, make, device, repeats, bandwidth, total) -> dict:
    size = case.bytes(dtype)
    count = total // size + 2
    expect_memory(count * size, "caches take", device)
    steps = [make(case, dtype, device) for _ in range(count)]
    if device == "cuda":
        cold, warm = (graph_ms(some, 24, repeats) for some in (steps, steps[:1]))
    else:
        turns = steps * (repeats + 1)
        cold = statistics.median([timed(step, device)[0] for step in turns][len(steps) :])
        turns = [timed(steps[0], device)[0] for _ in range(20 * repeats)]
        warm = statistics.median(turns[repeats:])
    achieved = size / cold * 1e-6
    return {
        "case": str(case),
        **dataclasses.asdict(case),
        "dtype": dtype_name,
        "who": who,
        "cold_us": round(cold * 1e3, 2),
        "warm_us": round(warm * 1e3, 2),
        "at_copy_bandwidth_us": round(size / bandwidth * 1e-3, 2),
        "cold_gb_per_s": round(achieved, 1),
        "of_copy_bandwidth": float(f"{achieved / bandwidth:.3g}"),
        "cache_mb": round(size / 1e6, 1),
        "visited_mb": round(len(steps) * size / 1e6, 1),
    }


HEADER = (
    f"{'case':<46} {'dtype':<9}{'who':<10}{'cold':>10}{'warm':>10} us{'cold':>9} GB/s"
    f"{'of copy':>10}{'cache':>9} MB"
)


def line(row: dict) -> str:
    return (
        f"{row['case']:<46} {row['dtype']:<9}{row['who']:<10}{row['cold_us']:>10.1f}"
        f"{row['warm_us']:>10.1f}   {row['cold_gb_per_s']:>9.1f}     "
        f"{row['of_copy_bandwidth']:>10.0%}{row['cache_mb']:>9.1f}"
    )
