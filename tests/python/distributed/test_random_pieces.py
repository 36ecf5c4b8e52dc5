"""With random pieces, documents, padding and rules, ranks have the rows, gradients and keys of one process."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from random_cases import random_cases
from ranks_as_threads import run_in_threads
from sharded_cases import compare_with_one_process, in_one_process


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    case=random_cases(),
    exchange=st.sampled_from(["direct", "two_hops"]),
    seed=st.integers(0, 99),
)
def test_random_pieces_equal_one_process(case, exchange, seed):
    ranks = len(case.lengths)
    whole = in_one_process(case, seed)
    run_in_threads(
        ranks,
        lambda collectives: compare_with_one_process(
            whole, collectives, collectives.rank, exchange
        ),
    )
