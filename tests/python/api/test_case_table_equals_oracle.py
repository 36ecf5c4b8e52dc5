"""Compares forward and backward of the forms of a call in the case table with the oracle. The C++ tests run all its cases, in full
size."""

from itertools import combinations

import pytest

from flash_dmattn.check.cases import CASES, make_case, run, shrink_case
from problem_calls import assert_matches_oracle

# What the operators pass on. The other columns are numbers, and values in the memory of the tensors.
FORM = ["mask", "bias", "intervals", "nonfinite", "softcap", "bias_delay"]
ALONE = ["dtype", "bias_dtype", "intervals_shape", "layout", "value_dim"]
NUMBERS = ["softcap", "bias_delay", "value_dim"]


def cases_of_all_pairs():
    """Yields cases that together have every pair of values of FORM in the table, and every value of ALONE beside each bias."""
    seen = set()
    for name, row in CASES.items():
        values = {c: row[c] != "0" if c in NUMBERS else row[c] for c in FORM + ALONE}
        pairs = {*combinations(((c, values[c]) for c in FORM), 2)}
        pairs |= {(c, values[c], values["bias"] == "none") for c in ALONE}
        if row["slow"] == "0" and pairs - seen:
            seen |= pairs
            yield name


@pytest.mark.parametrize("name", list(cases_of_all_pairs()))
def test_case_matches_oracle(name):
    case = make_case(shrink_case(CASES[name]))
    assert_matches_oracle(run(case), case.problem, saturate=case.nonfinite == "saturate")
