"""The host's part of a call, with attention so short that the kernels do not matter.

Each time is the least of many short runs, which other programs on the machine disturb least. On a GPU the host issues calls
without waiting for them, so the kernels have to take less time than the host needs to launch them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from flash_dmattn import flash_dmattn_func, sliding_window

from ..clock import Rounds, elapsed_ms
from ..record import Failure, Row
from . import DTYPES, Numbers, measure_sides

_HEADS_Q, _HEADS_KV, _HEAD_DIM, _WINDOW = 4, 2, 64, 16
_ROUNDS = Rounds(300, is_least=True)
_CALLS = 10  # timed together


def _sdpa(q, k, v, bias):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _ours(has_bias: bool = True, **options) -> Callable:
    def call(q, k, v, bias):
        added = bias if has_bias else None
        return flash_dmattn_func(q, k, v, attn_bias=added, is_causal=True, **options)

    return call


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    device, threads = options.device, torch.get_num_threads()
    torch.set_num_threads(1)
    for length in options.length or [128 if device == "cuda" else 8]:
        window = sliding_window(length, _WINDOW, device=device)
        cases = {
            "dense": {"sdpa": _sdpa, "ours": _ours(has_bias=False)},
            "key bias": {"ours": _ours()},
            "window": {"ours": lambda q, k, v, bias: flash_dmattn_func(q, k, v, key_intervals=window)},
            "top-w": {"ours": _ours(keep_window_size=_WINDOW)},
            "global top-w": {"ours": _ours(keep_window_size=_WINDOW, selection="global")},
        }  # fmt: skip
        for kind, calls in cases.items():
            sides = {
                side: lambda call=call: _numbers(call, device, length)
                for side, call in calls.items()
            }
            title = f"call N{length} {kind}"
            yield from measure_sides(title, DTYPES[device], sides, options.side)
    torch.set_num_threads(threads)


def _numbers(call: Callable, device: str, length: int) -> Numbers:
    dtype = getattr(torch, DTYPES[device])
    shapes = [(1, length, h, _HEAD_DIM) for h in (_HEADS_Q, _HEADS_KV, _HEADS_KV)]
    leaves = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    # Key scores are best kept in float32, even if queries have 16 bits.
    leaves.append(torch.randn(1, _HEADS_KV, length, device=device, requires_grad=True))
    dout = torch.randn_like(leaves[0])

    def without_gradients():
        with torch.no_grad():
            call(*leaves)

    def forward_and_backward():
        torch.autograd.grad(call(*leaves), leaves, dout, allow_unused=True)

    ms = {
        "forward": _least_ms(without_gradients, device),
        "forward with graph": _least_ms(lambda: call(*leaves), device),
        "both": _least_ms(forward_and_backward, device),
    }
    return ms, {"rounds": _ROUNDS.count}


def _least_ms(call: Callable, device: str) -> float:
    def one_round() -> float:
        elapsed_ms(lambda: None, device)  # waits for the device
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return 1e3 * (time.perf_counter() - begin) / _CALLS

    return _ROUNDS.time_one(one_round)
