"""Arguments of KV caches that mean nothing raise an error that names them, after which a cache holds what it held, also where a call
does several things one after the other."""

import re
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dmattn import (
    DynamicMaskAttention,
    KVSlots,
    RaggedBatch,
    extend_ragged,
    flash_dmattn_with_kvcache,
)

B, HKV, HQ, D, WINDOW, CHUNK, PLACES = 2, 2, 4, 8, 4, 3, 9


def tokens(n, batch=B):
    k, v = (torch.randn(batch, n, HKV, D) for _ in range(2))
    return {"key": k, "value": v, "scores": torch.randn(batch, HKV, n)}


def chunk(n):
    return {"query": torch.randn(B, n, HQ, D), **tokens(n)}


STEP = chunk(1)


def filled(chunk=CHUNK):
    cache = KVSlots(B, HKV, WINDOW, D, chunk=chunk)
    cache.fill(**tokens(6))
    return cache


@contextmanager
def unchanged(cache, message):
    before = [t.clone() for t in cache.tensors], cache.pending, cache.is_empty
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(message)):
        yield
    after = list(cache.tensors), cache.pending, cache.is_empty
    assert before[1:] == after[1:]
    assert all(map(torch.equal, before[0], after[0]))


@pytest.mark.parametrize(
    "message, options",
    [
        ("keep_window_size: got 0", {"keep_window_size": 0}),
        ("keep_window_size: got -1", {"keep_window_size": -1}),
        ("batch: got 1.5", {"batch": 1.5}),
        ("chunk: got -2", {"chunk": -2}),
        ("dtype: got torch.float64", {"dtype": torch.float64}),
    ],
)
def test_bad_kv_slots_size_raises(message, options):
    sizes = {"batch": 2, "heads_kv": 2, "keep_window_size": 4, "head_dim": 8}
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        KVSlots(**(sizes | options))


@pytest.mark.parametrize(
    "message, options",
    [
        ("dtype: got torch.float32 on cuda:0, expected bfloat16 or float16", {}),
        ("head_dim: got 12 on cuda:0, expected a multiple of 8", {"dtype": torch.float16, "head_dim": 12}),
        (
            "keep_window_size: got 129 sizes on cuda:0, expected at most 128 there",
            {"dtype": torch.float16, "heads_kv": 129, "keep_window_size": range(129)},
        ),
    ],
)  # fmt: skip
def test_unsupported_slots_on_gpu_raise(message, options):
    sizes = {"batch": 2, "heads_kv": 2, "keep_window_size": 4, "head_dim": 8, "device": "cuda"}
    with FakeTensorMode(), pytest.raises((ValueError, TypeError), match=f"^{message}"):
        KVSlots(**(sizes | options))


def test_float32_slot_tensors_on_gpu_raise():
    with FakeTensorMode(), pytest.raises(TypeError, match="k: got torch.float32 on cuda:0"):
        k = torch.zeros(2, 2, 4, 8, device="cuda")
        integers = [
            torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((2, 2, 4), (2, 2, 2), 2)
        ]
        KVSlots.from_tensors(4, k, k, torch.zeros(2, 2, 4, device="cuda"), *integers)


# A step and a chunk name them alike.
BAD_NUMBERS = [
    ("scale: got inf", {"scale": float("inf")}),
    ("scale: got nan", {"scale": float("nan")}),
    ("scale: got 0", {"scale": 0.0}),
    ("softcap: got -1.0", {"softcap": -1.0}),
    ("nonfinite: got 'no'", {"nonfinite": "no"}),
    ("scores_are_bias: got 'False'", {"scores_are_bias": "False"}),
    ("scores_are_bias: got None", {"scores_are_bias": None}),
]


