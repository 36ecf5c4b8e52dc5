"""Ranks compare their arguments in the first calls of a group, and where the caller asks for it."""

import pytest
import torch
import torch.distributed as dist

from ranks_as_threads import run_in_threads

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

N, RANKS = 8, 3


def call(wire, batch=1, value_dim=16, **changes):
    from flash_dmattn.distributed import context_parallel_dmattn

    q, k, s = torch.zeros(batch, N, 4, 16), torch.zeros(batch, N, 2, 16), torch.zeros(batch, 2, N)
    v = torch.zeros(batch, N, 2, value_dim)
    arguments = {"keep_window_size": 4, **changes}
    return context_parallel_dmattn(q, k, v, s, group=wire, **arguments)


OF_LAST_RANK = {
    "batch": {"batch": 2},
    "value_dim": {"value_dim": 8},
    "keep_window_size": {"keep_window_size": 5},
    "rule": {"recent_competes": False},
    "exchange": {"exchange": "direct"},
    "nonfinite": {"nonfinite": "propagate"},
    "documents": {"cu_seqlens": [0, 9, RANKS * N]},
}


@pytest.mark.parametrize("name", OF_LAST_RANK)
def test_another_argument_of_one_rank_raises_on_all(name):
    def raised(wire):
        changes = OF_LAST_RANK[name] if wire.rank == RANKS - 1 else {}
        if name == "rule":
            changes = {"recent_window": 3, **changes}
        with pytest.raises(ValueError, match=f"ranks that disagree.*{name}"):
            call(wire, **changes)
        return True

    assert run_in_threads(RANKS, raised) == [True] * RANKS


def test_later_calls_compare_nothing_unless_asked(monkeypatch):
    from flash_dmattn.distributed import wire as module

    monkeypatch.setattr(module, "CHECKED_CALLS", 2)

    def comparisons(wire):
        made = []
        gather = wire.all_gather
        wire.all_gather = lambda part: made.append(part) or gather(part)
        counts = []
        for check in (None, None, None, True, False):
            call(wire, check=check)
            counts.append(len(made))
        return counts

    assert run_in_threads(RANKS, comparisons) == [[1, 2, 2, 3, 3]] * RANKS


def test_tokens_that_move_beyond_a_piece_raise():
    from flash_dmattn.distributed import ContextParallel

    def roll(wire):
        ContextParallel(wire).roll(torch.zeros(1, N, 2), N + 1)

    with pytest.raises(ValueError, match="shifts: got 9, expected at most the 8 tokens"):
        run_in_threads(RANKS, roll)
