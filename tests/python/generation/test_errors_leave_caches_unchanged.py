"""A meaningless argument of a KV cache, or of a layer with one, raises an error that names it. The cache is unchanged afterwards, also if
a call does several things one after the other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dmattn import DynamicMaskAttention, KVSlots, flash_dmattn_with_kvcache
from small_caches import BAD_OPTIONS, CHUNK, HKV, HQ, WINDOW, B, D, tokens, unchanged


def chunk(n):
    return {"query": torch.randn(B, n, HQ, D), **tokens(n)}


STEP = chunk(1)


def filled(chunk=CHUNK):
    cache = KVSlots(B, HKV, WINDOW, D, chunk=chunk)
    cache.fill(**tokens(6))
    return cache


@pytest.mark.parametrize(
    "message, options",
    [
        ("keep_window_size: got 0", {"keep_window_size": 0}),
        ("keep_window_size: got -1", {"keep_window_size": -1}),
        ("batch: got 1.5", {"batch": 1.5}),
        ("chunk: got -2", {"chunk": -2}),
        ("value_dim: got 9, expected 1 to 8, the head_dim", {"value_dim": 9}),
        ("value_dim: got 0", {"value_dim": 0}),
        ("dtype: got torch.float64", {"dtype": torch.float64}),
        ("backend: got 'triton', which has no KV cache", {"backend": "triton"}),
        ("backend: got 'flex', which has no KV cache", {"backend": "flex"}),
        (
            "keep_window_size: got a rule of 2147483647 keys for each head, for which there is no memory",
            {"keep_window_size": 10**12, "head_dim": 256, "batch": 64},
        ),
    ],
)
def test_bad_kv_slots_size_raises(message, options):
    sizes = {"batch": 2, "heads_kv": 2, "keep_window_size": 4, "head_dim": 8}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{message}"):
        KVSlots(**(sizes | options))


@pytest.mark.parametrize(
    "message, options",
    [
        ("dtype: got torch.float32 on cuda:0, expected bfloat16 or float16", {}),
        ("head_dim: got 12 on cuda:0, expected a multiple of 8", {"dtype": torch.float16, "head_dim": 12}),
        ("value_dim: got 4 on cuda:0, expected a multiple of 8", {"dtype": torch.float16, "value_dim": 4}),
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


@pytest.mark.parametrize(
    "message, spoiled",
    [
        *BAD_OPTIONS,
        ("query: got shape (2, 2, 4, 8)", {"query": torch.randn(B, 2, HQ, D)}),
        ("key: got shape (2, 2, 2, 8), expected one token", tokens(2)),
        ("query: got torch.float64", {"query": STEP["query"].double()}),
        ("key: got shape (2, 1, 3, 8)", {"key": torch.randn(B, 1, 3, D)}),
        ("value: got shape (1, 1, 2, 8)", {"value": torch.randn(1, 1, HKV, D)}),
        ("scores: got shape (2, 2, 2)", {"scores": torch.randn(B, HKV, 2)}),
        ("scores: got torch.bfloat16", {"scores": STEP["scores"].bfloat16()}),
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
        *BAD_OPTIONS,
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
    # The other cache has the same number of places, but uses them differently.
    other = KVSlots(B, HKV, WINDOW + 1, D, chunk=CHUNK - 1)
    cache.append(**tokens(2))
    state = filled().state_dict()
    for message, call in {
        "key: got 2 tokens, expected 1 or fewer": lambda: cache.append(**tokens(2)),
        "pending: got 2 tokens": lambda: cache.step(**STEP),
        "query: got 3 queries": lambda: cache.attend(torch.randn(B, 3, HQ, D)),
        "scale: got 0": lambda: cache.attend(torch.randn(B, 1, HQ, D), scale=0.0),
        "return_lse: got 'no'": lambda: cache.attend(torch.randn(B, 1, HQ, D), return_lse="no"),
        "kept_tokens: got 3": lambda: cache.commit(3),
        "kept_tokens[1]: got 5": lambda: cache.commit(torch.tensor([0, 5])),
        "kept_tokens: got shape (3,)": lambda: cache.commit(torch.tensor([0, 1, 2])),
        "count: got 3": lambda: cache.drop(3),
        "index[1]: got 2": lambda: cache.select(torch.tensor([0, 2])),
        "index[0]: got -1": lambda: cache.select(torch.tensor([-1, 0])),
        "index: got list": lambda: cache.select([0]),
        "state: got keep_window_size 5": lambda: cache.load_state_dict(other.state_dict()),
        "snapshot: got 3 rows": lambda: cache.restore(KVSlots(3, HKV, WINDOW, D, chunk=CHUNK)),
        "intervals: got intervals for (batch, heads, keys) (2, 2, 6)": lambda: cache.fill(
            **tokens(3), intervals=cache.pending_intervals(1)
        ),
        "snapshot: got keep_window_size 5": lambda: cache.restore(other),
        "snapshot: got head_dim 16, expected 8": lambda: cache.restore(
            KVSlots(B, HKV, WINDOW, 2 * D)
        ),
        "snapshot: got value_dim 4, expected 8": lambda: cache.restore(
            KVSlots(B, HKV, WINDOW, D, value_dim=4)
        ),
        "snapshot: got heads_kv 1, expected 2": lambda: cache.restore(KVSlots(B, 1, WINDOW, D)),
        "snapshot: got torch.bfloat16, expected torch.float32": lambda: cache.restore(
            KVSlots(B, HKV, WINDOW, D, dtype=torch.bfloat16)
        ),
        "snapshot: got dict": lambda: cache.restore(state),
        "index: got torch.bool, expected torch.int32 or other integers": lambda: cache.select(
            torch.tensor([True, False])
        ),
        "index: got torch.float32": lambda: cache.select(torch.tensor([1.0])),
        "index: got shape (1, 2)": lambda: cache.select(torch.tensor([[0, 1]])),
        "index[0]": lambda: cache.select(torch.tensor([2**32])),
        "index: got shape (1,), expected (2,)": lambda: cache.reorder(torch.tensor([1])),
        "kept_tokens: got torch.float32": lambda: cache.commit(torch.tensor([1.0, 1.0])),
        "state: got none of v, expected": lambda: cache.load_state_dict(
            {name: value for name, value in state.items() if name != "v"}
        ),
        "state: got scores of shape (3,)": lambda: cache.load_state_dict(
            state | {"scores": torch.ones(3)}
        ),
        "state['seen']: got list": lambda: cache.load_state_dict(state | {"seen": [1, 2]}),
        "pending: got 4, expected at most 3": lambda: cache.load_state_dict(state | {"pending": 4}),
        "state['counts']: got 9 to 9 taken slots of a head, expected 0 to 4": lambda: (
            cache.load_state_dict(state | {"counts": torch.full_like(cache.counts, 9)})
        ),
    }.items():
        with unchanged(cache, message):
            call()


def test_snapshot_with_more_pending_tokens_than_the_cache_takes_raises():
    snapshot = filled()
    snapshot.append(**tokens(3))
    view = filled(chunk=0).over(torch.arange(B, dtype=torch.int32))
    for cache, limit in ((filled(chunk=2), "2, the chunk"), (view, "0, in a view")):
        with unchanged(cache, f"snapshot: got 3 pending tokens, expected at most {limit}"):
            cache.restore(snapshot)


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_in_another_dtype_raise_naming_the_cache(count):
    cache, states = filled(), {name: t.bfloat16() for name, t in chunk(count).items()}
    states["scores"] = states["scores"].float()
    new = {name: tensor for name, tensor in states.items() if name != "query"}
    for call in (
        lambda: cache.extend(**states),
        lambda: cache.step(**states),
        lambda: cache.append(**new),
        lambda: cache.fill(**new),
    ):
        with unchanged(
            cache,
            "key: got torch.bfloat16 on cpu, expected torch.float32 on cpu, those of the cache",
        ):
            call()
    caches = {"k_cache": torch.zeros(B, 9, HKV, D), "v_cache": torch.zeros(B, 9, HKV, D)}
    with pytest.raises(TypeError, match="^query: got .* on cpu, those of the cache$"):
        flash_dmattn_with_kvcache(
            **caches | {"query": states["query"]}, cache_seqlens=torch.zeros(B, dtype=torch.int32)
        )


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
    """Such a count comes from a cache with another window or from uninitialised memory."""
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
    """torch would treat the tangents as 0."""
    query, cache = STEP["query"], filled(chunk=0)
    caches = {"k_cache": torch.zeros(2, 9, 2, 8), "v_cache": torch.zeros(2, 9, 2, 8)}
    lengths = torch.zeros(2, dtype=torch.int32)
    for call in (
        lambda query: cache.step(**(STEP | {"query": query})),
        lambda query: flash_dmattn_with_kvcache(query, **caches, cache_seqlens=lengths),
    ):
        with pytest.raises(RuntimeError, match="got a tensor with a tangent"):
            torch.func.jvp(call, (query,), (query,))


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
