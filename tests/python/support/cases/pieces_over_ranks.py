"""Compares context parallelism over ranks, each with its own device, with the whole sequence on each device.

    torchrun --nproc_per_node 2 tests/python/support/cases/pieces_over_ranks.py NAME

Each rank computes the whole sequence itself, so only pieces pass through NCCL, or through gloo without a GPU. A failure on one
rank is raised on all ranks.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

# A host may refuse NVLink multicast.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.distributed import (
    attend_to_pieces,
    begin_exchange,
    boundary_places,
    context_parallel_dmattn,
)
from flash_dmattn.distributed.attention import seen_keys

NAMES = ("out", "dquery", "dkey", "dvalue", "dscores")
EXCHANGES = ("direct", "two_hops")
KINDS = ("normal", "ties", "falling", "rule", "documents")
# The rule of these kinds is only a window, so a piece has the same tiles of visible keys as the whole.
KINDS_OF_SAME_BITS = ("normal", "ties", "falling")

# 16 bits round 2.9e-3 of the norm of dk away over two H100s, 2.4e-3 on one: the two together are below 2**-7. Over two ranks of a
# CPU a row differs by 4.6e-3 at most. A key whose gradient is lost changes its row by about all of it, whatever the norm is.
NORM_BOUND, ROW_BOUND = 2**-7, 2**-5
# Each rank rounds its part of a moved key's gradient, which one process does not: 1.2 times the distance from double over two
# H100s, 1.3 to 1.4 times over 2 to 8 ranks of a CPU. No other tensor is rounded once more.
DISTANCE_BOUNDS = {name: 1.5 if name in ("dkey", "dvalue") else 1.05 for name in NAMES}


class Sizes(NamedTuple):
    heads: int
    heads_kv: int
    head_dim: int
    window: int
    tokens: int  # length in comparisons with the whole
    tokens_in_double: int  # length in the comparison with dense attention


class Ranks(NamedTuple):
    device: torch.device
    size: int
    rank: int
    sizes: Sizes

    def rows(self, tokens):
        """Returns the rows of a sequence that this rank has."""
        n = tokens // self.size
        return slice(self.rank * n, self.rank * n + n)


def ranks_of_this_host(device):
    """Returns the ranks, with sizes on a GPU at which sm90's kernels visit several tiles and blocks. device: "cuda" or "cpu"."""
    sizes = Sizes(4, 2, 16, 64, 512, 256)
    if device == "cuda":
        sizes = Sizes(16, 8, 128, 2048, 16384, 4096)
        device = torch.device("cuda", torch.cuda.current_device())
    return Ranks(torch.device(device), dist.get_world_size(), dist.get_rank(), sizes)


def draw(ranks, tokens, seed, kind="normal"):
    """Returns q, k, v and scores as leaves, and dout, for the whole sequence. They are the same on every rank."""
    sizes = ranks.sizes
    generator = torch.Generator(device=ranks.device).manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device=ranks.device).to(dtype)

    heads = (sizes.heads, sizes.heads_kv, sizes.heads_kv, sizes.heads)
    q, k, v, dout = (normal(1, tokens, h, sizes.head_dim) for h in heads)
    scores = normal(1, sizes.heads_kv, tokens, dtype=torch.float32)
    if kind == "ties":
        scores = (scores * 2).round() / 2
    elif kind == "falling":  # all keys that move are then rank 0's
        scores = -torch.arange(tokens, device=ranks.device).expand_as(scores) / tokens
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, scores)]
    return *leaves, dout


