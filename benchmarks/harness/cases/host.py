"""Times the host's part of a call, with attention so short that the kernels do not matter.

Each time is the minimum of many short runs, which other programs on the machine disturb least. On a GPU the host issues calls without
waiting for them, so the kernels must take less time than the host needs to launch them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from flash_dmattn import flash_dmattn_func, sliding_window

from .. import record
from ..clock import Rounds, wait
from . import runs_everywhere as expect_case_runs  # noqa: F401

_HEADS_Q, _HEADS_KV, _HEAD_DIM, _WINDOW = 4, 2, 64, 16
_ROUNDS = Rounds(300, "least")
_CALLS = 10  # timed together


def _sdpa(q, k, v, bias):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _our_call(**options) -> Callable:
    return lambda q, k, v, bias: flash_dmattn_func(q, k, v, is_causal=True, **options)


def _biased(**options) -> Callable:
    return lambda q, k, v, bias: _our_call(attn_bias=bias, **options)(q, k, v, bias)


def side_names(name: str, device: str) -> tuple[str, ...]:
    return ("ours", "sdpa")


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows(options)
    finally:
        torch.set_num_threads(threads)


def _rows(options: argparse.Namespace) -> Iterator[dict]:
    device = options.device
    for length in options.length or [128 if device == "cuda" else 8]:
        window = sliding_window(length, _WINDOW, device=device)
        calls = {
            ("dense", "sdpa"): _sdpa,
            ("dense", "ours"): _our_call(),
            ("key bias", "ours"): _biased(),
            ("window", "ours"): lambda q, k, v, bias: flash_dmattn_func(
                q, k, v, key_intervals=window
            ),
            ("top-w", "ours"): _biased(keep_window_size=_WINDOW),
            ("global top-w", "ours"): _biased(keep_window_size=_WINDOW, selection="global"),
        }
        for (kind, side), call in calls.items():
            if not options.side or side in options.side:
                yield _row(f"call N{length} {kind}", side, call, device, length)


def _row(case: str, side: str, call: Callable, device: str, length: int) -> dict:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
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

    graph = _least_us(lambda: call(*leaves), device)
    return record.row(
        case, side, str(dtype).removeprefix("torch."), forward=_least_us(without_gradients, device), unit="us",
        both=_least_us(forward_and_backward, device), parts={"forward with graph": graph}, threads=1, **_ROUNDS.fields(),
    )  # fmt: skip


def _least_us(call: Callable, device: str) -> float:
    def one_round() -> float:
        wait(device)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return 1e6 * (time.perf_counter() - begin) / _CALLS

    return _ROUNDS.time_one(one_round)
