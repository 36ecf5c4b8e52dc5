"""Calls for which other implementations of dynamic mask attention failed, at full size."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.failed_elsewhere import FAILED_ELSEWHERE, Setting, wide_mask_and_bias

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_passes(call, dtype, full=False):
    verdicts = list(call(Setting(flash_dmattn_func, "cpu", dtype, full)))
    assert verdicts
    for verdict in verdicts:
        assert verdict.passed, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAILED_ELSEWHERE)
def test_call(name, dtype):
    assert_passes(FAILED_ELSEWHERE[name], dtype)


def test_bf16_length_4096_window_2048_head_dim_128_with_4d_mask_and_bias():
    assert_passes(wide_mask_and_bias, torch.bfloat16, full=True)
