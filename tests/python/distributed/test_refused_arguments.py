"""Arguments that context parallelism cannot take are refused by name, before anything is exchanged."""

import pytest
import torch

from flash_dmattn.distributed import begin_exchange, boundary_state, context_parallel_dmattn
from ranks_as_threads import run_in_threads

N, RANKS = 8, 2


def call(wire, **changes):
    arguments = {
        "query": torch.randn(1, N, 4, 16),
        "key": torch.randn(1, N, 2, 16),
        "value": torch.randn(1, N, 2, 16),
        "scores": torch.randn(1, 2, N),
        "keep_window_size": 4,
        **changes,
    }
    return context_parallel_dmattn(group=wire, **arguments)


REFUSED = {
    "global": ({"selection": "global"}, ValueError, "selection: got 'global'.*later ranks"),
    "no_causality": ({"is_causal": False}, ValueError, "is_causal: got False"),
    "no_window": ({"keep_window_size": None}, ValueError, "keep_window_size: got None.*later ranks see all keys"),
    "threshold_alone": (
        {"keep_window_size": None, "score_threshold": 0.5}, ValueError, "keep_window_size: got None",
    ),
    "mask_of_pairs": (
        {"key_mask": torch.ones(N, RANKS * N).bool()}, ValueError, "key_mask: got.*pairs of tokens",
    ),
    "scores_of_query_heads": (
        {"scores": torch.randn(1, 4, N)}, ValueError, "scores: got shape",
    ),
    "float64_scores": ({"scores": torch.randn(1, 2, N).double()}, TypeError, "scores: got torch.float64"),
    "no_scores": ({"scores": None}, TypeError, "scores: got NoneType"),
    "head_tail_order": (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]])},
        ValueError, "position_ids: got positions that go on elsewhere.*head-tail",
    ),
    "positions_of_a_piece": ({"position_ids": torch.arange(N)[None]}, ValueError, "position_ids: got.*whole sequence"),
    "two_kinds_of_documents": (
        {"position_ids": torch.arange(2 * N)[None], "cu_seqlens": [0, 2 * N]}, ValueError, "position_ids: got positions together",
    ),
    "falling_offsets": ({"cu_seqlens": [0, 9, 5]}, ValueError, "cu_seqlens: got"),
    "lengths_of_others": ({"lengths": [N, N, N]}, ValueError, "lengths: got"),
    "another_length": ({"lengths": [N + 1, N + 1]}, ValueError, "lengths: got 9"),
    "unknown_exchange": ({"exchange": "ring"}, ValueError, "exchange: got 'ring'"),
    "unknown_bias": ({"attn_bias": "score"}, ValueError, "attn_bias: got 'score'"),
    "bias_of_pairs": ({"attn_bias": torch.randn(1, 2, N, N)}, ValueError, "attn_bias: got shape"),
    "query_of_another_length": ({"query": torch.randn(1, N - 1, 4, 16)}, ValueError, "query: got 7 queries"),
    "no_headroom": ({"headroom": True}, ValueError, "key: got 8 rows, expected 12"),
    "windows_of_other_heads": ({"keep_window_size": (3, 4, 5)}, ValueError, "keep_window_size: got 3 sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_argument_raises_naming_it(name):
    changes, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        run_in_threads(RANKS, lambda wire: call(wire, **changes))


def test_group_of_another_type_raises():
    with pytest.raises(TypeError, match="group: got str"):
        call("cp")


def test_boundary_state_of_another_bias_raises():
    def state(wire):
        k, s = torch.randn(1, N, 2, 16), torch.randn(1, 2, N)
        boundary_state(begin_exchange(k, k, s, group=wire, keep_window_size=4, attn_bias=s + 1))

    with pytest.raises(ValueError, match="exchanged: got another bias than the scores"):
        run_in_threads(RANKS, state)
