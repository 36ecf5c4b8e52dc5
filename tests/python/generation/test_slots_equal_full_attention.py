"""Slots and a full cache give the results of attention over all tokens, however a stream is split into chunks and steps.

The tests have only windows, and rules with recent keys, sinks, thresholds and windows per head.
"""

import random

import pytest
import torch

from flash_dmattn import KVSlots, flash_dmattn_with_kvcache, select_key_intervals
from gpu import devices, where_there_is_a_gpu
from token_streams import (
    KINDS,
    NUMERICS,
    Stream,
    check_drops,
    check_not_finite,
    check_ragged,
    check_scores_that_mask,
    check_speculation,
    check_split,
    check_with_kvcache,
    drawn,
    pieces_of,
)

BY_HEAD = {"recent_window": 3, "recent_competes": True, "sink_tokens": 1}
DELAYED = {"recent_window": 4, "sink_tokens": 2, "score_threshold": -0.5}
# (window, the other parts of a rule, or None for only a window).
EXAMPLES = pytest.mark.parametrize("window, rule", [(4, None), ((4, 2), BY_HEAD), (5, DELAYED)])


@devices
@pytest.mark.parametrize("first", range(0, 160, 20))
def test_any_split_equals_full_attention(first, device):
    for seed in range(first, first + 20):
        pieces, prefill = pieces_of(seed), random.Random(seed).randint(0, 12)
        backend = "reference" if device == "cpu" and seed % 2 else ""
        check_split(drawn(seed, prefill + sum(pieces), device), prefill, pieces, backend)


@devices
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_speculation_with_rollback_equals_full_attention(first, device):
    """Rows accept different numbers of the pending tokens."""
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 8))]
        speculated = [(size, draw.randint(0, 5), draw.randint(0, 5)) for size in sizes]
        check_speculation(drawn(seed, sum(sizes), device), speculated, seed)


@devices
@pytest.mark.parametrize("first", range(0, 40, 20))
def test_dropped_tokens_leave_no_trace(first, device):
    for seed in range(first, first + 20):
        pieces, draw = pieces_of(seed), random.Random(seed)
        check_drops(drawn(seed, sum(pieces), device), pieces, [draw.randint(0, 3) for _ in pieces])


@devices
@pytest.mark.parametrize("first", range(0, 40, 20))
def test_ragged_rows_equal_single_rows(first, device):
    for seed in range(first, first + 20):
        check_ragged(drawn(seed, 26, device), random.Random(seed).randint(1, 14), steps=12)


PIECES = (1, 1, 9, 1, 13, 1, 1, 3)


