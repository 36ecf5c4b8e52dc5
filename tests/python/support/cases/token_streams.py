"""Streams of tokens for KV caches, and checks that hold however a stream is cut.

The checks take a stream on any device, and run on it.
"""

import random

import torch

from flash_dmattn import (
    KVSlots,
    flash_dmattn_func,
    flash_dmattn_with_kvcache,
    select_key_intervals,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KINDS = ("normal", "ties", "equal", "nan")
PADDINGS = ("none", "left", "anywhere")
# Options of attention scores; defaults: 1 / sqrt(D), no softcap. With scores_are_bias False scores only select keys.
NUMERICS = (
    {},
    {"scale": 0.7},
    {"softcap": 1.5},
    {"scores_are_bias": False},
    {"scale": 0.9, "softcap": 2.0, "scores_are_bias": False},
)
# The parts of a rule other than its window; None has none.
RULES = (
    None,
    {"recent_window": 5, "recent_competes": True},
    {"recent_window": 4},
    {"sink_tokens": 3},
    {"score_threshold": 0.0, "sink_tokens": 1, "recent_window": 7},
    {"score_threshold": -0.5, "sink_tokens": 2, "recent_window": 2, "recent_competes": True},
)


class Stream:
    """Tokens of a batch, and the reference backend's result of full attention with per-query selection, on the CPU.

    first: the first token that has a result; earlier ones have NaN.
    rule: the parts of the rule other than its window.
    """

    def __init__(self, length, window, *, batch=2, heads=2, group=2, head_dim=8, value_dim=None,
                 dtype=torch.float32, kind="normal", padding="none", seed=0, device="cpu", scale=None, softcap=None,
                 scores_are_bias=True, first=0, rule=None):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=draw).to(dtype)

        self.q = normal(batch, length, heads * group, head_dim)
        self.k = normal(batch, length, heads, head_dim)
        self.v = normal(batch, length, heads, value_dim or head_dim)
        self.scores = torch.randn(batch, heads, length, generator=draw)
        if kind == "ties":
            self.scores = self.scores.round()
        elif kind == "equal":
            self.scores.zero_()
        elif kind == "low":  # the second masks
            low = torch.tensor([-2e4, -1e30, -0.99e30])[
                torch.randint(3, self.scores.shape, generator=draw)
            ]
            self.scores = torch.where(
                torch.rand(self.scores.shape, generator=draw) < 0.4, low, self.scores
            )
        elif kind == "nan":
            self.scores[torch.rand(self.scores.shape, generator=draw) < 0.3] = torch.nan
        self.mask = torch.ones(batch, length, dtype=torch.bool)
        for row, pad in enumerate(torch.randint(0, length, (batch,), generator=draw)):
            if padding == "left":
                self.mask[row, :pad] = False
            elif padding == "anywhere":
                self.mask[row] = torch.rand(length, generator=draw) < 0.7
        self.window, self.dtype, self.length, self.device = window, dtype, length, device
        self.rule = {"keep_window_size": window} | (rule or {})
        self.padding = padding
        self.options = {"scale": scale, "softcap": softcap, "scores_are_bias": scores_are_bias}
        self.out = self.q.new_full((*self.q.shape[:3], self.v.shape[3]), torch.nan)
        self.lse = torch.full((batch, heads * group, length), torch.nan)
        choice = {"keep_window_size": window, "selection_scores": self.scores}
        if rule:  # here a key whose bias masks still counts as a key
            choice = {
                "key_intervals": select_key_intervals(
                    self.scores, **self.rule, key_mask=self.mask, query_length=length - first
                )
            }
        self.out[:, first:], self.lse[..., first:] = flash_dmattn_func(
            self.q[:, first:], self.k, self.v, self.mask, self.scores if scores_are_bias else None,
            is_causal=True, scale=scale, softcap=softcap, return_lse=True, backend="reference", **choice,
        )  # fmt: skip
        for name in ("q", "k", "v", "scores", "mask", "out", "lse"):
            setattr(self, name, getattr(self, name).to(device))
        # Tensor cores round weights and results to 16 bits, in proportion to them.
        self.atol = TOLERANCE[dtype]
        self.rtol = 0 if device == "cpu" else TOLERANCE[dtype]

    def tokens(self, begin, end):
        part = slice(begin, end)
        return self.k[:, part], self.v[:, part], self.scores[:, :, part]

    def slots(self, chunk=0, backend=""):
        batch, _, heads, head_dim = self.k.shape
        return KVSlots(
            batch, heads, head_dim=head_dim, value_dim=self.v.shape[3], chunk=chunk, dtype=self.dtype,
            device=self.device, backend=backend, **self.rule,
        )  # fmt: skip

    def check(self, out, begin, end, rows=slice(None)):
        self.assert_close(out[rows], self.out[rows, begin:end])

    def assert_close(self, out, expected):
        torch.testing.assert_close(out, expected, atol=self.atol, rtol=self.rtol)


