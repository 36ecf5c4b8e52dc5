"""Tests more ranks than processors, as threads of one process."""

import pytest
import torch

from flash_dmattn.distributed import begin_exchange
from ranks_as_threads import run_in_threads
from sharded_cases import Case, cases, compare_with_one_process, in_one_process


def compare(case, ranks, exchanges=("direct", "two_hops")):
    """Compares a case with one process."""
    whole = in_one_process(case, seed=ranks)
    for exchange in exchanges:
        run_in_threads(
            ranks,
            lambda collectives, exchange=exchange: compare_with_one_process(
                whole, collectives, collectives.rank, exchange
            ),
        )


@pytest.mark.parametrize("name", cases(4))
def test_four_ranks_equal_one_process(name):
    compare(cases(4)[name], 4)


@pytest.mark.parametrize(
    "name",
    [
        "ties",
        "uneven",
        "documents of each row",
        "sinks, recent keys, uneven, padding",
        "a window for each head",
    ],
)
def test_eight_ranks_equal_one_process(name):
    compare(cases(8)[name], 8)


@pytest.mark.parametrize(
    "case",
    [
        Case([3] * 25, 11, "ties", batch=1),
        Case([3] * 14, 9, batch=1, rule={"recent_window": 7, "sink_tokens": 2}),
    ],
    ids=["window", "rule"],
)
def test_more_ranks_than_a_window_equal_one_process(case):
    compare(case, len(case.lengths), ["two_hops"])


@pytest.mark.parametrize("ranks, states", [(2, 1), (8, 2)])
def test_default_exchange_sends_at_most_two_states(ranks, states):
    w, n, heads, d = 16, 24, 8, 16
    torch.manual_seed(0)
    key, scores = torch.randn(1, ranks * n, heads, d), torch.randn(1, heads, ranks * n)

    def sent_by(collectives):
        rows = slice(collectives.rank * n, collectives.rank * n + n)
        key_rows, score_rows = key[:, rows], scores[..., rows]
        begin_exchange(
            key_rows, key_rows, score_rows, group=collectives, keep_window_size=w, check=False
        )
        return collectives.traffic.sent

    state = w * heads * (2 * d * 4 + 8)  # bytes of w keys of all heads with scores and positions
    assert max(run_in_threads(ranks, sent_by)) <= states * state
