"""Compares forward and backward of the table's quick cases with the oracle. The C++ tests run all cases on every instruction set."""

import pytest

from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.compare import assert_matches_oracle


@pytest.mark.parametrize("name", [name for name, row in CASES.items() if row["slow"] == "0"])
def test_case_matches_oracle(name):
    case = make_case(CASES[name])
    assert_matches_oracle(run(case), case.problem, saturate=case.nonfinite == "saturate")
