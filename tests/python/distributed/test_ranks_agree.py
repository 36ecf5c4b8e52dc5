"""Ranks compare their arguments in the first call of a group, and in later calls if the caller asks for it."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flash_dmattn.distributed import (
    ContextParallel,
    attend_to_pieces,
    begin_exchange,
    context_parallel_dmattn,
)
from flash_dmattn.distributed._exchange.collectives import Collectives
from flash_dmattn.distributed.attention import begin_with_options
from flash_dmattn.keys.rule import SelectionRule
from ranks_as_threads import run_in_threads

N, RANKS = 8, 3


def call(
    collectives, batch=1, n=N, heads=4, heads_kv=2, dims=(16, 16), dtype=torch.float32, **changes
):
    k, v = (torch.zeros(batch, n, heads_kv, dim, dtype=dtype) for dim in dims)
    arguments = {
        "query": torch.zeros(batch, n, heads, dims[0], dtype=dtype),
        "scores": torch.zeros(batch, heads_kv, n),
        "keep_window_size": 4,
        **changes,
    }
    return context_parallel_dmattn(key=k, value=v, group=collectives, **arguments)


# Arguments of the last rank; all other ranks have the defaults or OTHER_RANKS_ARGUMENTS.
OF_LAST_RANK = {
    "batch": {"batch": 2},
    "lengths": {"n": N - 1},
    "heads": {"heads_kv": 1},
    "head_dim": {"dims": (15, 16)},
    "value_dim": {"dims": (16, 8)},
    "dtype": {"dtype": torch.bfloat16},
    "requires_grad": {"scores": torch.zeros(1, 2, N).requires_grad_()},
    "scores": {"scores": torch.zeros(1, 2, N).bfloat16()},
    "attn_bias": {"attn_bias": torch.zeros(1, 1, N)},
    "attn_bias of none": {"attn_bias": None},
    "keep_window_size": {"keep_window_size": 5},
    "recent_competes": {"recent_competes": True},
    "exchange": {"exchange": "direct"},
    "saturate": {"nonfinite": "propagate"},
    "documents": {"cu_seqlens": [0, 9, RANKS * N]},
}
OTHER_RANKS_ARGUMENTS = {
    "recent_competes": {"recent_window": 3},
    "attn_bias": {"attn_bias": torch.zeros(1, 2, N)},
}
OPTIONS_OF_LAST_RANK = {
    "query_heads": {"heads": 2},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 2.0},
    "deterministic": {"deterministic": True},
    "sink_logits": {"sink_logits": torch.zeros(4)},
    "bias_delay": {"bias_delay": 3},
    "zero_sum": {"zero_sum": True},
    "backend": {"backend": "cpu"},
}


def all_ranks_disagree(words, rank_call):
    def raised(collectives):
        with pytest.raises(
            ValueError, match=f"ranks differ: got .*{words}.* on rank {collectives.rank}"
        ):
            rank_call(collectives)

    run_in_threads(RANKS, raised)


def one_rank_raises_on_all(rank, words, rank_call, error=ValueError):
    """Asserts that a call which is wrong on one rank raises on all. rank_call: called as (collectives, is_wrong)."""

    def raised(collectives):
        is_wrong = collectives.rank == rank
        others = ValueError, rf"invalid arguments on ranks \[{rank}\]"
        expected, match = (error, words) if is_wrong else others
        with pytest.raises(expected, match=match):
            rank_call(collectives, is_wrong)

    run_in_threads(RANKS, raised)


def raises_on_all_ranks(name, changed, rank_call):
    def changed_on_the_last(collectives):
        own_changes = changed[name] if collectives.rank == RANKS - 1 else {}
        rank_call(collectives, **OTHER_RANKS_ARGUMENTS.get(name, {}) | own_changes)

    all_ranks_disagree(rf"\b{name.split()[0]}=", changed_on_the_last)


@pytest.mark.parametrize("name", [*OF_LAST_RANK, *OPTIONS_OF_LAST_RANK])
def test_another_argument_of_one_rank_raises_on_all(name):
    raises_on_all_ranks(name, OF_LAST_RANK | OPTIONS_OF_LAST_RANK, call)


@pytest.mark.parametrize("name", OPTIONS_OF_LAST_RANK)
def test_another_option_of_attend_alone_raises_on_all(name):
    def two_steps(collectives, heads=4, **options):
        k, s = torch.zeros(1, N, 2, 16), torch.zeros(1, 2, N)
        exchanged = begin_exchange(k, k, s, group=collectives, keep_window_size=4)
        attend_to_pieces(torch.zeros(1, N, heads, 16), exchanged, **options)

    raises_on_all_ranks(name, OPTIONS_OF_LAST_RANK, two_steps)


def test_different_thresholds_with_equal_hash_raise():
    assert hash(-1.0) == hash(-2.0)
    all_ranks_disagree(
        "score_threshold=-[12].0",
        lambda collectives: call(collectives, score_threshold=-1.0 - (collectives.rank == 0)),
    )


def test_numbers_beyond_64_bits_are_compared():
    outs = run_in_threads(
        RANKS, lambda collectives: call(collectives, keep_window_size=2**70, bias_delay=2**70)
    )
    assert [tuple(out.shape) for out in outs] == [(1, N, 4, 16)] * RANKS
    all_ranks_disagree(
        "keep_window_size=",
        lambda collectives: call(collectives, keep_window_size=2**70 if collectives.rank else 4),
    )


def test_ranks_with_different_masks_and_results_raise_nothing():
    def results(collectives):
        changes = {"return_lse": True, "key_mask": torch.ones(1, N).bool(), "backend": None}
        return call(collectives, **(changes if collectives.rank == 1 else {}))

    first, (second, _), third = run_in_threads(RANKS, results)
    assert first.shape == second.shape == third.shape == (1, N, 4, 16)


ERRORS_OF_LAST_RANK = {
    "key_mask": ({"key_mask": torch.ones(1, N - 1).bool()}, ValueError),
    "softcap": ({"softcap": -1.0}, ValueError),
    "scale": ({"scale": "1"}, TypeError),
    "query": ({"query": torch.zeros(1, N, 4, 16).bfloat16()}, TypeError),
    "sink_logits": ({"sink_logits": torch.zeros(3)}, ValueError),
    "bias_delay": ({"bias_delay": 1, "attn_bias": None}, ValueError),
    "zero_sum": ({"zero_sum": "no"}, TypeError),
    "return_lse": ({"return_lse": "no"}, TypeError),
    "backend": ({"backend": "gpu"}, ValueError),
    "deterministic": ({"deterministic": "no"}, TypeError),
}


@pytest.mark.parametrize("name", ERRORS_OF_LAST_RANK)
def test_option_that_raises_on_one_rank_raises_on_all(name):
    """The error comes before the exchange. After it, the other ranks would wait for the gradients of the failed one."""

    def one_call(collectives, is_last):
        collectives.swap = None
        call(collectives, **(changes if is_last else {}))

    changes, error = ERRORS_OF_LAST_RANK[name]
    one_rank_raises_on_all(RANKS - 1, f"^{name}: got", one_call, error)


def test_ranks_in_different_functions_raise_on_all():
    def different_functions(collectives):
        if collectives.rank:
            call(collectives)
        else:
            ContextParallel(collectives).gather(torch.zeros(1, N))

    all_ranks_disagree("(begin_exchange|gather)", different_functions)


def test_later_calls_compare_on_request_or_in_debug_mode(monkeypatch):
    def comparisons(collectives):
        gathered_parts = []
        gather = collectives.all_gather
        collectives.all_gather = lambda part: gathered_parts.append(part) or gather(part)
        counts = []
        for check in (None, None, True, False):
            call(collectives, check=check)
            counts.append(len(gathered_parts))
        ContextParallel(collectives).roll(
            torch.zeros(1, N), 0
        )  # the first call of another function
        return [*counts, len(gathered_parts)]

    assert run_in_threads(RANKS, comparisons) == [[1, 1, 2, 2, 3]] * RANKS
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.INFO)
    assert run_in_threads(RANKS, comparisons) == [[1, 2, 3, 3, 4]] * RANKS


PIECES = {
    "shape of gather": lambda cp, odd: cp.gather(torch.zeros(1, N - odd, 2)),
    "dtype": lambda cp, odd: cp.gather(torch.zeros(1, N, dtype=torch.int64 if odd else None)),
    "shifts": lambda cp, odd: cp.roll(torch.zeros(1, N, 2), 1 + odd),
    "requires_grad": lambda cp, odd: cp.roll(torch.zeros(1, N).requires_grad_(bool(odd)), 1),
    "shape of mean": lambda cp, odd: cp.mean(torch.zeros(1 + odd), torch.ones(1 + odd)),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_other_shapes_raise_on_all(name):
    all_ranks_disagree(
        f"{name.split()[0]}=",
        lambda collectives: PIECES[name](ContextParallel(collectives), int(collectives.rank == 0)),
    )


def test_tokens_that_move_beyond_a_piece_raise_on_all():
    one_rank_raises_on_all(
        0,
        "shifts: got 9, expected at most the 8 tokens",
        lambda collectives, is_wrong: ContextParallel(collectives).roll(
            torch.zeros(1, N, 2), N + 1 if is_wrong else 1
        ),
    )


TOKENS = torch.arange(2 * N).view(2, N)
BATCH = {
    "input_ids": TOKENS,
    "labels": TOKENS,
    "position_ids": torch.arange(N)[None],
    "attention_mask": torch.ones(2, N, dtype=torch.int64),
}
LONG = torch.arange(2 * 8191).view(2, -1)
# (arguments of all ranks, arguments that differ on the first rank).
OTHER_BATCHES = {
    "input_ids": (BATCH, {"input_ids": TOKENS.flip(0)}),
    "labels": (BATCH, {"labels": TOKENS + 1}),
    "position_ids": (BATCH, {"position_ids": torch.arange(N)[None] + 1}),
    "attention_mask": (BATCH, {"attention_mask": torch.ones(2, N, dtype=torch.int64).tril()}),
    "multiple": (BATCH, {"multiple": 4}),
    "pad_token_id": (BATCH, {"pad_token_id": 7}),
    "input_ids in another order": ({"input_ids": LONG}, {"input_ids": LONG.flip(0)}),
    "attention_mask of other numbers": (
        {"input_ids": TOKENS, "attention_mask": torch.zeros(2, N, dtype=torch.int64)}, {"attention_mask": torch.full((2, N), 256)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_another_batch_of_one_rank_raises_on_all(name):
    batch, first_rank_only = OTHER_BATCHES[name]
    all_ranks_disagree(
        f"{name.split()[0]}=",
        lambda collectives: ContextParallel(collectives).shard(
            **batch | ({} if collectives.rank else first_rank_only)
        ),
    )


def test_batch_that_raises_on_one_rank_raises_on_all():
    one_rank_raises_on_all(
        1,
        "labels: got shape",
        lambda collectives, is_wrong: ContextParallel(collectives).shard(
            TOKENS, TOKENS[: 1 if is_wrong else 2]
        ),
    )


@pytest.mark.parametrize(
    ("backends", "expected"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_comparison_uses_a_device_of_the_group(monkeypatch, backends, expected):
    """The device depends on the group alone, because ranks may have tensors on different devices."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert Collectives._device(SimpleNamespace(group=None)) == expected


