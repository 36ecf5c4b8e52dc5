"""The gradient of scores sums to 0 over the keys, despite the rounding of the gradient that attention returns."""

import pytest
import torch
from torch.autograd import forward_ad

from flash_dmattn.scores import with_zero_sum_gradient
from gpu import devices


def gradient_for(wanted):
    scores = torch.randn_like(wanted).requires_grad_()
    through = with_zero_sum_gradient(scores)
    assert torch.equal(through, scores)
    through.backward(wanted)
    return scores.grad.cpu()


def random(shape, seed=0):
    """Returns gradients with a shared part, and 0 for every third key, as for keys that no query sees."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    values[..., ::3] = 0
    return values


def by_definition(wanted):
    """Subtracts the mean over the keys that have a gradient from these, in double."""
    wanted = wanted.cpu().double()
    seen = wanted != 0
    mean = wanted.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, wanted - mean, 0)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(2, 3, 50), (1, 4, 2048), (3, 5003), (1, 1, 1), (2, 0, 7), (2, 3, 0), (5,)]
)
def test_shared_part_of_seen_keys_is_removed(shape, dtype, device):
    wanted = random(shape).to(device, dtype)
    got = gradient_for(wanted)
    torch.testing.assert_close(got, by_definition(wanted).to(dtype))
    assert not got[wanted.cpu() == 0].any()


@devices
def test_noncontiguous_rows_equal_definition(device):
    wanted = random((2, 40, 3)).to(device).transpose(-1, -2)
    torch.testing.assert_close(gradient_for(wanted), by_definition(wanted).float())


@devices
def test_largest_numbers_and_rows_of_zeros_stay_finite(device):
    largest = torch.finfo(torch.float32).max
    wanted = torch.full((4, 40), -largest)
    wanted[0, 7], wanted[1], wanted[2] = largest, 0, largest
    got = gradient_for(wanted.to(device))
    assert got.isfinite().all() and not got[1].any()
    expected = by_definition(wanted[0]).clamp(-largest, largest).float()
    torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=0)


@devices
def test_zero_sum_holds_for_vmap(device):
    scores = torch.zeros(2, 3, 50, device=device, requires_grad=True)
    through = with_zero_sum_gradient(scores)

    def gradient(dout):
        return torch.autograd.grad(through, scores, dout, retain_graph=True)[0]

    several = torch.stack([random((2, 3, 50), seed) for seed in range(3)]).to(device)
    for got, one in zip(torch.vmap(gradient)(several), several, strict=True):
        torch.testing.assert_close(got, gradient(one))


@devices
def test_differentiable_gradient_equals_torch(device):
    wanted = random((2, 3, 50)).to(device).requires_grad_()
    scores = torch.zeros_like(wanted, requires_grad=True)
    through = with_zero_sum_gradient(scores)
    (got,) = torch.autograd.grad(through, scores, wanted, create_graph=True)
    (second,) = torch.autograd.grad(got.square().sum(), wanted)
    torch.testing.assert_close(second, 2 * got.detach())


@devices
def test_tangent_of_the_gradient_is_the_gradient_of_the_tangent(device):
    wanted, tangent = random((2, 3, 50)).to(device), random((2, 3, 50), 1).to(device)
    with forward_ad.dual_level():
        scores = torch.zeros_like(wanted, requires_grad=True)
        dual = forward_ad.make_dual(wanted, tangent)
        (got,) = torch.autograd.grad(with_zero_sum_gradient(scores), scores, dual)
        got = forward_ad.unpack_dual(got).tangent.cpu()
    torch.testing.assert_close(got, by_definition(tangent).float())


def test_call_without_gradient_records_nothing():
    scores = torch.randn(1, 2, 5)
    assert with_zero_sum_gradient(scores) is scores
    with torch.no_grad():
        scores.requires_grad_()
        assert with_zero_sum_gradient(scores) is scores
