"""A meaningless argument of a KV cache, or of what has one, raises an error that names it. The cache is unchanged afterwards, also if a
call does several things one after the other."""

from types import SimpleNamespace

import pytest
import torch

from flash_dmattn import (
    DynamicMaskAttention,
    KVSlots,
    RaggedBatch,
    extend_ragged,
    flash_dmattn_with_kvcache,
)
from small_caches import CHUNK, HKV, HQ, WINDOW, B, D, tokens, unchanged

PLACES, META = 9, torch.device("meta")


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


# ---- Calls on a cache --------------------------------------------------------------------------------


def chunk(n):
    return {"query": torch.randn(B, n, HQ, D), **tokens(n)}


STEP = chunk(1)
HALF = {name: t if name == "scores" else t.bfloat16() for name, t in tokens(1).items()}


def filled(pending=0, **options):
    cache = KVSlots(
        B, HKV, **{"keep_window_size": WINDOW, "head_dim": D, "chunk": CHUNK, **options}
    )
    cache.fill(**tokens(6))
    if pending:
        cache.append(**tokens(pending))
    return cache


def with_pending():
    return filled(pending=2)


def other(heads_kv=HKV, keep_window_size=WINDOW, head_dim=D, batch=B, **options):
    return KVSlots(batch, heads_kv, keep_window_size, head_dim, **options)


def step(**spoiled):
    return lambda cache: cache.step(**(STEP | spoiled))


def extend(**spoiled):
    return lambda cache: cache.extend(**(chunk(5) | spoiled))


def fill(**spoiled):
    return lambda cache: cache.fill(**(tokens(6) | spoiled))


def restore(**sizes):
    return lambda cache: cache.restore(other(**sizes))


def load(change):
    """`change` is for entries of a correct state; None leaves the entry out."""
    state = {name: value for name, value in (filled().state_dict() | change).items()}
    return lambda cache: cache.load_state_dict({n: v for n, v in state.items() if v is not None})


BAD_CALLS = [
    ("return_lse: got 'no'", step(return_lse="no")),
    ("query: got shape (2, 2, 4, 8)", step(query=torch.randn(B, 2, HQ, D))),
    ("key: got shape (2, 2, 2, 8), expected one token", step(**tokens(2))),
    ("key: got torch.bfloat16 on cpu, expected torch.float32 on cpu, those of the cache", step(**HALF)),
    ("value: got shape (1, 1, 2, 8)", step(value=torch.randn(1, 1, HKV, D))),
    ("scores: got shape (2, 2, 2)", step(scores=torch.randn(B, HKV, 2))),
    ("key_mask: got shape (2, 2), expected (2, 1)", step(key_mask=torch.ones(B, 2).bool())),
    ("heads_q: got 3", step(query=torch.randn(B, 1, 3, D))),
    ("return_lse: got 'no'", extend(return_lse="no")),
    ("query: got 4 queries, expected one for each of 5 tokens", extend(query=torch.randn(B, 4, HQ, D))),
    ("query: got shape (2, 5, 3, 8)", extend(query=torch.randn(B, 5, 3, D))),
    ("key: got shape (2, 2, 8)", extend(key=torch.randn(B, HKV, D))),
    ("value: got shape (2, 6, 2, 8)", extend(value=torch.randn(B, 6, HKV, D))),
    ("scores: got shape (2, 2, 6)", extend(scores=torch.randn(B, HKV, 6))),
    ("key_mask: got shape (2, 6)", extend(key_mask=torch.ones(B, 6).bool())),
    ("lengths[1]: got 6, expected 0 to 5", extend(lengths=torch.tensor([5, 6]))),
    ("key_mask: got shape (6,)", fill(key_mask=torch.ones(6).bool())),
    ("lengths[0]: got 7", fill(lengths=torch.tensor([7, 1]))),
    ("scores: got shape (2, 3, 6), expected (2, 2, 6)", fill(scores=torch.randn(B, 3, 6))),
    ("intervals: got Tensor", fill(intervals=torch.zeros(B, HKV, 6, 2).int())),
    ("key: got torch.bfloat16 on cpu, expected torch.float32 on cpu, those of the cache", fill(**HALF)),
    ("key: got torch.bfloat16 on cpu, expected torch.float32 on cpu, those of the cache", lambda cache: cache.append(**HALF)),
]  # fmt: skip
BAD_CALLS_WITH_PENDING_TOKENS = [
    ("key: got 2 tokens, expected 1 or fewer", lambda cache: cache.append(**tokens(2))),
    ("pending: got 2 tokens", step()),
    ("query: got 3 queries", lambda cache: cache.attend(torch.randn(B, 3, HQ, D))),
    ("return_lse: got 'no'", lambda cache: cache.attend(torch.randn(B, 1, HQ, D), return_lse="no")),
    ("intervals: got intervals for (batch, heads, keys) (2, 2, 6)",
     lambda cache: cache.fill(**tokens(3), intervals=cache.pending_intervals(1))),
    ("kept_tokens: got 3", lambda cache: cache.commit(3)),
    ("kept_tokens[1]: got 5", lambda cache: cache.commit(torch.tensor([0, 5]))),
    ("count: got 3", lambda cache: cache.drop(3)),
    ("index[1]: got 2", lambda cache: cache.select(torch.tensor([0, 2]))),
    ("index[0]", lambda cache: cache.select(torch.tensor([2**32]))),
    ("index: got torch.bool, expected torch.int32 or other integers", lambda cache: cache.select(torch.tensor([True, False]))),
    ("index: got shape (1,), expected (2,)", lambda cache: cache.reorder(torch.tensor([1]))),
    ("snapshot: got dict", lambda cache: cache.restore(cache.state_dict())),
    ("snapshot: got 3 rows", restore(batch=3, chunk=CHUNK)),
    # The same number of places, used differently.
    ("snapshot: got keep_window_size 5", restore(keep_window_size=WINDOW + 1, chunk=CHUNK - 1)),
    ("snapshot: got head_dim 16, expected 8", restore(head_dim=2 * D)),
    ("snapshot: got value_dim 4, expected 8", restore(value_dim=4)),
    ("snapshot: got heads_kv 1, expected 2", restore(heads_kv=1)),
    ("snapshot: got torch.bfloat16, expected torch.float32", restore(dtype=torch.bfloat16)),
    ("state: got keep_window_size 5", lambda cache: cache.load_state_dict(other(keep_window_size=5, chunk=2).state_dict())),
    ("state: got recent_competes True, expected False",
     lambda cache: filled(recent_window=2).load_state_dict(other(recent_window=2, recent_competes=True).state_dict())),
    ("state: got none of v, expected", load({"v": None})),
    ("state: got scores of shape (3,)", load({"scores": torch.ones(3)})),
    ("state['seen']: got list", load({"seen": [1, 2]})),
    ("state['counts']: got 9 to 9 taken slots of a head, expected 0 to 4", load({"counts": torch.full((B, HKV, 8), 9).int()})),
    ("pending: got 4, expected at most 3", load({"pending": 4})),
]  # fmt: skip