@pytest.mark.parametrize(
    "message, spoiled",
    [
        *BAD_NUMBERS,
        ("query: got [2, 2, 4, 8]", {"query": torch.randn(B, 2, HQ, D)}),
        ("key: got [2, 2, 2, 8], expected one token", tokens(2)),
        ("query: got Double", {"query": STEP["query"].double()}),
        ("key: got [2, 1, 3, 8]", {"key": torch.randn(B, 1, 3, D)}),
        ("value: got [1, 1, 2, 8]", {"value": torch.randn(1, 1, HKV, D)}),
        ("scores: got [2, 2, 2]", {"scores": torch.randn(B, HKV, 2)}),
        ("scores: got BFloat16", {"scores": STEP["scores"].bfloat16()}),
        ("key_mask: got shape (2, 2), expected (2, 1)", {"key_mask": torch.ones(B, 2).bool()}),
        ("key_mask: got torch.float32", {"key_mask": torch.ones(B, 1)}),
        ("heads_q: got 3", {"query": torch.randn(B, 1, 3, D)}),
        ("key: got list", {"key": [1.0]}),
    ],
)
def test_bad_step_leaves_cache_unchanged(message, spoiled):
    cache = filled(chunk=0)
    with unchanged(cache, message):
        cache.step(**(STEP | spoiled))


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("query: got 4 queries, expected one for each of 5 tokens", {"query": torch.randn(B, 4, HQ, D)}),
        ("query: got shape (2, 5, 3, 8)", {"query": torch.randn(B, 5, 3, D)}),
        ("query: got torch.float64", {"query": torch.randn(B, 5, HQ, D).double()}),
        ("value: got shape (2, 6, 2, 8)", {"value": torch.randn(B, 6, HKV, D)}),
        ("scores: got shape (2, 2, 6)", {"scores": torch.randn(B, HKV, 6)}),
        ("scores: got torch.bfloat16", {"scores": torch.randn(B, HKV, 5).bfloat16()}),
        ("key_mask: got shape (2, 6)", {"key_mask": torch.ones(B, 6).bool()}),
        ("key_mask: got torch.float32", {"key_mask": torch.ones(B, 5)}),
        ("key: got shape (2, 2, 8)", {"key": torch.randn(B, HKV, D)}),
        *BAD_NUMBERS,
        ("scal", {"scal": 1.0}),
    ],
)  # fmt: skip
def test_bad_chunk_leaves_cache_unchanged(message, spoiled):
    cache = filled()
    with unchanged(cache, message):
        cache.extend(**(chunk(5) | spoiled))


def test_extend_without_tokens_returns_empty():
    cache = filled()
    assert cache.extend(**chunk(0)).shape == (B, 0, HQ, D)


def test_bad_chunk_row_or_state_leaves_cache_unchanged():
    cache = filled()
    other = KVSlots(B, HKV, WINDOW + 1, D, chunk=CHUNK - 1)  # as many places, of another meaning
    cache.append(**tokens(2))
    state = filled().state_dict()
    for message, call in {
        "key: got 2 tokens, expected 1 or fewer": lambda: cache.append(**tokens(2)),
        "pending: got 2 tokens": lambda: cache.step(**STEP),
        "query: got 3 queries": lambda: cache.attend(torch.randn(B, 3, HQ, D)),
        "scale: got 0": lambda: cache.attend(torch.randn(B, 1, HQ, D), scale=0.0),
        "keep: got 3": lambda: cache.commit(3),
        "keep[1]: got 5": lambda: cache.commit(torch.tensor([0, 5])),
        "keep: got [3]": lambda: cache.commit(torch.tensor([0, 1, 2])),
        "count: got 3": lambda: cache.drop(3),
        "index[1]: got 2": lambda: cache.select(torch.tensor([0, 2])),
        "index: got list": lambda: cache.select([0]),
        "state: got keep_window_size 5": lambda: cache.load_state_dict(other.state_dict()),
        "snapshot: got 3 rows": lambda: cache.restore(KVSlots(3, HKV, WINDOW, D, chunk=CHUNK)),
        "intervals: got intervals for (batch, heads, keys) (2, 2, 6)": lambda: cache.fill(
            **tokens(3), intervals=cache.pending_intervals(1)
        ),
        "snapshot: got keep_window_size 5": lambda: cache.restore(other),
        "snapshot: got dict": lambda: cache.restore(state),
        "index: got torch.bool": lambda: cache.select(torch.tensor([True, False])),
        "index: got torch.float32": lambda: cache.select(torch.tensor([1.0])),
        "index: got shape (1, 2)": lambda: cache.select(torch.tensor([[0, 1]])),
        "index[0]": lambda: cache.select(torch.tensor([2**32])),
        "index: got shape (1,), expected (2,)": lambda: cache.reorder(torch.tensor([1])),
        "keep: got torch.float32": lambda: cache.commit(torch.tensor([1.0, 1.0])),
        "state: got none of v, expected": lambda: cache.load_state_dict(
            {name: value for name, value in state.items() if name != "v"}
        ),
        "state: got scores of shape (3,)": lambda: cache.load_state_dict(
            state | {"scores": torch.ones(3)}
        ),
        "state['seen']: got list": lambda: cache.load_state_dict(state | {"seen": [1, 2]}),
        "pending: got 4, expected at most 3": lambda: cache.load_state_dict(state | {"pending": 4}),
    }.items():
        with unchanged(cache, message):
            call()


