"""A score has the same bits in any batch, cut and layout. Its derivatives are those of its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from flash_dmattn import make_scores, score_projection
from flash_dmattn._core import projection_in_torch as fallback
from flash_dmattn._core.score_forms import SCALED_FORMS


def projection_in_torch(hidden, weight, bias, A=None, form="projection"):
    return fallback.score_projection(hidden, weight, bias, A, form)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
B, S, H = 2, 21, 3


def operands(dtype=torch.float32, features=200, weight_dtype=None):
    weight_dtype = weight_dtype or dtype
    return (
        torch.randn(B, S, features, dtype=dtype),
        torch.randn(H, features, dtype=weight_dtype),
        torch.randn(H, dtype=weight_dtype),
    )


def linear(hidden, weight, bias):
    return F.linear(*(t.to(torch.float64) for t in (hidden, weight, bias))).mT


DEFINITIONS = {
    "projection": lambda z, A: z,
    "gelu": lambda z, A: F.gelu(z),
    "gate": lambda z, A: F.logsigmoid(z),
    "linear": lambda z, A: A[:, None] * F.softplus(z, threshold=100),
    "doge": lambda z, A: (A[:, None] * F.softplus(z, threshold=100)).exp(),
}
FORMS = list(DEFINITIONS)


def factor_of(form, dtype=torch.float32):
    return {"A": torch.tensor([-0.3, 0.2, 1.0], dtype=dtype)} if form in SCALED_FORMS else {}


@pytest.mark.parametrize("features", [1, 63, 64, 200, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_row_has_the_same_bits_in_any_cut_and_layout(dtype, features, weight_dtype):
    hidden, weight, bias = operands(dtype, features, weight_dtype)
    expected = score_projection(hidden, weight, bias)
    assert expected.dtype == torch.promote_types(dtype, torch.float32)
    unit = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        expected.double(), linear(hidden, weight, bias), atol=unit * features**0.5, rtol=unit
    )
    steps = [score_projection(token, weight, bias) for token in hidden.split(1, 1)]
    assert torch.equal(torch.cat(steps, 2), expected)
    rows = score_projection(hidden.flatten(0, 1)[None], weight, bias)
    assert torch.equal(rows.unflatten(2, (B, S))[0].transpose(0, 1), expected)
    strided = torch.empty(features, S + 2, B, dtype=dtype).permute(2, 1, 0)
    strided[:, 2:] = hidden
    assert torch.equal(score_projection(strided[:, 2:], weight.mT.contiguous().mT, bias), expected)
    if dtype != torch.float64:
        assert torch.equal(projection_in_torch(hidden, weight.float(), bias.float()), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("project", [score_projection, projection_in_torch])
def test_scores_and_gradients_equal_the_definition(form, dtype, project):
    leaves = {
        **dict(zip(("hidden", "weight", "bias"), operands(dtype, 20), strict=True)),
        **factor_of(form, dtype),
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    scores = project(**leaves, form=form)
    assert torch.equal(
        project(
            **{k: t[..., -1:, :] if k == "hidden" else t for k, t in leaves.items()}, form=form
        ),
        scores[..., -1:],
    )
    dscores = torch.randn_like(scores)
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected = DEFINITIONS[form](linear(*list(exact.values())[:3]), exact.get("A"))
    unit = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(scores.double(), expected, atol=unit, rtol=unit)
    expected.backward(dscores.double())
    gradients = torch.autograd.grad(scores, list(leaves.values()), dscores)
    for actual, leaf in zip(gradients, exact.values(), strict=True):
        assert actual.dtype == dtype
        unit, largest = max(torch.finfo(dtype).eps, 1e-13), torch.finfo(dtype).max
        scale = leaf.grad.abs().max().item()
        torch.testing.assert_close(
            actual.double().clamp(-largest, largest),
            leaf.grad.clamp(-largest, largest),
            rtol=8 * unit,
            atol=8 * unit * scale,
        )


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_pass_gradgradcheck(form):
    leaves = [
        t.requires_grad_()
        for t in (*operands(torch.float64, 5), *factor_of(form, torch.float64).values())
    ]

    def call(hidden, weight, bias, A=None):
        return score_projection(hidden, weight, bias, form=form, A=A)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_transforms_of_torch_func_give_the_gradient(form):
    hidden, weight, bias = operands(torch.float64, 5)
    options = {"form": form, **factor_of(form, torch.float64)}
    gradient = torch.func.grad(lambda w: score_projection(hidden, w, bias, **options).sum())(weight)
    scores = score_projection(hidden, weight.requires_grad_(), bias, **options)
    torch.testing.assert_close(gradient, *torch.autograd.grad(scores.sum(), weight))


@pytest.mark.parametrize("shape", [(0, S, 8), (B, 0, 8), (B, S, 0)])
def test_empty_dimension_gives_the_bias_or_nothing(shape):
    hidden, bias = torch.randn(shape, requires_grad=True), torch.randn(H)
    weight = torch.randn(H, shape[2], requires_grad=True)
    for project in (score_projection, projection_in_torch):
        scores = project(hidden, weight, bias)
        assert torch.equal(scores, bias[:, None].expand(shape[0], H, shape[1]))
        scores.sum().backward()
    assert hidden.grad.shape == shape and (weight.grad == 0).all()


@pytest.mark.parametrize("score", ["gate", "linear", "doge"])
def test_compiled_autocast_and_checkpointed_scores_are_the_same(score):
    torch._dynamo.reset()
    module, hidden = make_scores(200, H, score), torch.randn(B, S, 200)
    expected = module(hidden)
    gradients = torch.autograd.grad(expected.sum(), module.parameters())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)

    def with_autocast(hidden):
        with torch.autocast("cpu", torch.bfloat16):
            return module(hidden)

    def with_checkpoint(hidden):
        return checkpoint(module, hidden, use_reentrant=False)

    for call in (compiled, with_autocast, with_checkpoint):
        scores = call(hidden)
        assert torch.equal(scores, expected)
        assert_same(torch.autograd.grad(scores.sum(), module.parameters()), gradients)


def assert_same(actual, expected):
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("score", ["gate", "linear", "doge"])
def test_activation_gives_equal_bits_to_equal_tokens(score):
    module = make_scores(24, H, score)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    scores = module(torch.randn(1, 1, 24).expand(1, 37, 24))
    assert (scores == scores[..., :1]).all()


@pytest.mark.parametrize("form", FORMS)
def test_operator_passes_opcheck(form):
    leaves = [t.requires_grad_() for t in (*operands(torch.float32, 8), torch.rand(H))]
    if form not in SCALED_FORMS:
        leaves[3] = None
    operator = torch.ops.flash_dmattn.score_projection.default
    torch.library.opcheck(operator, (*leaves, form))
