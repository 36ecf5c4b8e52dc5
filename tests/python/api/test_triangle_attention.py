"""Compares triangle attention with the oracle, in the shapes of Evoformer and cuEquivariance."""

from functools import partial

import pytest
import torch

from flash_dmattn import is_available, triangle_attention
from gpu import where_there_is_a_gpu
from triangle_cases import NAMES, draw, gradients, oracle


def assert_equal(inputs, mask=None, tolerance=2e-5, backend=None, **options):
    direction = torch.randn(*inputs[0].shape[:4], inputs[2].shape[4])
    ours = gradients(triangle_attention, inputs, direction, mask, backend=backend, **options)
    expected = oracle(inputs, direction, mask, **options)
    for name, actual, wanted in zip(NAMES, ours, expected, strict=True):
        if actual is None:
            continue
        atol = tolerance * wanted.abs().max().item()
        torch.testing.assert_close(
            actual.double(), wanted, atol=atol, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# Evoformer's (1, 256, 256, 4, 32) and cuEquivariance's (1, 512, 256, 8, 8) with fewer rows and tokens; ragged sizes.
SHAPES = {
    "evoformer": (1, 16, 64, 64, 4, 32, 32),
    "cuequivariance": (1, 32, 16, 64, 8, 8, 8),
    "ragged": (1, 7, 33, 19, 3, 20, 12),
    "one row": (1, 1, 9, 17, 2, 16, 16),
    "one query": (1, 5, 1, 17, 2, 16, 16),
    "two elements": (2, 6, 21, 34, 2, 16, 16),
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_and_gradients_equal_oracle(shape, scale):
    assert_equal(draw(*shape)[0], scale=scale)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_gradients_of_some_rows_at_a_time_equal_oracle(monkeypatch, rows):
    monkeypatch.setattr("flash_dmattn.triangle._rows_with_own_gradient", lambda *_: rows)
    inputs = draw(*SHAPES["ragged"])[0]
    assert_equal(inputs, torch.rand(1, 7, 1, 1, 19) < 0.7)


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masked_keys_and_rows_equal_oracle(shape, empty_rows):
    inputs, mask = draw(*shape)
    mask[:, 0] = False
    with torch.no_grad():
        inputs[3][:, :, 0, 0] = -torch.inf  # a query that the bias leaves without keys
    assert_equal(inputs, mask, empty_rows=empty_rows)


@pytest.mark.parametrize("wanted", [(3,), (0, 3), (0, 1, 2), (2,)])
@pytest.mark.parametrize("batch", [1, 2])
def test_only_wanted_gradients_are_computed(wanted, batch):
    inputs, mask = draw(batch, 5, 18, 23, 2, 16, 16)
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i in wanted)
    assert_equal(inputs, mask)


# On a GPU (B, N, Sq, Sk, H, D, Dv) of Evoformer and cuEquivariance with fewer rows; sizes that TMA units do not load; two elements.
LOW_PRECISION = [("cpu", (1, 9, 40, 50, 4, 32, 32)), *where_there_is_a_gpu(
    ("cuda", (1, 24, 256, 256, 4, 32, 32)), ("cuda", (1, 40, 256, 256, 8, 8, 8)), ("cuda", (1, 9, 200, 200, 4, 32, 32)),
    ("cuda", (1, 7, 77, 77, 3, 24, 24)), ("cuda", (2, 6, 96, 96, 4, 32, 32)),
)]  # fmt: skip


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device, shape", LOW_PRECISION, ids=str)
def test_results_are_as_accurate_as_the_oracle_in_their_dtype(
    device, shape, dtype, bias_dtype, empty_rows, deterministic
):
    if device == "cuda" and dtype == torch.float32 and not is_available("triton"):
        pytest.skip("float32 on a GPU takes Triton")
    inputs, mask = draw(*shape, dtype, device)
    mask[:, 2] = False
    inputs[3] = inputs[3].detach().to(bias_dtype or dtype).requires_grad_()
    direction = torch.randn_like(inputs[0])
    options = {"empty_rows": empty_rows}
    expected = oracle(inputs, direction, mask, **options)
    rounded = oracle(inputs, direction, mask, dtype=dtype, **options)
    ours = gradients(
        triangle_attention, inputs, direction, mask, deterministic=deterministic, **options
    )
    for name, actual, low, wanted in zip(NAMES, ours, rounded, expected, strict=True):
        assert actual.dtype == (inputs[3].dtype if name == "dbias" else dtype)
        error, allowed = ((t.double() - wanted).norm() for t in (actual, low))
        assert error <= 2 * allowed + 2e-6 * wanted.norm(), name


def test_strided_inputs_give_the_same_results():
    """Projections are [B, N, S, H, D], whose transposed view callers pass."""
    inputs, mask = draw(2, 6, 21, 34, 2, 16, 16)
    direction = torch.randn(inputs[0].shape)
    strided = [t.detach().transpose(2, 3).contiguous().transpose(2, 3) for t in inputs]
    strided = [t.requires_grad_() for t in strided]
    results = [gradients(triangle_attention, t, direction, mask) for t in (inputs, strided)]
    torch.testing.assert_close(*results, atol=0, rtol=0)


REPEATED = [("cpu", (1, 40, 64, 64, 2, 16, 16), torch.float32), *where_there_is_a_gpu(*(
    ("cuda", (1, 64, 256, 256, 4, 32, 32), dtype) for dtype in (torch.bfloat16, torch.float16)
))]  # fmt: skip


@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("device, shape, dtype", REPEATED, ids=str)
def test_gradients_repeat_bit_for_bit(device, shape, dtype, bias_dtype):
    inputs, mask = draw(*shape, dtype, device)
    inputs[3] = inputs[3].detach().to(bias_dtype or dtype).requires_grad_()
    direction = torch.randn_like(inputs[0])
    run = partial(gradients, triangle_attention, inputs, direction, mask, deterministic=True)
    first = run()
    for _ in range(2 if device == "cpu" else 9):
        assert all(map(torch.equal, run(), first))


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_compiled_triangle_attention_has_one_graph(empty_rows):
    torch._dynamo.reset()
    inputs, mask = draw(2, 5, 18, 23, 2, 16, 16)
    mask[:, 1] = False
    direction = torch.randn(inputs[0].shape)
    compiled = torch.compile(triangle_attention, backend="aot_eager", fullgraph=True)
    options = {"empty_rows": empty_rows}
    results = [gradients(f, inputs, direction, mask, **options) for f in (triangle_attention, compiled)]  # fmt: skip
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("sizes", [(0, 9), (9, 0)])
def test_no_queries_or_no_keys_give_zeros(sizes, empty_rows):
    inputs, mask = draw(1, 3, *sizes, 2, 16, 16)
    out = triangle_attention(*inputs, mask, empty_rows=empty_rows)
    assert out.shape == (1, 3, 2, sizes[0], 16)
    assert not out.any()


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_triton_equals_oracle(empty_rows):
    inputs, mask = draw(1, 3, 20, 18, 2, 16, 16)
    mask[:, 0] = False
    assert_equal(inputs, mask, backend="triton", empty_rows=empty_rows)
