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


HIDDEN, WEIGHT = torch.zeros(1, 4, 12), torch.zeros(6, 12)
REFUSED = {
    "transposed weight": ((HIDDEN, WEIGHT.t(), 3), ValueError, "hidden, weight: got shapes"),
    "negative places": ((HIDDEN, WEIGHT, -1), ValueError, "places: got -1"),
    "hidden as a list": (([1], WEIGHT, 3), TypeError, "hidden: got list, expected a torch.Tensor"),
    "no weight": ((HIDDEN, None, 3), TypeError, "weight: got NoneType, expected a torch.Tensor"),
    "bias as a number": ((HIDDEN, WEIGHT, 3, 1.0), TypeError, "bias: got float, expected a torch.Tensor"),
    "bias of other features": (
        (HIDDEN, WEIGHT, 3, torch.zeros(5)), ValueError, r"bias: got shape \(5,\), expected \(6,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_projection_raises_naming_the_argument(name):
    arguments, error, words = REFUSED[name]
    with pytest.raises(error, match=f"^{words}"):
        linear_with_headroom(*arguments)
