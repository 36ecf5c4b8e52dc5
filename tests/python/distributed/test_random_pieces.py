"""Random lengths of pieces, documents, padding and rules: the rows, gradients and keys of one process."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks_as_threads import run_in_threads
from sharded_cases import Case, compare_with_one_process

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

RULES = st.fixed_dictionaries(
    {},
    optional={
        "recent_window": st.integers(1, 20),
        "recent_competes": st.booleans(),
        "sink_tokens": st.integers(1, 6),
        "score_threshold": st.sampled_from([-0.5, 0.0, 1.0]),
    },
)


@st.composite
def random_cases(draw):
    lengths = draw(
        st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(lambda n: sum(n) > 45)
    )
    heads = draw(st.sampled_from([1, 2]))
    window = draw(st.one_of(st.integers(0, 60), st.tuples(*[st.integers(0, 30)] * heads)))
    documents = draw(st.sampled_from(["", "random", "rows", "tiny"]))
    masks = ["", "left", "right", "random"]
    return Case(
        lengths,
        window,
        draw(st.sampled_from(["normal", "ties", "equal", "falling", "odd"])),
        mask=draw(st.sampled_from(masks)),
        documents=documents,
        bias=draw(st.sampled_from(["scores", "own", "none"])),
        rule=draw(RULES),
        heads=heads,
    )


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    case=random_cases(), exchange=st.sampled_from(["direct", "two_hops"]), seed=st.integers(0, 99)
)
def test_random_pieces_equal_one_process(case, exchange, seed):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_in_threads(
            len(case.lengths),
            lambda wire: compare_with_one_process(case, wire, wire.rank, exchange, seed),
        )
    finally:
        torch.set_num_threads(threads)
