"""Context parallelism refuses arguments that it does not support, by name and before anything is exchanged."""

import pytest
import torch

from flash_dmattn.distributed import (
    ContextParallel,
    attend_to_pieces,
    begin_exchange,
    boundary_places,
    boundary_state,
    context_parallel_dmattn,
    linear_with_headroom,
)
from flash_dmattn.distributed.attention import begin_with_options
from flash_dmattn.keys.rule import SelectionRule
from ranks_as_threads import run_in_threads

N, RANKS = 8, 2


def call(collectives, **changes):
    make = {
        "query": lambda: torch.randn(1, N, 4, 16),
        "key": lambda: torch.randn(1, N, 2, 16),
        "value": lambda: torch.randn(1, N, 2, 16),
        "scores": lambda: torch.randn(1, 2, N),
        "keep_window_size": lambda: 4,
    }
    arguments = {name: make[name]() for name in make if name not in changes} | changes
    return context_parallel_dmattn(group=collectives, **arguments)


REFUSED = {
    "global": ({"selection": "global"}, ValueError, "selection: got 'global'.*later ranks"),
    "no_causality": ({"is_causal": False}, ValueError, "is_causal: got False"),
    "no_window": ({"keep_window_size": None}, ValueError, "keep_window_size: got None.*a rank have room for that many"),
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
    "fractional_offset": ({"cu_seqlens": [0, 2.5, 4]}, TypeError, "^cu_seqlens: got 2.5, expected an integer"),
    "offset_beyond_int32": ({"cu_seqlens": [0, 2**40]}, ValueError, "^cu_seqlens: got 1099511627776, expected less"),
    "offsets_as_text": ({"cu_seqlens": "ab"}, TypeError, "^cu_seqlens: got str, expected a tensor or a sequence of offsets"),
    "offsets_of_other_rows": (
        {"cu_seqlens": torch.tensor([[0, 4], [0, 5]])}, ValueError, r"^cu_seqlens: got shape \(2, 2\), expected",
    ),
    "lengths_of_others": ({"lengths": [N, N, N]}, ValueError, "lengths: got"),
    "one_length": ({"lengths": N}, TypeError, "^lengths: got int, expected a number for each of 2 ranks"),
    "check_as_text": ({"check": "no"}, TypeError, "^check: got 'no', expected True or False"),
    "another_length": ({"lengths": [N + 1, N + 1]}, ValueError, "lengths: got 9"),
    "unknown_exchange": ({"exchange": "ring"}, ValueError, "exchange: got 'ring'"),
    "list_of_exchanges": ({"exchange": ["direct"]}, ValueError, r"^exchange: got \['direct'\]"),
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
        run_in_threads(RANKS, lambda collectives: call(collectives, **changes))


IDS = torch.zeros(1, N, dtype=torch.int64)


def begin(collectives, **changes):
    k = torch.zeros(1, N, 2, 16)
    arguments = {"scores": torch.zeros(1, 2, N), "keep_window_size": 4, **changes}
    return begin_exchange(k, k, group=collectives, **arguments)


REFUSED_CALLS = {
    "shard offsets that begin later": (
        lambda cp: cp.shard(IDS, cu_seqlens=torch.tensor([2, 8])),
        ValueError, r"cu_seqlens: got \[2, 8\], expected offsets that begin at 0, never fall and end at 8 at most",
    ),
    "shard float offsets": (
        lambda cp: cp.shard(IDS, cu_seqlens=torch.tensor([0.0, 2.5, 8.0])), ValueError, "cu_seqlens: got torch.float32",
    ),
    "shard no offsets": (lambda cp: cp.shard(IDS, cu_seqlens=[]), ValueError, r"cu_seqlens: got torch.int32 of shape \(0,\)"),
    "shard offsets of rows": (
        lambda cp: cp.shard(IDS, cu_seqlens=torch.tensor([[0, 8]])), ValueError, "cu_seqlens: got torch.int64 of shape",
    ),
    "shard positions of other tokens": (
        lambda cp: cp.shard(IDS, position_ids=torch.arange(N - 1)[None], attention_mask=torch.zeros(1, N)),
        ValueError, "position_ids: got torch.int64 of shape",
    ),
    "shard additive mask": (
        lambda cp: cp.shard(IDS, attention_mask=torch.zeros(1, N)), TypeError, "attention_mask: got torch.float32, expected torch.bool",
    ),
    "shard float tokens": (lambda cp: cp.shard(IDS.float()), TypeError, "input_ids: got torch.float32, expected torch.int32 or"),
    "shard bool labels": (lambda cp: cp.shard(IDS, IDS.bool()), TypeError, "labels: got torch.bool, expected torch.int32 or"),
    "shard multiple of 0": (lambda cp: cp.shard(IDS, multiple=0), ValueError, "multiple: got 0, expected 1 or more"),
    "gather a vector": (lambda cp: cp.gather(torch.zeros(N)), ValueError, r"local: got shape \(8,\), expected \[B, n, ...\]"),
    "gather a length as text": (lambda cp: cp.gather(IDS, "x"), TypeError, "length: got 'x', expected an integer"),
    "gather more tokens": (lambda cp: cp.gather(IDS, 99), ValueError, "length: got 99, expected at most 16, the tokens of all pieces"),
    "mean over a negative count": (lambda cp: cp.mean(torch.zeros(()), -2), ValueError, "count: got -2, expected 0 or more"),
    "mean over NaN": (lambda cp: cp.mean(torch.zeros(()), float("nan")), ValueError, "count: got nan, expected 0 or more"),
    "mean of text": (lambda cp: cp.mean("x", 3), TypeError, "total: got str, expected a torch.Tensor"),
    "mean of integers": (
        lambda cp: cp.mean(torch.tensor(5), 2), TypeError, "total: got torch.int64, expected a floating point dtype",
    ),
    "mean over text": (lambda cp: cp.mean(torch.zeros(()), "x"), TypeError, "count: got 'x', expected a number"),
    "roll by text": (lambda cp: cp.roll(IDS, "x"), TypeError, "shifts: got 'x', expected an integer"),
    "begin with a stream as text": (
        lambda cp: begin(cp.collectives, stream="x"), TypeError, "stream: got str, expected a torch.cuda.Stream or None",
    ),
    "begin with options as a list": (
        lambda cp: begin_with_options(
            *torch.zeros(2, 1, N, 2, 16), torch.zeros(1, 2, N), SelectionRule(4), torch.zeros(1, N, 4, 16), [1], group=cp.collectives
        ),
        TypeError, "options: got list, expected a mapping",
    ),
    "attend to nothing": (
        lambda cp: attend_to_pieces(torch.zeros(1, N, 4, 16), None),
        TypeError, "exchanged: got NoneType, expected the result of begin_exchange",
    ),
    "attend to a list": (
        lambda cp: attend_to_pieces(torch.zeros(1, N, 4, 16), [begin(cp.collectives)]), TypeError, "exchanged: got list, expected the result",
    ),
    "state of nothing": (lambda cp: boundary_state(None), TypeError, "exchanged: got NoneType, expected the result"),
    "places of text": (lambda cp: boundary_places(cp.collectives, "x", 2), TypeError, "tokens: got 'x', expected an integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_wrong_call_raises_naming_the_argument(name):
    wrong_call, error, words = REFUSED_CALLS[name]
    with pytest.raises(error, match=f"^{words}"):
        run_in_threads(RANKS, lambda collectives: wrong_call(ContextParallel(collectives)))


def test_group_of_wrong_type_raises():
    with pytest.raises(TypeError, match="group: got str"):
        call("cp")


def test_boundary_state_of_another_bias_raises():
    def state(collectives):
        k, s = torch.randn(1, N, 2, 16), torch.randn(1, 2, N)
        boundary_state(
            begin_exchange(k, k, s, group=collectives, keep_window_size=4, attn_bias=s + 1)
        )

    with pytest.raises(ValueError, match="exchanged: got another bias than the scores"):
        run_in_threads(RANKS, state)


TRANSFORMED = {
    "vmap of query": (lambda f, q, k: torch.vmap(lambda x: f(query=x))(q[None]), "query: got a call under a transform of torch.func"),
    "vmap of key": (lambda f, q, k: torch.vmap(lambda x: f(key=x))(k[None]), "key: got a call under a transform of torch.func"),
    "vmap of another tensor": (
        lambda f, q, k: torch.vmap(lambda x: x + f(query=q, key=k).sum())(torch.ones(2)), "flash_dmattn: got a call under a transform",
    ),
    "grad of query": (lambda f, q, k: torch.func.grad(lambda x: f(query=x).sum())(q), "query: got a tensor of torch.func.grad"),
    "grad of key": (lambda f, q, k: torch.func.grad(lambda x: f(key=x).sum())(k), "key: got a tensor of torch.func.grad"),
    "jvp of key": (lambda f, q, k: torch.func.jvp(lambda x: f(key=x), (k,), (k,)), "key: got a tensor with a tangent"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMED)
def test_context_parallelism_under_a_transform_of_torch_func_raises_naming_the_tensor(name):
    transform, words = TRANSFORMED[name]

    def refused(collectives):
        q, k = torch.randn(1, N, 4, 16), torch.randn(1, N, 2, 16)
        tensors = {"query": q, "key": k, "value": k.clone(), "scores": k[..., 0].mT}
        with pytest.raises(RuntimeError, match=f"^{words}"):
            transform(lambda **changes: call(collectives, **tensors | changes), q, k)

    run_in_threads(RANKS, refused)


@pytest.mark.parametrize("name", ["mean", "roll", "gather", "projection"])
def test_context_parallel_helper_under_vmap_raises_naming_the_tensor(name):
    def refused(collectives):
        cp = ContextParallel(collectives)
        function, words = {
            "mean": (lambda x: cp.mean(x.sum(), 1), "total"),
            "roll": (lambda x: cp.roll(x, 1), "local"),
            "gather": (cp.gather, "local"),
            "projection": (
                lambda x: linear_with_headroom(x[..., None], torch.ones(1, 1), 2),
                "hidden",
            ),
        }[name]
        with pytest.raises(RuntimeError, match=f"^{words}: got a call under a transform"):
            torch.vmap(function)(torch.randn(2, 1, N))

    run_in_threads(RANKS, refused)


@pytest.mark.parametrize("attn_bias", ["scores", None])
def test_second_derivative_of_pieces_raises_on_all_ranks(attn_bias):
    def refused(collectives):
        torch.manual_seed(collectives.rank)
        k, s = torch.randn(1, N, 2, 16), torch.randn(1, 2, N)
        leaves = [k.requires_grad_(), s.requires_grad_(attn_bias is not None)]
        out = call(collectives, key=k, scores=s, attn_bias=attn_bias)
        leaves = [t for t in leaves if t.requires_grad]
        loss = out.square().sum()
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        assert all(map(torch.equal, gradients, expected))
        for gradient in gradients:
            with pytest.raises(RuntimeError, match="^create_graph: got True, expected False"):
                gradient.sum().backward(retain_graph=True)

    run_in_threads(RANKS, refused)
