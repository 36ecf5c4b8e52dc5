"""The package runs on instruction sets below the largest of this machine; the C++ tests run the whole case table on each."""

import pytest

from flash_dmattn import backends
from python_process import run_forked

RUN = """
import torch
from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.compare import compare_result
from flash_dmattn import backends

torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
reason = next(backend.reason for backend in backends() if backend.name == "cpu")
print(reason, flush=True)
names = [name for name, row in CASES.items() if row["slow"] == "0"][::80]
for name in names if "{}" in reason.split() else []:
    case = make_case(CASES[name])
    try:
        verdicts = compare_result(run(case), case.problem, case.nonfinite == "saturate")
        assert all(verdict.passed for verdict in verdicts), verdicts
    except Exception as error:
        raise AssertionError("case " + name) from error
"""


# The other tests run on the largest instruction set, and once more on avx2 (make test-python-avx2).
@pytest.mark.parametrize("name", ["generic", "avx512"])
def test_smaller_instruction_set_matches_oracle(name):
    reason = next(backend.reason for backend in backends() if backend.name == "cpu")
    if name == "generic" or "avx512" in reason or "amx" in reason:
        reason = run_forked(RUN.format(name), FLASH_DMATTN_MAX_ISA=name).stdout.strip()
    if name not in reason.split():
        pytest.skip(f"this machine and build run {reason}, not {name}")
