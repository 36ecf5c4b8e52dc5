"""Calls for which other implementations of dynamic mask attention failed. The case table has a mask and a bias of 4097 x 4097 elements."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.failed_elsewhere import FAILED_ELSEWHERE, Setting
from verdicts import assert_all_passed

# For errors of memory or sizes, the two 16-bit dtypes are equivalent, so one is enough.
CALLS = [(name, dtype) for name in FAILED_ELSEWHERE for dtype in (torch.float32, torch.bfloat16)]
CALLS += [(name, torch.float16) for name in ("choice of keys", "PEFT cast", "determinism")]


@pytest.mark.parametrize("name, dtype", CALLS)
def test_known_failure_of_other_implementations_passes(name, dtype):
    setting = Setting(flash_dmattn_func, "cpu", dtype, full=False)
    assert_all_passed(FAILED_ELSEWHERE[name](setting))