# ---- Calls on a cache of all keys --------------------------------------------------------------------


def full_cache():
    caches = {
        "k_cache": torch.zeros(B, PLACES, HKV, D),
        "v_cache": torch.zeros(B, PLACES, HKV, D),
        "score_cache": torch.zeros(B, HKV, PLACES),
        "cache_seqlens": integers(3, 7),
    }
    return SimpleNamespace(arguments=caches, tensors=caches.values(), pending=0, is_empty=False)


def attend(**spoiled):
    correct = {**chunk(2), "keep_window_size": WINDOW}
    return lambda cache: flash_dmattn_with_kvcache(**(cache.arguments | correct | spoiled))


BAD_CALLS_ON_ALL_KEYS = [
    ("scores: got None, expected the new tokens': key and value are given", attend(scores=None)),
    ("key: got None, expected the new tokens': scores is given", attend(key=None, value=None)),
    ("value: got None, expected the new tokens': key is given", attend(value=None, score_cache=None, scores=None)),
    ("scores: got scores without score_cache, expected both or none", attend(score_cache=None)),
    ("score_cache: got None", attend(score_cache=None, scores=None)),
    ("scores: got shape (2, 1, 2)", attend(scores=torch.randn(B, 1, 2))),
    ("v_cache: got shape (2, 9, 1, 7), expected (2, 9, 2, 7)", attend(v_cache=torch.zeros(B, PLACES, 1, 7))),
    ("value_dim: got 9, expected 1 to 8, the head_dim", attend(v_cache=torch.zeros(B, PLACES, HKV, 9))),
    ("score_cache: got shape (2, 2, 8)", attend(score_cache=torch.zeros(B, HKV, PLACES - 1))),
    ("cache_seqlens: got shape (1,)", attend(cache_seqlens=torch.zeros(1).int())),
    ("cache_seqlens[1]: got 8, expected 0 to 7", attend(cache_seqlens=integers(0, 8))),
    ("cache_leftpad: got shape (2, 1)", attend(cache_leftpad=torch.zeros(B, 1).int())),
    ("cache_leftpad[1]: got 10", attend(cache_leftpad=integers(0, 10))),
    ("return_lse: got 'no'", attend(return_lse="no")),
    ("k_cache: got an expanded tensor", attend(k_cache=torch.zeros(1, PLACES, HKV, D).expand(B, -1, -1, -1))),
    ("k_cache: got a tensor that requires a gradient", attend(k_cache=torch.zeros(B, PLACES, HKV, D, requires_grad=True))),
]  # fmt: skip

