"""A text gets the same tokens and scores however it is cut, padded, batched or drafted. Its words repeat, as in any text."""

import random

import pytest
import torch

from doge_generation import left_padding
from doge_generation import make_ids as make_text
from flash_dmattn import DynamicMaskAttention
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    enable_flash_dmattn,
)
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from scored_models import make_base
from transformers_version import recording, within_limit

pytestmark = pytest.mark.transformers

WORDS, LENGTH = 61, 120  # of make_text


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make_model(scorer):
    options = {"vocab_size": WORDS, "max_position_embeddings": 512, "num_hidden_layers": 2}
    if scorer == "doge":
        model = make_base("Doge", keep_window_size=24, **options)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.A)
        return enable_flash_dmattn(model)
    model = make_base(**options)
    add_learned_scores(model, keep_window_size=20, recent_window=6, sink_tokens=3, scorer=scorer)
    for layer in scored_layers(model):
        for parameter in layer.scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def random_cut(rng, length):
    """Returns lengths of parts. The last one is 1, after which no token is pending."""
    cut = []
    while sum(cut) < length - 1:
        part = rng.choice([1, 1, 1, 2, 5, 16, 17, 40, 64])
        cut += [min(part, length - 1 - sum(cut))] * rng.choice([1, 1, 8 if part == 1 else 1])
        while sum(cut) > length - 1:
            cut.pop()
    return [*cut, 1]


def read(model, ids, cut, **mask):
    """Returns the logits of a text that is read in parts, and the cache."""
    cache, logits, end = DynamicMaskCache(model.config), [], 0
    for part in ids.split(cut, 1):
        end += part.shape[1]
        options = {name: value[:, :end] for name, value in mask.items()}
        logits.append(model(part, past_key_values=cache, **options).logits)
    return torch.cat(logits, 1), cache


def keys_of(slots):
    """Returns the positions of the keys in slots, [B, H, n] in order, and their scores."""
    positions, order = slots.positions.sort(-1)
    positions = torch.where(positions < 0, ~positions, positions)
    positions, again = positions.sort(-1)
    return positions, slots.scores.gather(-1, order).gather(-1, again)


@pytest.mark.parametrize("scorer", ["hidden", "mlp", "doge"])
def test_random_cuts_give_logits_and_scores_of_the_whole_text(scorer):
    model, rng = make_model(scorer), random.Random(1)
    ids = make_text(2, LENGTH)
    whole = model(ids, use_cache=False).logits
    kept = keys_of(read(model, ids, [LENGTH - 1, 1])[1].layers[0].slots)
    for _ in range(12):
        logits, cache = read(model, ids, random_cut(rng, LENGTH))
        torch.testing.assert_close(logits, whole, atol=2e-4, rtol=2e-4)
        positions, scores = keys_of(cache.layers[0].slots)
        assert torch.equal(positions, kept[0]) and torch.equal(scores, kept[1])


@pytest.mark.parametrize("scorer", ["hidden", "doge"])
def test_padded_row_of_a_batch_gives_logits_of_the_row_alone(scorer):
    model = make_model(scorer)
    ids, mask = make_text(3, LENGTH, seed=1), left_padding(3, LENGTH, 31)
    alone = model(ids[:1, 31:], use_cache=False).logits[0]
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    for cut in ([LENGTH], [50, 1, 69], [40, *[1] * (LENGTH - 40)]):
        logits, _ = read(model, ids, cut, attention_mask=mask)
        torch.testing.assert_close(logits[0, 31:], alone, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(logits[1:], whole[1:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("scorer", ["hidden", "doge"])
def test_drafts_give_greedy_tokens(scorer):
    model = make_model(scorer)
    for seed in range(3):
        ids = make_text(1, 80, seed=seed)
        greedy, drafted = (
            model.generate(
                ids, attention_mask=torch.ones_like(ids),
                past_key_values=recording(DynamicMaskCache(model.config)),
                max_new_tokens=30, do_sample=False, eos_token_id=0, **draft,
            )
            for draft in ({}, {"prompt_lookup_num_tokens": 4})
        )  # fmt: skip
        assert torch.equal(within_limit(drafted, greedy.shape[1]), greedy)


@pytest.mark.parametrize("score", ["gate", "doge", "linear"])
@pytest.mark.parametrize("score_input", ["hidden", "value"])
def test_layer_gives_outputs_of_the_whole_text_in_any_cut(score, score_input):
    torch.manual_seed(3)
    layer = DynamicMaskAttention(32, 4, 2, 9, score=score, score_input=score_input)
    for parameter in layer.scores.parameters():
        torch.nn.init.normal_(parameter)
    hidden, rng = torch.randn(WORDS, 32)[make_text(2, LENGTH)], random.Random(2)
    whole = layer(hidden)
    for _ in range(6):
        cache = layer.make_cache(2, chunk=128)
        parts = [layer(part, cache=cache) for part in hidden.split(random_cut(rng, LENGTH), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
