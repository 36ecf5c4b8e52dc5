"""KV caches of many slots on the GPU equal full attention, also in graphs, and on several streams and devices."""

import random

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from gpu import capture
from token_streams import (
    KINDS,
    NUMERICS,
    PADDINGS,
    RULES,
    Stream,
    check_drops,
    check_ragged,
    check_speculation,
    check_split,
    check_with_kvcache,
    drawn,
    pieces_of,
)

DEVICE = "cuda"
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs"
)


DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("number", [-(2**31), -1, 10**6, 2**31 - 1])
def test_lengths_and_kept_tokens_out_of_range_are_clamped(number, rule):
    """The host does not read them."""
    stream = Stream(16, 6, dtype=torch.bfloat16, device=DEVICE, rule=rule)

    def filled(length, kept):
        cache = stream.slots(chunk=4)
        lengths, kept = (
            torch.full((2,), n, dtype=torch.int32, device=DEVICE) for n in (length, kept)
        )
        cache.fill(*stream.tokens(0, 12), lengths=lengths)
        cache.append(*stream.tokens(12, 16))
        cache.commit(kept)
        return cache.tensors

    expected = filled(0, 0) if number < 0 else filled(12, 4)
    assert all(map(torch.equal, filled(number, number), expected))


WINDOWS = (65, 100, 192, 300)
RULES_OF_MANY_SLOTS = (
    *RULES[:3],
    {"recent_window": 90, "recent_competes": True, "sink_tokens": 4},
    {"recent_window": 70, "score_threshold": -1.0},
)