def rule_of(ranks, kind):
    """Returns the arguments of a selection, and the documents of the sequence or None."""
    tokens, window = ranks.sizes.tokens, ranks.sizes.window
    rule, offsets = {"keep_window_size": window}, None
    if kind == "rule":
        rule = {
            "keep_window_size": window // 2, "recent_window": window // 4, "sink_tokens": 5,
        }  # fmt: skip
    if kind == "documents":
        offsets = [0, tokens // 5, tokens // 2 + 77, tokens - 9]
        offsets = torch.tensor(offsets, device=ranks.device)
    return rule, offsets


def with_gradients(out, leaves, dout):
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def rows_of(tensors, rows):
    """Returns the rows of leaves, or of a result and its gradients.
    In the last tensor (scores), tokens are the last dimension."""
    return [*(t[:, rows] for t in tensors[:-1]), tensors[-1][..., rows]]


def attend_to_whole(leaves, dout, rule, offsets=None):
    q, k, v, s = leaves
    if offsets is None:
        out = flash_dmattn_func(q, k, v, None, s, is_causal=True, **rule)
    else:
        chosen = select_key_intervals(s, **rule, cu_seqlens_k=offsets)
        out = flash_dmattn_func(q, k, v, attn_bias=s, key_intervals=chosen)
    return with_gradients(out, leaves, dout)


def attend_to_piece(ranks, leaves, dout, **options):
    """Returns this rank's rows of the result and of the gradients."""
    rows = ranks.rows(dout.shape[1])
    piece = [t.detach().clone().requires_grad_() for t in rows_of(leaves, rows)]
    out = context_parallel_dmattn(*piece, group=dist.group.WORLD, **options)
    return with_gradients(out, piece, dout[:, rows])


def norm_distance(actual, wanted):
    """Returns the norm of the difference relative to the norm of `wanted`, or 0 if both are 0, like gradients of keys that no
    query sees."""
    difference, size = (actual.double() - wanted.double()).norm(), wanted.double().norm()
    return (difference / size).item() if difference != 0 else 0.0


def row_distance(actual, wanted):
    """Returns the largest difference of one row (for scores, one element), relative to its size and the size of a typical row."""
    difference, size = (t.double() for t in (actual.float() - wanted.float(), wanted))
    if wanted.ndim == 4:
        difference, size = (t.norm(dim=-1) for t in (difference, size))
    typical = size.square().mean().sqrt()
    return (difference.abs() / (size.abs() + typical)).max().item() if difference.any() else 0.0


def different_bits(actual, wanted, label):
    return [
        f"{label}: {name} has other bits"
        for name, a, b in zip(NAMES, actual, wanted, strict=True)
        if not torch.equal(a, b)
    ]


def pieces_of_one_kind(ranks, kind):
    """Yields (exchange, this rank's tensors, those of the whole)."""
    *leaves, dout = draw(ranks, ranks.sizes.tokens, 1, kind)
    rule, offsets = rule_of(ranks, kind)
    whole = attend_to_whole(leaves, dout, rule, offsets)
    expected = rows_of(whole, ranks.rows(ranks.sizes.tokens))
    for exchange in EXCHANGES:
        options = {"exchange": exchange, "cu_seqlens": offsets, **rule}
        yield exchange, attend_to_piece(ranks, leaves, dout, **options), expected


# ---- Checks, each of which returns what is wrong on this rank ------------------------------------------


def keys_of_pieces_equal_whole(ranks, kind):
    """Checks that queries of a piece see the same keys as in the whole sequence, whose intervals are clipped to the piece."""
    tokens, heads = ranks.sizes.tokens, ranks.sizes.heads_kv
    rule, offsets = rule_of(ranks, kind)
    scores = draw(ranks, tokens, 1, kind)[3].detach()
    choice = {} if offsets is None else {"cu_seqlens_k": offsets}
    rows = ranks.rows(tokens)
    n = rows.stop - rows.start
    expected = select_key_intervals(scores, **rule, **choice).intervals[:, :, : rows.stop].long()
    expected = (expected - rows.start).clamp(0, n)
    expected = expected * (expected[..., :1] < expected[..., 1:])
    keys = torch.zeros((1, n, heads, 8), dtype=torch.bfloat16, device=ranks.device)
    exchanged = begin_exchange(
        keys,
        keys,
        scores[..., rows].contiguous(),
        group=dist.group.WORLD,
        cu_seqlens=offsets,
        **rule,
    )
    piece_intervals = seen_keys(exchanged)[1].intervals.intervals.long()
    places = exchanged.boundary.places
    actual = torch.zeros_like(expected)
    actual[:, :, rows] = piece_intervals[:, :, places:]
    exists = (exchanged.positions >= 0)[..., None]
    at = exchanged.positions.long().clamp(min=0)[..., None].expand(-1, -1, -1, 2)
    actual.scatter_add_(2, at, piece_intervals[:, :, :places] * exists)
    different = (actual != expected).any(-1).sum().item()
    return [f"{different} keys have another interval"] if different else []


def out_of_pieces_has_bits_of_whole(ranks, kind):
    """Runs only on a GPU, because a CPU rounds some elements differently under other rules."""
    return [
        f"{exchange}: {(results[0] != expected[0]).sum().item()} elements of out have other bits"
        for exchange, results, expected in pieces_of_one_kind(ranks, kind)
        if not torch.equal(results[0], expected[0])
    ]


def pieces_equal_whole_within_rounding(ranks, kind):
    wrong = []
    for exchange, results, expected in pieces_of_one_kind(ranks, kind):
        for name, actual, wanted in zip(NAMES, results, expected, strict=True):
            for distance, bound in ((norm_distance, NORM_BOUND), (row_distance, ROW_BOUND)):
                value = distance(actual, wanted)
                if not value <= bound:
                    measured = f"{distance.__name__} {value:.1e}, expected {bound:.1e} at most"
                    wrong.append(f"{exchange}, {name}: got a {measured}")
    return wrong


def pieces_are_as_far_from_double_as_whole(ranks):
    """Compares the distance of all ranks' rows from dense attention in double with the distance of the whole on one device."""
    sizes, tokens = ranks.sizes, ranks.sizes.tokens_in_double
    rule = {"keep_window_size": sizes.window // 4}
    *leaves, dout = draw(ranks, tokens, 2)
    q, k, v, s = wide = [t.detach().double().requires_grad_() for t in leaves]
    mask = select_key_intervals(leaves[3].detach(), **rule).to_mask()
    outs = []
    for head in range(sizes.heads):
        shared = head // (sizes.heads // sizes.heads_kv)
        scores = q[0, :, head] @ k[0, :, shared].T * sizes.head_dim**-0.5 + s[0, shared]
        scores = scores.masked_fill(~mask[0, shared], -torch.inf)
        outs.append(scores.softmax(-1) @ v[0, :, shared])
    exact = with_gradients(torch.stack(outs, 1)[None], wide, dout.double())
    whole = attend_to_whole(leaves, dout, rule)
    rows, wrong = ranks.rows(tokens), []
    for exchange in EXCHANGES:
        results = attend_to_piece(ranks, leaves, dout, exchange=exchange, **rule)
        tensors = zip(NAMES, results, rows_of(whole, rows), rows_of(exact, rows), strict=True)
        for name, actual, one, wanted in tensors:
            squares = [(t.double() - wanted).square().sum() for t in (actual, one)]
            ours, theirs = (sum(gather_values(ranks, t.item())) ** 0.5 for t in squares)
            if not ours <= DISTANCE_BOUNDS[name] * theirs:
                got = f"got {ours / theirs:.2f} times the distance of one device from double"
                wrong.append(f"{exchange}, {name}: {got}, expected {DISTANCE_BOUNDS[name]} at most")
    return wrong


def deterministic_runs_have_same_bits(ranks):
    *leaves, dout = draw(ranks, ranks.sizes.tokens, 1)
    wrong = []
    for exchange in EXCHANGES:
        options = {"exchange": exchange, "deterministic": True, **rule_of(ranks, "normal")[0]}
        first, second = (attend_to_piece(ranks, leaves, dout, **options) for _ in range(2))
        wrong += different_bits(second, first, exchange)
    return wrong


def headroom_has_bits_of_separate_keys(ranks):
    """Compares keys and values after free rows, into which the rank receives those of other ranks, with separate ones."""
    tokens, window = ranks.sizes.tokens, ranks.sizes.window
    *leaves, dout = draw(ranks, tokens, 1)
    rows = ranks.rows(tokens)
    places = boundary_places(dist.group.WORLD, rows.stop - rows.start, window)
    results = []
    for headroom in (False, True):
        q, k, v, s = (t.detach().clone().requires_grad_() for t in rows_of(leaves, rows))
        keys, fronts = [k, v], []
        if headroom:
            fronts = [torch.full_like(t[:, :places], torch.nan).requires_grad_() for t in keys]
            keys = [torch.cat(parts, 1) for parts in zip(fronts, keys, strict=True)]
        options = {"group": dist.group.WORLD, "keep_window_size": window, "headroom": headroom}
        exchanged = begin_exchange(*keys, s, **options)
        out = attend_to_pieces(q, exchanged, deterministic=True)
        results.append(with_gradients(out, [q, k, v, s, *fronts], dout[:, rows]))
    *with_headroom, dkeys, dvalues = results.pop()
    wrong = different_bits(with_headroom, results[0], "headroom")
    if exchanged.key.data_ptr() != keys[0].data_ptr():
        wrong.append("keys are received elsewhere")
    if dkeys.any() or dvalues.any():  # a norm of all rows would add them to its own
        wrong.append("free rows have a gradient")
    return wrong


def ranks_with_other_windows_raise(ranks):
    """Checks that each rank raises, and that no rank waits for the others."""
    *leaves, dout = draw(ranks, ranks.sizes.tokens, 1)
    try:
        window = ranks.sizes.window + ranks.rank
        attend_to_piece(ranks, leaves, dout, keep_window_size=window, check=True)
    except ValueError as error:
        expected = "ranks differ" in str(error) and "keep_window_size=" in str(error)
        return [] if expected else [f"got the error {error}, expected one of ranks that differ"]
    return ["got no error, expected one of ranks that differ"]


def graph_has_bits_of_eager_run(ranks):
    """Checks that a captured graph of forward and backward, collectives included, gives the same bits. Needs a GPU."""
    # pytest's paths do not reach torchrun's programs.
    sys.path.append(str(Path(__file__).parents[1] / "runtime"))
    from gpu import capture

    *leaves, dout = draw(ranks, ranks.sizes.tokens, 3)
    rows, wrong = ranks.rows(ranks.sizes.tokens), []
    rule = rule_of(ranks, "normal")[0]
    for exchange in EXCHANGES:
        piece = [t.detach().clone().requires_grad_() for t in rows_of(leaves, rows)]
        options = {
            "group": dist.group.WORLD, "exchange": exchange, "check": False, "deterministic": True, **rule,
        }  # fmt: skip

        def step(piece=piece, options=options):
            out = context_parallel_dmattn(*piece, **options)
            return with_gradients(out, piece, dout[:, rows])

        eager = step()
        # NCCL's thread queries events during a capture, which is an error in the mode "global".
        graph, captured = capture(step, error_mode="thread_local")
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        wrong += different_bits(captured, eager, exchange)
        del graph, captured
    return wrong


def exchange_on_own_stream_has_same_bits(ranks):
    """Runs `begin_exchange`, a projection of queries and `attend_to_pieces`, with the exchange on the projection's stream or
    another. Runs only on a GPU."""
    sizes, tokens = ranks.sizes, ranks.sizes.tokens
    *leaves, dout = draw(ranks, tokens, 3)
    rows = ranks.rows(tokens)
    _, *keys = (t.detach().clone().requires_grad_() for t in rows_of(leaves, rows))
    width = 2 * sizes.heads * sizes.head_dim
    generator = torch.Generator(device=ranks.device).manual_seed(4)
    hidden, weight = (
        (torch.randn(shape, generator=generator, device=ranks.device) * factor).bfloat16()
        for shape, factor in (((tokens, width), 1), ((width, width // 2), width**-0.5))
    )
    hidden, weight = hidden[rows].requires_grad_(), weight.requires_grad_()
    results = []
    for stream in (None, torch.cuda.Stream()):
        options = {"group": dist.group.WORLD, "keep_window_size": sizes.window, "stream": stream}
        exchanged = begin_exchange(*keys, **options)
        query = (hidden @ weight).view(1, -1, sizes.heads, sizes.head_dim)
        out = attend_to_pieces(query, exchanged, deterministic=True)
        inputs = [hidden, weight, *keys]
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout[:, rows])])
    names = ("out", "dhidden", "dweight", "dkey", "dvalue", "dscores")
    return [
        f"{name} has other bits"
        for name, *pair in zip(names, *results, strict=True)
        if not torch.equal(*pair)
    ]


CHECKS = {
    f"{check.__name__}[{kind}]": (check, kind)
    for check in (keys_of_pieces_equal_whole, pieces_equal_whole_within_rounding)
    for kind in KINDS
} | {
    check.__name__: (check,)
    for check in (
        pieces_are_as_far_from_double_as_whole, deterministic_runs_have_same_bits, headroom_has_bits_of_separate_keys,
        ranks_with_other_windows_raise,
    )
}  # fmt: skip
GPU_CHECKS = {
    f"{out_of_pieces_has_bits_of_whole.__name__}[{kind}]": (out_of_pieces_has_bits_of_whole, kind)
    for kind in KINDS_OF_SAME_BITS
} | {
    check.__name__: (check,)
    for check in (graph_has_bits_of_eager_run, exchange_on_own_stream_has_same_bits)
}


def gather_values(ranks, value):
    values_of_ranks = [None] * ranks.size
    dist.all_gather_object(values_of_ranks, value)
    return values_of_ranks


def run_check(name, device):
    """Fails on every rank if the check found something wrong on any rank."""
    ranks = ranks_of_this_host(device)
    check, *arguments = (CHECKS | GPU_CHECKS)[name]
    texts_of_ranks = gather_values(ranks, check(ranks, *arguments))
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(texts_of_ranks) for text in texts]
    assert not wrong, "\n".join([name, *wrong])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # A rank that fails leaves the others waiting in a collective until the time limit.
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=100))
    run_check(sys.argv[1], device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


if __name__ == "__main__":
    main()
