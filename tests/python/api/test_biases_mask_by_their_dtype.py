"""A bias masks at or below a value that depends on the bias's own dtype, whatever the dtype of query, key and value."""

from itertools import product

import pytest
import torch

from biases_that_mask import FORMS, check_bias_that_masks
from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    flex_dmattn_func,
    sliding_window,
    triton_dmattn_func,
)
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)
from flash_dmattn.keys.recognise import intervals_of_mask, split_additive
from flash_dmattn.utils.mask import create_mask
from gpu import where_there_is_a_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BIAS_DTYPES = [*DTYPES, torch.float64]
VISIBLE, MASKED = True, False
# Biases of a row's only key: out equals its value if the bias does not mask.
VALUES = [
    (torch.float16, -9992.0, VISIBLE),
    (torch.float16, -1e4, MASKED),
    (torch.float16, -65504.0, MASKED),
    (torch.bfloat16, -65504.0, VISIBLE),
    (torch.bfloat16, -0.99e30, VISIBLE),
    (torch.bfloat16, -1e30, MASKED),
    (torch.bfloat16, torch.finfo(torch.bfloat16).min, MASKED),
    (torch.float32, -2e4, VISIBLE),
    (torch.float32, -65504.0, VISIBLE),
    (torch.float32, -0.99e30, VISIBLE),
    (torch.float32, -1e30, MASKED),
    (torch.float32, torch.finfo(torch.bfloat16).min, MASKED),
    (torch.float32, torch.finfo(torch.float32).min, MASKED),
    (torch.float64, -0.99e30, VISIBLE),
    (torch.float64, -1e30, MASKED),
    (torch.float64, torch.finfo(torch.float64).min, MASKED),
]


# On a GPU one length uses the kernels for few queries, the other exceeds their limit.
CALLS = [
    *product(["cpu"], DTYPES, BIAS_DTYPES, [(24, 64)]),
    *where_there_is_a_gpu(*product(["cuda"], DTYPES[1:], DTYPES, [(24, 138), (150, 264)])),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device, dtype, bias_dtype, lengths", CALLS)
def test_bias_of_any_dtype_matches_oracle(device, dtype, bias_dtype, lengths, form):
    check_bias_that_masks(flash_dmattn_func, form, dtype, bias_dtype, device, lengths)


@pytest.mark.parametrize(
    "function, dtype, bias_dtype, form",
    [
        (triton_dmattn_func, torch.float16, torch.float32, "keys"),
        (triton_dmattn_func, torch.float32, torch.float16, "elements"),
        (triton_dmattn_func, torch.float16, torch.float16, "chosen keys"),
        (triton_dmattn_func, torch.float32, torch.float16, "keys beside scores"),
        (triton_dmattn_func, torch.float16, torch.float32, "elements beside scores"),
        (flex_dmattn_func, torch.float16, torch.float32, "keys"),
        (flex_dmattn_func, torch.float16, torch.float16, "elements"),
        (flex_dmattn_func, torch.bfloat16, torch.float16, "chosen keys"),
        (flex_dmattn_func, torch.float16, torch.float32, "elements beside scores"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
def test_bias_masks_by_the_rule_of_its_dtype(function, dtype, bias_dtype, form, compiled_on_gpu):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    has_backward = function is triton_dmattn_func or device == "cuda"
    check_bias_that_masks(function, form, dtype, bias_dtype, device, has_backward=has_backward)


@pytest.mark.parametrize("bias_dtype, value, visible", VALUES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("backend", ["", "reference"])
def test_lone_masking_bias_gives_zero_row(backend, dtype, bias_dtype, value, visible):
    q, k, v = (torch.randn(1, 1, 2, 8, dtype=dtype) for _ in range(3))
    for shape in ((1, 2, 1), (1, 2, 1, 1)):
        bias = torch.full(shape, value, dtype=bias_dtype, requires_grad=True)
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, backend=backend)
        assert torch.equal(out, v if visible else torch.zeros_like(v))
        assert lse.isfinite().all() == visible
        out.sum().backward()
        assert (bias.grad == 0).all()


def test_bias_of_packed_sequences_masks_by_its_own_dtype():
    q, k, v = (torch.randn(6, 1, 8) for _ in range(3))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    fills = {torch.float16: -1e4, torch.bfloat16: -1e30, torch.float32: -1e30}
    for dtype, fill in fills.items():
        bias = torch.zeros(6, 1, dtype=dtype)
        bias[1], bias[4] = fill, 0.99 * fill
        for window in (None, 3):
            out = flash_dmattn_varlen_func(
                q, k, v, offsets, offsets, attn_bias=bias, is_causal=True, keep_window_size=window
            )
            assert torch.equal(out[1], v[0])  # key 1 is masked
            alone = bias.clone()
            alone[2:4] = fill
            out = flash_dmattn_varlen_func(
                q, k, v, offsets, offsets, attn_bias=alone, is_causal=True, keep_window_size=window
            )
            assert torch.equal(out[4], v[4])  # of keys 2, 3 and 4, only key 4 is visible


@pytest.mark.parametrize("dtype, fill", [(torch.float16, -1e4), (torch.float32, -1e30)])
def test_additive_mask_masks_by_its_own_dtype(dtype, fill):
    allowed = sliding_window(12, 5).to_mask()
    filled = torch.where(allowed, 0.0, fill).to(dtype)
    assert torch.equal(intervals_of_mask(filled).to_mask(), allowed)
    assert torch.equal(split_additive(filled)[0], allowed)
    above = torch.where(allowed, 0.0, 0.99 * fill).to(dtype)
    assert intervals_of_mask(above) is None
    assert split_additive(above)[0].all()


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_additive_mask_and_bias_of_other_dtypes_mask_by_their_own(dtype, bias_dtype, mask_dtype):
    """Mask and bias with different dtypes each mask by the rule of their own dtype."""
    q, k, v = (torch.randn(1, 12, 2, 16, dtype=dtype) for _ in range(3))
    mask = torch.randn(1, 1, 12, 12).to(mask_dtype)
    bias = torch.randn(1, 2, 12).to(bias_dtype)
    if mask_dtype != bias_dtype:  # visible keys have lower values than hidden ones
        wide = mask if mask_dtype == torch.float32 else bias
        wide -= torch.full((12,), 6e4).index_fill(0, torch.tensor([3, 5]), 0)
    hidden = {torch.float16: -1e4, torch.float32: -1e30}
    mask[..., 3] = hidden[mask_dtype]
    bias[..., 5] = hidden[bias_dtype]
    out = _flash_dynamic_mask_attention_forward(q, k, v, mask, bias, 12, 12, is_causal=False)
    elements = (mask.float() + bias[:, :, None].float()).index_fill(
        -1, torch.tensor([3, 5]), -torch.inf
    )
    expected = flash_dmattn_func(q, k, v, attn_bias=elements)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3 if dtype == torch.float32 else 4e-3)


def test_masking_scores_are_left_out_of_created_mask():
    for dtype, masks_at in ((torch.float16, -1e4), (torch.bfloat16, -1e30), (torch.float32, -1e30)):
        scores = torch.tensor([[[masks_at, 0.99 * masks_at, -torch.inf, 0.0]]], dtype=dtype)
        kept = create_mask(scores, None, 1, 1, 4, 4, None)
        assert kept.flatten().tolist() == [False, True, False, True]
