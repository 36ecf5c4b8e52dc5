"""Few queries over many keys on the GPU: splits, graphs, streams."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from gpu import capture

SHAPES = [  # (batch, queries, keys, heads_q, heads_kv, head_dim)
    (1, 1, 131072, 4, 2, 128),  # one kv head on half of the GPU
    (1, 1, 1, 4, 2, 64),
    (2, 3, 5000, 6, 2, 64),
    (40, 1, 300, 16, 8, 128),  # more kv heads than places
    (1, 64, 3000, 8, 1, 128),  # several tiles of rows
    (1, 17, 2049, 2, 2, 256),
]


def draw(batch, queries, keys, heads_q, heads_kv, head_dim):
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads_q, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, keys, heads_kv, head_dim, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(batch, heads_kv, keys, device="cuda")
    return q, k, v, bias


def expected(q, k, v, bias):
    """In float64, causal."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias.double().repeat_interleave(group, 1)[:, :, None]
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, device=q.device, dtype=torch.bool).triu(keys - queries + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_equal_float64(shape):
    q, k, v, bias = draw(*shape)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    torch.testing.assert_close(out.double(), expected(q, k, v, bias), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 200], ids=["all", "per_query"])
def test_thousand_replays_give_same_bits(shape, window):
    static = draw(*shape)
    options = {} if window is None else {"keep_window_size": window}

    def step():
        q, k, v, bias = static
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)

    graph, captured = capture(step)
    eager = step()
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        captured.fill_(torch.nan)
        graph.replay()
        different |= (captured != eager).any()
    assert not different


def test_two_streams_give_same_bits():
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [draw(1, 1, 20000, 4, 2, 128), draw(1, 5, 9000, 8, 2, 64)]
    alone = [flash_dmattn_func(q, k, v, attn_bias=b) for q, k, v, b in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for stream, (q, k, v, bias), result in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(flash_dmattn_func(q, k, v, attn_bias=bias))
    torch.cuda.synchronize()
    for out, result in zip(alone, results, strict=True):
        assert all(torch.equal(out, other) for other in result)


def test_heads_that_share_keys_equal_heads_of_their_own():
    q, k, v, bias = draw(2, 5, 1500, 8, 2, 128)
    shared = flash_dmattn_func(q, k, v, attn_bias=bias)
    alone = [
        flash_dmattn_func(q[:, :, h : h + 1], *(t[:, :, g : g + 1] for t in (k, v)), attn_bias=bias[:, g : g + 1])
        for h, g in ((h, h // 4) for h in range(8))
    ]  # fmt: skip
    torch.testing.assert_close(shared, torch.cat(alone, 2), rtol=1e-2, atol=2e-3)
