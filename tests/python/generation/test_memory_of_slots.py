"""A cache holds w keys however long the stream is, here 524,288 tokens, and its memory can be saved and loaded."""

import io

import pytest
import torch

from flash_dmattn import KVSlots
from flash_dmattn.integrations.serving.states import SlotState
from flash_dmattn.keys.rule import SelectionRule
from small_caches import CHUNK, HKV, HQ, WINDOW, B, D, tokens


def test_half_a_million_tokens_need_constant_memory():
    tokens, window, chunk = 524_288, 32, 4096
    cache = KVSlots(1, 2, window, 8, chunk=chunk)
    size = sum(t.numel() * t.element_size() for t in cache.tensors)
    addresses = [t.data_ptr() for t in cache.tensors]
    generator = torch.Generator().manual_seed(0)
    best = torch.empty(2, 0)
    for begin in range(0, tokens, chunk):
        scores = torch.randn(1, 2, chunk, generator=generator)
        # The key of a token is its position.
        k = torch.arange(begin, begin + chunk).float()[None, :, None, None].expand(1, chunk, 2, 8)
        cache.append(k, k, scores)
        cache.commit()
        best = torch.cat([best, scores[0]], 1).sort(1, descending=True)[0][:, :window]
    assert cache.seen.tolist() == [tokens]
    assert torch.equal(cache.scores[0, :, :window].sort(1, descending=True)[0], best)
    assert torch.equal(cache.k[0, :, :window, 0], cache.positions[0, :, :window].float())
    assert size == sum(t.numel() * t.element_size() for t in cache.tensors)
    assert addresses == [t.data_ptr() for t in cache.tensors]

    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
    out, lse = cache.step(q, k, k, torch.full((1, 2, 1), -9.0), return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()  # the new token scores too low to keep
    assert cache.seen.tolist() == [tokens + 1]


def test_memory_is_the_sum_over_heads():
    windows = (3, 40, 1173, 0, 7, 64, 12, 90)
    options = {"recent_window": 16, "sink_tokens": 4, "chunk": 60, "dtype": torch.bfloat16}
    cache = KVSlots(2, 8, windows, 64, **options)
    slots = sum(windows) + 8 * (16 + 4 + 60)
    assert cache.k.shape == (2, slots, 64)
    assert (cache.scores.shape, cache.positions.shape) == ((2, slots), (2, slots))
    assert (cache.chunk, cache.places) == (60, 1193)
    equal = KVSlots(2, 8, (9,) * 8, 64, **options)
    assert equal.k.shape == KVSlots(2, 8, 9, 64, **options).k.shape == (2, 8, 89, 64)
    rule = SelectionRule(windows, sink_tokens=4, recent_window=16)
    sizes = SlotState(8, rule, 64, torch.bfloat16).nbytes(), slots - 8 * 60
    assert 0 <= sizes[0] - sizes[1] * (2 * 64 * 2 + 8) - 8 * 32 < 6 * 128


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


def test_loaded_state_has_the_dtype_of_the_cache_and_may_be_empty():
    wide, half = (KVSlots(B, HKV, WINDOW, D, dtype=t) for t in (torch.float32, torch.bfloat16))
    for is_empty in (True, False):
        half.load_state_dict(wide.state_dict())
        assert half.is_empty == is_empty and torch.equal(half.k, wide.k.bfloat16())
        wide.fill(**tokens(9))


@pytest.mark.parametrize("window", [WINDOW, (WINDOW,) * HKV], ids=["one", "equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "copied",
    [
        lambda cache: cache,
        lambda cache: cache.select(torch.tensor([1, 0])),
        lambda cache: cache.snapshot(),
        lambda cache: cache.repeat(3),
        lambda cache: cache.over(torch.tensor([1, 0], dtype=torch.int32)),
    ],
    ids=["made", "select", "snapshot", "repeat", "view"],
)
def test_loaded_cache_has_the_bits_of_the_saved_one(copied, dtype, window):
    cache = KVSlots(B, HKV, window, D, chunk=CHUNK, dtype=dtype)
    prompt = tokens(9)
    cache.fill(**prompt | {name: prompt[name].to(dtype) for name in ("key", "value")})
    cache = copied(cache)
    loaded = [saved_and_loaded(cache, weights_only=False)]
    if cache.rows is None:
        loaded.append(KVSlots(cache.batch, HKV, window, D, chunk=CHUNK, dtype=dtype))
        loaded[1].load_state_dict(saved_and_loaded(cache.state_dict(), weights_only=True))
    query, key, value = (torch.randn(cache.batch, 1, h, D, dtype=dtype) for h in (HQ, HKV, HKV))
    step = query, key, value, torch.randn(cache.batch, HKV, 1)
    caches = [cache, *loaded]
    for _ in range(2):
        for tensors in zip(*(c.tensors for c in caches), strict=True):
            assert all(torch.equal(t, tensors[0]) for t in tensors)
        outs = [c.step(*step) for c in caches]
        assert all(torch.equal(out, outs[0]) for out in outs)
