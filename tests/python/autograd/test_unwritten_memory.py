"""Results do not depend on earlier contents of memory, because workspaces and results are written before they are read."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn._core.numerics import default_deterministic, resolve_deterministic

OPTIONS = {
    "window": {"keep_window_size": 13},
    "rule": {"keep_window_size": 9, "recent_window": 4, "sink_tokens": 2},
    "dense": {},
}


@pytest.fixture
def fill_memory():
    """Makes torch.empty return NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()

    def fill(is_filled):
        torch.use_deterministic_algorithms(is_filled)

    yield fill
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries", [1, 3, 16, 40, 53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_do_not_depend_on_unwritten_memory(fill_memory, name, queries, dtype, with_lse):
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, 16, dtype=dtype).requires_grad_()
    k, v = (torch.randn(2, 53, 2, 16, dtype=dtype).requires_grad_() for _ in range(2))
    s = torch.randn(2, 2, 53).requires_grad_()
    dout, dlse = torch.randn(2, queries, 4, 16, dtype=dtype), torch.randn(2, 4, queries)
    runs = []
    for is_filled in (False, True):
        fill_memory(is_filled)
        out, lse = flash_dmattn_func(
            q, k, v, attn_bias=s, is_causal=True, return_lse=True, **OPTIONS[name]
        )
        results, directions = ((out, lse), (dout, dlse)) if with_lse else ((out,), (dout,))
        runs.append([out, lse, *torch.autograd.grad(results, (q, k, v, s), directions)])
    for plain, filled in zip(*runs, strict=True):
        assert torch.equal(plain, filled)


def test_blocks_of_threads_that_overlap_leave_no_default():
    before, first, second = resolve_deterministic(None), *map(default_deterministic, (True, False))
    for call in (first.__enter__, second.__enter__):
        call()
    for block, remains in ((first, False), (second, before)):
        block.__exit__(None, None, None)
        assert resolve_deterministic(None) == remains
