"""The floating-point modes of the calling thread apply to the whole call, whichever threads compute it."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.merge import add_sink


@pytest.fixture
def two_threads():
    """Runs torch with two threads, which have their own modes before the caller changes its modes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(400, 400) @ torch.randn(400, 400)
    yield
    torch.set_num_threads(before)


def step(inputs, bias, dout, window):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = flash_dmattn_func(*leaves, attn_bias=bias, is_causal=True, keep_window_size=window)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("sizes", [(1e-37, 1.0), (1.0, 1e-39)])
def test_flushed_subnormal_numbers_do_not_depend_on_the_thread(sizes):
    q, k, v, dout = (torch.randn(2, 300, 4, 32) for _ in range(4))
    bias = torch.randn(2, 4, 300)
    call = ((q, k, v * sizes[0]), bias, dout * sizes[1], 64)
    plain = step(*call)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        torch.set_num_threads(1)
        expected = step(*call)
        torch.set_num_threads(2)
        results = [step(*call) for _ in range(20)]
    finally:
        torch.set_flush_denormal(False)
    assert not all(map(torch.equal, expected, plain))
    for result in results:
        assert all(map(torch.equal, result, expected))
    assert all(map(torch.equal, step(*call), plain))  # the threads have their own modes again


def test_gradient_of_a_sink_under_a_large_dout_does_not_need_subnormal_numbers():
    out, lse = torch.randn(1, 5, 2, 128), torch.randn(1, 2, 5)
    sinks = torch.zeros(2, requires_grad=True)
    dout = torch.randn_like(out) * 1e37
    changed, _ = add_sink(out, lse, sinks)
    (expected,) = torch.autograd.grad(changed, sinks, dout, retain_graph=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        (gradient,) = torch.autograd.grad(changed, sinks, dout)
    finally:
        torch.set_flush_denormal(False)
    assert expected.isfinite().all() and torch.equal(gradient, expected)
