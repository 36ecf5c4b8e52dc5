"""Times context parallelism on the GPUs of one host, and the whole sequence on one of them.

    torchrun --nproc_per_node 2 benchmarks/context_parallel.py --json record.json

`bench.py compare` prints the ratios of a record's times. The program ends within `--budget` seconds and prints which length it did not
reach. Without a GPU it uses gloo and small sizes, only to try the program. tests/python/gpu/test_context_parallel_over_nccl.py checks
the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import (
    attend_to_pieces,
    begin_exchange,
    boundary_places,
    context_parallel_dmattn,
    exchanged_bytes,
)
from harness import record
from harness.case import PER_QUERY, Case
from harness.clock import Rounds, capture_graph, timed
from harness.ranks import GPU, Ranks, add_options

HQ, HKV, D, WINDOW = (16, 8, 128, 2048) if GPU else (4, 2, 16, 64)
LENGTHS = (65536, 262144, 1048576) if GPU else (512, 1024)
WIDTH = 2048 if GPU else 128  # of the hidden states that become queries
DTYPE = torch.bfloat16 if GPU else torch.float32
ROUNDS = Rounds(5, warm_up=0)
NOTE = (
    "a round: successive calls; times of the slowest rank; both: forward and backward; "
    "headroom: keys and values after free rows, into which those of other ranks are received; without NVLink multicast"
)


def rows_of_rank(ranks: Ranks, length: int) -> slice:
    n = length // ranks.size
    return slice(ranks.rank * n, ranks.rank * n + n)


def draw_inputs(ranks: Ranks, length: int, rows: slice | None = None) -> list[Tensor]:
    """Returns q, k, v and scores as leaves, and dout. The sequence is drawn block by block, so that every rank gets the same numbers."""
    rows = slice(0, length) if rows is None else rows
    block, parts = 16384 if GPU else 64, []
    for at in range(rows.start // block * block, rows.stop, block):
        generator = torch.Generator(device=ranks.device).manual_seed(at)

        def normal(*shape, generator=generator, dtype=DTYPE):
            drawn = torch.randn(shape, generator=generator, device=ranks.device)
            return drawn.to(dtype)

        tensors = [normal(1, block, heads, D) for heads in (HQ, HKV, HKV, HQ)]
        tensors.append(normal(1, block, HKV, dtype=torch.float32))
        cut = slice(max(rows.start - at, 0), min(rows.stop - at, block))
        parts.append([t[:, cut] for t in tensors])
    q, k, v, dout, s = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    s = s.transpose(1, 2).contiguous()
    leaves = [t.detach().contiguous().requires_grad_() for t in (q, k, v, s)]
    return [*leaves, dout]


def attend_to_whole(leaves: list[Tensor]) -> Tensor:
    q, k, v, s = leaves
    return flash_dmattn_func(q, k, v, None, s, is_causal=True, keep_window_size=WINDOW)


def with_gradients(out: Tensor, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, leaves, dout)]


def median_ms(ranks: Ranks, body: Callable[[], object], together: bool = True) -> float:
    """Returns the milliseconds per run of `body` on this rank, in a series of runs after a third of a second of warm-up."""

    def repeat_body(count: int) -> None:
        for _ in range(count):
            body()

    def run(count: int) -> float:
        return timed(repeat_body, ranks.device.type, count)[0] / count

    run(2)
    once = run(2)
    once = max(ranks.gather_values(once)) if together else once
    run(max(1, min(40, int(350 / once))))
    count = max(2, min(30, int(120 / once)))

    def one_round() -> float:
        if together:
            ranks.wait_for_all()
        return run(count)

    return ROUNDS.time_one(one_round)


def measure_whole(ranks: Ranks, length: int) -> dict:
    """Times the whole sequence on rank 0, while the other ranks wait."""
    measurements = None
    if ranks.rank == 0:
        *leaves, dout = draw_inputs(ranks, length)
        ranks.clear_memory()

        def forward():
            with torch.no_grad():
                attend_to_whole(leaves)

        def forward_and_backward():
            with_gradients(attend_to_whole(leaves), leaves, dout)

        measurements = {
            "forward": median_ms(ranks, forward, together=False),
            "both": median_ms(ranks, forward_and_backward, together=False),
            "peak_mb": ranks.peak_mb(),
        }
    ranks.wait_for_all()
    return ranks.gather_values(measurements)[0]


def measure_pieces(ranks: Ranks, length: int, exchange: str, headroom: bool) -> dict:
    rows = rows_of_rank(ranks, length)
    n = rows.stop - rows.start
    *piece, dout = draw_inputs(ranks, length, rows)
    W = boundary_places(ranks.group, n, WINDOW)
    if headroom:
        for i in (1, 2):
            wide = piece[i].new_zeros((1, W + n, HKV, D))
            wide[:, W:] = piece[i].detach()
            piece[i] = wide.requires_grad_()
    q, *keys = piece
    options = {
        "group": ranks.group, "keep_window_size": WINDOW, "exchange": exchange, "headroom": headroom, "check": False,
    }  # fmt: skip
    ranks.clear_memory()

    def forward():
        with torch.no_grad():
            attend_to_pieces(q, begin_exchange(*keys, **options))

    def forward_and_backward():
        with_gradients(attend_to_pieces(q, begin_exchange(*keys, **options)), piece, dout)

    measurements = {
        "forward": median_ms(ranks, forward),
        "both": median_ms(ranks, forward_and_backward),
    }
    measurements["peak_mb"] = ranks.peak_mb()
    before = exchanged_bytes(ranks.group)
    forward()
    middle = exchanged_bytes(ranks.group)
    forward_and_backward()
    after = exchanged_bytes(ranks.group)
    moved = {
        f"exchanged {way}": max(b.sent - a.sent, b.received - a.received) / 1e6
        for way, a, b in (("forward", before, middle), ("forward + backward", middle, after))
    }
    parts = {}
    with torch.no_grad():
        parts["begin"] = median_ms(ranks, lambda: begin_exchange(*keys, **options))
        if headroom and length == LENGTHS[0]:
            checked = {**options, "check": True}
            parts["begin, checked"] = median_ms(ranks, lambda: begin_exchange(*keys, **checked))
        exchanged = begin_exchange(*keys, **options)
        parts["attend"] = median_ms(ranks, lambda: attend_to_pieces(q, exchanged))
    leaves = [
        t.detach().requires_grad_() for t in (q, exchanged.key, exchanged.value, exchanged.bias)
    ]
    free = exchanged._replace(
        key=leaves[1], value=leaves[2], scores=leaves[3].detach(), bias=leaves[3]
    )
    parts["attend both"] = median_ms(
        ranks, lambda: with_gradients(attend_to_pieces(leaves[0], free), leaves, dout)
    )
    measurements["parts"] = parts
    measurements = slowest(ranks.gather_values(measurements | {"values": moved}))
    measurements["values"] = {
        name: [number, "MB"] for name, number in measurements["values"].items()
    }
    return measurements


def slowest(measurements: list[dict]) -> dict:
    return {
        key: slowest([f[key] for f in measurements])
        if isinstance(value, dict)
        else max(f[key] for f in measurements)
        for key, value in measurements[0].items()
    }


def measure_graph(ranks: Ranks, length: int, exchange: str) -> dict:
    """Times the replay of a CUDA graph of forward and backward, collectives included."""
    *piece, dout = draw_inputs(ranks, length, rows_of_rank(ranks, length))
    options = {
        "group": ranks.group, "keep_window_size": WINDOW, "exchange": exchange, "check": False, "deterministic": True,
    }  # fmt: skip

    def forward_and_backward():
        with_gradients(context_parallel_dmattn(*piece, **options), piece, dout)

    forward_and_backward()
    replay = capture_graph([forward_and_backward])
    ranks.wait_for_all()
    return {"forward": None, "both": max(ranks.gather_values(median_ms(ranks, replay)))}


def measure_beside_projection(ranks: Ranks, length: int) -> dict[str, dict]:
    """Times `begin_exchange`, the projection of queries and `attend_to_pieces`. The exchange runs on the projection's stream or on its
    own."""
    rows = rows_of_rank(ranks, length)
    _, *keys, dout = draw_inputs(ranks, length, rows)
    n = rows.stop - rows.start
    hidden = torch.randn((n, WIDTH), device=ranks.device).to(DTYPE).requires_grad_()
    weight = (torch.randn((WIDTH, HQ * D), device=ranks.device) / WIDTH**0.5).to(DTYPE)
    weight.requires_grad_()
    leaves = [hidden, weight, *keys]
    times_by_stream = {}
    streams = {"one stream": None}
    if GPU:
        streams["own stream"] = torch.cuda.Stream()
    for name, stream in streams.items():
        options = {
            "group": ranks.group, "keep_window_size": WINDOW, "check": False, "stream": stream,
        }  # fmt: skip

        def forward_and_backward(options=options):
            exchanged = begin_exchange(*keys, **options)
            query = (hidden @ weight).view(1, n, HQ, D)
            with_gradients(attend_to_pieces(query, exchanged, deterministic=True), leaves, dout)

        def forward(options=options):
            with torch.no_grad():
                exchanged = begin_exchange(*keys, **options)
                attend_to_pieces((hidden @ weight).view(1, n, HQ, D), exchanged)

        times_by_stream[name] = {
            "forward": median_ms(ranks, forward),
            "both": median_ms(ranks, forward_and_backward),
        }
    with torch.no_grad():
        projection = median_ms(ranks, lambda: hidden @ weight)
    for times in times_by_stream.values():
        times["parts"] = {"projection": projection}
    return {name: slowest(ranks.gather_values(times)) for name, times in times_by_stream.items()}


def measure(ranks: Ranks) -> None:
    kind = str(DTYPE).removeprefix("torch.")
    for length in LENGTHS:
        if not ranks.has_time_for(40):
            ranks.print_line(f"N {length}: no time left")
            return
        case = Case(PER_QUERY, length, D, WINDOW, HQ, HKV)
        whole = measure_whole(ranks, length)
        ranks.clear_memory()
        sides = {"one GPU": whole}
        for side, exchange, headroom in (
            ("pieces", "direct", False), ("headroom", "direct", True), ("two hops", "two_hops", True),
        ):  # fmt: skip
            if not ranks.has_time_for(25):
                ranks.print_line(f"N {length}, {side}: no time left")
                break
            sides[side] = measure_pieces(ranks, length, exchange, headroom)
            ranks.clear_memory()
        if GPU and length == LENGTHS[0]:
            sides["graph"] = measure_graph(ranks, length, "direct")
            sides["graph, two hops"] = measure_graph(ranks, length, "two_hops")
            ranks.clear_memory()
        if length == LENGTHS[1]:
            for name, times in measure_beside_projection(ranks, length).items():
                sides[f"projection, {name}"] = times
            ranks.clear_memory()
        for side, times in sides.items():
            measured = {k: v for k, v in times.items() if k != "forward"}
            name = side if side == "one GPU" else f"{ranks.size} GPUs, {side}"
            measured |= ROUNDS.fields()
            ranks.add_row(record.row(case, name, kind, times["forward"], **measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=280)
    ranks = Ranks(parser.parse_args(), NOTE)
    ranks.print_line(
        f"{ranks.device.type} x {ranks.size}, torch {torch.__version__}, H{HQ} Hkv{HKV} D{D} w{WINDOW} {DTYPE}"
    )
    measure(ranks)
    ranks.finish()


if __name__ == "__main__":
    main()
