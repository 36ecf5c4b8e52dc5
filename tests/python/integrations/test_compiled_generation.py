"""With a static DynamicMaskCache, one graph serves all decoding steps and nothing is read from the device."""

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

from doge_generation import left_padding, make_ids, make_model
from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn
from operators_called import OperatorsCalled
from transformers_version import IS_TRANSFORMERS_4

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(
        IS_TRANSFORMERS_4, reason="transformers 4 reads the length of a static cache"
    ),
]
B, S, STEPS = 2, 40, 12


def make_ours(layers=2):
    """Makes a Doge whose layers have a window of 9."""
    return enable_flash_dmattn(make_model(num_hidden_layers=layers))


@pytest.fixture
def ours():
    return make_ours()


def prefilled(ours, pad=0):
    cache = DynamicMaskCache(ours.config, static=True)
    ids, mask = make_ids(B, S), left_padding(B, S, pad)
    ours(ids, attention_mask=mask if pad else None, past_key_values=cache)
    return cache


def decode(forward, cache, pad=0, steps=STEPS):
    """Returns the logits of steps with fixed tokens."""
    tokens, logits = make_ids(B, steps, seed=3), []
    for i in range(steps):
        options = {}
        if pad:
            mask = left_padding(B, S + steps, pad)
            options["attention_mask"] = mask
            options["position_ids"] = mask[:, : S + i + 1].sum(1, keepdim=True) - 1
        logits.append(forward(tokens[:, [i]], past_key_values=cache, **options).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("pad", [0, 13])
@torch.no_grad()
def test_decoding_reads_nothing(pad, ours):
    cache = prefilled(ours, pad)
    with OperatorsCalled() as called:
        decode(ours, cache, pad)
    assert called.all and not called.reads()


@pytest.mark.parametrize(("pad", "backend", "layers"), [(0, "inductor", 2), (13, "eager", 1)])
@torch.no_grad()
def test_one_graph_serves_all_steps_and_reads_lengths_before_they_change(pad, backend, layers):
    """Inductor's fused kernels recompute their inputs, and later layers use positions after the first layer has counted the
    token. The graph must read a length before it changes. With padding, the call gives the positions."""
    torch._dynamo.reset()
    ours = make_ours(layers)
    expected = decode(ours, prefilled(ours, pad), pad)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    actual = decode(compiled, prefilled(ours, pad), pad)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@torch.no_grad()
def test_memory_stays_in_place(ours):
    cache = prefilled(ours)
    before = [t.data_ptr() for layer in cache.layers for t in layer.slots.tensors]
    decode(ours, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    ours(make_ids(B, 300, seed=2), past_key_values=cache)
    cache.reset()
    ours(make_ids(B, S, seed=2), past_key_values=cache)
    assert before == [t.data_ptr() for layer in cache.layers for t in layer.slots.tensors]


@torch.no_grad()
def test_static_cache_allocates_before_first_token(ours):
    """torch.export and a compiled prefill need that."""
    expected = decode(ours, prefilled(ours))
    cache = DynamicMaskCache(ours.config, static=True)
    assert cache.is_compileable and not cache.is_initialized
    cache.early_initialization(B, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.batch_size == B and cache.get_seq_length() == 0
    ours(make_ids(B, S), past_key_values=cache)
    assert cache.get_seq_length() == S and cache.get_query_offset() == S
    assert torch.equal(decode(ours, cache), expected)


def test_generate_compiles_the_step_of_a_static_cache():
    """`generate` compiles the step itself if the cache allows it, also on the CPU."""
    torch._dynamo.reset()
    ours, ids, options = make_ours(1), make_ids(B, S), {"max_new_tokens": 6, "do_sample": False}
    expected = ours.generate(ids, past_key_values=DynamicMaskCache(ours.config), **options)
    config = transformers.CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    actual = ours.generate(
        ids,
        past_key_values=DynamicMaskCache(ours.config, static=True),
        compile_config=config,
        **options,
    )
    assert torch.equal(actual, expected)