# ---- Ragged steps on a pool --------------------------------------------------------------------------

# A step changes the pool in three parts, one after the other: a token of row 2, a prompt for row 0, and a later chunk of row 1.
OFFSETS, BEGINS, TOKENS = [0, 1, 5, 7], [False, True, False], 7


def pool(**options):
    rows = KVSlots(4, HKV, WINDOW, D, **options)
    rows.fill(**tokens(6, batch=4))
    return rows


def pool_with_pending():
    rows = pool(chunk=CHUNK)
    rows.append(**tokens(2, batch=4))
    return rows


def batch_of(*rows, offsets=OFFSETS, begins=BEGINS):
    return RaggedBatch(offsets, integers(*rows), begins)


def ragged_states(count=TOKENS):
    query, key, value = (torch.randn(count, h, D) for h in (HQ, HKV, HKV))
    return {"query": query, "key": key, "value": value, "scores": torch.randn(HKV, count)}


def ragged_step(on=lambda pool: pool, **spoiled):
    arguments = {"batch": batch_of(2, 0, 1), **ragged_states(), **spoiled}
    return lambda pool: extend_ragged(on(pool), **arguments)


def decode(*rows):
    """One token for each row."""
    return ragged_step(batch=RaggedBatch.of_rows(integers(*rows)), **ragged_states(len(rows)))


BAD_RAGGED_STEPS = [
    ("rows[0]: got 9, expected below 4, the rows of pool, or negative", ragged_step(batch=batch_of(9, 0, 1))),
    ("rows[2]: got 4, expected below 4", decode(1, -1, 4)),
    ("rows[2]: got 1, which rows[0] is, expected no row twice", decode(1, -1, 1)),
    ("rows: got a tensor on meta, expected cpu, the device of pool",
     ragged_step(batch=RaggedBatch(OFFSETS, integers(2, 0, 1).to(META), BEGINS))),
    ("batch: got list, expected RaggedBatch", ragged_step(batch=[0, 2])),
    ("key: got 7 tokens, expected 6, those of query", ragged_step(query=torch.randn(6, HQ, D))),
    ("query: got 7 tokens, expected 9 or more", ragged_step(batch=batch_of(2, 0, 1, offsets=[2, 3, 7, 9]))),
    ("query: got shape (7, 3, 8), expected [T, Hq, 8] with Hq a multiple of 2", ragged_step(query=torch.randn(7, 3, D))),
    ("query: got torch.float64 on cpu, expected torch.float32 on cpu, those of pool", ragged_step(query=torch.randn(7, HQ, D).double())),
    ("value: got 6 tokens, expected 7, those of query", ragged_step(value=torch.randn(6, HKV, D))),
    ("value: got shape (7, 2, 9), expected (7, 2, 8)", ragged_step(value=torch.randn(7, HKV, D + 1))),
    ("scores: got shape (2, 6), expected (2, 7)", ragged_step(scores=torch.randn(HKV, 6))),
    ("return_lse: got 'no'", ragged_step(return_lse="no")),
    ("pool: got a view of some rows, expected a cache of its own", ragged_step(lambda pool: pool.over(integers(0, 1)))),
    ("pool: got tuple, expected KVSlots", ragged_step(lambda pool: pool.tensors)),
]  # fmt: skip

# ---- A layer with a cache ----------------------------------------------------------------------------

LAYER, HIDDEN = DynamicMaskAttention(32, HQ, HKV, WINDOW), torch.randn(B, 6, 32)


def cache_of_layer():
    cache = LAYER.make_cache(B)
    LAYER(HIDDEN, cache=cache)
    return cache


def run_layer(hidden=HIDDEN[:, :1], layer=LAYER, **options):
    return lambda cache: layer(hidden, cache=cache, **options)