def test_commit_on_unknown_backend_raises():
    cache = filled()
    cache.append(**tokens(3))
    cache.backend = "abacus"
    with unchanged(cache, "abacus"):
        cache.commit(1)


def test_attend_uses_backend_of_cache():
    cache = filled()
    cache.append(**tokens(1))
    intervals = cache.pending_intervals(1)
    cache.pending_intervals = lambda queries: intervals
    cache.backend = "abacus"
    with pytest.raises((ValueError, RuntimeError), match="abacus"):
        cache.attend(torch.randn(B, 1, HQ, D))


def test_bad_prompt_argument_raises():
    cache = filled()
    for message, options in {
        "key_mask: got shape (6,)": {"key_mask": torch.ones(6).bool()},
        "key_mask: got torch.int64": {"key_mask": torch.ones(B, 6).long()},
        "lengths: got torch.float32": {"lengths": torch.ones(B)},
        "lengths: got shape (2, 1)": {"lengths": torch.ones(B, 1).int()},
        "lengths[0]: got 7": {"lengths": torch.tensor([7, 1])},
        "scores: got shape (2, 3, 6), expected (2, 2, 6)": {"scores": torch.randn(B, 3, 6)},
        "intervals: got Tensor": {"intervals": torch.zeros(B, HKV, 6, 2).int()},
    }.items():
        with unchanged(cache, message):
            cache.fill(**tokens(6) | options)


def test_count_beyond_the_window_raises():
    """As of a cache with another window, or of memory that was never cleared."""
    cache = filled(chunk=0)
    cache.counts[1, 0, 0] = WINDOW + 1
    for call in (
        lambda: cache.step(**chunk(1)),
        lambda: cache.snapshot(),
        lambda: cache.append(**tokens(0)),
        lambda: cache.commit(),
    ):
        with unchanged(cache, "counts[2].count: got 5, expected 0 to 4"):
            call()
    cache.counts[1, 0] = torch.tensor([WINDOW, WINDOW, WINDOW, -1, 0, 7, 0, 0])
    with unchanged(cache, "counts[2].victim: got 7, expected 0 to 3"):
        cache.step(**chunk(1))


def test_state_of_another_dtype_is_converted():
    empty = KVSlots(B, HKV, WINDOW, D, chunk=CHUNK)
    empty.load_state_dict(KVSlots(B, HKV, WINDOW, D, chunk=CHUNK).state_dict())
    assert empty.is_empty
    half = KVSlots(B, HKV, WINDOW, D, chunk=CHUNK, dtype=torch.bfloat16)
    half.load_state_dict(filled().state_dict())
    assert not half.is_empty and half.k.dtype == torch.bfloat16 and half.seen.tolist() == [6, 6]


def test_gradients_are_refused():
    cache, leaf = filled(chunk=0), STEP | {"query": STEP["query"].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="query: got a tensor that requires a gradient"):
        cache.step(**leaf)
    with torch.no_grad():
        cache.step(**leaf)


def test_tangents_are_refused():
    """torch would take them for 0."""
    query, cache = STEP["query"], filled(chunk=0)
    caches = {"k_cache": torch.zeros(2, 9, 2, 8), "v_cache": torch.zeros(2, 9, 2, 8)}
    lengths = torch.zeros(2, dtype=torch.int32)
    for call in (
        lambda query: cache.step(**(STEP | {"query": query})),
        lambda query: flash_dmattn_with_kvcache(query, **caches, cache_seqlens=lengths),
    ):
        with pytest.raises(RuntimeError, match="got a tensor with a tangent"):
            torch.func.jvp(call, (query,), (query,))


