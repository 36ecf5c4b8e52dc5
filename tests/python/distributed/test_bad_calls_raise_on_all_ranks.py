"""A bad call of context parallelism raises on all ranks before anything is exchanged: an argument of a rank is
wrong, or ranks differ."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flash_dmattn.distributed import (
    ContextParallel,
    attend_to_pieces,
    begin_exchange,
    boundary_places,
    boundary_state,
    context_parallel_dmattn,
    linear_with_headroom,
)
from flash_dmattn.distributed._exchange.arguments import AttendOptions, ExchangeCall
from flash_dmattn.distributed._exchange.collectives import Collectives
from flash_dmattn.keys.rule import SelectionRule
from ranks_as_threads import run_in_threads

N, RANKS = 8, 2
TOKENS = torch.arange(N)[None]
POSITIONS = torch.arange(RANKS * N)[None]
PIECE = torch.zeros(1, N)


def tensors(batch=1, n=N, heads=4, heads_kv=2, dims=(16, 16), dtype=torch.float32):
    key, value = (torch.zeros(batch, n, heads_kv, dim, dtype=dtype) for dim in dims)
    query = torch.zeros(batch, n, heads, dims[0], dtype=dtype)
    return {"query": query, "key": key, "value": value, "scores": torch.zeros(batch, heads_kv, n)}


INPUTS = tensors()
Q, K, _, S = INPUTS.values()


def call(cp, **changes):
    arguments = INPUTS | {"keep_window_size": 4} | changes
    return context_parallel_dmattn(group=cp.collectives, **arguments)


def begin(cp, **changes):
    arguments = {"key": K, "value": K, "scores": S} | changes
    return begin_exchange(group=cp.collectives, **{"keep_window_size": 4} | arguments)


CALLS = {
    "attention": call,
    "begin": begin,
    "attend": lambda cp, query=Q, **changes: attend_to_pieces(query, begin(cp), **changes),
    "shard": lambda cp, **changes: cp.shard(**{"input_ids": TOKENS} | changes),
    "gather": lambda cp, **changes: cp.gather(**{"local": PIECE} | changes),
    "roll": lambda cp, **changes: cp.roll(**{"local": PIECE, "shifts": 1} | changes),
    "mean": lambda cp, **changes: cp.mean(**{"total": torch.zeros(()), "count": 1} | changes),
}


def run_ranks(rank_call):
    return run_in_threads(RANKS, lambda collectives: rank_call(ContextParallel(collectives)))


# ---- Ranks differ ------------------------------------------------------------------------------------

# (call, what the last rank changes, the name in the error, what all ranks change)
DIFFERENT = [
    ("attention", tensors(dims=(16, 8)), "value_dim"),
    ("attention", {"scores": S.bfloat16()}, "scores"),
    ("attention", {"scores": S.clone().requires_grad_()}, "requires_grad"),
    # -1 and -2 have the same hash in Python.
    ("attention", {"score_threshold": -1.0}, "score_threshold", {"score_threshold": -2.0}),
    ("attend", {"softcap": 2.0}, "softcap"),
    ("gather", {"local": TOKENS}, "dtype"),
    ("roll", {"shifts": 2}, "shifts"),
    ("roll", {"local": PIECE.clone().requires_grad_()}, "requires_grad"),
    ("mean", {"total": torch.zeros(2), "count": torch.ones(2)}, "shape"),
    (
        "shard",
        {"attention_mask": 0 * TOKENS + 256},
        "attention_mask",
        {"attention_mask": 0 * TOKENS},
    ),
]


def all_ranks_disagree(words, rank_call):
    def raised(cp):
        with pytest.raises(ValueError, match=f"ranks differ: got .*{words}.* on rank {cp.rank}"):
            rank_call(cp)

    run_ranks(raised)


@pytest.mark.parametrize("row", DIFFERENT, ids=lambda row: f"{row[0]} {row[2]}")
def test_another_argument_of_one_rank_raises_on_all(row):
    function, changes, name, of_all = (*row, {})[:4]
    all_ranks_disagree(
        rf"\b{name}=",
        lambda cp: CALLS[function](cp, **of_all | (changes if cp.rank == RANKS - 1 else {})),
    )


# Another value of every argument that ranks have to share.
OTHERS = {
    "attention": tensors(2, 9, 6, 3, dims=(8, 4), dtype=torch.bfloat16) | {
        "key": torch.zeros(2, 9, 3, 8).bfloat16().requires_grad_(), "attn_bias": torch.zeros(2, 3, 9), "keep_window_size": 5,
        "recent_window": 3, "recent_competes": True, "sink_tokens": 1, "score_threshold": -1.0, "cu_seqlens": [0, 9, 18],
        "lengths": [9, 9], "exchange": "two_hops", "nonfinite": "propagate", "scale": 0.5, "softcap": 2.0, "deterministic": True,
        "sink_logits": torch.zeros(6), "bias_delay": 3, "zero_sum": True, "backend": "cpu",
    },
    "shard": {
        "input_ids": TOKENS.flip(1), "labels": TOKENS, "position_ids": TOKENS, "attention_mask": TOKENS > 2, "cu_seqlens": [0, N],
        "multiple": 4, "pad_token_id": 7,
    },
}  # fmt: skip
# What ranks compare of other arguments of attention.
DERIVED = (
    "batch heads head_dim value_dim dtype query_heads requires_grad documents saturate".split()
)
# Arguments of attention that may differ, that have a single value, or that become documents.
NOT_COMPARED = "key_mask headroom check stream return_lse selection position_ids".split()


@pytest.mark.parametrize("function", OTHERS)
def test_all_arguments_that_ranks_share_are_compared(function):
    def compared(cp, **changes):
        seen = []
        cp.collectives._compare = lambda call, error, arguments: seen.append(arguments())
        CALLS[function](cp, **changes)
        return seen[0]

    usual, other = (run_ranks(partial(compared, **c))[0] for c in ({}, OTHERS[function]))
    changed = {name for name in usual if repr(usual[name]) != repr(other[name])}
    expected = {*OTHERS[function]}
    if function == "attention":
        fields = {*ExchangeCall._fields, *SelectionRule._fields, *AttendOptions._fields} - {"rule"}
        assert fields - expected == {*NOT_COMPARED}
        expected = expected - {"query", "key", "value", "cu_seqlens", "nonfinite"} | {*DERIVED}
    assert changed == expected


def test_numbers_beyond_64_bits_are_accepted():
    outs = run_ranks(lambda cp: call(cp, keep_window_size=2**70, bias_delay=2**70))
    assert [tuple(out.shape) for out in outs] == [(1, N, 4, 16)] * RANKS


def test_ranks_with_different_masks_and_results_raise_nothing():
    changes = {"return_lse": True, "key_mask": torch.ones(1, N).bool(), "backend": None}
    first, (second, _) = run_ranks(lambda cp: call(cp, **(changes if cp.rank else {})))
    assert first.shape == second.shape == (1, N, 4, 16)


def test_ranks_in_different_functions_raise_on_all():
    """Both compare the same arguments."""
    all_ranks_disagree(
        "(mean|gather)", lambda cp: cp.mean(PIECE, PIECE) if cp.rank else cp.gather(PIECE)
    )


def test_later_calls_compare_on_request_or_in_debug_mode(monkeypatch):
    def comparisons(cp):
        gathered_parts = []
        gather = cp.collectives.all_gather
        cp.collectives.all_gather = lambda part: gathered_parts.append(part) or gather(part)
        counts = []
        for check in (None, None, True, False):
            call(cp, check=check)
            counts.append(len(gathered_parts))
        cp.roll(PIECE, 0)  # the first call of another function
        return [*counts, len(gathered_parts)]

    assert run_ranks(comparisons) == [[1, 1, 2, 2, 3]] * RANKS
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.INFO)
    assert run_ranks(comparisons) == [[1, 2, 3, 3, 4]] * RANKS


@pytest.mark.parametrize(
    ("backends", "expected"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_comparison_uses_a_device_of_the_group(monkeypatch, backends, expected):
    """The device depends on the group alone, because ranks may have tensors on different devices."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert Collectives._device(SimpleNamespace(group=None)) == expected


