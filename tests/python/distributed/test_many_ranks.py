"""Tests more ranks than processors, as threads of one process, and that the comparison notices mistakes."""

import pytest
import torch

from flash_dmattn.distributed import _exchange, begin_exchange
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
        Case([6] * 64, 17, "ties", batch=1),
        Case([4] * 24, 9, batch=1, rule={"recent_window": 7, "sink_tokens": 2}),
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


def _skip_first(function):
    return lambda self, route, *gradients: function(self, route, *(g * 0 for g in gradients))


def _one_sum_less(function):
    def add_rows(total, rows, places):
        function(total, rows, torch.where(places == places.max(), -1, places))

    return add_rows


def _one_key_less(function):
    def seen(*arguments):
        places = function(*arguments)
        return torch.where(places == places.max(), -1, places)

    return seen


def _other_order(function):
    return lambda *arguments: function(*arguments).flip(-1)


def _other_positions(function):
    return lambda metadata: function(metadata) + (function(metadata) > 20).int()


def _last_two(function):
    return lambda self: self.rank >= self.ranks() - 2


MUTANTS = {
    "gradients are not returned": ("kinds.Direct.give_back", _skip_first, "ties"),
    "gradients of two hops are not returned": ("kinds.TwoHops.give_back", _skip_first, "ties"),
    "the last rank but one gives nothing": ("pieces.PieceOffsets.is_last", _last_two, "ties"),
    "a gradient is not added": ("kinds._add_rows", _one_sum_less, "ties"),
    "a rank loses its best keys": ("earlier_keys.keys_seen_before", _one_key_less, "ties"),
    "a boundary loses a key": ("kinds.keys_seen_before", _one_key_less, "ties"),
    "keys in another order": ("earlier_keys.keys_seen_before", _other_order, "all equal"),
    "positions one off": ("kinds.position_of", _other_positions, "recent keys"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_comparison_fails_for_a_mistake(name, monkeypatch):
    path, broken, case = MUTANTS[name]
    module, _, attribute = path.rpartition(".")
    target = _exchange
    for part in module.split("."):
        target = getattr(target, part)
    monkeypatch.setattr(target, attribute, broken(getattr(target, attribute)))
    with pytest.raises(AssertionError):
        compare(cases(4)[case], 4)