# ---- extend_ragged ---------------------------------------------------------------------------------

# A token of row 2, a prompt for row 0 and a later chunk of row 1: the parts of a step that change the pool one after the other.
OFFSETS, BEGINS, TOKENS = [0, 1, 5, 7], [False, True, False], 7


def pool_of_rows(**options):
    pool = KVSlots(4, HKV, WINDOW, D, **options)
    pool.fill(**tokens(6, batch=4))
    return pool


def batch_of(*rows, offsets=OFFSETS, begins=BEGINS):
    return RaggedBatch(offsets, torch.tensor(rows, dtype=torch.int32), begins)


def ragged_step(**spoiled):
    """All arguments of a correct call except the pool, spoiled."""
    query, key, value = (torch.randn(TOKENS, h, D) for h in (HQ, HKV, HKV))
    scores = torch.randn(HKV, TOKENS)
    states = {"query": query, "key": key, "value": value, "scores": scores}
    return {"batch": batch_of(2, 0, 1)} | states | spoiled


def decoding_rows(*rows):
    """A spoiled batch in which each token decodes, and the states of its tokens."""
    batch = RaggedBatch.of_rows(torch.tensor(rows, dtype=torch.int32))
    states = {
        name: torch.randn(len(rows), h, D)
        for name, h in (("query", HQ), ("key", HKV), ("value", HKV))
    }
    return {"batch": batch, **states, "scores": torch.randn(HKV, len(rows))}  # fmt: skip


META = torch.device("meta")


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("rows[0]: got 9, expected below 4, the rows of pool, or negative", {"batch": batch_of(9, 0, 1)}),
        ("rows[1]: got 4, expected below 4", {"batch": batch_of(2, 4, 1)}),
        ("rows[2]: got 9, expected below 4", {"batch": batch_of(2, 0, 9)}),
        ("rows[1]: got 9, expected below 4", {"batch": batch_of(0, 9, offsets=[0, 2, 5], begins=None)}),
        ("rows[2]: got 4, expected below 4", decoding_rows(1, -1, 4)),
        ("rows[2]: got 1, which rows[0] is, expected no row twice", decoding_rows(1, -1, 1)),
        ("rows: got a tensor on meta, expected cpu, the device of pool",
         {"batch": RaggedBatch(OFFSETS, torch.zeros(3, dtype=torch.int32, device=META), BEGINS)}),
        ("batch: got list, expected RaggedBatch", {"batch": [0, 2]}),
        ("batch: got NoneType, expected RaggedBatch", {"batch": None}),
        ("key: got 7 tokens, expected 6, those of query", {"query": torch.randn(6, HQ, D)}),
        ("query: got 7 tokens, expected 9 or more", {"batch": batch_of(2, 0, 1, offsets=[2, 3, 7, 9])}),
        ("query: got NoneType, expected a torch.Tensor", {"query": None}),
        ("query: got list, expected a torch.Tensor", {"query": [1.0]}),
        ("query: got shape (7, 3, 8), expected [T, Hq, 8] with Hq a multiple of 2", {"query": torch.randn(7, 3, D)}),
        ("query: got shape (7, 4, 7), expected [T, Hq, 8]", {"query": torch.randn(7, HQ, D - 1)}),
        ("query: got shape (1, 7, 4, 8), expected [T, Hq, 8]", {"query": torch.randn(1, 7, HQ, D)}),
        ("query: got torch.float64 on cpu, expected torch.float32 on cpu", {"query": torch.randn(7, HQ, D).double()}),
        ("query: got torch.float32 on meta, expected torch.float32 on cpu", {"query": torch.randn(7, HQ, D, device=META)}),
        ("key: got 3 tokens, expected 7, those of query", {"key": torch.randn(3, HKV, D)}),
        ("key: got 8 tokens, expected 7, those of query", {"key": torch.randn(8, HKV, D)}),
        ("key: got shape (7, 1, 8), expected (7, 2, 8)", {"key": torch.randn(7, 1, D)}),
        ("key: got NoneType, expected a torch.Tensor", {"key": None}),
        ("key: got torch.bfloat16 on cpu", {"key": torch.randn(7, HKV, D).bfloat16()}),
        ("value: got 6 tokens, expected 7, those of query", {"value": torch.randn(6, HKV, D)}),
        ("value: got shape (7, 2, 9), expected (7, 2, 8)", {"value": torch.randn(7, HKV, D + 1)}),
        ("value: got list, expected a torch.Tensor", {"value": [1.0]}),
        ("value: got torch.float32 on meta", {"value": torch.randn(7, HKV, D, device=META)}),
        ("scores: got shape (2, 6), expected (2, 7)", {"scores": torch.randn(HKV, 6)}),
        ("scores: got shape (7, 2), expected (2, 7)", {"scores": torch.randn(7, HKV)}),
        ("scores: got shape (7,), expected (2, 7)", {"scores": torch.randn(7)}),
        ("scores: got NoneType, expected a torch.Tensor", {"scores": None}),
        ("scores: got torch.bfloat16 on cpu, expected torch.float32 on cpu", {"scores": torch.randn(HKV, 7).bfloat16()}),
        ("scores: got torch.float32 on meta", {"scores": torch.randn(HKV, 7, device=META)}),
        *(case for case in BAD_NUMBERS if "nonfinite" not in case[1]),
        ("return_lse: got 'no'", {"return_lse": "no"}),
        ("scal", {"scal": 1.0}),
    ],
)  # fmt: skip
def test_bad_ragged_step_leaves_pool_unchanged(message, spoiled):
    pool = pool_of_rows()
    with unchanged(pool, message):
        extend_ragged(pool, **ragged_step(**spoiled))