# ---- A call that is wrong on one rank ----------------------------------------------------------------

# (call, what the last rank changes, its error)
WRONG = [
    ("attention", {"selection": "global"}, ValueError, "selection: got 'global'.*later ranks"),
    ("attention", {"keep_window_size": None}, ValueError, "keep_window_size: got None.*a rank have room for that many"),
    ("attention", {"key_mask": torch.ones(N, RANKS * N).bool()}, ValueError, "key_mask: got.*pairs of tokens"),
    ("attention", {"scores": torch.zeros(1, 4, N)}, ValueError, "scores: got shape"),
    ("attention", {"scores": S.double()}, TypeError, "scores: got torch.float64"),
    ("attention", {"position_ids": torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]])}, ValueError,
     "position_ids: got positions that go on elsewhere.*head-tail"),
    ("attention", {"position_ids": TOKENS}, ValueError, "position_ids: got.*whole sequence"),
    ("attention", {"position_ids": POSITIONS, "cu_seqlens": [0, 2 * N]}, ValueError, "position_ids: got positions together"),
    ("attention", {"cu_seqlens": [0, 2.5, 4]}, TypeError, "cu_seqlens: got 2.5, expected an integer"),
    ("attention", {"cu_seqlens": [0, 2**40]}, ValueError, "cu_seqlens: got 1099511627776, expected less"),
    ("attention", {"cu_seqlens": "ab"}, TypeError, "cu_seqlens: got str, expected a tensor or a sequence of offsets"),
    ("attention", {"cu_seqlens": torch.tensor([[0, 4], [0, 5]])}, ValueError, r"cu_seqlens: got shape \(2, 2\), expected"),
    ("attention", {"lengths": [N, N, N]}, ValueError, "lengths: got"),
    ("attention", {"lengths": [N + 1, N + 1]}, ValueError, "lengths: got 9"),
    ("attention", {"exchange": "ring"}, ValueError, "exchange: got 'ring'"),
    ("attention", {"attn_bias": "score"}, ValueError, "attn_bias: got 'score'"),
    ("attention", {"query": Q[:, 1:]}, ValueError, "query: got 7 queries"),
    ("attention", {"headroom": True}, ValueError, "key: got 8 rows, expected 12"),
    ("attention", {"return_lse": "no"}, TypeError, "return_lse: got"),
    ("attend", {"softcap": -1.0}, ValueError, "softcap: got"),
    ("begin", {"stream": "x"}, TypeError, "stream: got str, expected a torch.cuda.Stream or None"),
    ("shard", {"cu_seqlens": torch.tensor([2, 8])}, ValueError,
     r"cu_seqlens: got \[2, 8\], expected offsets that begin at 0, never fall and end at 8 at most"),
    ("shard", {"position_ids": TOKENS[:, 1:], "attention_mask": PIECE}, ValueError, "position_ids: got torch.int64 of shape"),
    ("shard", {"attention_mask": PIECE}, TypeError, "attention_mask: got torch.float32, expected torch.bool"),
    ("shard", {"input_ids": PIECE}, TypeError, "input_ids: got torch.float32, expected torch.int32 or"),
    ("shard", {"labels": TOKENS[:, 1:]}, ValueError, "labels: got shape"),
    ("shard", {"multiple": 0}, ValueError, "multiple: got 0, expected 1 or more"),
    ("gather", {"local": torch.zeros(N)}, ValueError, r"local: got shape \(8,\), expected \[B, n, ...\]"),
    ("mean", {"count": -2}, ValueError, "count: got -2, expected 0 or more"),
    ("mean", {"total": torch.tensor(5)}, TypeError, "total: got torch.int64, expected a floating point dtype"),
    ("roll", {"shifts": N + 1}, ValueError, "shifts: got 9, expected at most the 8 tokens"),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row[0]} {row[3]}")