def drawn(seed, length, device="cpu"):
    """Returns a stream with random tokens, options and rule: a third of the rules are only a window, the others show some key."""
    draw = random.Random(seed)
    least = int(device != "cpu")
    windows = draw.randint(least, 7), draw.randint(0, 7)
    window, rule = draw.choice((windows[0], windows)), None
    if draw.random() < 1 / 3:
        window = draw.randint(1, 12)
    else:
        rule = {
            "recent_window": draw.randint(0, 8),
            "recent_competes": draw.random() < 0.5,
            "sink_tokens": draw.randint(0, 4),
            "score_threshold": draw.choice((None, None, -0.5, 0.0, 1.0, float("inf"))),
        }
        if not (rule["recent_window"] or rule["sink_tokens"] or window not in (0, (0, 0))):
            rule["recent_window"] = 1
    return Stream(
        length, window, rule=rule, kind=draw.choice(KINDS), padding=draw.choice(PADDINGS), head_dim=16,
        value_dim=draw.choice((16, 8 if least else 3)), dtype=draw.choice(list(TOLERANCE)[least:]), seed=seed,
        device=device, **draw.choice(NUMERICS),
    )  # fmt: skip


def pieces_of(seed, most=7):
    draw = random.Random(seed)
    return [draw.randint(1, most) for _ in range(draw.randint(1, 8))]


def check_scores_that_mask(dtype, device="cpu"):
    """Checks that scores are float32 in caches of any dtype, so that -2e4 is an ordinary number and -1e30 masks."""
    q, k, v = (torch.randn(1, 1, 1, 8, dtype=dtype, device=device) for _ in range(3))
    for score, visible in ((-2e4, True), (-0.99e30, True), (-1e30, False)):
        cache = KVSlots(1, 1, 4, 8, dtype=dtype, device=device)
        out = cache.step(q, k, v, torch.full((1, 1, 1), score, device=device))
        assert torch.equal(out, v if visible else torch.zeros_like(v))


def check_split(stream, prefill, pieces, backend=""):
    """Runs a prompt of `prefill` tokens and then the pieces, with a step for one token and a chunk for several."""
    cache = stream.slots(chunk=max(pieces), backend=backend)
    if prefill:
        k, v, scores = stream.tokens(0, prefill)
        cache.fill(k, v, scores, key_mask=stream.mask[:, :prefill])
    begin = prefill
    for size in pieces:
        part = slice(begin, begin + size)
        k, v, scores = stream.tokens(begin, begin + size)
        if size == 1:
            out, lse = cache.step(
                stream.q[:, part], k, v, scores, key_mask=stream.mask[:, part], return_lse=True,
                **stream.options,
            )  # fmt: skip
        else:
            cache.append(k, v, scores, key_mask=stream.mask[:, part])
            out, lse = cache.attend(stream.q[:, part], return_lse=True, **stream.options)
            cache.commit()
        stream.check(out, begin, begin + size)
        torch.testing.assert_close(lse, stream.lse[:, :, part], atol=stream.atol, rtol=1e-5)
        begin += size
    assert cache.seen.tolist() == [begin] * 2


