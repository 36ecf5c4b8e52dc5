"""Slots and a full cache give the results of attention over all tokens, however a stream is split into chunks and steps.

The tests have only windows, and rules with recent keys, sinks, thresholds and windows per head.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import KVSlots, flash_dmattn_with_kvcache, select_key_intervals
from token_streams import (
    KINDS,
    NUMERICS,
    PADDINGS,
    TOLERANCE,
    Stream,
    check_drops,
    check_not_finite,
    check_ragged,
    check_scores_that_mask,
    check_speculation,
    check_split,
    check_with_kvcache,
)

BY_HEAD = {"recent_window": 3, "recent_competes": True, "sink_tokens": 1}
DELAYED = {"recent_window": 4, "sink_tokens": 2, "score_threshold": -0.5}
# (window, the other parts of a rule, or None for only a window).
EXAMPLES = pytest.mark.parametrize("window, rule", [(4, None), ((4, 2), BY_HEAD), (5, DELAYED)])


@st.composite
def rules(draw):
    """Draws only a window in a third of the cases, otherwise a window (or one per head) and other parts of a rule
    that shows some key."""
    if draw(st.sampled_from([True, False, False])):
        return draw(st.integers(1, 12)), None
    window = draw(st.integers(0, 7) | st.tuples(st.integers(0, 7), st.integers(0, 7)))
    rule = {
        "recent_window": draw(st.integers(0, 8)),
        "recent_competes": draw(st.booleans()),
        "sink_tokens": draw(st.integers(0, 4)),
        "score_threshold": draw(st.sampled_from([None, None, -0.5, 0.0, 1.0, float("inf")])),
    }
    if not (rule["recent_window"] or rule["sink_tokens"] or window not in (0, (0, 0))):
        rule["recent_window"] = 1
    return window, rule


STREAMS = {
    "rule": rules(),
    "kind": st.sampled_from(KINDS),
    "padding": st.sampled_from(PADDINGS),
    "seed": st.integers(0, 10**6),
    "numerics": st.sampled_from(NUMERICS),
    "value_dim": st.sampled_from([None, 3]),
}
DTYPES = st.sampled_from(list(TOLERANCE))


def stream_of(length, rule, numerics, **options):
    return Stream(length, rule[0], rule=rule[1], **numerics, **options)


@settings(max_examples=300, deadline=None)
@given(
    **STREAMS,
    pieces=st.lists(st.integers(1, 7), min_size=1, max_size=10),
    prefill=st.integers(0, 12),
    dtype=DTYPES,
    backend=st.sampled_from(["", "reference"]),
)
def test_any_split_equals_full_attention(pieces, prefill, backend, **options):
    check_split(stream_of(prefill + sum(pieces), **options), prefill, pieces, backend)


@settings(max_examples=160, deadline=None)
@given(
    **STREAMS,
    speculated=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8
    ),
)
def test_speculation_with_rollback_equals_full_attention(speculated, **options):
    """Rows accept different numbers of the pending tokens."""
    stream = stream_of(sum(size for size, *_ in speculated), **options)
    check_speculation(stream, speculated, options["seed"])


@settings(max_examples=100, deadline=None)
@given(
    **STREAMS,
    pieces=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_dropped_tokens_leave_no_trace(pieces, **options):
    sizes, dropped = zip(*pieces, strict=True)
    check_drops(stream_of(sum(sizes), **options), sizes, dropped)


@settings(max_examples=100, deadline=None)
@given(**STREAMS, begin=st.integers(1, 14), dtype=DTYPES)
def test_ragged_rows_equal_single_rows(begin, **options):
    check_ragged(stream_of(26, **options), begin, steps=12)


PIECES = (1, 1, 9, 1, 13, 1, 1, 3)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("layout", ["by token", "by head"])
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("numerics", NUMERICS, ids=str)
def test_with_kvcache_equals_full_attention(mode, layout, kind, padding, numerics):
    stream = Stream(30, 6, kind=kind, padding=padding, **numerics)
    check_with_kvcache(stream, PIECES, mode, layout)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("padding", ["none", "left"])
@EXAMPLES
def test_with_kvcache_under_a_rule_equals_full_attention(mode, padding, window, rule):
    stream = Stream(30, window, kind="ties", padding=padding, rule=rule, value_dim=5)
    check_with_kvcache(stream, PIECES, mode, "by token")


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_mask_by_the_rule_of_float32(dtype, mode):
    stream = Stream(30, 6, dtype=dtype, kind="low")
    check_with_kvcache(stream, PIECES, mode, "by token")
    check_split(stream, 5, (1, 1, 4, 1, 7, 11))
    check_scores_that_mask(dtype)


@pytest.mark.parametrize(
    "name, other", [("scale", 0.5), ("softcap", 4.0), ("scores_are_bias", True)]
)
def test_each_option_changes_the_result(name, other):
    """If an option had no effect, the other tests would prove nothing about it."""
    stream = Stream(30, 6, scale=0.9, softcap=2.0, scores_are_bias=False)
    stream.options[name] = other
    with pytest.raises(AssertionError):
        check_split(stream, 5, (1, 7, 1, 13))


@pytest.mark.parametrize(
    "part", ["recent_window", "recent_competes", "sink_tokens", "score_threshold"]
)
def test_each_part_of_a_rule_changes_the_result(part):
    """If a part of a rule had no effect, the other tests would prove nothing about it."""
    stream = Stream(40, 5, rule=DELAYED)
    without = {
        "recent_window": 0,
        "recent_competes": True,
        "sink_tokens": 0,
        "score_threshold": None,
    }
    stream.rule[part] = without[part]
    with pytest.raises(AssertionError):
        check_split(stream, 5, (1, 7, 1, 13, 1, 1, 1, 1))


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


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("length", [2, 3, 20, 25])
def test_full_cache_equals_left_padding_of_zero(length, queries):
    """A left padding of 0 tokens makes the call use intervals, which give the same result."""
    caches = [torch.randn(2, 25, 2, 8), torch.randn(2, 25, 2, 8), torch.randn(2, 2, 25)]
    for cache, tokens in zip(caches, (1, 1, 2), strict=True):
        cache.narrow(tokens, length, 25 - length).fill_(torch.nan)
    q, lengths = torch.randn(2, queries, 4, 8), torch.full((2,), length, dtype=torch.int32)
    out, expected = (
        flash_dmattn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_leftpad=leftpad)
        for leftpad in (None, torch.zeros(2, dtype=torch.int32))
    )
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ["saturate", "propagate"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_tokens_follow_the_mode(value, name, mode):
    check_not_finite(Stream(9, 4, batch=1), name, value, mode)


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


@pytest.mark.parametrize("mode", ["all keys", "slots"])
def test_compiled_with_kvcache_has_one_graph(mode):
    """Lengths are read only on the device, so one graph serves all steps."""
    torch._dynamo.reset()
    stream, size = Stream(12, 3), 15
    caches = [torch.zeros(2, size, 2, 8), torch.zeros(2, size, 2, 8), torch.zeros(2, 2, size)]
    options = {"keep_window_size": 3, "cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    if mode == "slots":
        options["slot_positions"] = torch.zeros(2, 2, size, dtype=torch.int32)
        options["slot_counts"] = torch.zeros(2, 2, 8, dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, scores):
        return flash_dmattn_with_kvcache(q, *caches, k, v, scores=scores, **options)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(12):
            out = step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
            stream.check(out, t, t + 1)
            options["cache_seqlens"].fill_(t + 1)
