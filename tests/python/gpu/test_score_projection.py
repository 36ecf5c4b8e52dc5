"""Scores on the GPU have the same bits in any batch, cut and compiled code. They and their gradients equal those of the CPU."""

import pytest
import torch

from flash_dmattn import make_scores, score_projection
from flash_dmattn._core.score_forms import FORMS, SCALED_FORMS

B, S, F, H = 2, 3001, 330, 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scores_have_one_result_in_any_cut_and_equal_the_cpu(form, dtype):
    hidden = torch.randn(B, S, F, dtype=dtype)
    leaves = [hidden, torch.randn(H, F) / F**0.5, torch.randn(H)]
    if form in SCALED_FORMS:
        leaves.append(torch.rand(H) - 0.5)

    def project(hidden, weight, bias, A=None):
        return score_projection(hidden, weight, bias, form=form, A=A)

    ours = [leaf.cuda().requires_grad_() for leaf in leaves]
    scores = project(*ours)
    with torch.no_grad():
        for parts in ([1] * 5 + [S - 5], [S - 1, 1], [17, 1000, S - 1017]):
            cut = [project(part, *ours[1:]) for part in ours[0].split(parts, 1)]
            assert torch.equal(torch.cat(cut, 2), scores)
        row = project(ours[0][1:], *ours[1:])
        assert torch.equal(row, scores[1:])
    expected = project(*(leaf.requires_grad_() for leaf in leaves))
    if form == "projection":
        assert torch.equal(scores.cpu(), expected) or dtype == torch.float64
    torch.testing.assert_close(scores.cpu(), expected)
    dscores = torch.randn_like(expected)
    gradients = torch.autograd.grad(scores, ours, dscores.cuda())
    for actual, wanted in zip(
        gradients, torch.autograd.grad(expected, leaves, dscores), strict=True
    ):
        largest = wanted.abs().max().item()
        unit = torch.finfo(wanted.dtype).eps if wanted.dtype == dtype else 1e-5
        bound = max(4 * unit, 1e-5) * largest
        torch.testing.assert_close(actual.cpu(), wanted, rtol=2 * unit, atol=bound)


@pytest.mark.parametrize("score", ["gate", "linear", "doge"])
@torch.no_grad()
def test_compiled_scores_have_the_bits_of_eager_ones(score):
    torch._dynamo.reset()
    module, hidden = make_scores(F, H, score, device="cuda"), torch.randn(B, S, F, device="cuda")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert torch.equal(torch.compile(module, fullgraph=True)(hidden), module(hidden))
