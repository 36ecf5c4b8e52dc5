"""Context parallelism on the GPUs of one host against one GPU: the same keys, the same bits, graphs, times.

    torchrun --nproc_per_node 2 benchmarks/context_parallel.py --json record.json

Pieces of N tokens on each GPU are compared with the whole on one; `bench.py compare` divides the times of a record. It ends within `--budget` seconds: what was not reached is said.
Without a GPU: gloo and small sizes, which tries the program.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.distributed import (
    attend,
    begin,
    boundary_places,
    context_parallel_dmattn,
    exchanged_bytes,
)
from flash_dmattn.distributed.pending import seen_keys
from harness import record
from harness.cases import PER_QUERY, Case
from harness.clock import timed
from harness.ranks import GPU, Ranks, add_options

HQ, HKV, D, WINDOW = (16, 8, 128, 2048) if GPU else (4, 2, 16, 64)
LENGTHS = (65536, 262144, 1048576) if GPU else (512, 1024)
COMPARED, BY_ORACLE = (16384, 4096) if GPU else (512, 256)  # tokens of comparisons
DTYPE = torch.bfloat16 if GPU else torch.float32
NAMES = ("out", "dquery", "dkey", "dvalue", "dscores")
NOTE = (
    "median of 5 rounds of successive calls, of the slowest rank; both: forward and backward; "
    "headroom: keys and values after free rows, into which those of other ranks are received; without NVLink multicast"
)


def piece_of(ranks: Ranks, length: int) -> slice:
    n = length // ranks.size
    return slice(ranks.rank * n, ranks.rank * n + n)


def inputs(
    ranks: Ranks, length: int, seed: int, rows: slice | None = None, scores="normal"
) -> list:
    """q, k, v, scores as leaves, and dout: rows of a sequence that is the same on every device, as it is made in blocks."""
    rows = slice(0, length) if rows is None else rows
    block, parts = 16384 if GPU else 64, []
    for at in range(rows.start // block * block, rows.stop, block):
        generator = torch.Generator(device=ranks.device).manual_seed(seed * 1000003 + at)

        def normal(*shape, generator=generator, dtype=DTYPE):
            made = torch.randn(shape, generator=generator, device=ranks.device)
            return made.to(dtype)

        made = [normal(1, block, heads, D) for heads in (HQ, HKV, HKV, HQ)]
        made.append(normal(1, block, HKV, dtype=torch.float32))
        cut = slice(max(rows.start - at, 0), min(rows.stop - at, block))
        parts.append([t[:, cut] for t in made])
    q, k, v, dout, s = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    s = s.transpose(1, 2).contiguous()
    if scores == "ties":
        s = (s * 2).round() / 2
    elif scores == "falling":
        s = -torch.arange(rows.start, rows.stop, device=s.device).expand_as(s) / length
    leaves = [t.detach().contiguous().requires_grad_() for t in (q, k, v, s)]
    return [*leaves, dout]


def attend_to_whole(leaves: list, rule: dict, **options) -> Tensor:
    q, k, v, s = leaves
    return flash_dmattn_func(q, k, v, None, s, is_causal=True, **rule, **options)


def with_gradients(out: Tensor, leaves: list, dout: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, leaves, dout)]


def rows_of(tensors: list, rows: slice) -> list[Tensor]:
    """The rows of leaves, or of a result and its gradients, of which the last has tokens in its last dimension."""
    return [*(t[:, rows] for t in tensors[:-1]), tensors[-1][..., rows]]


def on_pieces_of(ranks: Ranks, leaves: list, dout: Tensor, rows: slice, **options) -> list[Tensor]:
    """This rank's rows of the result and of the gradients."""
    piece = [t.detach().clone().requires_grad_() for t in rows_of(leaves, rows)]
    out = context_parallel_dmattn(*piece, group=ranks.group, **options)
    return with_gradients(out, piece, dout[:, rows])


