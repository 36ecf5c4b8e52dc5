"""Gradients of scores that sum to 0, on a GPU against those on the CPU."""

import pytest
import torch
from torch.autograd import forward_ad

from flash_dmattn.scores import with_zero_sum_gradient


def gradient_for(wanted):
    scores = torch.zeros_like(wanted).requires_grad_()
    with_zero_sum_gradient(scores).backward(wanted)
    return scores.grad


def random(shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    values[..., ::3] = 0
    return values


@pytest.mark.parametrize(
    "shape", [(2, 3, 50), (1, 4, 2048), (3, 5003), (1, 1, 1), (2, 0, 7), (2, 3, 0), (5,)]
)
def test_zero_sum_gradient_equals_double_precision(shape):
    wanted = random(shape)
    exact = gradient_for(wanted.double()).float()
    torch.testing.assert_close(gradient_for(wanted.cuda()).cpu(), exact)


def test_largest_numbers_and_rows_of_zeros_stay_finite():
    largest = torch.finfo(torch.float32).max
    wanted = torch.full((3, 40), -largest)
    wanted[0, 7] = largest
    wanted[1] = 0
    got = gradient_for(wanted.cuda()).cpu()
    assert got.isfinite().all()
    torch.testing.assert_close(got[:2], gradient_for(wanted)[:2], rtol=1e-5, atol=0)


def test_noncontiguous_rows_equal_cpu():
    wanted = random((2, 40, 3)).transpose(-1, -2)
    torch.testing.assert_close(gradient_for(wanted.cuda()).cpu(), gradient_for(wanted))


def test_zero_sum_holds_for_every_dtype_and_vmap():
    wanted = random((2, 3, 50))
    torch.testing.assert_close(
        gradient_for(wanted.double().cuda()).cpu(), gradient_for(wanted.double())
    )

    scores = torch.zeros(2, 3, 50, device="cuda", requires_grad=True)
    through = with_zero_sum_gradient(scores)

    def gradient(dout):
        return torch.autograd.grad(through, scores, dout, retain_graph=True)[0]

    several = torch.stack([random((2, 3, 50), seed).cuda() for seed in range(3)])
    for got, one in zip(torch.vmap(gradient)(several), several, strict=True):
        torch.testing.assert_close(got, gradient(one))


def test_differentiable_gradient_equals_torch():
    wanted = random((2, 3, 50)).cuda().requires_grad_()
    scores = torch.zeros_like(wanted, requires_grad=True)
    through = with_zero_sum_gradient(scores)
    (got,) = torch.autograd.grad(through, scores, wanted, create_graph=True)
    (second,) = torch.autograd.grad(got.square().sum(), wanted)
    torch.testing.assert_close(second, 2 * got.detach())


def test_tangent_equals_torch():
    wanted, tangent = random((2, 3, 50)), random((2, 3, 50), 1)
    tangents = []
    for device in ("cpu", "cuda"):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(wanted.to(device), tangent.to(device))
            scores = torch.zeros(2, 3, 50, device=device, requires_grad=True)
            (got,) = torch.autograd.grad(with_zero_sum_gradient(scores), scores, dual)
            tangents.append(forward_ad.unpack_dual(got).tangent.cpu())
    torch.testing.assert_close(*tangents)
