"""The gradient of scores sums to 0 over the keys, despite the rounding of the gradient that attention returns."""

import torch

from flash_dmattn.scores import with_zero_sum_gradient


def gradient_for(wanted):
    scores = torch.randn(wanted.shape, dtype=wanted.dtype, requires_grad=True)
    through = with_zero_sum_gradient(scores)
    assert torch.equal(through, scores)
    through.backward(wanted)
    return scores.grad


def test_shared_part_of_bias_gradient_is_removed():
    exact = torch.randn(2, 3, 50, dtype=torch.float64)
    exact -= exact.mean(-1, keepdim=True)
    torch.testing.assert_close(gradient_for(exact + 0.25), exact)


def test_invisible_keys_keep_a_gradient_of_0():
    wanted = torch.randn(2, 3, 50)
    wanted[0, 1, :20] = 0
    wanted[1, 2] = 0
    got = gradient_for(wanted)
    assert torch.equal(got == 0, wanted == 0)
    torch.testing.assert_close(got.sum(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)


def test_largest_numbers_stay_finite():
    largest = torch.finfo(torch.float32).max
    for wanted in (largest, -largest):
        assert gradient_for(torch.full((1, 1, 40), wanted)).isfinite().all()
    mixed = torch.full((1, 1, 40), -largest)
    mixed[..., 0] = largest
    assert gradient_for(mixed).isfinite().all()


def test_call_without_gradient_records_nothing():
    scores = torch.randn(1, 2, 5)
    assert with_zero_sum_gradient(scores) is scores
    with torch.no_grad():
        scores.requires_grad_()
        assert with_zero_sum_gradient(scores) is scores