def check_speculation(stream, speculated, seed):
    """Checks that rejected tokens leave no trace. speculated: (pending tokens, accepted in row 0, accepted in row 1)."""
    cache = stream.slots(chunk=max(size for size, *_ in speculated))
    place = [0, 0]
    generator = torch.Generator().manual_seed(seed)
    for size, *accepted in speculated:
        accepted = [min(size, n) for n in accepted]
        rows = []
        for row, begin in enumerate(place):
            good = [t[row] for t in _tokens_with_queries(stream, begin, begin + size)]
            rows.append([_junk_after(t, accepted[row], generator) for t in good])
        q, k, v, scores, mask = (torch.stack(parts) for parts in zip(*rows, strict=True))
        cache.append(k, v, scores.transpose(1, 2).contiguous(), key_mask=mask)
        out = cache.attend(q, **stream.options)
        for row, (begin, count) in enumerate(zip(place, accepted, strict=True)):
            stream.assert_close(out[row, :count], stream.out[row, begin : begin + count])
        if accepted[0] == accepted[1]:
            cache.drop(size - accepted[0])
            cache.commit()
        else:
            cache.commit(torch.tensor(accepted, dtype=torch.int32, device=stream.device))
        place = [begin + count for begin, count in zip(place, accepted, strict=True)]
        assert cache.seen.tolist() == place


def _tokens_with_queries(stream, begin, end):
    part = slice(begin, end)
    k, v, scores = stream.tokens(begin, end)
    return stream.q[:, part], k, v, scores.transpose(1, 2), stream.mask[:, part]


def _junk_after(tokens, count, generator):
    """Replaces the tokens after the first `count` by others with high scores."""
    if tokens.dtype == torch.bool:
        return tokens
    junk = (torch.randn(tokens.shape, generator=generator).abs() + 9).to(tokens)
    junk[:count] = tokens[:count]
    return junk


def check_drops(stream, pieces, dropped):
    """Appends further tokens after each piece, with scores good enough for any slot, and drops them."""
    cache = stream.slots(chunk=max(pieces) + max(dropped))
    begin = 0
    for size, junk in zip(pieces, dropped, strict=True):
        part = slice(begin, begin + size)
        k, v, scores = stream.tokens(begin, begin + size)
        cache.append(k, v, scores, key_mask=stream.mask[:, part])
        junk_states = (t.new_full((t.shape[0], junk, *t.shape[2:]), 3) for t in (k, v))
        cache.append(*junk_states, scores.new_full((*scores.shape[:2], junk), 99))
        cache.drop(junk)
        stream.check(cache.attend(stream.q[:, part], **stream.options), begin, begin + size)
        cache.commit()
        begin += size
    assert cache.seen.tolist() == [begin] * 2