# {argument: (a call with a wrong argument on rank n and right ones on the others, the error)}
WRONG_CALLS = {
    "pad_token_id": (lambda cp, n: cp.shard(TOKENS, pad_token_id=None if n else 0), TypeError),
    "multiple": (lambda cp, n: cp.shard(TOKENS, multiple=1.5 if n else 1), TypeError),
    "position_ids": (
        lambda cp, n: cp.shard(TOKENS, position_ids=[0] if n else None, attention_mask=TOKENS),
        TypeError,
    ),
    "shifts": (lambda cp, n: cp.roll(torch.zeros(1, N), 1.0 if n else 1), TypeError),
    "local": (lambda cp, n: cp.roll(torch.zeros(N) if n else torch.zeros(1, N), 1), ValueError),
    "length": (lambda cp, n: cp.gather(torch.zeros(1, N), "x" if n else N), TypeError),
    "total": (lambda cp, n: cp.mean("x" if n else torch.zeros(()), 1), TypeError),
    "cu_seqlens": (lambda cp, n: cp.shard(TOKENS, cu_seqlens=[2 if n else 0, N]), ValueError),
    "lengths": (lambda cp, n: call(cp.collectives, lengths=N if n else None), TypeError),
    "check": (lambda cp, n: call(cp.collectives, check="no" if n else None), TypeError),
    "options": (
        lambda cp, n: (
            call(cp.collectives) if not n else begin_with(cp.collectives, {"softcp": 2.0})
        ),
        TypeError,
    ),
}


