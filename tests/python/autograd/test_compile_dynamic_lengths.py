"""One dynamic graph serves all lengths: torch.compile(fullgraph=True, dynamic=True)."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    intersect,
    select_key_intervals,
    sliding_window,
)

LENGTHS = range(11, 35, 2)


def choice(q, k, v, bias):
    return flash_dmattn_func(q, k, v, attn_bias=bias, keep_window_size=4, is_causal=True)


def global_choice(q, k, v, bias):
    options = {"keep_window_size": 4, "selection": "global"}
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


def intersection(q, k, v, bias):
    length = q.shape[1]
    chosen = select_key_intervals(bias, 4, query_length=length)
    window = sliding_window(length, 7, device=q.device)
    return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=intersect(chosen, window))


def packed(q, k, v, bias):
    offsets = torch.tensor([0, 5, 0]) + torch.tensor([0, 0, 1]) * q.shape[1]
    options = {"attn_bias": bias[0].t(), "keep_window_size": 3, "is_causal": True}
    return flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, **options)


@pytest.mark.parametrize("function", [choice, global_choice, intersection, packed])
def test_lengths(function):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in LENGTHS:
        q, k, v = (torch.randn(1, length, heads, 8) for heads in (4, 2, 2))
        bias = torch.randn(1, 2, length)
        torch.testing.assert_close(compiled(q, k, v, bias), function(q, k, v, bias))
    assert counter.frame_count == 1


def test_scales():
    compiled = torch.compile(
        lambda q, scale: flash_dmattn_func(q, q, q, scale=scale),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    q = torch.randn(1, 12, 2, 8)
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(q, scale), flash_dmattn_func(q, q, q, scale=scale))
