"""Triangle attention on a GPU equals the oracle, and repeats bit for bit."""

from functools import partial

import pytest
import torch

from flash_dmattn import is_available, triangle_attention
from triangle_cases import NAMES, draw, gradients, oracle

# (B, N, H, S, D): Evoformer's and cuEquivariance's with fewer rows; sizes that TMA units do not load; two elements.
SHAPES = [(1, 24, 4, 256, 32), (1, 40, 8, 256, 8), (1, 9, 4, 200, 32), (1, 7, 3, 77, 24), (2, 6, 4, 96, 32)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw_square(shape, dtype, bias_dtype=None):
    batch, rows, heads, length, head_dim = shape
    sizes = (batch, rows, length, length, heads, head_dim, head_dim)
    inputs, mask = draw(*sizes, dtype, "cuda")
    inputs[3] = inputs[3].detach().to(bias_dtype or dtype).requires_grad_()
    return inputs, mask, torch.randn_like(inputs[0])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_as_accurate_as_the_oracle_in_their_dtype(
    shape, dtype, bias_dtype, empty_rows, deterministic
):
    if dtype == torch.float32 and not is_available("triton"):
        pytest.skip("float32 on a GPU takes Triton")
    inputs, mask, direction = draw_square(shape, dtype, bias_dtype)
    mask[:, 2] = False
    options = {"empty_rows": empty_rows}
    expected = oracle(inputs, direction, mask, **options)
    rounded = oracle(inputs, direction, mask, dtype=dtype, **options)
    ours = gradients(
        triangle_attention, inputs, direction, mask, deterministic=deterministic, **options
    )
    for name, actual, low, wanted in zip(NAMES, ours, rounded, expected, strict=True):
        error, allowed = ((t.double() - wanted).norm() for t in (actual, low))
        assert error <= 2 * allowed + 2e-6 * wanted.norm(), name


@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_repeat_bit_for_bit(dtype, bias_dtype):
    inputs, mask, direction = draw_square((1, 64, 4, 256, 32), dtype, bias_dtype)
    run = partial(gradients, triangle_attention, inputs, direction, mask, deterministic=True)
    first = run()
    for _ in range(9):
        assert all(map(torch.equal, run(), first))


def test_memory_holds_gradients_of_a_part_of_rows():
    """The bias and its gradient have 8 MiB. An expanded bias, or gradients of all rows at the same time, would have 1 GiB."""
    inputs, mask, direction = draw_square((1, 128, 4, 1024, 32), torch.bfloat16)
    gradients(triangle_attention, inputs, direction, mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(triangle_attention, inputs, direction, mask)
    assert torch.cuda.max_memory_allocated() - before < 768 * 2**20
