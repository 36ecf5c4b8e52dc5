"""Compares continuous batching of a Doge with slots with `generate` over all keys for one prompt at a time."""

import random

import pytest
import torch
from transformers import GenerationConfig

from doge_generation import VOCABULARY, WINDOW, brute_force_of, greedy_tokens_by_prompt, make_model
from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn
from flash_dmattn.integrations.transformers.compat import (
    CACHE,
    HAS_SLOTS_IN_BATCHES,
    set_continuous_batching,
)

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not HAS_SLOTS_IN_BATCHES, reason="slots in batches need transformers 5.24"),
]
if HAS_SLOTS_IN_BATCHES:
    from transformers import ContinuousBatchingConfig

    from flash_dmattn.integrations.transformers import slot_manager

LENGTHS = (1, 5, 40, 2, WINDOW, WINDOW + 1, 70, 17, 33)
NEW = 12
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": NEW}


def prompt_of(length):
    return torch.randint(3, VOCABULARY, (length,)).tolist()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return enable_flash_dmattn(make_model())


@pytest.fixture(scope="module")
def alone(model):
    """Returns a function from a prompt to the tokens of `generate` with eager attention over all keys."""
    return greedy_tokens_by_prompt(brute_force_of(model), NEW)


def sectors(count, model):
    """Returns num_blocks for a number of states, because transformers counts memory in tokens of all keys."""
    state, *_ = slot_manager.states_of(model.config, model.dtype)
    token_bytes = 2 * state.heads_kv * state.head_dim * state.dtype.itemsize
    return count * state.nbytes() // (4 * token_bytes)


def options(model, states=8, **others):
    return ContinuousBatchingConfig(
        page_size=4, num_blocks=sectors(states, model), **{"max_batch_tokens": 64} | others
    )


def free_states(manager):
    cache = manager.batch_processor.cache
    cache.pool.try_to_free_sectors()
    return cache.pool.num_free_sectors, cache.num_sectors


def assert_equals_generate(model, alone, prompts, states=8, config=None, **others):
    """Asserts that every sequence of a batch has the tokens of its prompt alone."""
    done = model.generate_batch(
        prompts,
        generation_config=config or GenerationConfig(**GREEDY),
        continuous_batching_config=options(model, states, **others),
    ).values()
    count = 1 if config is None else config.num_return_sequences
    assert [result.prompt_ids for result in done] == [p for p in prompts for _ in range(count)]
    for result in done:
        assert result.error is None
        assert result.generated_tokens == alone(result.prompt_ids)


@pytest.mark.parametrize("budget, states", [(64, 12), (13, 12), (3, 2)])
def test_tokens_equal_generate_however_chunks_are_cut(model, alone, budget, states):
    torch.manual_seed(0)  # the same prompts
    prompts = [prompt_of(length) for length in LENGTHS]
    assert_equals_generate(model, alone, prompts, states, max_batch_tokens=budget)


def test_late_requests_with_cancelled_requests_equal_generate(model, alone):
    torch.manual_seed(1)
    random.seed(1)
    prompts = [prompt_of(random.choice(LENGTHS)) for _ in range(12)]
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=options(model, 4, max_batch_tokens=11),
    )
    manager.start()
    results = {}
    try:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=NEW)
            if number % 3 == 2:
                manager.cancel_request(str(number - 1))
            result = manager.get_result(timeout=0.02)
            if result is not None and result.is_finished():
                results[result.request_id] = result
        kept = [number for number in range(len(prompts)) if number % 3 != 1]
        while not all(str(number) in results for number in kept):
            result = manager.get_result(timeout=5)
            assert result is not None, "no result in 5 seconds"
            results[result.request_id] = result
        for number in kept:
            assert results[str(number)].generated_tokens == alone(prompts[number])
        while manager.batch_processor.has_pending_requests():
            manager.get_result(timeout=0.05)
        free, all_states = free_states(manager)
        assert free == all_states
    finally:
        manager.stop(block=True)