def test_ragged_step_on_another_pool_leaves_it_unchanged():
    pool = pool_of_rows(chunk=CHUNK)
    view = pool.over(torch.tensor([0, 1], dtype=torch.int32))
    with unchanged(pool, "pool: got a view of some rows, expected a cache of its own"):
        extend_ragged(view, **ragged_step())
    pool.append(**tokens(2, batch=4))
    with unchanged(pool, "pool: got 2 pending tokens, expected a cache of its own without"):
        extend_ragged(pool, **ragged_step())
    for other, name in (
        (None, "NoneType"),
        (pool.tensors, "tuple"),
        (DynamicMaskAttention, "type"),
    ):
        with pytest.raises(TypeError, match=f"pool: got {name}, expected KVSlots"):
            extend_ragged(other, **ragged_step())


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize("rows", [(2, 0, 1), (1, 0, 2)], ids=str)
def test_ragged_step_on_memory_that_was_never_cleared_leaves_pool_unchanged(rows, row):
    pool = pool_of_rows()
    pool.counts[row, 0, 0] = WINDOW + 1
    with unchanged(pool, ".count: got 5, expected 0 to 4"):
        extend_ragged(pool, **ragged_step(batch=batch_of(*rows)))


def test_ragged_step_on_unknown_backend_leaves_pool_unchanged():
    pool = pool_of_rows()
    pool.backend = "abacus"
    with unchanged(pool, "abacus"):
        extend_ragged(pool, **ragged_step())


def test_ragged_step_with_a_tangent_leaves_pool_unchanged():
    pool, step = pool_of_rows(), ragged_step()
    with unchanged(pool, "value: got a tensor with a tangent"):
        torch.func.jvp(
            lambda value: extend_ragged(pool, **(step | {"value": value})),
            (step["value"],),
            (step["value"],),
        )


def test_rows_on_another_device_are_not_read():
    """Reading them would wait for a GPU; on the meta device it raises."""
    rows = torch.full((3,), 9, dtype=torch.int32, device=META)
    pool = KVSlots(4, HKV, WINDOW, D, device=META)
    for batch in (RaggedBatch(OFFSETS, rows, BEGINS), RaggedBatch.of_rows(rows)):
        batch._check_rows(pool)


# ---- flash_dmattn_with_kvcache ---------------------------------------------------------------------


SLOTS = {
    "slot_positions": torch.zeros(B, HKV, PLACES, dtype=torch.int32),
    "slot_counts": torch.zeros(B, HKV, 8, dtype=torch.int32),
}