@devices
@pytest.mark.parametrize("layout", ["by token", "by head"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_kvcache_equals_full_attention(layout, kind, device):
    for seed in range(10):
        stream = Stream(
            sum(pieces := pieces_of(seed, most=13)), 1 + seed, kind=kind, padding=("none", "left")[seed // 2 % 2],
            head_dim=16, dtype=(torch.bfloat16, torch.float16)[seed % 2] if device == "cuda" else torch.float32,
            seed=seed, device=device, **NUMERICS[seed % len(NUMERICS)],
        )  # fmt: skip
        check_with_kvcache(stream, pieces, layout)


@pytest.mark.parametrize("padding", ["none", "left"])
@EXAMPLES
def test_with_kvcache_under_a_rule_equals_full_attention(padding, window, rule):
    stream = Stream(30, window, kind="ties", padding=padding, rule=rule, value_dim=5)
    check_with_kvcache(stream, PIECES, "by token")


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_mask_by_the_rule_of_float32(dtype, device):
    check_scores_that_mask(dtype, device)
    for seed in range(4):
        stream = Stream(30, 6, dtype=dtype, kind="low", seed=seed, device=device)
        check_split(stream, 5, (1, 1, 4, 1, 7, 11))
        check_with_kvcache(stream, PIECES, "by token")


def test_ragged_padded_full_cache_equals_single_rows():
    stream = Stream(20, 5, padding="left")
    caches = [torch.zeros(2, 25, 2, 8), torch.zeros(2, 25, 2, 8), torch.zeros(2, 2, 25)]
    lengths = torch.tensor([20, 13], dtype=torch.int32)
    for row, n in enumerate(lengths):
        caches[0][row, :n], caches[1][row, :n] = stream.k[row, :n], stream.v[row, :n]
        caches[2][row, :, :n] = stream.scores[row, :, :n]
    leftpad = (~stream.mask).sum(1).int()
    rows = torch.arange(2)[:, None]
    last = lengths[:, None].long() + torch.arange(-3, 0)
    out = flash_dmattn_with_kvcache(
        stream.q[rows, last], *caches, cache_seqlens=lengths, cache_leftpad=leftpad, keep_window_size=5,
    )  # fmt: skip
    torch.testing.assert_close(out, stream.out[rows, last], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("length", [2, 3, 20, 25])
def test_full_cache_equals_left_padding_of_zero(length, queries, dtype):
    """A left padding of 0 tokens makes the call use intervals, which give the same result. Scores are always float32."""
    caches = [*torch.randn(2, 2, 25, 2, 8, dtype=dtype), torch.randn(2, 2, 25)]
    for cache, tokens in zip(caches, (1, 1, 2), strict=True):
        cache.narrow(tokens, length, 25 - length).fill_(torch.nan)
    q = torch.randn(2, queries, 4, 8, dtype=dtype)
    lengths = torch.full((2,), length, dtype=torch.int32)
    out, expected = (
        flash_dmattn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_leftpad=leftpad)
        for leftpad in (None, torch.zeros(2, dtype=torch.int32))
    )
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def test_new_tokens_in_the_memory_of_the_cache_are_written_correctly():
    """Their source and destination overlap."""
    caches = k, v, scores = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 2, 9)
    new = k[:, :2], v[:, :2], scores[..., :2]
    expected, ones = [t.clone() for t in new], torch.ones(2, dtype=torch.int32)
    q = torch.randn(2, 2, 4, 8)
    flash_dmattn_with_kvcache(q, *caches, *new[:2], scores=new[2], cache_seqlens=ones)
    assert all(map(torch.equal, (k[:, 1:3], v[:, 1:3], scores[..., 1:3]), expected))


NONFINITE = [("cpu", torch.float32, (9, 4, 8)), *where_there_is_a_gpu(*(
    ("cuda", dtype, sizes) for dtype in (torch.bfloat16, torch.float16) for sizes in ((9, 4, 8), (30, 12, 64), (132, 100, 128))
))]  # fmt: skip


@pytest.mark.parametrize("mode", ["saturate", "propagate"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("device, dtype, sizes", NONFINITE, ids=str)
def test_nonfinite_tokens_follow_the_mode(device, dtype, sizes, value, name, mode):
    length, window, head_dim = sizes
    stream = Stream(length, window, batch=1, head_dim=head_dim, dtype=dtype, device=device)
    check_not_finite(stream, name, value, mode)


@EXAMPLES
def test_copied_caches_continue_under_the_rule(window, rule):
    """Reordered, repeated, restored and loaded caches continue like the original."""
    stream = Stream(30, window, kind="ties", padding="anywhere", rule=rule, value_dim=5)
    cache = stream.slots(chunk=4)

    def run(cache, begin, end, row):
        for t in range(begin, end):
            k, v, scores = (
                x[row].expand(cache.batch, *x.shape[1:]) for x in stream.tokens(t, t + 1)
            )
            mask = stream.mask[row, t : t + 1].expand(cache.batch, 1)
            q = stream.q[row, t : t + 1].expand(cache.batch, -1, -1, -1)
            out = cache.step(q, k, v, scores, key_mask=mask)
            stream.assert_close(out, stream.out[row, t : t + 1].expand_as(out))

    run(cache, 0, 12, 0)
    saved = cache.snapshot()
    assert saved.select(torch.tensor([0])).seen.tolist() == [12]
    run(cache, 12, 20, 0)
    cache.restore(saved)
    run(cache, 12, 20, 0)
    beams = saved.repeat(2)
    beams.reorder(torch.tensor([3, 1, 0, 2]))
    run(beams, 12, 16, 0)
    other = stream.slots(chunk=4)
    other.load_state_dict(saved.state_dict())
    run(other, 12, 30, 0)
    cache.clear()
    run(cache, 0, 30, 1)


def test_capped_counts_the_keys_beyond_the_window():
    stream = Stream(40, (6, 3), rule={"score_threshold": 0.0, "recent_window": 5, "sink_tokens": 2})
    cache = stream.slots()
    cache.fill(*stream.tokens(0, 25))
    for t in range(25, 40):
        cache.step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
    reaching = (stream.scores[..., 2:-5] >= 0).sum(-1)  # neither sinks nor recent
    assert torch.equal(cache.capped, (reaching - torch.tensor([6, 3])).clamp(min=0))
    assert cache.capped.min() > 0


def test_capped_is_zero_for_heads_without_a_window():
    """Without a window, no key of a head competes."""
    stream = Stream(20, (0, 3), rule={"score_threshold": float("-inf"), "recent_window": 2})
    cache = stream.slots()
    cache.fill(*stream.tokens(0, 12))
    for t in range(12, 20):
        cache.step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
    assert torch.equal(cache.capped, torch.tensor([[0, 15]]).expand(cache.batch, 2))


def test_memory_holds_the_keys_of_the_rule():
    """sink_tokens + its window + recent_window for each head, however long the text."""
    cache = KVSlots(1, 2, (32, 8), 8, recent_window=16, sink_tokens=4, chunk=512)
    assert cache.places == 52 and cache.k.shape == (1, 52 + 28 + 2 * 512, 8)
    scores = torch.randn(1, 2, 8192)
    for begin in range(0, 8192, 512):
        k = torch.arange(begin, begin + 512).float()[None, :, None, None].expand(1, 512, 2, 8)
        cache.append(k, k, scores[..., begin : begin + 512])
        cache.commit()
    intervals = select_key_intervals(scores, **cache.rule._asdict(), query_length=1)
    for head, (held, first) in enumerate(((52, 0), (28, 52 + 512))):
        visible = intervals.intervals[0, head, :, 1].nonzero()[:, 0]
        assert len(visible) == held
        taken = slice(first, first + int(cache.counts[0, head, 0]))
        entries = cache.positions[0, taken]
        positions = torch.where(entries < 0, -1 - entries, entries)
        assert torch.equal(positions.sort()[0].long(), visible)
        assert torch.equal(cache.k[0, taken, 0], positions.float())


@EXAMPLES
def test_compiled_step_has_one_graph(window, rule):
    torch._dynamo.reset()
    stream = Stream(12, window, rule=rule, value_dim=5)
    cache = stream.slots()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, scores):
        return cache.step(q, k, v, scores)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(12):
            out = step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
            stream.check(out, t, t + 1)


def test_compiled_chunk_has_one_graph():
    torch._dynamo.reset()
    stream = Stream(12, 3)
    cache = stream.slots(chunk=4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def chunk(q, k, v, scores):
        cache.append(k, v, scores)
        out = cache.attend(q)
        cache.commit()
        return out

    for t in range(0, 12, 4):
        stream.check(chunk(stream.q[:, t : t + 4], *stream.tokens(t, t + 4)), t, t + 4)


def test_compiled_with_kvcache_has_one_graph():
    """Lengths are read only on the device, so one graph serves all steps."""
    torch._dynamo.reset()
    stream, size = Stream(12, 3), 15
    caches = [torch.zeros(2, size, 2, 8), torch.zeros(2, size, 2, 8), torch.zeros(2, 2, size)]
    options = {"keep_window_size": 3, "cache_seqlens": torch.zeros(2, dtype=torch.int32)}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, scores):
        return flash_dmattn_with_kvcache(q, *caches, k, v, scores=scores, **options)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(12):
            out = step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
            stream.check(out, t, t + 1)
            options["cache_seqlens"].fill_(t + 1)
