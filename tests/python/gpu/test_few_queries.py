"""Tests few queries over many keys on the GPU, which split the keys, in graphs and on several streams."""

import pytest
import torch

from dense_in_double import dense_in_double
from flash_dmattn import flash_dmattn_func
from gpu import capture
from rules_by_definition import causal_elements

SHAPES = [  # (batch, queries, keys, heads_q, heads_kv, head_dim)
    (1, 1, 131072, 4, 2, 128),  # each kv head has half of the GPU
    (1, 1, 1, 4, 2, 64),
    (2, 3, 5000, 6, 2, 64),
    (40, 1, 300, 16, 8, 128),  # more kv heads than multiprocessors
    (1, 64, 3000, 8, 1, 128),  # several tiles of rows
    (1, 17, 2049, 2, 2, 256),
]


def draw(batch, queries, keys, heads_q, heads_kv, head_dim):
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads_q, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, keys, heads_kv, head_dim, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(batch, heads_kv, keys, device="cuda")
    return q, k, v, bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_equal_float64(shape):
    q, k, v, bias = draw(*shape)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    seen = causal_elements(q.shape[1], k.shape[1]).cuda()
    expected, _ = dense_in_double(q, k, v, bias, seen)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=4e-3)


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