def all_keys(**spoiled):
    """A correct call on a cache of all keys, spoiled."""
    return {
        "query": torch.randn(B, 2, HQ, D),
        "k_cache": torch.zeros(B, PLACES, HKV, D),
        "v_cache": torch.zeros(B, PLACES, HKV, D),
        "score_cache": torch.zeros(B, HKV, PLACES),
        "key": torch.randn(B, 2, HKV, D),
        "value": torch.randn(B, 2, HKV, D),
        "scores": torch.randn(B, HKV, 2),
        "cache_seqlens": torch.tensor([3, 7], dtype=torch.int32),
        "keep_window_size": WINDOW,
    } | spoiled


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("scores: got None, expected the new tokens': key and value are given", {"scores": None}),
        ("key: got None, expected the new tokens': scores is given", {"key": None, "value": None}),
        ("value: got None, expected the new tokens': key is given", {"value": None, "score_cache": None, "scores": None}),
        ("scores: got scores without score_cache, expected both or none", {"score_cache": None}),
        ("slot_positions: got None, expected int32 [B, Hkv, S]", {"slot_counts": torch.zeros(B, HKV, 8).int()}),
        ("slot_counts: got None, expected int32 [B, Hkv, 8]", {"slot_positions": torch.zeros(B, HKV, PLACES).int()}),
        ("keep_window_size: got None, expected the window of the slots' rule", SLOTS | {"keep_window_size": None}),
        ("score_cache: got None, expected float32 [B, Hkv, S]", SLOTS | {"score_cache": None, "scores": None}),
        ("key: got None, expected the new tokens, [B, m, Hkv, D]", SLOTS | {"key": None, "value": None, "scores": None}),
        ("key_mask: got a mask for a cache of all keys", {"key_mask": torch.ones(B, 2).bool()}),
        ("score_cache: got None", {"score_cache": None, "scores": None}),
        ("keep_window_size: got -1", {"keep_window_size": -1}),
        ("cache_seqlens: got list", {"cache_seqlens": [1, 2]}),
        ("scale: got 0", {"scale": 0.0}),
        ("query: got shape (1, 2, 4, 8)", {"query": torch.randn(1, 2, HQ, D)}),
        ("query: got shape (2, 2, 3, 8)", {"query": torch.randn(B, 2, 3, D)}),
        ("query: got torch.bfloat16", {"query": torch.randn(B, 2, HQ, D).bfloat16()}),
        ("key: got shape (1, 2, 2, 8)", {"key": torch.randn(1, 2, HKV, D)}),
        ("key: got shape (2, 2, 1, 8)", {"key": torch.randn(B, 2, 1, D)}),
        ("value: got shape (2, 1, 2, 8)", {"value": torch.randn(B, 1, HKV, D)}),
        ("value: got torch.bfloat16", {"value": torch.randn(B, 2, HKV, D).bfloat16()}),
        ("scores: got shape (2, 1, 2)", {"scores": torch.randn(B, 1, 2)}),
        ("v_cache: got shape (2, 9, 2, 7)", {"v_cache": torch.zeros(B, PLACES, HKV, D - 1)}),
        ("score_cache: got shape (2, 2, 8)", {"score_cache": torch.zeros(B, HKV, PLACES - 1)}),
        ("score_cache: got torch.bfloat16", {"score_cache": torch.zeros(B, HKV, PLACES).bfloat16()}),
        ("cache_seqlens: got shape (1,)", {"cache_seqlens": torch.zeros(1).int()}),
        ("cache_seqlens: got torch.float32", {"cache_seqlens": torch.zeros(B)}),
        ("cache_seqlens[1]: got 8, expected 0 to 7", {"cache_seqlens": torch.tensor([0, 8]).int()}),
        ("cache_seqlens[0]: got -1", {"cache_seqlens": torch.tensor([-1, 0]).int()}),
        ("cache_leftpad: got shape (2, 1)", {"cache_leftpad": torch.zeros(B, 1).int()}),
        ("cache_leftpad[1]: got 10", {"cache_leftpad": torch.tensor([0, 10]).int()}),
        ("keep_window_size: got 2.5", {"keep_window_size": 2.5}),
        ("backend: got 'abacus', expected one of 'cuda', 'triton', 'flex', 'cpu', 'reference', or None for the first",
         {"backend": "abacus"}),
        ("scores_are_bias: got 'no'", {"scores_are_bias": "no"}),
        ("return_lse: got 'no'", {"return_lse": "no"}),
        ("k_cache: got an expanded tensor", {"k_cache": torch.zeros(1, PLACES, HKV, D).expand(B, -1, -1, -1)}),
        ("k_cache: got a tensor that requires a gradient",
         {"k_cache": torch.zeros(B, PLACES, HKV, D, requires_grad=True)}),
    ],
)  # fmt: skip
def test_bad_full_cache_argument_leaves_cache_unchanged(message, spoiled):
    arguments = all_keys(**spoiled)
    names = ("k_cache", "v_cache", "score_cache", "cache_seqlens")
    caches = [arguments[name] for name in names if torch.is_tensor(arguments[name])]
    before = [t.clone() for t in caches]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(message)):
        flash_dmattn_with_kvcache(**arguments)
    assert all(map(torch.equal, before, caches))


