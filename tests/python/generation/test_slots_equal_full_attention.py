"""Slots and a full cache against attention over all tokens: any split of a stream into chunks and steps gives the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import flash_dmattn_with_kvcache
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

STREAMS = {
    "window": st.integers(1, 12),
    "kind": st.sampled_from(KINDS),
    "padding": st.sampled_from(PADDINGS),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=150, deadline=None)
@given(
    **STREAMS,
    pieces=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    prefill=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    backend=st.sampled_from(["", "reference"]),
    numerics=st.sampled_from(NUMERICS),
)
def test_any_split_equals_full_attention(pieces, prefill, dtype, backend, numerics, **options):
    stream = Stream(prefill + sum(pieces), dtype=dtype, **numerics, **options)
    check_split(stream, prefill, pieces, backend)


@settings(max_examples=100, deadline=None)
@given(
    **STREAMS,
    speculated=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6
    ),
    numerics=st.sampled_from(NUMERICS),
)
def test_speculation_with_rollback_equals_full_attention(speculated, numerics, **options):
    """Rows accept different numbers of the pending tokens."""
    stream = Stream(sum(size for size, *_ in speculated), **numerics, **options)
    check_speculation(stream, speculated, options["seed"])


@settings(max_examples=60, deadline=None)
@given(
    **STREAMS,
    pieces=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_dropped_tokens_leave_no_trace(pieces, **options):
    sizes, dropped = zip(*pieces, strict=True)
    check_drops(Stream(sum(sizes), **options), sizes, dropped)


@settings(max_examples=60, deadline=None)
@given(**STREAMS, begin=st.integers(1, 10), dtype=st.sampled_from(list(TOLERANCE)))
def test_ragged_rows_equal_single_rows(begin, dtype, **options):
    check_ragged(Stream(24, dtype=dtype, **options), begin, steps=10)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("layout", ["by token", "by head"])
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("numerics", NUMERICS, ids=str)
def test_with_kvcache_equals_full_attention(mode, layout, kind, padding, numerics):
    stream = Stream(30, 6, kind=kind, padding=padding, **numerics)
    check_with_kvcache(stream, (1, 1, 9, 1, 13, 1, 1, 3), mode, layout)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_mask_by_the_rule_of_float32(dtype, mode):
    stream = Stream(30, 6, dtype=dtype, kind="low")
    check_with_kvcache(stream, (1, 1, 9, 1, 13, 1, 1, 3), mode, "by token")
    check_split(stream, 5, (1, 1, 4, 1, 7, 11))
    check_scores_that_mask(dtype)


@pytest.mark.parametrize(
    "name, other", [("scale", 0.5), ("softcap", 4.0), ("scores_are_bias", True)]
)
def test_each_option_changes_the_result(name, other):
    """Else the other tests would prove nothing of them."""
    stream = Stream(30, 6, scale=0.9, softcap=2.0, scores_are_bias=False)
    stream.options[name] = other
    with pytest.raises(AssertionError):
        check_split(stream, 5, (1, 7, 1, 13))


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
    """The same as through intervals, which a left padding of no tokens brings."""
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


def test_restored_snapshot_gives_same_steps():
    stream = Stream(20, 4, kind="ties", batch=1)
    cache = stream.slots(chunk=3)

    def run(cache, begin, end):
        outs = []
        for t in range(begin, end):
            rows = cache.batch
            tokens = [x.expand(rows, *x.shape[1:]) for x in stream.tokens(t, t + 1)]
            outs.append(cache.step(stream.q[:, t : t + 1].expand(rows, -1, -1, -1), *tokens))
        return torch.cat(outs, 1)

    run(cache, 0, 8)
    prefix = cache.snapshot()
    stream.check(run(cache, 8, 14), 8, 14)
    cache.restore(prefix)
    stream.check(run(cache, 8, 14), 8, 14)

    beams = prefix.repeat(3)  # a shared prefix
    stream.check(run(beams, 8, 12)[1:2], 8, 12)
    beams.reorder(torch.tensor([2, 0, 0]))
    stream.check(run(beams, 12, 14)[2:], 12, 14)
    assert prefix.select(torch.tensor([0])).seen.tolist() == [8]

    saved = {n: t.clone() if torch.is_tensor(t) else t for n, t in prefix.state_dict().items()}
    other = stream.slots(chunk=3)
    other.load_state_dict(saved)
    stream.check(run(other, 8, 20), 8, 20)
    cache.clear()
    stream.check(run(cache, 0, 8), 0, 8)


def test_compiled_step_has_one_graph():
    stream = Stream(12, 3)
    cache = stream.slots(chunk=4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, scores):
        return cache.step(q, k, v, scores)

    for t in range(8):
        stream.check(step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1)), t, t + 1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def chunk(q, k, v, scores):
        cache.append(k, v, scores)
        out = cache.attend(q)
        cache.commit()
        return out

    stream.check(chunk(stream.q[:, 8:], *stream.tokens(8, 12)), 8, 12)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
def test_compiled_with_kvcache_has_one_graph(mode):
    """Lengths are read on the device only: one graph for all steps."""
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
