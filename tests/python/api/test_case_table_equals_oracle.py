"""Compares forward and backward of cases of the table with the oracle: on a CPU the forms of a call in small, because the C++ tests
run all cases in full size, and on a GPU all those in 16 bits."""

from itertools import combinations

import pytest

from flash_dmattn.check.cases import CASES, make_case, run, shrink_case
from gpu import on_gpu, where_there_is_a_gpu
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


IN_16_BITS = [name for name, row in CASES.items() if row["dtype"] in ("bf16", "f16")]
CALLS = [
    *(("cpu", name) for name in cases_of_all_pairs()),
    *where_there_is_a_gpu(*(("cuda", name) for name in IN_16_BITS)),
]


@pytest.mark.parametrize("device, name", CALLS)
def test_case_matches_oracle(device, name):
    row = CASES[name]
    case = on_gpu(make_case(row)) if device == "cuda" else make_case(shrink_case(row))
    result = run(case)
    if device == "cuda" and (row["inputs"], row["dtype"]) == ("limits", "bf16"):
        # Scores beyond fp32 have no order on a GPU.
        assert all(getattr(result, x).isfinite().all() for x in ("out", "dq", "dk", "dv"))
    else:
        assert_matches_oracle(result, case.problem, saturate=case.nonfinite == "saturate")
