"""More ranks than processors, as threads of one process; and the mistakes that the comparison has to notice."""

import pytest
import torch
import torch.distributed as dist

from ranks_as_threads import run_in_threads
from sharded_cases import Case, cases, compare_with_one_process

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(autouse=True)
def one_thread():
    """A rank is a thread already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(case, ranks, exchange):
    run_in_threads(
        ranks, lambda wire: compare_with_one_process(case, wire, wire.rank, exchange, ranks)
    )


@pytest.mark.parametrize("exchange", ["direct", "two_hops"])
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
def test_eight_ranks_equal_one_process(name, exchange):
    compare(cases(8)[name], 8, exchange)


@pytest.mark.parametrize(
    "case",
    [
        Case([6] * 64, 17, "ties", batch=1),
        Case([4] * 64, 9, batch=1, rule={"recent_window": 7, "sink_tokens": 2}),
    ],
    ids=["window", "rule"],
)
def test_sixty_four_ranks_equal_one_process(case):
    compare(case, 64, "two_hops")


def _skip_first(function):
    return lambda self, route, *gradients: function(self, route, *(g * 0 for g in gradients))


def _one_sum_less(function):
    def add_rows(total, rows, places):
        function(total, rows, torch.where(places == places.max(), -1, places))

    return add_rows


def _one_key_less(function):
    def seen(*arguments):
        found = function(*arguments)
        return torch.where(found == found.max(), -1, found)

    return seen


def _other_order(function):
    return lambda *arguments: function(*arguments).flip(-1)


def _other_positions(function):
    return lambda notes: function(notes) + (function(notes) > 20).int()


MUTANTS = {
    "gradients are not returned": ("exchange.Direct.give_back", _skip_first, "ties"),
    "gradients of two hops are not returned": ("exchange.TwoHops.give_back", _skip_first, "ties"),
    "a gradient is not added": ("exchange._add_rows", _one_sum_less, "ties"),
    "a rank loses its best keys": ("extend.keys_seen_before", _one_key_less, "ties"),
    "a border loses a key": ("exchange.keys_seen_before", _one_key_less, "ties"),
    "keys in another order": ("extend.keys_seen_before", _other_order, "all equal"),
    "positions one off": ("exchange.position_of", _other_positions, "recent keys"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_comparison_fails_for_a_mistake(name, monkeypatch):
    import flash_dmattn.distributed.exchange
    import flash_dmattn.distributed.extend  # noqa: F401

    path, broken, case = MUTANTS[name]
    module, _, attribute = path.rpartition(".")
    target = flash_dmattn.distributed
    for part in module.split("."):
        target = getattr(target, part)
    monkeypatch.setattr(target, attribute, broken(getattr(target, attribute)))
    with pytest.raises(AssertionError):
        for exchange in ("direct", "two_hops"):
            compare(cases(4)[case], 4, exchange)
