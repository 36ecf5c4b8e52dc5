"""Decoding on a GPU: one query over all keys beside torch's SDPA, and the step of a KV cache of w keys.

    python benchmarks/cuda/decode.py [--record FILE]

Every call is replayed from a CUDA graph. Cold: the calls of a graph go through several sets of buffers, together more than four
times the L2, so that keys come from memory. Warm: always the same one. Copy bandwidth is that of a plain copy in the same run,
bytes read and written; those of a call are K and V, once.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import KVSlots, flash_dmattn_func
from flash_dmattn.benchmark.record import machine

HEADS_Q, HEADS_KV, HEAD_DIM = 16, 8, 128
COLD_BYTES = 4 * 60e6
RIVALS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def microseconds(call, sets, at_least=24):
    """Of one call, from replays of a graph that goes through all `sets`."""
    rounds = max(1, math.ceil(at_least / len(sets)))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for arguments in sets:
            call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(rounds):
            for arguments in sets:
                call(*arguments)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(sets)))
    return statistics.median(times)


def copy_bandwidth():
    """Bytes per microsecond: the better of a copy by the driver and one by an elementwise kernel."""
    source = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    ways = (target.copy_, lambda x: torch.neg(x, out=target))
    bytes_moved = 2 * source.numel() * source.element_size()
    return max(bytes_moved / microseconds(way, [(source,)], at_least=8) for way in ways)


def number_of_sets(bytes_of_one):
    return max(2, min(32, math.ceil(COLD_BYTES / bytes_of_one) + 1))


def attention(batch, keys, bandwidth):
    size = 4 * batch * HEADS_KV * keys * HEAD_DIM
    sets = []
    for _ in range(number_of_sets(size)):
        k, v = (normal(batch, HEADS_KV, keys, HEAD_DIM) for _ in range(2))
        sets.append((normal(batch, HEADS_Q, 1, HEAD_DIM), k, v))

    def ours(*qkv):
        return flash_dmattn_func(*(t.transpose(1, 2) for t in qkv))

    def sdpa(backend):
        def call(q, k, v):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    calls = {"ours": ours} | {name: sdpa(backend) for name, backend in RIVALS.items()}
    row = {"case": f"B{batch} N{keys}", "floor_us": round(size / bandwidth, 2)}
    for name, call in calls.items():
        try:
            cold, warm = microseconds(call, sets), microseconds(call, sets[:1])
        except RuntimeError:  # the backend declines
            continue
        row[name] = {"cold_us": round(cold, 2), "warm_us": round(warm, 2)}
    return row


def slots(batch, window, bandwidth):
    """A step: a token is inserted, the worst key is evicted, its query attends."""
    size = 4 * batch * HEADS_KV * window * HEAD_DIM

    def full_cache():
        cache = KVSlots(batch, HEADS_KV, window, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        cache.k.normal_()
        cache.v.normal_()
        cache.scores.normal_()
        cache.positions.copy_(torch.arange(window, device="cuda").expand_as(cache.positions))
        cache.counts[..., 0] = window
        cache.counts[..., 1] = cache.scores.argmin(-1)
        cache.seen.fill_(window)
        cache.is_empty = False
        token = [normal(batch, 1, heads, HEAD_DIM) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]
        return cache, *token, torch.randn(batch, HEADS_KV, 1, device="cuda")

    sets = [full_cache() for _ in range(number_of_sets(size))]
    cold, warm = (microseconds(KVSlots.step, some) for some in (sets, sets[:1]))
    row = {"case": f"step B{batch} w{window}", "floor_us": round(size / bandwidth, 2)}
    return row | {"ours": {"cold_us": round(cold, 2), "warm_us": round(warm, 2)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e6:.2f} TB/s")
    rows = []
    for batch, keys in ((1, 1024), (1, 8192), (1, 131072), (1, 524288), (64, 4096)):
        rows.append(attention(batch, keys, bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    for batch, window in ((1, 1024), (1, 2048), (1, 4096), (64, 2048)):
        rows.append(slots(batch, window, bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.record:
        found = {
            "machine": machine("cuda"),
            "torch": torch.__version__,
            "copy_bytes_per_us": round(bandwidth),
            "rows": rows,
        }
        options.record.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