BAD_LAYER_CALLS = [
    ("cache: got a cache with (batch, heads_kv, keep_window_size, head_dim) (2, 2, 4, 8), expected (2, 2, 5, 8)",
     run_layer(layer=DynamicMaskAttention(32, HQ, HKV, WINDOW + 1))),
    ("expected (1, 2, 4, 8)", run_layer(HIDDEN[:1, :1])),
    ("hidden: got shape (6, 32), expected [B, S, 32]", run_layer(HIDDEN[0])),
    ("key_mask: got shape (2, 6), expected (2, 1)", run_layer(key_mask=torch.ones(B, 6).bool())),
    ("cache: got dict", lambda cache: LAYER(HIDDEN, cache=cache.state_dict())),
]  # fmt: skip

BAD = {
    filled: BAD_CALLS,
    with_pending: BAD_CALLS_WITH_PENDING_TOKENS,
    full_cache: BAD_CALLS_ON_ALL_KEYS,
    pool: BAD_RAGGED_STEPS,
    pool_with_pending: [("pool: got 2 pending tokens, expected a cache of its own without", ragged_step())],
    cache_of_layer: BAD_LAYER_CALLS,
}  # fmt: skip


@pytest.mark.parametrize(
    "make, words, call",
    [(make, *row) for make, rows in BAD.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_bad_call_leaves_cache_unchanged(make, words, call):
    with torch.no_grad() if make is cache_of_layer else torch.enable_grad():
        cache = make()
        with unchanged(cache, words):
            call(cache)


# ---- Caches in a wrong state -------------------------------------------------------------------------


def test_snapshot_with_more_pending_tokens_than_the_cache_takes_raises():
    snapshot = filled(pending=3)
    view = filled(chunk=0).over(torch.arange(B, dtype=torch.int32))
    for cache, limit in ((filled(chunk=2), "2, the chunk"), (view, "0, in a view")):
        with unchanged(cache, f"snapshot: got 3 pending tokens, expected at most {limit}"):
            cache.restore(snapshot)


def test_unknown_backend_leaves_cache_unchanged():
    for cache, call in (
        (with_pending(), lambda cache: cache.commit(1)),
        (with_pending(), lambda cache: cache.attend(torch.randn(B, 1, HQ, D))),
        (pool(), ragged_step()),
    ):
        if cache.pending:
            intervals = cache.pending_intervals(1)
            cache.pending_intervals = lambda *_, intervals=intervals: intervals
        cache.backend = "abacus"
        with unchanged(cache, "abacus"):
            call(cache)


def test_count_beyond_the_window_raises():
    """Such a count comes from a cache with another window or from uninitialised memory."""
    cache = filled(chunk=0)
    cache.counts[1, 0, 0] = WINDOW + 1
    for call in (
        step(),
        lambda cache: cache.snapshot(),
        lambda cache: cache.append(**tokens(0)),
        lambda cache: cache.commit(),
    ):
        with unchanged(cache, "counts[2].count: got 5, expected 0 to 4"):
            call(cache)
    cache.counts[1, 0] = torch.tensor([WINDOW, WINDOW, WINDOW, -1, 0, 7, 0, 0])
    with unchanged(cache, "counts[2].victim: got 7, expected 0 to 3"):
        cache.step(**STEP)


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize("rows", [(2, 0, 1), (1, 0, 2)], ids=str)
def test_ragged_step_on_memory_that_was_never_cleared_leaves_pool_unchanged(rows, row):
    cleared = pool()
    cleared.counts[row, 0, 0] = WINDOW + 1
    with unchanged(cleared, ".count: got 5, expected 0 to 4"):
        ragged_step(batch=batch_of(*rows))(cleared)


def test_gradients_are_refused():
    cache, leaf = filled(chunk=0), STEP["query"].clone().requires_grad_()
    with unchanged(cache, "query: got a tensor that requires a gradient"):
        step(query=leaf)(cache)
    with torch.no_grad():
        step(query=leaf)(cache)


@pytest.mark.parametrize(
    "make, call, states",
    [(filled, step, STEP), (full_cache, attend, chunk(2)), (pool, ragged_step, ragged_states())],
)
def test_tangents_are_refused(make, call, states):
    """torch would treat the tangents as 0."""
    cache, value = make(), states["value"]
    with unchanged(cache, "value: got a tensor with a tangent"):
        torch.func.jvp(lambda value: call(**states | {"value": value})(cache), (value,), (value,))


def test_rows_on_another_device_are_not_read():
    """Reading them would wait for a GPU; on the meta device it raises."""
    rows = torch.full((3,), 9, dtype=torch.int32, device=META)
    pool = KVSlots(4, HKV, WINDOW, D, device=META)
    for batch in (RaggedBatch(OFFSETS, rows, BEGINS), RaggedBatch.of_rows(rows)):
        batch._check_rows(pool)
