"""Tests more ranks than processors, as threads of one process, and that the comparison notices mistakes."""

import pytest
import torch

from flash_dmattn.distributed import _exchange, begin_exchange
from flash_dmattn.distributed._exchange.kinds import choose_exchange
from flash_dmattn.distributed._exchange.wire import ranks_per_node
from ranks_as_threads import ThreadWire, _Meeting, run_in_threads
from sharded_cases import Case, cases, compare_with_one_process, in_one_process


def compare(case, ranks, exchanges):
    """Compares a case with one process. exchanges: (exchange, ranks per node)."""
    whole = in_one_process(case, seed=ranks)
    for exchange, node_size in exchanges:
        run_in_threads(
            ranks,
            lambda wire, exchange=exchange: compare_with_one_process(
                whole, wire, wire.rank, exchange
            ),
            node_size,
        )


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
    exchanges = ("direct", 1), ("two_hops", 1), ("nodes", 2), ("nodes", 4), ("nodes", 8)
    compare(cases(8)[name], 8, exchanges)


@pytest.mark.parametrize("name", ["ties", "documents of each row", "sinks of documents"])
def test_sixteen_ranks_of_several_nodes_equal_one_process(name):
    compare(cases(16)[name], 16, [("nodes", 4), ("nodes", 8)])


@pytest.mark.parametrize(
    "case, exchange",
    [
        (Case([6] * 64, 17, "ties", batch=1), ("two_hops", 1)),
        (Case([4] * 64, 9, batch=1, rule={"recent_window": 7, "sink_tokens": 2}), ("nodes", 8)),
    ],
    ids=["window", "rule"],
)
def test_sixty_four_ranks_equal_one_process(case, exchange):
    compare(case, 64, [exchange])


def test_nodes_send_one_part_of_one_state_to_each_later_node():
    ranks, size, w, n, heads, d = 16, 4, 16, 24, 4, 16
    torch.manual_seed(0)
    key, scores = torch.randn(1, ranks * n, heads, d), torch.randn(1, heads, ranks * n)

    def sent_by(wire):
        rows = slice(wire.rank * n, wire.rank * n + n)
        begin_exchange(
            key[:, rows], key[:, rows], scores[..., rows],
            group=wire, keep_window_size=w, exchange="nodes", check=False,
        )  # fmt: skip
        return wire.sent_to

    state = w * heads * (2 * d * 4 + 8)  # bytes of w keys of all heads with scores and positions
    for rank, sent in enumerate(run_in_threads(ranks, sent_by, size)):
        node, local = divmod(rank, size)
        for other in range(ranks):
            expected = 2 * state // size if other // size == node else 0
            if other % size == local and other // size > node:
                expected = state // size
            assert sent[other] == expected


@pytest.mark.parametrize(
    ("ranks", "host_size", "size"),
    [
        (range(16), 8, 8),
        (range(0, 16, 2), 8, 4),  # every second GPU
        (range(0, 16, 8), 8, 1),  # one of each host
        (range(4), 8, 4),
        ([0, 1, 2, 8], 8, 1),  # hosts have different numbers
    ],
)
def test_ranks_of_a_node_are_found(ranks, host_size, size):
    assert ranks_per_node(list(ranks), host_size) == size


@pytest.mark.parametrize(
    ("ranks", "node_size", "expected"),
    [
        (2, 2, "Direct"),
        (8, 8, "TwoHops"),
        (16, 8, "Nodes"),
        (128, 8, "Nodes"),
        (136, 8, "TwoHops"),
        (18, 3, "Nodes"),
        (21, 3, "TwoHops"),
        (4, 2, "TwoHops"),
    ],
)
def test_exchange_follows_ranks_and_nodes(ranks, node_size, expected):
    wire = ThreadWire(_Meeting(ranks), 0, node_size)
    assert choose_exchange("auto", wire).__name__ == expected


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
    return lambda notes: function(notes) + (function(notes) > 20).int()


def _smaller_summary(function):
    def init(self, wire, boundary):
        function(self, wire, boundary)
        self.summary = max(0, self.summary - 1)

    return init


def _last_two(function):
    return lambda self: self.rank >= self.ranks() - 2


MUTANTS = {
    "gradients are not returned": ("kinds.Direct.give_back", _skip_first, "ties"),
    "gradients of two hops are not returned": ("kinds.TwoHops.give_back", _skip_first, "ties"),
    "gradients of nodes are not returned": ("kinds.Nodes.give_back", _skip_first, "ties"),
    "a node gives a key less": ("kinds.Nodes.__init__", _smaller_summary, "ties"),
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
        compare(cases(4)[case], 4, [("direct", 1), ("two_hops", 1), ("nodes", 2)])
