"""Compares the rules of published methods in docs/howto/learned-scores.md with their definition over all elements."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, forgetting_attention, select_key_intervals

B, N, HQ, HKV, D = 2, 60, 4, 2, 16
W, BUDGET, SINKS = 7, 9, 4


def distance():
    return torch.arange(N)[:, None] - torch.arange(N)


def best(scores, competes, count):
    """Returns the `count` competing keys with the highest scores, [B, H, N, N]. No two scores are equal."""
    ranked = scores[:, :, None].masked_fill(~competes, -torch.inf).argsort(-1, descending=True)
    return torch.zeros_like(competes).scatter(-1, ranked[..., :count], True) & competes


def causal(scores):
    return (distance() >= 0).expand(*scores.shape[:2], N, N)


METHODS = {
    "StreamingLLM": (
        {"keep_window_size": 0, "sink_tokens": SINKS, "recent_window": W},
        lambda s: (distance() < W) | (torch.arange(N) < SINKS),
    ),
    "DMS": (
        {"score_threshold": 0.0, "recent_window": W + 1},
        lambda s: (distance() <= W) | ~(-s[:, :, None] > 0),  # -s: the logit of eviction
    ),
    "SP-KV, WG-KV, KVzap": (
        {"score_threshold": 0.5, "recent_window": W},
        lambda s: (distance() < W) | (s[:, :, None] >= 0.5),
    ),
    "KVpop": (
        {"keep_window_size": BUDGET, "recent_window": W},
        lambda s: (distance() < W) | best(s, causal(s) & (distance() >= W), BUDGET),
    ),
    "KVP": (
        {"keep_window_size": [BUDGET, 3]},
        lambda s: torch.cat([best(s[:, [h]], causal(s[:, [h]]), w) for h, w in ((0, BUDGET), (1, 3))], 1),
    ),
    "Locret": (
        {"keep_window_size": BUDGET, "recent_window": W, "recent_competes": True},
        lambda s: (distance() < W) | best(s, causal(s), BUDGET),
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_call_matches_method(method):
    rule, sees = METHODS[method]
    scores = torch.randn(B, HKV, N)
    visible = sees(scores) & causal(scores)
    assert torch.equal(select_key_intervals(scores, **rule).to_mask(), visible)
    q = torch.randn(B, N, HQ, D)
    k, v = torch.randn(2, B, N, HKV, D)
    out = flash_dmattn_func(q, k, v, selection_scores=scores, is_causal=True, **rule)
    expected = flash_dmattn_func(q, k, v, attn_mask=visible)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_press_keeps_the_same_keys_for_later_queries():
    """Knorm of kvpress keeps the keys with the smallest norms."""
    keys = torch.randn(B, HKV, N, D)
    scores = -keys.norm(dim=-1)
    kept = select_key_intervals(scores, BUDGET).to_mask()[:, :, -1]
    assert torch.equal(
        kept.nonzero()[:, 2].view(B, HKV, BUDGET), scores.topk(BUDGET).indices.sort(-1).values
    )


def test_constant_gate_equals_alibi():
    q, k, v = torch.randn(3, B, N, HQ, D)
    slopes = 2.0 ** -torch.arange(2, 2 * HQ + 1, 2.0)
    bias = -slopes[:, None, None] * distance()
    expected = flash_dmattn_func(q, k, v, attn_bias=bias[None], is_causal=True)
    out = forgetting_attention(q, k, v, -slopes.expand(B, N, HQ))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_soft_phase_adds_gates_to_old_keys():
    """In the training of DMS, WG-KV and SP-KV, every key is visible and recent keys have no gate."""
    q, k, v = (torch.randn(B, N, heads, D) for heads in (HQ, HKV, HKV))
    gates = torch.nn.functional.logsigmoid(torch.randn(B, HKV, N))
    actual = flash_dmattn_func(q, k, v, attn_bias=gates, bias_delay=W, is_causal=True)
    bias = gates[:, :, None] * (distance() >= W)
    expected = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
    assert torch.allclose(actual, expected, atol=2e-6)