def drawn_with_many_slots(seed, length, window, head_dim, **options):
    """Returns a stream with enough keys for several blocks, any of which may hold the worst key."""
    draw = random.Random(seed)
    window = draw.choice((window, (window, window // 5)))
    return Stream(
        length, window, kind=draw.choice(("normal", "ties", "nan")), padding=draw.choice(PADDINGS),
        group=draw.choice((1, 2, 4)), head_dim=head_dim, value_dim=draw.choice((head_dim, head_dim // 2)), dtype=draw.choice(DTYPES), seed=seed,
        device=DEVICE, rule=draw.choice(RULES_OF_MANY_SLOTS), **draw.choice(NUMERICS), **options,
    )  # fmt: skip


def pieces_for_many_slots(seed):
    """Returns (tokens of a prompt, pieces). Slots are full after the prompt or fill up later. Most pieces are steps."""
    draw, window = random.Random(seed), WINDOWS[seed % len(WINDOWS)]
    pieces = [1] * 16 + [draw.randint(2, 90) for _ in range(2)]
    draw.shuffle(pieces)
    return window, draw.choice((window - 8, window, window + 50)), pieces


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("first", range(0, 24, 12))
def test_any_split_with_many_slots_equals_cpu(first, head_dim):
    """The keys of a step are split over blocks, and the keys that it changes may be in any of them."""
    for seed in range(first, first + 12):
        window, prefill, pieces = pieces_for_many_slots(seed)
        length = prefill + sum(pieces)
        check_split(drawn_with_many_slots(seed, length, window, head_dim), prefill, pieces)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_split_over_more_than_a_cluster_equals_cpu(head_dim):
    """A second kernel adds their sums and finds the victim among theirs."""
    for seed, prefill in enumerate((4090, 4110, 4200)):
        pieces = [1, 1, 1, 9, 1, 1, 40, 1, 1, 1]
        stream = drawn_with_many_slots(seed, prefill + sum(pieces), 4100, head_dim, first=prefill)
        check_split(stream, prefill, pieces)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_speculation_and_drops_with_many_slots_equal_cpu(head_dim):
    for seed in range(8):
        window, prefill, _ = pieces_for_many_slots(seed)
        draw = random.Random(seed)
        sizes = [prefill, *(draw.randint(2, 20) for _ in range(6))]
        stream = drawn_with_many_slots(seed, sum(sizes), window, head_dim)
        check_drops(stream, sizes, [draw.randint(0, 9) for _ in sizes])
        accepted = [(size, draw.randint(0, size), draw.randint(0, size)) for size in sizes[1:]]
        check_speculation(stream, [(prefill, prefill, prefill), *accepted], seed)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_kvcache_with_many_keys_equals_cpu(head_dim):
    for seed in range(8):
        window, prefill, pieces = pieces_for_many_slots(seed)
        stream = Stream(
            prefill + sum(pieces), window, kind=KINDS[seed % 2], padding=("none", "left")[seed // 2 % 2],
            head_dim=head_dim, dtype=DTYPES[seed // 4], seed=seed, device=DEVICE, **NUMERICS[seed % 5],
        )  # fmt: skip
        check_with_kvcache(stream, [prefill, *pieces], "by head")


def test_head_without_slots_equals_cpu():
    for seed in range(4):
        padding, dtype = PADDINGS[seed % len(PADDINGS)], DTYPES[seed % 2]
        windows = ((6, 0), (0, 6))[seed // 2]
        stream = Stream(24, windows, dtype=dtype, padding=padding, seed=seed, device=DEVICE)
        check_ragged(stream, 8, steps=10)


# ---- CUDA graphs -----------------------------------------------------------------------------------

LENGTH, WINDOW, CHUNK = 240, 30, 8


def long_stream(seed=0, device=DEVICE, **options):
    options = {"dtype": torch.bfloat16, "head_dim": 64, "kind": "ties", "padding": "left"} | options
    return Stream(LENGTH, options.pop("window", WINDOW), seed=seed, device=device, **options)


def held(cache):
    """Returns the entries, scores, keys and values in the slots in order of entries, and the number of keys that
    have competed."""
    parts = []
    states = [t.flatten(1, -2) for t in (cache.k, cache.v, cache.scores[..., None])]
    for head, (first, end) in enumerate(cache._head_ranges()):
        entries = cache.positions.flatten(1)[:, first:end]
        free = torch.arange(end - first, device=cache.k.device) >= cache.counts[:, head, :1]
        free |= entries == -(2**31)
        entries, slots = entries.masked_fill(free, 2**31 - 1).sort(-1)
        free = free.gather(-1, slots)[..., None]
        parts.append(entries)
        for t in states:
            rows = slots[..., None].expand(-1, -1, t.shape[2])
            parts.append(t[:, first:end].gather(1, rows).masked_fill(free, 0).nan_to_num(99))
    return *parts, cache.counts[..., 1]


def assert_same_cache(actual, expected):
    assert torch.equal(actual.seen, expected.seen)
    assert all(map(torch.equal, held(actual), held(expected)))


def add_chunk(cache, q, k, v, scores, mask):
    cache.append(k, v, scores, key_mask=mask)
    out = cache.attend(q)
    cache.commit()
    return out


def tokens_with_queries(stream, begin, end):
    part = slice(begin, end)
    return [stream.q[:, part], *stream.tokens(begin, end), stream.mask[:, part]]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [1, CHUNK])
@pytest.mark.parametrize("window", [WINDOW, (WINDOW, 4)])
def test_captured_chunk_equals_eager(size, rule, window):
    """A graph captures append, pending_intervals, attention and commit once. One pending token is a chunk, too."""
    stream = long_stream(rule=rule, window=window)
    eager, captured = stream.slots(chunk=size), stream.slots(chunk=size)
    static = [t.clone() for t in tokens_with_queries(stream, 0, size)]
    graph, out = capture(lambda: add_chunk(captured, *static))  # adds the first chunk
    add_chunk(eager, *static)
    for begin in range(size, LENGTH, size):
        tokens = tokens_with_queries(stream, begin, begin + size)
        for place, new in zip(static, tokens, strict=True):
            place.copy_(new)
        graph.replay()
        assert torch.equal(out, add_chunk(eager, *tokens))
        stream.check(out, begin, begin + size)
    assert_same_cache(captured, eager)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("window", [WINDOW, (WINDOW, 4)])
def test_captured_step_equals_eager(rule, window):
    stream = long_stream(kind="nan", rule=rule, window=window)
    cache = stream.slots()
    q, k, v, scores, mask = static = [t.clone() for t in tokens_with_queries(stream, 0, 1)]
    graph, out = capture(lambda: cache.step(q, k, v, scores, key_mask=mask))
    for begin in range(1, LENGTH):
        for place, new in zip(static, tokens_with_queries(stream, begin, begin + 1), strict=True):
            place.copy_(new)
        graph.replay()
        stream.check(out, begin, begin + 1)
    assert cache.seen.tolist() == [LENGTH] * 2


@pytest.mark.parametrize("window", [WINDOW, (WINDOW, 0)])
def test_captured_late_scores_equal_cpu(window):
    rule = {"recent_window": 4, "sink_tokens": 1, "score_threshold": -0.5}
    expected, actual = texts = [
        long_stream(rule=rule, window=window, device=device) for device in ("cpu", DEVICE)
    ]
    caches = [text.slots() for text in texts]
    late = actual.scores[..., 0].clone()
    for text, cache in zip(texts, caches, strict=True):
        cache.fill(*text.tokens(0, 20))
        cache.rescore_last(text.scores[..., 0])
    graph, _ = capture(lambda: caches[1].rescore_last(late))
    for begin in range(20, LENGTH):
        for text, cache in zip(texts, caches, strict=True):
            q, k, v, scores, mask = tokens_with_queries(text, begin, begin + 1)
            cache.step(q, k, v, scores, key_mask=mask)
        late.copy_(actual.scores[..., begin - 20])
        graph.replay()
        caches[0].rescore_last(expected.scores[..., begin - 20])
    for got, wanted in zip(held(caches[1]), held(caches[0]), strict=True):
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("window", [WINDOW, (4, WINDOW)])
def test_captured_fill_equals_eager(rule, window):
    """A graph captures `fill` once, for prompts of different lengths."""
    streams = [long_stream(seed, rule=rule, window=window) for seed in range(4)]
    cache = streams[0].slots()
    lengths = torch.full((2,), LENGTH, dtype=torch.int32, device=DEVICE)
    k, v, scores = static = [t.clone() for t in streams[0].tokens(0, LENGTH)]
    graph, _ = capture(lambda: cache.fill(k, v, scores, lengths=lengths))
    for i, stream in enumerate(streams):
        for place, new in zip(static, stream.tokens(0, LENGTH), strict=True):
            place.copy_(new)
        lengths.copy_(torch.tensor([LENGTH - i, 7 * i + 1], dtype=torch.int32))
        graph.replay()
        expected = stream.slots()
        expected.fill(*stream.tokens(0, LENGTH), lengths=lengths)
        assert_same_cache(cache, expected)


@pytest.mark.parametrize("window", [WINDOW, (WINDOW, 4)])
def test_captured_copy_rows_equals_eager(window):
    """A graph captures once how a snapshot is restored and its rows change places."""
    stream = long_stream(batch=4, window=window)
    source = stream.slots(chunk=CHUNK)
    source.fill(*stream.tokens(0, 50))
    source.append(*stream.tokens(50, 55))  # pending tokens are copied, too
    cache = stream.slots(chunk=CHUNK)
    index = torch.tensor([3, 0, 0, 1], dtype=torch.int32, device=DEVICE)

    def move():
        cache.restore(source)
        cache.reorder(index)

    graph, _ = capture(move)
    for rows in ([0, 1, 2, 3], [3, 3, 2, 0]):
        index.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        assert cache.pending == 5
        q = stream.q[rows, 52:55]
        stream.assert_close(cache.attend(q), full_attention_of(stream, rows, 52, 55))
        actual, expected = cache.snapshot(), source.select(index)
        for copy in (actual, expected):
            copy.commit()
        assert_same_cache(actual, expected)


def full_attention_of(stream, rows, begin, end):
    """Attends to all tokens of rows without padding."""
    out = flash_dmattn_func(
        stream.q[rows, :end], stream.k[rows, :end], stream.v[rows, :end],
        attn_bias=stream.scores[rows, :, :end], is_causal=True, keep_window_size=stream.window,
    )  # fmt: skip
    return out[:, begin:]


# ---- Streams and devices ---------------------------------------------------------------------------


def test_caches_on_two_streams_do_not_interfere():
    streams = [torch.cuda.Stream() for _ in range(2)]
    texts = [long_stream(seed, head_dim=dim) for seed, dim in ((0, 64), (1, 128))]
    caches = [text.slots(chunk=CHUNK) for text in texts]
    results = [[], []]
    torch.cuda.synchronize()
    for begin in range(0, LENGTH, CHUNK):
        for stream, text, cache, result in zip(streams, texts, caches, results, strict=True):
            with torch.cuda.stream(stream):
                if begin % 3:
                    result.append(
                        add_chunk(cache, *tokens_with_queries(text, begin, begin + CHUNK))
                    )
                    continue
                for t in range(begin, begin + CHUNK):
                    q, k, v, scores, mask = tokens_with_queries(text, t, t + 1)
                    result.append(cache.step(q, k, v, scores, key_mask=mask))
    torch.cuda.synchronize()
    for text, result in zip(texts, results, strict=True):
        text.check(torch.cat(result, 1), 0, LENGTH)


@needs_two_gpus
def test_cache_of_another_device_equals_cpu():
    """The current device differs from the cache's."""
    assert torch.cuda.current_device() == 0
    for seed in range(10):
        pieces = pieces_of(seed)
        stream = drawn(seed, 5 + sum(pieces), "cuda:1")
        check_split(stream, 5, pieces)
        check_ragged(drawn(seed, 24, "cuda:1"), 6, steps=10)
        if stream.padding != "anywhere":
            check_with_kvcache(stream, pieces, "by head")
    assert torch.cuda.current_device() == 0


@needs_two_gpus
@pytest.mark.parametrize("queries", [1, 5, 64])
def test_few_queries_on_another_device_equal_cpu(queries):
    stream = long_stream(device="cuda:1", padding="none")
    out = flash_dmattn_func(
        stream.q[:, -queries:], stream.k, stream.v, attn_bias=stream.scores, is_causal=True,
        keep_window_size=WINDOW,
    )  # fmt: skip
    assert out.device == torch.device("cuda:1")
    stream.check(out, LENGTH - queries, LENGTH)


@needs_two_gpus
def test_graph_on_another_device_equals_eager():
    stream = long_stream(device="cuda:1")
    with torch.cuda.device(1):
        cache = stream.slots(chunk=CHUNK)
        static = [t.clone() for t in tokens_with_queries(stream, 0, CHUNK)]
        graph, out = capture(lambda: add_chunk(cache, *static))
        for begin in range(CHUNK, 5 * CHUNK, CHUNK):
            tokens = tokens_with_queries(stream, begin, begin + CHUNK)
            for place, new in zip(static, tokens, strict=True):
                place.copy_(new)
            graph.replay()
            stream.check(out, begin, begin + CHUNK)