def test_tokens_that_alias_the_cache_are_written_unchanged():
    """Written from where they are to where they belong, although the places overlap."""
    arguments = all_keys(
        k_cache=torch.randn(B, PLACES, HKV, D), cache_seqlens=torch.tensor([1, 1]).int()
    )
    arguments["key"] = arguments["k_cache"][:, :2]
    expected = arguments["key"].clone()
    flash_dmattn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"][:, 1:3], expected)


def test_double_precision_takes_scores_in_float32():
    arguments = all_keys()
    wide = {
        name: t.double() if name in ("query", "key", "value", "k_cache", "v_cache") else t
        for name, t in all_keys(**arguments).items()
    }
    torch.testing.assert_close(
        flash_dmattn_with_kvcache(**wide).float(), flash_dmattn_with_kvcache(**arguments)
    )


# ---- DynamicMaskAttention --------------------------------------------------------------------------


@torch.no_grad()
def test_bad_layer_argument_leaves_cache_unchanged():
    layer, hidden = DynamicMaskAttention(32, HQ, HKV, WINDOW), torch.randn(B, 6, 32)
    cache = layer.make_cache(B)
    layer(hidden, cache=cache)
    other = DynamicMaskAttention(32, HQ, HKV, WINDOW + 1)
    for message, call in {
        "cache: got a cache with (batch, heads_kv, keep_window_size, head_dim) (2, 2, 4, 8), expected (2, 2, 5, 8)": (
            lambda: other(hidden[:, :1], cache=cache)
        ),
        "expected (1, 2, 4, 8)": lambda: layer(hidden[:1, :1], cache=cache),
        "hidden: got shape (6, 32), expected [B, S, 32]": lambda: layer(hidden[0], cache=cache),
        "key_mask: got shape (2, 6), expected (2, 1)": lambda: layer(
            hidden[:, :1], cache=cache, key_mask=torch.ones(B, 6).bool()
        ),
        "cache: got dict": lambda: layer(hidden, cache=cache.state_dict()),
    }.items():
        with unchanged(cache, message):
            call()


@torch.no_grad()
def test_layer_with_cache_of_another_dtype_equals_whole_text():
    layer, hidden = DynamicMaskAttention(32, HQ, HKV, WINDOW), torch.randn(B, 9, 32)
    cache = layer.make_cache(B, dtype=torch.bfloat16)
    parts = [layer(part, cache=cache) for part in hidden.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(hidden), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "message, sizes",
    [
        ("keep_window_size: got 0", {"keep_window_size": 0}),
        ("heads_q: got 3, expected a multiple of heads_kv, 2", {"heads_q": 3, "heads_kv": 2}),
        ("head_dim: got 257", {"head_dim": 257}),
        ("hidden_size: got 32.0", {"hidden_size": 32.0}),
    ],
)
def test_bad_layer_size_raises(message, sizes):
    with pytest.raises((ValueError, TypeError), match=message):
        DynamicMaskAttention(
            **({"hidden_size": 32, "heads_q": HQ, "keep_window_size": WINDOW} | sizes)
        )