def test_wrong_argument_of_one_rank_raises_on_all(row):
    """The error comes before the exchange. After it, the other ranks would wait for the gradients of the failed one."""
    function, changes, error, words = row

    def raised(cp):
        if cp.rank == RANKS - 1:
            with pytest.raises(error, match=f"^{words}"):
                CALLS[function](cp, **changes)
        else:
            others = rf"^group: got invalid arguments on ranks \[{RANKS - 1}\]"
            with pytest.raises(ValueError, match=others):
                CALLS[function](cp)

    run_ranks(raised)


UNDER_VMAP = "got a call under a transform of torch.func"
# Nothing is exchanged, or has been already.
WRONG_ON_ALL_RANKS = [
    (lambda cp: call(cp, is_causal=False), TypeError, "is_causal: got an unknown argument, expected one in the"),
    (lambda cp: cp.gather(TOKENS, 99), ValueError, "length: got 99, expected at most 16, the tokens of all pieces"),
    (lambda cp: attend_to_pieces(Q, None), TypeError, "exchanged: got NoneType, expected the result of begin_exchange"),
    (lambda cp: attend_to_pieces(Q, [begin(cp)]), TypeError, "exchanged: got list, expected the result"),
    (lambda cp: boundary_state(None), TypeError, "exchanged: got NoneType, expected the result"),
    (lambda cp: boundary_state(begin(cp, attn_bias=S + 1)), ValueError, "exchanged: got another bias than the scores"),
    (lambda cp: boundary_places(cp.collectives, "x", 2), TypeError, "tokens: got 'x', expected an integer"),
    (lambda cp: boundary_places("cp", N, 2), TypeError, "group: got str"),
    (lambda cp: torch.vmap(lambda x: call(cp, query=x))(Q[None]), RuntimeError, f"query: {UNDER_VMAP}"),
    (lambda cp: torch.vmap(lambda x: call(cp, key=x))(K[None]), RuntimeError, f"key: {UNDER_VMAP}"),
    (lambda cp: torch.vmap(lambda x: x + call(cp).sum())(torch.ones(2)), RuntimeError, f"flash_dmattn: {UNDER_VMAP}"),
    (lambda cp: torch.func.grad(lambda x: call(cp, query=x).sum())(Q), RuntimeError, "query: got a tensor of torch.func.grad"),
    (lambda cp: torch.func.grad(lambda x: call(cp, key=x).sum())(K), RuntimeError, "key: got a tensor of torch.func.grad"),
    (lambda cp: torch.func.jvp(lambda x: call(cp, key=x), (K,), (K,)), RuntimeError, "key: got a tensor with a tangent"),
    (lambda cp: torch.vmap(lambda x: cp.mean(x.sum(), 1))(PIECE[None]), RuntimeError, f"total: {UNDER_VMAP}"),
    (lambda cp: torch.vmap(lambda x: cp.roll(x, 1))(PIECE[None]), RuntimeError, f"local: {UNDER_VMAP}"),
    (lambda cp: torch.vmap(cp.gather)(PIECE[None]), RuntimeError, f"local: {UNDER_VMAP}"),
    (lambda cp: torch.vmap(lambda x: linear_with_headroom(x, torch.ones(1, 1), 2))(PIECE[None, ..., None]), RuntimeError,
     f"hidden: {UNDER_VMAP}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong_call", "error", "words"), WRONG_ON_ALL_RANKS, ids=[row[2] for row in WRONG_ON_ALL_RANKS]
)
def test_wrong_call_of_all_ranks_raises_naming_the_argument(wrong_call, error, words):
    with pytest.raises(error, match=f"^{words}"):
        run_ranks(wrong_call)


def test_query_under_autocast_is_checked_as_attention_takes_it(monkeypatch):
    from flash_dmattn.distributed._exchange import arguments as module

    dtypes = []
    monkeypatch.setattr(module, "check_device", lambda query, backend: dtypes.append(query.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        AttendOptions().check(Q, K.bfloat16(), N, None)
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("attn_bias", ["scores", None])
def test_second_derivative_of_pieces_raises_on_all_ranks(attn_bias):
    def refused(cp):
        torch.manual_seed(cp.rank)
        q, k, v, s = map(torch.randn_like, tensors().values())
        leaves = [k.requires_grad_(), *([s.requires_grad_()] if attn_bias else [])]
        out = call(cp, query=q, key=k, value=v, scores=s, attn_bias=attn_bias)
        loss = out.square().sum()
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        assert all(map(torch.equal, gradients, expected))
        for gradient in gradients:
            with pytest.raises(RuntimeError, match="^create_graph: got True, expected False"):
                gradient.sum().backward(retain_graph=True)

    run_ranks(refused)