def begin_with(collectives, options, query=True):
    k, s = torch.zeros(1, N, 2, 16), torch.zeros(1, 2, N)
    q = torch.zeros(1, N, 4, 16) if query else None
    return begin_with_options(k, k, s, SelectionRule(4), q, options, group=collectives)


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_argument_of_one_rank_raises_on_all(name):
    wrong_call, error = WRONG_CALLS[name]
    one_rank_raises_on_all(
        RANKS - 1,
        f"^{name}: got",
        lambda collectives, n: wrong_call(ContextParallel(collectives), n),
        error,
    )


def test_attend_options_are_compared_if_begin_had_a_query():
    def other_options(collectives):
        exchanged = begin_with(collectives, None)
        attend_to_pieces(
            torch.zeros(1, N, 4, 16), exchanged, softcap=2.0 if collectives.rank else None
        )

    all_ranks_disagree("softcap=", other_options)


def test_begin_options_without_query_or_unequal_to_attend_raise():
    def raised(collectives):
        with pytest.raises(
            ValueError, match="options: got options of attend_to_pieces without query"
        ):
            begin_with(collectives, {"softcap": 2.0}, query=False)
        exchanged = begin_with(collectives, {"softcap": 2.0})
        query, sinks = torch.zeros(1, N, 4, 16), torch.zeros(4)
        for message, wrong in {
            "softcap: got 3.0, expected 2.0 as in begin_exchange": {"softcap": 3.0},
            "softcap: got None, expected 2.0 as in begin_exchange": {},
            "scale: got 0.5, expected None as in begin_exchange": {"softcap": 2.0, "scale": 0.5},
            "sink_logits: got 'a tensor', expected None as": {"softcap": 2.0, "sink_logits": sinks},
        }.items():
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                attend_to_pieces(query, exchanged, **wrong)
        exchanged = begin_with(collectives, {"sink_logits": sinks})
        with pytest.raises(
            ValueError, match="^sink_logits: got another tensor than begin_exchange"
        ):
            attend_to_pieces(query, exchanged, sink_logits=sinks.clone())

    run_in_threads(RANKS, raised)


def test_query_under_autocast_is_checked_as_attention_takes_it(monkeypatch):
    from flash_dmattn.distributed._exchange import arguments as module

    dtypes = []
    monkeypatch.setattr(module, "check_device", lambda query, backend: dtypes.append(query.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        query, key = torch.zeros(1, N, 4, 16), torch.zeros(1, N, 2, 16, dtype=torch.bfloat16)
        module.AttendOptions().check(query, key, N, None)
    assert dtypes == [torch.bfloat16]