def test_prompt_of_one_token_begins_with_an_empty_state(model, alone):
    """The first step of such a prompt is a decoding step, and its state held another text before."""
    torch.manual_seed(5)
    prompts = [prompt_of(length) for length in (40, 1, 30, 1, 1)]
    assert_equals_generate(model, alone, prompts, states=1)


def test_forks_equal_their_prompt(model, alone):
    torch.manual_seed(3)
    prompts = [prompt_of(length) for length in (1, 25, 60)]
    config = GenerationConfig(**GREEDY)
    config.num_return_sequences = 3  # which the config refuses for equal sequences
    assert_equals_generate(model, alone, prompts, 5, config, max_batch_tokens=16)


def test_many_finished_requests_free_every_state(model):
    torch.manual_seed(4)
    random.seed(4)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=options(model, 24, max_batch_tokens=256),
    )
    manager.start()
    try:
        count = 1000
        for number in range(count):
            prompt = prompt_of(random.choice((1, 2, 3, 11)))
            manager.add_request(
                prompt, request_id=str(number), max_new_tokens=random.choice((1, 2))
            )
            if random.random() < 0.1:
                manager.cancel_request(str(random.randrange(number + 1)))
        finished = 0
        while manager.get_result(timeout=0.5) is not None:
            finished += 1
        assert finished > 0.8 * count  # the others were cancelled
        assert not manager.batch_processor.has_pending_requests()
        free, all_states = free_states(manager)
        assert free == all_states
        assert not manager.batch_processor.cache.cache_allocators["full_attention"].block_table
    finally:
        manager.stop(block=True)


def test_model_generates_the_same_after_batching(model, alone):
    prompt = prompt_of(50)
    name = model.config._attn_implementation
    assert_equals_generate(model, alone, [prompt])
    assert model.config._attn_implementation == name
    ids = torch.tensor([prompt])
    for cache in ({}, {"cache": DynamicMaskCache(model.config)}):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **cache
        )
        assert out[0, len(prompt) :].tolist() == alone(prompt)


def test_model_without_scores_keeps_transformers_cache(model, monkeypatch):
    """A Doge with its own attention has no slots but transformers' own cache of all keys."""
    from transformers.generation.continuous_batching import cache as caches

    group = caches.group_layers_by_attn_type
    eager, processors, name = brute_force_of(model), [], model.config._attn_implementation

    def make_another_cache_first(config):
        monkeypatch.undo()
        other = eager.init_continuous_batching(GenerationConfig(**GREEDY), options(model))
        processors.append(other._create_batch_processor())
        return group(config)

    monkeypatch.setattr(caches, "group_layers_by_attn_type", make_another_cache_first)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), options(model))
    processors.append(manager._create_batch_processor())
    kinds = [type(p.cache.cache_allocators["full_attention"]).__name__ for p in processors]
    assert kinds == ["FullAttentionCacheAllocator", "SlotAllocator"]
    manager.destroy()
    model.set_attn_implementation(name)


def of_another_version():
    model = make_model()
    set_continuous_batching(model, (model.config._attn_implementation,), None)
    return model


REFUSED = {
    "with transformers 5.24 and enable_flash_dmattn; this is": of_another_version,
    "sliding_window: got 16": lambda: enable_flash_dmattn(make_model(sliding_window=16)),
    # A token's experts depend on the other tokens.
    "^config.is_moe: got True": lambda: enable_flash_dmattn(
        make_model(is_moe=True, num_experts=16, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_model_without_slots_is_refused_with_the_reason(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]().generate_batch([[3, 4, 5]], generation_config=GenerationConfig(**GREEDY))


def test_paged_cache_without_slots_raises(model):
    class Paged(slot_manager.PagedAttentionCache):
        def __init__(self):
            self.cache_allocators = {}

    with pytest.raises(TypeError, match=f"^{CACHE}: got a paged cache without slots"):
        model(torch.tensor([[3, 4]]), cache=Paged(), use_cache=False)
