"""Calls for which other implementations of dynamic mask attention failed, on the GPU."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func_auto
from flash_dmattn.check.failed_elsewhere import FAILED_ELSEWHERE, Setting
from verdicts import assert_all_passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAILED_ELSEWHERE)
def test_call_that_failed_elsewhere_passes_on_a_gpu(name, dtype):
    torch.manual_seed(0)
    setting = Setting(flash_dmattn_func_auto("cuda"), "cuda", dtype, full=False)
    assert_all_passed(FAILED_ELSEWHERE[name](setting))
