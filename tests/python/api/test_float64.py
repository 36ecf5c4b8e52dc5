"""float64 calls are accurate to float64: no value passes through a narrower type."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, select_key_intervals
from flash_dmattn.check.oracle import Problem, attention
from rules_by_definition import causal_elements, select

B, S, HQ, HKV = 2, 30, 4, 2
OFFSETS = torch.tensor([0, 11, 12, S], dtype=torch.int32)


def tensors(head_dim=16, batch=B):
    q, dout = (torch.randn(batch, S, HQ, head_dim, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, S, HKV, head_dim, dtype=torch.float64) for _ in range(2))
    return q, k, v, dout


def assert_equals_oracle(problem, **options):
    inputs = [problem.q, problem.k, problem.v]
    inputs += [] if problem.bias is None else [problem.bias]
    leaves = [t.clone().requires_grad_() for t in inputs]
    bias = leaves[3] if len(leaves) > 3 else None
    out, lse = flash_dmattn_func(
        *leaves[:3], problem.mask, bias, is_causal=problem.causal, return_lse=True, **options
    )
    gradients = torch.autograd.grad(out, leaves, problem.dout)
    expected = attention(problem)
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    for name, actual in zip(names, (out, lse, *gradients), strict=False):
        wanted = getattr(expected, name)
        size = max(wanted.abs().max().item(), 0.1)
        torch.testing.assert_close(
            actual, wanted, rtol=0, atol=2e-14 * size, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "head_dim, scale, softcap",
    [(d, None, None) for d in (16, 32, 80, 96, 128)]
    + [(16, scale, softcap) for scale in (None, 0.1, -1 / 3) for softcap in (None, 0.3, 30.0)],
)
def test_scale_and_softcap_are_not_rounded(head_dim, scale, softcap):
    q, k, v, dout = tensors(head_dim)
    problem = Problem(q, k, v, dout, causal=True, scale=scale, softcap=softcap or 0.0)
    assert_equals_oracle(problem, scale=scale, softcap=softcap)


@pytest.mark.parametrize("shape", [(B, HQ, 1, S), (1, HKV, 1, S), (B, 1, S, S), (B, HQ, S, S)])
def test_float64_bias_gradient_matches_oracle(shape):
    q, k, v, dout = tensors()
    bias = torch.randn(shape, dtype=torch.float64)
    assert_equals_oracle(Problem(q, k, v, dout, bias=bias, causal=True))


@pytest.mark.parametrize("size", [1e-100, 1e100])
def test_values_beyond_float32_stay_exact(size):
    q, k, v, dout = tensors()
    leaves = [t.clone().requires_grad_() for t in (q, k, v * size)]
    out = flash_dmattn_func(*leaves, is_causal=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    expected = attention(Problem(q, k, v, dout, causal=True))
    for actual, wanted in zip(
        (out / size, gradients[0] / size, gradients[1] / size, gradients[2]),
        (expected.out, expected.dq, expected.dk, expected.dv),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-13)


def test_scores_beyond_float32_stay_exact():
    q, k, v, _ = tensors()
    out, lse = flash_dmattn_func(q * 1e50, k, v, is_causal=True, return_lse=True)
    expected = attention(Problem(q * 1e50, k, v, causal=True))
    torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-14, atol=0)


# ---- Choices of keys by scores that are one number in float32 ---------------------------------------


def nearly_equal_scores(batch=B):
    order = torch.rand(batch, HKV, S).argsort(-1)
    return 1 + order.double() * 1e-13


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("is_bias", [True, False])
def test_selection_matches_oracle(selection, is_bias):
    q, k, v, dout = tensors()
    scores, causal = nearly_equal_scores(), causal_elements(S, S).expand(B, HKV, S, S)
    allowed = causal if selection == "per_query" else torch.ones_like(causal)
    bias = scores[:, :, None] if is_bias else None
    problem = Problem(q, k, v, dout, bias=bias, shown=select(scores, 7, allowed), causal=True)
    assert_equals_oracle(
        problem,
        keep_window_size=7,
        selection=selection,
        selection_scores=None if is_bias else scores,
    )


def documents():
    """Returns a causal mask [Sq, Sk] of the elements within one document."""
    document = torch.searchsorted(OFFSETS[1:].long(), torch.arange(S), right=True)
    return causal_elements(S, S) & (document[:, None] == document)


@pytest.mark.parametrize("kind", ["documents", "window", "random"])
def test_choice_under_a_dense_mask_matches_oracle(kind):
    q, k, v, dout = tensors()
    mask = {
        "documents": documents(),
        "window": causal_elements(S, S).triu(-12),
        "random": torch.rand(S, S) < 0.7,
    }[kind].expand(B, 1, S, S)
    scores = nearly_equal_scores()
    allowed = (mask & causal_elements(S, S)).expand(B, HKV, S, S)
    problem = Problem(
        q, k, v, dout, mask, scores[:, :, None], select(scores, 4, allowed), causal=True
    )
    assert_equals_oracle(problem, keep_window_size=4)


def test_selection_within_documents_matches_oracle():
    q, k, v, _ = tensors(batch=1)
    scores = nearly_equal_scores(1)
    shown = select(scores, 4, documents().expand(1, HKV, S, S))
    expected = attention(Problem(q, k, v, bias=scores[:, :, None], shown=shown)).out
    out = flash_dmattn_varlen_func(
        q[0], k[0], v[0], OFFSETS, OFFSETS, S, S, attn_bias=scores[0].mT, is_causal=True,
        keep_window_size=4,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-14)


def test_selected_intervals_match_oracle():
    scores = nearly_equal_scores()
    chosen = select_key_intervals(scores, 5).to_mask()
    assert torch.equal(chosen, select(scores, 5, causal_elements(S, S).expand(B, HKV, S, S)))
