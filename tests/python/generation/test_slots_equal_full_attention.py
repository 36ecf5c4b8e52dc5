"""Slots and a full cache against attention over all tokens: any split of a stream into chunks and steps gives the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import KVSlots, flash_dmattn_func, flash_dmattn_with_kvcache

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Stream:
    """Tokens of a batch, and the result of full attention with per-query selection."""

    def __init__(self, length, window, *, batch=2, heads=2, group=2, head_dim=8, dtype=torch.float32,
                 kind="normal", padding="none", seed=0):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=draw).to(dtype)

        self.q = normal(batch, length, heads * group, head_dim)
        self.k, self.v = (normal(batch, length, heads, head_dim) for _ in range(2))
        self.scores = torch.randn(batch, heads, length, generator=draw)
        if kind == "ties":
            self.scores = self.scores.round()
        elif kind == "equal":
            self.scores.zero_()
        elif kind == "nan":
            self.scores[torch.rand(self.scores.shape, generator=draw) < 0.3] = torch.nan
        self.mask = torch.ones(batch, length, dtype=torch.bool)
        for row, pad in enumerate(torch.randint(0, length, (batch,), generator=draw)):
            if padding == "left":
                self.mask[row, :pad] = False
            elif padding == "anywhere":
                self.mask[row] = torch.rand(length, generator=draw) < 0.7
        self.window, self.dtype, self.length = window, dtype, length
        self.out, self.lse, _ = flash_dmattn_func(
            self.q, self.k, self.v, self.mask, self.scores, is_causal=True,
            keep_window_size=window, return_attn_probs=True, backend="reference",
        )  # fmt: skip

    def tokens(self, begin, end):
        part = slice(begin, end)
        return self.k[:, part], self.v[:, part], self.scores[:, :, part]

    def slots(self, chunk=0, backend=""):
        batch, _, heads, head_dim = self.k.shape
        return KVSlots(batch, heads, self.window, head_dim, chunk=chunk, dtype=self.dtype, backend=backend)  # fmt: skip

    def check(self, out, begin, end, rows=slice(None)):
        torch.testing.assert_close(
            out[rows], self.out[rows, begin:end], atol=TOLERANCE[self.dtype], rtol=0
        )


STREAMS = {
    "window": st.integers(1, 12),
    "kind": st.sampled_from(["normal", "ties", "equal", "nan"]),
    "padding": st.sampled_from(["none", "left", "anywhere"]),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=150, deadline=None)
@given(
    **STREAMS,
    pieces=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    prefill=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    backend=st.sampled_from(["", "reference"]),
)
def test_any_split_of_a_stream(pieces, prefill, dtype, backend, **options):
    stream = Stream(prefill + sum(pieces), dtype=dtype, **options)
    cache = stream.slots(chunk=7, backend=backend)
    if prefill:
        k, v, scores = stream.tokens(0, prefill)
        cache.fill(k, v, scores, key_mask=stream.mask[:, :prefill])
    begin = prefill
    for size in pieces:
        part = slice(begin, begin + size)
        k, v, scores = stream.tokens(begin, begin + size)
        if size == 1:
            out, lse = cache.step(
                stream.q[:, part], k, v, scores, key_mask=stream.mask[:, part], return_lse=True
            )
        else:
            cache.append(k, v, scores, key_mask=stream.mask[:, part])
            out, lse = cache.attend(stream.q[:, part], return_lse=True)
            cache.commit()
        stream.check(out, begin, begin + size)
        torch.testing.assert_close(lse, stream.lse[:, :, part], atol=TOLERANCE[dtype], rtol=1e-5)
        begin += size
    assert cache.seen.tolist() == [begin] * 2


@settings(max_examples=100, deadline=None)
@given(
    **STREAMS,
    speculated=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6
    ),
)
def test_speculation_with_any_rollback(speculated, **options):
    """Rows accept different numbers of the pending tokens; the rejected ones leave no trace."""
    length = sum(size for size, *_ in speculated)
    streams = [Stream(length, **options) for _ in range(2)]  # one for each row, as they diverge
    cache = streams[0].slots(chunk=5)
    place = [0, 0]
    generator = torch.Generator().manual_seed(options["seed"])
    for size, *accepted in speculated:
        accepted = [min(size, n) for n in accepted]
        rows = []
        for row, begin in enumerate(place):
            end = begin + size
            good = [t[row] for t in (stream_tokens(streams[0], begin, end))]
            rows.append([junk_after(t, accepted[row], generator) for t in good])
        q, k, v, scores, mask = (torch.stack(parts) for parts in zip(*rows, strict=True))
        cache.append(k, v, scores.transpose(1, 2).contiguous(), key_mask=mask)
        out = cache.attend(q)
        for row, (begin, count) in enumerate(zip(place, accepted, strict=True)):
            expected = streams[0].out[row, begin : begin + count]
            torch.testing.assert_close(out[row, :count], expected, atol=2e-5, rtol=0)
        if accepted[0] == accepted[1]:
            cache.drop(size - accepted[0])
            cache.commit()
        else:
            cache.commit(torch.tensor(accepted, dtype=torch.int32))
        place = [begin + count for begin, count in zip(place, accepted, strict=True)]
        assert cache.seen.tolist() == place


def stream_tokens(stream, begin, end):
    part = slice(begin, end)
    k, v, scores = stream.tokens(begin, end)
    return stream.q[:, part], k, v, scores.transpose(1, 2), stream.mask[:, part]


def junk_after(tokens, count, generator):
    """Tokens of which those after `count` are others, with high scores."""
    if tokens.dtype == torch.bool:
        return tokens
    junk = torch.randn(tokens.shape, generator=generator).abs() + 9
    junk[:count] = tokens[:count]
    return junk


@settings(max_examples=60, deadline=None)
@given(**STREAMS, begin=st.integers(1, 10), dtype=st.sampled_from(list(TOLERANCE)))
def test_rows_of_different_lengths(begin, dtype, **options):
    """A ragged batch padded on the right, then steps: each row as if it were alone."""
    stream = Stream(24, dtype=dtype, **options)
    cache = stream.slots()
    lengths = torch.tensor([begin, max(1, begin // 2)], dtype=torch.int32)
    k, v, scores = stream.tokens(0, begin)
    cache.fill(k, v, scores, lengths=lengths, key_mask=stream.mask[:, :begin])
    for _ in range(10):
        rows, index = torch.arange(2), lengths.long()
        out = cache.step(
            stream.q[rows, index][:, None],
            stream.k[rows, index][:, None],
            stream.v[rows, index][:, None],
            stream.scores[rows, :, index][:, :, None],
            key_mask=stream.mask[rows, index][:, None],
        )
        for row in range(2):
            at = int(lengths[row])
            torch.testing.assert_close(
                out[row, 0], stream.out[row, at], atol=TOLERANCE[dtype], rtol=0
            )
        lengths += 1
    assert torch.equal(cache.seen, lengths)


@pytest.mark.parametrize("mode", ["all keys", "slots"])
@pytest.mark.parametrize("layout", ["by token", "by head"])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_with_kvcache(mode, layout, kind):
    stream = Stream(30, 6, kind=kind)
    size = 40

    def zeros(*shape):
        if layout == "by token":
            return torch.zeros(shape)
        return torch.zeros(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)

    caches = [zeros(2, size, 2, 8), zeros(2, size, 2, 8), torch.full((2, 2, size), torch.nan)]
    seqlens = torch.zeros(2, dtype=torch.int32)
    options = {"keep_window_size": 6, "cache_seqlens": seqlens, "return_softmax_lse": True}
    if mode == "slots":
        options["slot_positions"] = torch.zeros(2, 2, size, dtype=torch.int32)
        options["slot_counts"] = torch.zeros(2, 2, 2, dtype=torch.int32)
    begin = 0
    for count in (1, 1, 9, 1, 13, 1, 1, 3):
        part = slice(begin, begin + count)
        k, v, scores = stream.tokens(begin, begin + count)
        before = seqlens.clone()
        out, lse, _ = flash_dmattn_with_kvcache(
            stream.q[:, part], *caches, k, v, scores=scores, **options
        )
        stream.check(out, begin, begin + count)
        torch.testing.assert_close(lse, stream.lse[:, :, part])
        begin += count
        assert torch.equal(seqlens, before + (count if mode == "slots" else 0))
        seqlens.fill_(begin)
    if mode == "all keys":  # without new tokens, and all keys seen
        out = flash_dmattn_with_kvcache(stream.q[:, :begin], *caches, cache_seqlens=seqlens)
        full = flash_dmattn_func(
            stream.q, stream.k, stream.v, attn_bias=stream.scores, is_causal=True
        )
        torch.testing.assert_close(out, full)


def test_full_cache_with_rows_of_different_lengths_and_left_padding():
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


@pytest.mark.parametrize("mode", ["saturate", "propagate"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(value, name, mode):
    """They show, or saturate, as in flash_dmattn_func: in steps, in chunks and in a cache of all keys."""
    stream, window = Stream(9, 4, batch=1), 4
    getattr(stream, name)[0, 5, 0, 3] = value
    expected = flash_dmattn_func(
        stream.q, stream.k, stream.v, attn_bias=stream.scores, is_causal=True,
        keep_window_size=window, nonfinite=mode,
    )  # fmt: skip
    steps, chunks = stream.slots(), stream.slots(chunk=3)
    caches = [torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 2, 8), torch.zeros(1, 2, 9)]
    outs = [[], [], []]
    for t in range(9):
        q, tokens = stream.q[:, t : t + 1], stream.tokens(t, t + 1)
        outs[0].append(steps.step(q, *tokens, nonfinite=mode))
        outs[1].append(
            flash_dmattn_with_kvcache(
                q,
                *caches,
                *tokens[:2],
                scores=tokens[2],
                nonfinite=mode,
                cache_seqlens=torch.tensor([t]).int(),
                keep_window_size=window,
            )  # fmt: skip
        )
    for t in range(0, 9, 3):
        chunks.append(*stream.tokens(t, t + 3))
        outs[2].append(chunks.attend(stream.q[:, t : t + 3], nonfinite=mode))
        chunks.commit()
    for parts in outs:
        torch.testing.assert_close(torch.cat(parts, 1), expected, equal_nan=True)


def test_snapshots_rows_and_saved_states():
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


def test_compiled_without_a_break():
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
def test_with_kvcache_compiled_without_a_break(mode):
    """Lengths are read on the device only: one graph for all steps."""
    torch._dynamo.reset()
    stream, size = Stream(12, 3), 15
    caches = [torch.zeros(2, size, 2, 8), torch.zeros(2, size, 2, 8), torch.zeros(2, 2, size)]
    options = {"keep_window_size": 3, "cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    if mode == "slots":
        options["slot_positions"] = torch.zeros(2, 2, size, dtype=torch.int32)
        options["slot_counts"] = torch.zeros(2, 2, 2, dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, scores):
        return flash_dmattn_with_kvcache(q, *caches, k, v, scores=scores, **options)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(12):
            out = step(stream.q[:, t : t + 1], *stream.tokens(t, t + 1))
            stream.check(out, t, t + 1)
            options["cache_seqlens"].fill_(t + 1)
