"""linear_with_headroom gives the rows of F.linear after rows of zeros."""

import pytest
import torch
import torch.nn.functional as F

from flash_dmattn.distributed import linear_with_headroom


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_and_gradients_equal_linear(dtype, with_bias):
    hidden, weight = torch.randn(2, 9, 12, dtype=dtype), torch.randn(8, 12, dtype=dtype)
    leaves = [hidden, weight] + ([torch.randn(8, dtype=dtype)] if with_bias else [])
    leaves = [t.requires_grad_() for t in leaves]
    bias = leaves[2] if with_bias else None
    expected = F.linear(hidden, weight, bias)
    out = linear_with_headroom(hidden, weight, 5, bias)
    assert out.shape == (2, 14, 8) and out.dtype == dtype
    torch.testing.assert_close(out[:, 5:], expected)
    assert not out[:, :5].any()
    dout = torch.randn(2, 9, 8, dtype=dtype)
    wanted = torch.autograd.grad(expected, leaves, dout)
    torch.testing.assert_close(torch.autograd.grad(out[:, 5:], leaves, dout), wanted)


def test_linear_with_headroom_has_the_dtype_of_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_with_headroom(torch.randn(1, 4, 12), torch.randn(8, 12), 3)
    assert out.dtype == torch.bfloat16
