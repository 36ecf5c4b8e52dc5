"""The host's time for a call: attention so short that kernels take none of it.

    python benchmarks/host_time.py [--device cpu|cuda] [--length 128] [--json FILE]

One row for each form of a call, in µs: forward without gradients; forward that records them; forward and backward.
A time is the least of many short runs, which other programs of the machine disturb least. On a GPU calls are issued
without waiting for them, so kernels must take less time than the host needs to launch them.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from flash_dmattn import flash_dmattn_func, sliding_window

HEADS_Q, HEADS_KV, HEAD_DIM, WINDOW = 4, 2, 64, 16
RUNS, CALLS = 300, 10


def sdpa(q, k, v, bias):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def dense(q, k, v, bias):
    return flash_dmattn_func(q, k, v, is_causal=True)


def key_bias(q, k, v, bias):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)


def window(q, k, v, bias, known={}):  # noqa: B006 (made once, as a model would)
    length = q.shape[1]
    if length not in known:
        known[length] = sliding_window(length, WINDOW, device=q.device)
    return flash_dmattn_func(q, k, v, key_intervals=known[length])


def top_w(q, k, v, bias):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=WINDOW)


def global_top_w(q, k, v, bias):
    options = {"keep_window_size": WINDOW, "selection": "global"}
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


FORMS = (sdpa, dense, key_bias, window, top_w, global_top_w)


def microseconds(call, device):
    """The least time of a call in one of many runs."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(RUNS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
        synchronize()
    return round(1e6 * min(times), 1)


def measure(form, device, length):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(1, length, h, HEAD_DIM) for h in (HEADS_Q, HEADS_KV, HEADS_KV)]
    shapes.append((1, HEADS_KV, length))
    leaves = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    dout = torch.randn_like(leaves[0])

    def without_gradients():
        with torch.no_grad():
            form(*leaves)

    def both():
        torch.autograd.grad(form(*leaves), leaves, dout, allow_unused=True)

    return {
        "call": form.__name__,
        "forward": microseconds(without_gradients, device),
        "forward_with_graph": microseconds(lambda: form(*leaves), device),
        "forward_and_backward": microseconds(both, device),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, help="default: 128 on a GPU, 8 on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length = options.length or (128 if options.device == "cuda" else 8)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.device}, N {length}; µs a call")
    print(f"{'':<16}{'forward':>12}{'with graph':>12}{'and backward':>14}")
    rows = []
    for form in FORMS:
        row = measure(form, options.device, length)
        rows.append(row)
        name, *times = row.values()
        print(f"{name:<16}{times[0]:>12}{times[1]:>12}{times[2]:>14}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


main()
