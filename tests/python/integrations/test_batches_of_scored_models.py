"""Compares continuous batching of models with learned scores with `generate` for one prompt at a time."""

import pytest
import torch
from transformers import GenerationConfig

from flash_dmattn.integrations.transformers import add_learned_scores, remove_learned_scores
from flash_dmattn.integrations.transformers.compat import HAS_SLOTS_IN_BATCHES

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not HAS_SLOTS_IN_BATCHES, reason="slots in batches need transformers 5.24"),
]
if HAS_SLOTS_IN_BATCHES:
    from transformers import ContinuousBatchingConfig

    from scored_models import VOCABULARY, make_base, make_scored

NEW = 10
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": NEW}


def batched(model, prompts, keep=False, **options):
    """Generates for several prompts at once. keep: whether the manager is kept for the next batch."""
    done = model.generate_batch(
        prompts,
        persistent_manager=keep,
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=4, **{"num_blocks": 400, "max_batch_tokens": 13} | options
        ),
    )
    return [result.generated_tokens for result in done.values()]


def alone(model, prompt):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
    )
    return out[0, len(prompt) :].tolist()


def prompts_of(*lengths):
    torch.manual_seed(len(lengths))
    return [torch.randint(2, VOCABULARY, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize(
    "family, rule, scorer",
    [
        ("Llama", "all", "hidden"),
        ("Llama", "heads", "mlp"),
        ("Qwen3", "competing", "mlp"),
        ("Mistral", "streaming", "key_norm"),
        ("GPT2", "window", "hidden"),
        ("DeepseekV3", "all", "hidden"),
    ],
)
def test_tokens_equal_generate_however_chunks_are_cut(family, rule, scorer):
    model = make_scored(family, rule, scorer)
    prompts = prompts_of(1, 5, 40, 2, 9, 17, 33, 1)
    expected = [alone(model, prompt) for prompt in prompts]
    name = model.config._attn_implementation
    assert batched(model, prompts) == expected
    assert model.config._attn_implementation == name
    assert alone(model, prompts[2]) == expected[2]


def test_phase_that_attends_to_all_keys_is_refused():
    model = make_scored().set_score_phase("soft")
    with pytest.raises(ValueError, match="^phase: got 'soft', which attends to all keys"):
        batched(model, prompts_of(3))


def test_phase_off_uses_transformers_cache():
    model = make_scored()
    prompts = prompts_of(4, 19)
    expected = [alone(make_base(), prompt) for prompt in prompts]
    model.set_score_phase("off")
    assert batched(model, prompts) == expected


def test_kept_manager_is_not_used_in_another_phase():
    model = make_scored()
    prompts = prompts_of(4, 19)
    expected = batched(model, prompts, keep=True)
    kept = model._cached_continuous_batching_manager
    model.set_score_phase("soft")
    with pytest.raises(ValueError, match="^phase: got 'soft', which attends to all keys"):
        batched(model, prompts, keep=True)
    model.set_score_phase("hard")
    assert batched(model, prompts, keep=True) == expected
    assert model._cached_continuous_batching_manager is kept
    model.set_score_phase("off")
    assert batched(model, prompts, keep=True) == [alone(make_base(), prompt) for prompt in prompts]


def test_kept_manager_is_not_used_under_another_rule():
    model = make_scored()
    prompts = prompts_of(4, 19)
    batched(model, prompts, keep=True)
    kept = model._cached_continuous_batching_manager
    add_learned_scores(remove_learned_scores(model), keep_window_size=2)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    model._cached_continuous_batching_manager = kept
    assert batched(model, prompts, keep=True) == [alone(model, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("Gemma3", {}, r"config.learned_scores: got scores in 1 of 2 layers, expected all"),
        ("Llama", {"dense_prefill": True}, r"config.learned_scores: got dense_prefill"),
    ],
)
def test_models_without_states_of_one_size_are_refused(family, options, message):
    model = add_learned_scores(make_base(family), 4, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        batched(model, prompts_of(3))
