"""Inputs [B, S, H, D] of transformers' attention, and the oracle for them."""

import torch

from dense_in_double import dense_in_double

B, S, HQ, HKV, D, KEEP = 2, 37, 4, 2, 16, 9
LOWEST = torch.finfo(torch.float32).min


def make_states(query_length=S, batch=B):
    query = torch.randn(batch, query_length, HQ, D, requires_grad=True)
    key, value = (torch.randn(batch, S, HKV, D, requires_grad=True) for _ in range(2))
    return query, key, value


def causal(query_length=S):
    return torch.ones(query_length, S, dtype=torch.bool).tril(S - query_length)


def padded_causal(query_length=S):
    """Returns a causal mask [B, 1, Sq, S] with left padding in the first row and right padding in the second."""
    present = torch.ones(B, S, dtype=torch.bool)
    present[0, :8], present[1, -6:] = False, False
    return present[:, None, None] & causal(query_length)


def dense_attention(query, key, value, visible, bias):
    """Attends by the oracle. visible, bias: [B or 1, H, Sq, Sk], or a bias [B, H, Sk]. Rows without a visible key are 0."""
    return dense_in_double(query, key, value, bias, visible)[0].to(query.dtype)


def assert_same(inputs, actual, expected):
    """Compares outputs, and the gradients of all inputs that require one."""
    direction = torch.randn_like(expected)
    inputs = [t for t in inputs if t is not None and t.requires_grad]
    gradients = [
        torch.autograd.grad(out, inputs, direction, retain_graph=True) for out in (actual, expected)
    ]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)
