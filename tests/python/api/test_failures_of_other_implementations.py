"""The situations in which other implementations of dynamic mask attention failed, at full size."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.situations import SITUATIONS, Setting, wide_mask_and_bias

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_passes(situation, dtype, full=False):
    verdicts = list(situation(Setting(flash_dmattn_func, "cpu", dtype, full)))
    assert verdicts
    for verdict in verdicts:
        assert verdict.passed, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name, dtype):
    assert_passes(SITUATIONS[name], dtype)


def test_bf16_length_4096_window_2048_head_dim_128_with_4d_mask_and_bias():
    assert_passes(wide_mask_and_bias, torch.bfloat16, full=True)
