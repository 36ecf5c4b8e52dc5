"""Forward and backward of every case in the table, against the oracle."""

import pytest

from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.compare import assert_matches_oracle


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if row["slow"] == "1" else ())
        for name, row in CASES.items()
    ],
)
def test_case_matches_oracle(name):
    case = make_case(CASES[name])
    assert_matches_oracle(run(case), case.problem, saturate=case.nonfinite == "saturate")