def check_ragged(stream, begin, steps):
    """Checks that each row of a right-padded batch with `begin` and `begin` / 2 tokens, and then steps, equals the row alone."""
    cache = stream.slots()
    lengths = torch.tensor([begin, max(1, begin // 2)], dtype=torch.int32, device=stream.device)
    k, v, scores = stream.tokens(0, begin)
    cache.fill(k, v, scores, lengths=lengths, key_mask=stream.mask[:, :begin])
    for _ in range(steps):
        rows, index = torch.arange(2, device=stream.device), lengths.long()
        out = cache.step(
            stream.q[rows, index][:, None],
            stream.k[rows, index][:, None],
            stream.v[rows, index][:, None],
            stream.scores[rows, :, index][:, :, None],
            key_mask=stream.mask[rows, index][:, None],
            **stream.options,
        )
        stream.assert_close(out[:, 0], stream.out[rows, index])
        lengths += 1
    assert torch.equal(cache.seen, lengths)


def check_with_kvcache(stream, pieces, layout):
    """Checks flash_dmattn_with_kvcache on a cache laid out "by token" or "by head". Padding is on the left."""
    size, device = stream.length + 10, stream.device
    bounds = {} if device == "cpu" else {"atol": stream.atol, "rtol": stream.rtol}
    batch, _, heads, _ = stream.k.shape

    def cache_of(states):
        if layout == "by token":
            return states.new_zeros(batch, size, heads, states.shape[3])
        return states.new_zeros(batch, heads, size, states.shape[3]).transpose(1, 2)

    scores_of_none = torch.full((batch, heads, size), torch.nan, device=device)
    caches = [cache_of(stream.k), cache_of(stream.v), scores_of_none]
    seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
    left = {} if stream.padding == "none" else {"cache_leftpad": (~stream.mask).sum(1)}
    begin = 0
    for count in pieces:
        part = slice(begin, begin + count)
        k, v, scores = stream.tokens(begin, begin + count)
        out, lse = flash_dmattn_with_kvcache(
            stream.q[:, part], *caches, k, v, scores=scores, cache_seqlens=seqlens, return_lse=True,
            **left, **stream.rule, **stream.options,
        )  # fmt: skip
        stream.check(out, begin, begin + count)
        torch.testing.assert_close(lse, stream.lse[:, :, part], **bounds)
        assert (seqlens == begin).all()
        begin += count
        seqlens.fill_(begin)
    # Without new tokens, and all keys seen.
    out = flash_dmattn_with_kvcache(
        stream.q[:, :begin], *caches, cache_seqlens=seqlens, **left, **stream.options
    )
    numerics = dict(stream.options)
    is_bias = numerics.pop("scores_are_bias")
    full = flash_dmattn_func(
        stream.q[:, :begin], stream.k[:, :begin], stream.v[:, :begin],
        stream.mask[:, :begin] if left else None,
        stream.scores[..., :begin] if is_bias else None, is_causal=True, **numerics,
    )  # fmt: skip
    torch.testing.assert_close(out, full, **bounds)


def check_not_finite(stream, name, value, mode):
    """Checks that a non-finite number in q, k or v propagates or saturates as in flash_dmattn_func, in steps, chunks and a cache
    of all keys."""
    length, chunk, spoiled = stream.length, 3, stream.length // 2 + 1
    batch, _, heads, head_dim = stream.k.shape
    getattr(stream, name)[0, spoiled, 0, 3] = value
    expected = flash_dmattn_func(
        *(t.cpu() for t in (stream.q, stream.k, stream.v)), attn_bias=stream.scores.cpu(),
        is_causal=True, keep_window_size=stream.window, nonfinite=mode, backend="reference",
    ).to(stream.device)  # fmt: skip
    steps, chunks = stream.slots(), stream.slots(chunk=chunk)
    keys, values = (stream.k.new_zeros(batch, length, heads, head_dim) for _ in range(2))
    scores_of_all = torch.zeros(batch, heads, length, device=stream.device)
    outs = {"steps": [], "chunks": [], "all keys": []}
    for t in range(length):
        q, (k, v, scores) = stream.q[:, t : t + 1], stream.tokens(t, t + 1)
        outs["steps"].append(steps.step(q, k, v, scores, nonfinite=mode))
        lengths = torch.full((batch,), t, dtype=torch.int32, device=stream.device)
        outs["all keys"].append(
            flash_dmattn_with_kvcache(
                q, keys, values, scores_of_all, k, v, scores=scores, nonfinite=mode,
                cache_seqlens=lengths, keep_window_size=stream.window,
            )
        )  # fmt: skip
    for t in range(0, length, chunk):
        chunks.append(*stream.tokens(t, t + chunk))
        outs["chunks"].append(chunks.attend(stream.q[:, t : t + chunk], nonfinite=mode))
        chunks.commit()
    for way, parts in outs.items():
        torch.testing.assert_close(
            torch.cat(parts, 1), expected, atol=stream.atol, rtol=stream.rtol, equal_nan=True,
            msg=lambda text, way=way: f"{way}, {name} = {value}, {mode!r}: {text}",
        )  # fmt: skip
