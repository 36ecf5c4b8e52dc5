"""Compares forward and backward of each form of a call in the case table with the oracle. The C++ tests run all its cases."""

import pytest

from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.compare import assert_matches_oracle

# What the operators pass on. The other columns are numbers, and values in the memory of the tensors.
FORM = [
    "dtype",
    "mask",
    "bias",
    "bias_dtype",
    "intervals",
    "intervals_shape",
    "layout",
    "nonfinite",
]
OPTIONAL = ["softcap", "bias_delay", "value_dim"]


def one_case_of_each_form():
    forms = {}
    for name, row in CASES.items():
        form = *(row[column] for column in FORM), *(row[column] != "0" for column in OPTIONAL)
        if row["slow"] == "0":
            forms.setdefault(form, name)
    return forms.values()


@pytest.mark.parametrize("name", one_case_of_each_form())
def test_case_matches_oracle(name):
    case = make_case(CASES[name])
    assert_matches_oracle(run(case), case.problem, saturate=case.nonfinite == "saturate")