def gaps(actual: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative distances, in the order of NAMES."""
    pairs = [(a.float(), b.float()) for a, b in zip(actual, wanted, strict=True)]
    return [((a - b).norm() / b.norm().clamp_min(1e-20)).item() for a, b in pairs]


def gaps_everywhere(ranks: Ranks, actual: list[Tensor], wanted: list[Tensor]) -> str:
    """The largest of all ranks."""
    worst = map(max, zip(*ranks.everywhere(gaps(actual, wanted)), strict=True))
    return in_words(worst)


def in_words(numbers: Iterable[float]) -> str:
    return " ".join(f"{name} {n:.1e}" for name, n in zip(NAMES, numbers, strict=True))


# ---- Right -----------------------------------------------------------------------------------------


def same_keys(ranks: Ranks, rows: slice, scores: Tensor, rule: dict, cu_seqlens=None) -> bool:
    """The intervals of the whole, clipped to a piece, against those of the keys that its rank has."""
    choice = {} if cu_seqlens is None else {"cu_seqlens_k": cu_seqlens}
    n = rows.stop - rows.start
    expected = select_key_intervals(scores, **rule, **choice).intervals[:, :, : rows.stop].long()
    expected = (expected - rows.start).clamp(0, n)
    expected = expected * (expected[..., :1] < expected[..., 1:])
    none = torch.zeros((1, n, HKV, 8), dtype=DTYPE, device=ranks.device)
    pending = begin(
        none,
        none,
        scores[..., rows].contiguous(),
        group=ranks.group,
        cu_seqlens=cu_seqlens,
        **rule,
    )
    found = seen_keys(pending)[1].keys.intervals.long()
    W = pending.border.places
    actual = torch.zeros_like(expected)
    actual[:, :, rows] = found[:, :, W:]
    exists = (pending.positions >= 0)[..., None]
    at = pending.positions.long().clamp(min=0)[..., None].expand(-1, -1, -1, 2)
    actual.scatter_add_(2, at, found[:, :, :W] * exists)
    return bool((actual == expected).all())


def compare(ranks: Ranks) -> None:
    rows = piece_of(ranks, COMPARED)
    documents = torch.tensor(
        [0, COMPARED // 5, COMPARED // 2 + 77, COMPARED - 9], device=ranks.device
    )
    rules = {
        "normal": {"keep_window_size": WINDOW},
        "ties": {"keep_window_size": WINDOW},
        "falling": {"keep_window_size": WINDOW},
        "rule": {
            "keep_window_size": WINDOW // 2, "recent_window": WINDOW // 4, "recent_competes": False, "sink_tokens": 5,
        },
        "documents": {"keep_window_size": WINDOW},
    }  # fmt: skip
    for kind, rule in rules.items():
        *leaves, dout = inputs(ranks, COMPARED, 1, scores=kind)
        cu_seqlens = documents if kind == "documents" else None
        if cu_seqlens is None:
            out = attend_to_whole(leaves, rule)
        else:
            q, k, v, s = leaves
            chosen = select_key_intervals(s, **rule, cu_seqlens_k=documents)
            out = flash_dmattn_func(q, k, v, attn_bias=s, key_intervals=chosen)
        expected = rows_of(with_gradients(out, leaves, dout), rows)
        is_equal = same_keys(ranks, rows, leaves[3].detach(), rule, cu_seqlens)
        is_equal = all(ranks.everywhere(is_equal))
        for exchange in ("direct", "two_hops"):
            options = {"exchange": exchange, "cu_seqlens": cu_seqlens, **rule}
            found = on_pieces_of(ranks, leaves, dout, rows, **options)
            bits = ranks.everywhere(torch.equal(found[0], expected[0]))
            text = gaps_everywhere(ranks, found, expected)
            ranks.say(
                f"{kind:9} {exchange:8} same keys {is_equal}; out bit-equal {bits}; relative to 1 GPU: {text}"
            )
            if kind == "normal":
                options["deterministic"] = True
                runs = [on_pieces_of(ranks, leaves, dout, rows, **options) for _ in range(2)]
                equal = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
                ranks.say(
                    f"{exchange} twice with deterministic=True: bit-equal {ranks.everywhere(equal)}"
                )
    distance_from_float32(ranks)


def distance_from_float32(ranks: Ranks) -> None:
    """How far one GPU and the pieces are from dense attention in float32."""
    window = WINDOW // 4
    *leaves, dout = inputs(ranks, BY_ORACLE, 2)
    q, k, v, s = (t.detach().float().requires_grad_() for t in leaves)
    mask = select_key_intervals(s, window).to_mask()
    outs = []
    for head in range(HQ):
        shared = head // (HQ // HKV)
        scores = q[0, :, head] @ k[0, :, shared].T * D**-0.5 + s[0, shared]
        scores = scores.masked_fill(~mask[0, shared], -torch.inf)
        outs.append(scores.softmax(-1) @ v[0, :, shared])
    exact = with_gradients(torch.stack(outs, 1)[None], [q, k, v, s], dout.float())
    rule = {"keep_window_size": window}
    one = gaps(with_gradients(attend_to_whole(leaves, rule), leaves, dout), exact)
    rows = piece_of(ranks, BY_ORACLE)
    found = on_pieces_of(ranks, leaves, dout, rows, **rule)
    pieces = gaps_everywhere(ranks, found, rows_of(exact, rows))
    ranks.say(f"distance from float32, 1 GPU: {in_words(one)}; pieces: {pieces}")


def check_disagreement(ranks: Ranks) -> None:
    """Ranks with other windows: an error on each of them, and no rank waits."""
    *piece, _ = inputs(ranks, COMPARED, 1, piece_of(ranks, COMPARED))
    try:
        context_parallel_dmattn(*piece, group=ranks.group, keep_window_size=WINDOW + ranks.rank)
        found = "no error"
    except ValueError as error:
        found = str(error)
    ranks.say(f"ranks that disagree: {ranks.everywhere(found)}")


# ---- Quick -----------------------------------------------------------------------------------------


def median_ms(ranks: Ranks, body: Callable[[], object], together: bool = True) -> float:
    """Milliseconds of a body on this rank, one of several in succession; the GPU has worked for a third of a second before."""

    def several(count: int) -> None:
        for _ in range(count):
            body()

    def run(count: int) -> float:
        return timed(several, ranks.device.type, count)[0] / count

    run(2)
    once = run(2)
    once = max(ranks.everywhere(once)) if together else once
    run(max(1, min(40, int(350 / once))))
    count = max(2, min(30, int(120 / once)))
    times = []
    for _ in range(5):
        if together:
            ranks.meet()
        times.append(run(count))
    return statistics.median(times)


def on_one(ranks: Ranks, length: int) -> dict:
    """Times of the whole on rank 0, while the others wait."""
    found = None
    if ranks.rank == 0:
        *leaves, dout = inputs(ranks, length, 3)
        ranks.clear_memory()
        rule = {"keep_window_size": WINDOW}

        def forward():
            with torch.no_grad():
                attend_to_whole(leaves, rule)

        found = {
            "forward": median_ms(ranks, forward, together=False),
            "both": median_ms(ranks, lambda: with_gradients(attend_to_whole(leaves, rule), leaves, dout), together=False),
            "peak_mb": ranks.peak_mb(),
        }  # fmt: skip
    ranks.meet()
    return ranks.everywhere(found)[0]


def on_pieces(ranks: Ranks, length: int, exchange: str, headroom: bool) -> dict:
    rows = piece_of(ranks, length)
    n = rows.stop - rows.start
    *piece, dout = inputs(ranks, length, 3, rows)
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
            attend(q, begin(*keys, **options))

    def both():
        with_gradients(attend(q, begin(*keys, **options)), piece, dout)

    found = {"forward": median_ms(ranks, forward), "both": median_ms(ranks, both)}
    found["peak_mb"] = ranks.peak_mb()
    before = exchanged_bytes(ranks.group)
    forward()
    middle = exchanged_bytes(ranks.group)
    both()
    after = exchanged_bytes(ranks.group)
    moved = {
        f"exchanged {way}": max(b.sent - a.sent, b.received - a.received) / 1e6
        for way, a, b in (("forward", before, middle), ("forward + backward", middle, after))
    }
    parts = {}
    with torch.no_grad():
        parts["begin"] = median_ms(ranks, lambda: begin(*keys, **options))
        if headroom and length == LENGTHS[0]:
            checked = {**options, "check": True}
            parts["begin, checked"] = median_ms(ranks, lambda: begin(*keys, **checked))
        pending = begin(*keys, **options)
        parts["attend"] = median_ms(ranks, lambda: attend(q, pending))
    leaves = [t.detach().requires_grad_() for t in (q, pending.key, pending.value, pending.bias)]
    free = pending._replace(
        key=leaves[1], value=leaves[2], scores=leaves[3].detach(), bias=leaves[3]
    )
    parts["attend both"] = median_ms(
        ranks, lambda: with_gradients(attend(leaves[0], free), leaves, dout)
    )
    found["parts"] = parts
    found = slowest(ranks.everywhere(found | {"values": moved}))
    found["values"] = {name: [number, "MB"] for name, number in found["values"].items()}
    return found


def slowest(found: list[dict]) -> dict:
    return {
        key: slowest([f[key] for f in found])
        if isinstance(value, dict)
        else max(f[key] for f in found)
        for key, value in found[0].items()
    }


def in_a_graph(ranks: Ranks, length: int, exchange: str) -> dict:
    """Forward and backward, collectives included, captured once and replayed."""
    rows = piece_of(ranks, length)
    *piece, dout = inputs(ranks, length, 3, rows)
    options = {
        "group": ranks.group, "keep_window_size": WINDOW, "exchange": exchange, "check": False, "deterministic": True,
    }  # fmt: skip

    def both():
        return with_gradients(context_parallel_dmattn(*piece, **options), piece, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            eager = both()
    torch.cuda.current_stream().wait_stream(side)
    ranks.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = both()
    ranks.meet()
    ms = max(ranks.everywhere(median_ms(ranks, graph.replay)))
    is_equal = all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    ranks.say(
        f"N {length} {exchange}: in a graph {ms:.3f} ms, bit-equal to eager {ranks.everywhere(is_equal)}"
    )
    return {"forward": None, "both": ms}


def beside_projection(ranks: Ranks, length: int) -> dict[str, dict]:
    """begin, the projection of queries and attend, with the exchange on the stream of the projection or on one of its own."""
    rows = piece_of(ranks, length)
    q, *keys, dout = inputs(ranks, length, 3, rows)
    n, width = rows.stop - rows.start, 2 * HQ * D if not GPU else 2048
    hidden = torch.randn((n, width), device=ranks.device).to(DTYPE).requires_grad_()
    weight = (torch.randn((width, HQ * D), device=ranks.device) / width**0.5).to(DTYPE)
    weight.requires_grad_()
    leaves = [hidden, weight, *keys]
    found, results = {}, []
    streams = {"one stream": None}
    if GPU:
        streams["own stream"] = torch.cuda.Stream()
    for name, stream in streams.items():
        options = {
            "group": ranks.group,
            "keep_window_size": WINDOW,
            "check": False,
            "stream": stream,
        }

        def both(options=options):
            pending = begin(*keys, **options)
            query = (hidden @ weight).view(1, n, HQ, D)
            return with_gradients(attend(query, pending, deterministic=True), leaves, dout)

        def forward(options=options):
            with torch.no_grad():
                pending = begin(*keys, **options)
                attend((hidden @ weight).view(1, n, HQ, D), pending)

        found[name] = {"forward": median_ms(ranks, forward), "both": median_ms(ranks, both)}
        results.append(both())
    is_equal = all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
    ranks.say(f"N {length} beside a projection: bit-equal {ranks.everywhere(is_equal)}")
    with torch.no_grad():
        projection = median_ms(ranks, lambda: hidden @ weight)
    for times in found.values():
        times["parts"] = {"projection": projection}
    return {name: slowest(ranks.everywhere(times)) for name, times in found.items()}


def measure(ranks: Ranks) -> None:
    kind = str(DTYPE).removeprefix("torch.")
    for length in LENGTHS:
        if not ranks.has(40):
            ranks.say(f"N {length}: no time left")
            return
        case = Case(PER_QUERY, length, D, WINDOW, HQ, HKV)
        one = on_one(ranks, length)
        ranks.clear_memory()
        sides = {"one GPU": one}
        for side, exchange, headroom in (
            ("pieces", "direct", False), ("headroom", "direct", True), ("two hops", "two_hops", True),
        ):  # fmt: skip
            if not ranks.has(25):
                break
            sides[side] = on_pieces(ranks, length, exchange, headroom)
            ranks.clear_memory()
        if GPU and length == LENGTHS[0]:
            sides["graph"] = in_a_graph(ranks, length, "direct")
            sides["graph, two hops"] = in_a_graph(ranks, length, "two_hops")
            ranks.clear_memory()
        if length == LENGTHS[1]:
            for name, found in beside_projection(ranks, length).items():
                sides[f"projection, {name}"] = found
            ranks.clear_memory()
        for side, found in sides.items():
            measured = {k: v for k, v in found.items() if k != "forward"}
            name = side if side == "one GPU" else f"{ranks.size} GPUs, {side}"
            row = record.row(case, name, kind, found["forward"], **measured)
            ranks.say(record.format_row(row))
            ranks.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=280)
    ranks = Ranks(parser.parse_args(), NOTE)
    ranks.say(
        f"{ranks.device.type} x {ranks.size}, torch {torch.__version__}, H{HQ} Hkv{HKV} D{D} w{WINDOW} {DTYPE}"
    )
    for step in (check_disagreement, compare, measure):
        step(ranks)
    ranks.finish()


if __name__ == "__main__":
    main()
