"""Scores of keys match their formulas, have the right dtype in every precision, and stay finite at the ends of the range."""

import pytest
import torch
import torch.nn.functional as F

from flash_dmattn import DynamicMaskAttention, make_scores
from flash_dmattn.scores import doge_scores_of

B, S, C, H = 2, 7, 12, 3
NAMES = ("gate", "linear", "doge")


def formula(module, hidden):
    z = F.linear(hidden, module.proj.weight.double(), module.proj.bias.double()).mT
    if module.A is None:
        return z.sigmoid().log()
    product = module.A.double()[:, None] * F.softplus(z, threshold=60)
    return product.exp() if "Doge" in type(module).__name__ else product


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scores_match_formula_in_float32(name, dtype):
    module, hidden = make_scores(C, H, name, dtype=dtype), torch.randn(B, S, C, dtype=dtype)
    if name != "gate":
        torch.nn.init.normal_(module.A)
    scores, expected = module(hidden), formula(module, hidden.double())
    assert scores.shape == (B, H, S)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scores.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_no_bit_of_the_scores(name):
    module, hidden = make_scores(C, H, name), torch.randn(B, S, C)
    expected = module(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(hidden), expected)


def test_fresh_gate_scores_are_near_0():
    layer = DynamicMaskAttention(64, 4, 2, keep_window_size=8)
    gates = layer.scores(torch.randn(B, S, 64)).detach()
    assert gates.max() <= 0 and gates.mean().item() == pytest.approx(-0.05, abs=0.03)
    assert (layer.scores.proj.bias == 3).all()


def test_score_function_gets_float32_input_without_autocast():
    seen = []
    mlp = torch.nn.Sequential(torch.nn.Linear(C, 5), torch.nn.GELU(), torch.nn.Linear(5, H))

    def score(hidden):
        seen.append((hidden.dtype, torch.is_autocast_enabled("cpu")))
        return mlp(hidden)

    hidden = torch.randn(B, S, C, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        scores = make_scores(C, H, score)(hidden)
    assert seen == [(torch.float32, False)]
    assert torch.equal(scores, mlp(hidden.float()).mT)


def test_scoring_module_is_part_of_the_layer_and_learns():
    mlp = torch.nn.Sequential(torch.nn.Linear(C, H), torch.nn.LogSigmoid())
    layer = DynamicMaskAttention(C, H, keep_window_size=3, score=mlp)
    layer(torch.randn(B, S, C)).square().sum().backward()
    assert "scores.function.0.weight" in layer.state_dict()
    assert mlp[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gradient", [0.0, 1.0, -3e38])
def test_finite_numbers_give_finite_doge_scores_and_gradients(dtype, gradient):
    info = torch.finfo(dtype)
    sizes = torch.tensor([0.0, info.tiny, 1e-3, 1.0, 20.0, 88.0, 1e3, info.max], dtype=dtype)
    A = torch.cat([sizes, -sizes]).requires_grad_()
    lines = torch.cat([sizes, -sizes, torch.linspace(-100, 100, 401, dtype=dtype)])
    # A projection in 16 bits gives inf beyond its range.
    step = torch.cat([lines, torch.tensor([torch.inf, -torch.inf], dtype=dtype)])
    step = step[None, :, None].repeat(1, 1, len(A)).requires_grad_()
    scores = doge_scores_of(A, step)
    assert scores.isfinite().all() and scores.min() >= 0
    scores.backward(torch.full_like(scores, gradient))
    assert A.grad.isfinite().all() and step.grad.isfinite().all()


def test_slope_of_doge_score_matches_formula_beyond_the_limit_of_a_factor():
    """A of 3e36 and a softplus of 2.4e-36 make an exponent of 7.
    The gradient of softplus exceeds 2^64, but that of step does not."""
    A = torch.tensor([3e36], requires_grad=True)
    step = torch.full((1, 1, 1), -82.0, requires_grad=True)
    doge_scores_of(A, step).backward(torch.full((1, 1, 1), 1e-20))
    exact = [t.detach().double().requires_grad_() for t in (A, step)]
    (exact[0] * F.softplus(exact[1])).exp().backward(torch.full((1, 1, 1), 1e-20).double())
    torch.testing.assert_close(step.grad.double(), exact[1].grad, atol=0, rtol=1e-4)


def test_second_derivatives_of_doge_scores_pass_gradgradcheck():
    A = torch.randn(H, dtype=torch.float64, requires_grad=True)
    step = torch.randn(B, S, H, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(doge_scores_of, (A, step))
    assert torch.autograd.gradgradcheck(doge_scores_of, (A, step))


def test_layer_runs_on_meta_and_compiles_to_one_graph():
    assert DynamicMaskAttention(C, 4, 2, 3, device="meta")(
        torch.empty(B, S, C, device="meta")
    ).is_meta
    torch._dynamo.reset()
    mlp = torch.nn.Sequential(torch.nn.Linear(C, 2), torch.nn.LogSigmoid())
    for score in ("doge", mlp):  # the other scores use only torch's operators
        layer, hidden = DynamicMaskAttention(C, 4, 2, 3, score=score), torch.randn(B, S, C)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        results = []
        for call in (layer, compiled):
            out = call(hidden)
            results.append([out, *torch.autograd.grad(out.square().sum(), layer.parameters())])
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", ["gate", "linear", "doge"])
def test_scores_initialised_on_meta_begin_like_others(score):
    scorer = make_scores(C, 2, score)
    meta_scorer = make_scores(C, 2, score, device="meta").to_empty(device="cpu")
    for module in meta_scorer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.equal(meta_scorer.proj.bias, scorer.proj.bias)
    if score != "gate":
        assert torch.equal(meta_scorer.A, scorer.A)
