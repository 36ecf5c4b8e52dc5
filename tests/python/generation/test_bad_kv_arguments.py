"""Arguments of KV caches that mean nothing raise an error that names them, and change nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dmattn import KVSlots, flash_dmattn_with_kvcache


def tokens(n=1, **dtypes):
    k, v = (torch.randn(2, n, 2, 8) for _ in range(2))
    return {"key": k, "value": v, "scores": torch.randn(2, 2, n)}


STEP = {"query": torch.randn(2, 1, 4, 8)} | tokens()


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
    with pytest.raises((ValueError, TypeError)) as caught:
        KVSlots(**(sizes | options))
    assert message in str(caught.value)


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
    with FakeTensorMode(), pytest.raises((ValueError, TypeError)) as caught:
        KVSlots(**(sizes | options))
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", [None, "no"])
def test_flag_of_scores_that_is_no_bool_raises(flag):
    cache = KVSlots(2, 2, 4, 8, chunk=2)
    for attend in (cache.step, cache.extend):
        with pytest.raises(TypeError, match=f"scores_are_bias: got {flag!r}"):
            attend(**STEP, scores_are_bias=flag)
    assert cache.is_empty


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
        ("q: got [2, 2, 4, 8]", {"query": torch.randn(2, 2, 4, 8)}),
        ("k: got [2, 2, 2, 8], expected one token", tokens(2)),
        ("q: got Double", {"query": torch.randn(2, 1, 4, 8).double()}),
        ("k: got [2, 1, 3, 8]", {"key": torch.randn(2, 1, 3, 8)}),
        ("v: got [1, 1, 2, 8]", {"value": torch.randn(1, 1, 2, 8)}),
        ("scores: got [2, 2, 2]", {"scores": torch.randn(2, 2, 2)}),
        ("scores: got BFloat16", {"scores": torch.randn(2, 2, 1).bfloat16()}),
        (
            "key_mask: got shape (2, 2), expected (2, 1)",
            {"key_mask": torch.ones(2, 2, dtype=torch.bool)},
        ),
        ("key_mask: got torch.float32", {"key_mask": torch.ones(2, 1)}),
        ("heads_q: got 3", {"query": torch.randn(2, 1, 3, 8)}),
        ("scale: got inf", {"scale": float("inf")}),
        ("scale: got 0", {"scale": 0.0}),
        ("softcap: got -1.0", {"softcap": -1.0}),
        ("nonfinite: got 'no'", {"nonfinite": "no"}),
        ("key: got list", {"key": [1.0]}),
    ],
)
def test_bad_step_argument_raises_and_leaves_cache(message, spoiled):
    cache = KVSlots(2, 2, 4, 8)
    cache.step(**STEP)
    before = [t.clone() for t in cache.tensors]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        cache.step(**(STEP | spoiled))
    assert message in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.tensors, strict=True))


def test_bad_chunk_or_row_argument_raises():
    cache = KVSlots(2, 2, 4, 8, chunk=3)
    cache.append(**tokens(2))
    for message, call in {
        "key: got 2 tokens, expected 1 or fewer": lambda: cache.append(**tokens(2)),
        "pending: got 2 tokens": lambda: cache.step(**STEP),
        "query: got 3 queries": lambda: cache.attend(torch.randn(2, 3, 4, 8)),
        "scale: got 0": lambda: cache.attend(torch.randn(2, 1, 4, 8), scale=0.0),
        "keep: got 3": lambda: cache.commit(3),
        "keep[1]: got 5": lambda: cache.commit(torch.tensor([0, 5])),
        "keep: got [3]": lambda: cache.commit(torch.tensor([0, 1, 2])),
        "count: got 3": lambda: cache.drop(3),
        "index[1]: got 2": lambda: cache.select(torch.tensor([0, 2])),
        "index: got list": lambda: cache.select([0]),
        "state: got keep_window_size 5": lambda: cache.load_state_dict(
            KVSlots(2, 2, 5, 8, chunk=3).state_dict()
        ),
        "snapshot: got 3 rows": lambda: cache.restore(KVSlots(3, 2, 4, 8, chunk=3)),
        "intervals: got them for (batch, heads, keys) (2, 2, 6)": lambda: cache.fill(
            **tokens(3), intervals=cache.pending_intervals(1)
        ),
        "scores: got shape (2, 3, 2), expected (2, 2, 3)": lambda: cache.fill(
            **(tokens(3) | {"scores": torch.randn(2, 3, 2)})
        ),
        "lengths[0]: got 4": lambda: cache.fill(**tokens(3), lengths=torch.tensor([4, 1])),
    }.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call()
        assert message in str(caught.value)
    assert cache.pending == 2


def test_gradients_are_refused():
    cache = KVSlots(2, 2, 4, 8)
    with pytest.raises(RuntimeError, match="query: got a tensor that requires a gradient"):
        cache.step(**(STEP | {"query": STEP["query"].clone().requires_grad_()}))
    with torch.no_grad():
        cache.step(**(STEP | {"query": STEP["query"].clone().requires_grad_()}))


def test_tangents_are_refused():
    """torch would take them for 0."""
    query, cache = STEP["query"], KVSlots(2, 2, 4, 8)
    caches = {"k_cache": torch.zeros(2, 9, 2, 8), "v_cache": torch.zeros(2, 9, 2, 8)}
    lengths = torch.zeros(2, dtype=torch.int32)
    for call in (
        lambda query: cache.step(**(STEP | {"query": query})),
        lambda query: flash_dmattn_with_kvcache(query, **caches, cache_seqlens=lengths),
    ):
        with pytest.raises(RuntimeError, match="got a tensor with a tangent"):
            torch.func.jvp(call, (query,), (query,))


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("k, v, scores: got some", {"scores": None}),
        ("slot_positions, slot_counts: got one", {"slot_counts": torch.zeros(2, 2, 2).int()}),
        ("key_mask: got it for a cache of all keys", {"key_mask": torch.ones(2, 1).bool()}),
        ("score_cache: got None", {"score_cache": None, "scores": None}),
        ("keep_window_size: got -1", {"keep_window_size": -1}),
        ("cache_seqlens: got list", {"cache_seqlens": [1, 2]}),
        ("scale: got 0", {"scale": 0.0}),
    ],
)
def test_bad_with_kvcache_argument_raises(message, spoiled):
    options = {
        "q": STEP["query"],
        "k_cache": torch.zeros(2, 9, 2, 8),
        "v_cache": torch.zeros(2, 9, 2, 8),
        "score_cache": torch.zeros(2, 2, 9),
        "k": STEP["key"],
        "v": STEP["value"],
        "scores": STEP["scores"],
        "cache_seqlens": torch.zeros(2, dtype=torch.int32),
        "keep_window_size": 4,
    }
    flash_dmattn_with_kvcache(**options)
    with pytest.raises((ValueError, TypeError)) as caught:
        flash_dmattn_with_kvcache(**(options | spoiled))
    assert message in str(caught.value)
