"""Calls for which other implementations of dynamic mask attention failed, at full size."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.failed_elsewhere import FAILED_ELSEWHERE, Setting, wide_mask_and_bias
from verdicts import assert_all_passed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAILED_ELSEWHERE)
def test_call_passes(name, dtype):
    setting = Setting(flash_dmattn_func, "cpu", dtype, full=False)
    assert_all_passed(FAILED_ELSEWHERE[name](setting))


def test_bf16_length_4096_window_2048_head_dim_128_with_4d_mask_and_bias():
    setting = Setting(flash_dmattn_func, "cpu", torch.bfloat16, full=True)
    assert_all_passed(wide_mask_and_bias(setting))
