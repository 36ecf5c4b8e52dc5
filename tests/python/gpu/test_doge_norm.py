"""torch's kernel for the norms of query and key in Doge's attention rounds where DogeRMSNorm does."""

import copy
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers.models.doge.modeling_doge import DogeRMSNorm  # noqa: E402

from flash_dmattn.integrations.transformers.doge import FlashDogeRMSNorm  # noqa: E402


def results_of(function, states, weight):
    states = states.detach().requires_grad_()
    out = function(states)
    seed = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, (states, weight), seed)]


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_equals_model_norm_within_rounding(dtype, is_autocast):
    norm = DogeRMSNorm(128).cuda().to(torch.float32 if is_autocast else dtype)
    torch.nn.init.normal_(norm.weight)
    fused = copy.copy(norm)
    fused.__class__ = FlashDogeRMSNorm
    norms = partial(fused, is_fused=True), norm
    states = torch.randn(2, 300, 4, 128, device="cuda").to(dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
        actual, expected = (results_of(function, states, norm.weight) for function in norms)
    eps = torch.finfo(dtype).eps
    for ours, theirs, tolerance in zip(actual, expected, (eps, 4 * eps, 16 * eps), strict=True):
        assert ours.dtype == theirs.dtype
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest)
    # A different order of the sum changes few roundings; rounding at a different place changes every third.
    if dtype != torch.float32:
        assert (actual[0] != expected[0]).float().mean() < 0.02
