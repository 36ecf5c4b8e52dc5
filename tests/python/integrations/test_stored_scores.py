"""The score of a key is computed once, when the key is written, also with transformers' own caches."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from doge_generation import assert_same_generation, keep_recent_of_equal_scores, make_ids, make_pair
from flash_dmattn import scores
from flash_dmattn._core import ops
from flash_dmattn.integrations.transformers import scored_cache
from operators_called import OperatorsCalled
from scored_models import VOCABULARY, make_scored
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
since_transformers_5 = pytest.mark.skipif(
    IS_TRANSFORMERS_4,
    reason="caches of transformers 4 crop to a length, and it reads those of static ones",
)

B, S = 2, 40


@pytest.fixture
def scored(monkeypatch):
    """Returns a list that collects the number of tokens of each call that computes scores."""
    lengths = []
    project = scores.score_projection_direct

    def watch(hidden, *weights):
        lengths.append(hidden.shape[1])
        return project(hidden, *weights)

    monkeypatch.setattr(scores, "score_projection_direct", watch)
    return lengths


def caches(config):
    return {"dynamic": DynamicCache(), "dynamic of a config": DynamicCache(config=config),
            "static": StaticCache(config=config, max_cache_len=80)}  # fmt: skip


@pytest.mark.parametrize("name", ["dynamic", "dynamic of a config", "static"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 15}], ids=str)
def test_step_computes_one_score_per_token(name, options, scored):
    oracle, ours = make_pair()
    cache = caches(ours.config)[name]
    assert_same_generation(oracle, ours, make_ids(B, S), cache, **options)
    assert scored[-3:] == [1] * 3 and sum(scored) == 3 * (S + 23)


@pytest.mark.parametrize("name", ["dynamic of a config", "static"])
def test_sliding_window_cache_keeps_scores(name, scored):
    oracle, ours = make_pair(sliding_window=16)
    cache = caches(ours.config)[name]
    assert_same_generation(oracle, ours, make_ids(B, S), cache)
    assert scored[-3:] == [1] * 3


def logits_of(model, cache, seed, tokens=5):
    ids = make_ids(len(cache.layers[0].keys), tokens, seed=seed)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, tokens - 4], 1)]
    return torch.cat(parts, dim=1)


@since_transformers_5
@torch.no_grad()
def test_rows_and_lengths_change_with_those_of_the_keys(scored):
    oracle, ours = make_pair()
    results = []
    for model in (oracle, ours):
        cache = DynamicCache()
        model(make_ids(B, S), past_key_values=cache)
        scored.clear()
        cache.crop(-7)
        results.append([logits_of(model, cache, 1)])
        cache.batch_repeat_interleave(3)
        results[-1].append(logits_of(model, cache, 2))
        cache.batch_select_indices(torch.tensor([4, 0, 3]))
        results[-1].append(logits_of(model, cache, 3))
        cache.reorder_cache(torch.tensor([2, 2, 1]))
        results[-1].append(logits_of(model, cache, 4))
        copied = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        results[-1].append(logits_of(model, copied, 5))
    assert max(scored) == 3
    expected = [logits.float() for logits in results[0]]
    torch.testing.assert_close(results[1], expected, atol=2e-4, rtol=2e-4)
    cache.reset()
    assert torch.equal(
        ours(make_ids(B, S), past_key_values=cache).logits, ours(make_ids(B, S)).logits
    )


@torch.no_grad()
def test_keys_without_scores_get_scores(scored):
    """Eager attention writes keys without scores, before our attention or between its calls."""
    oracle, ours = make_pair()
    keep_recent_of_equal_scores(ours)
    expected, cache = DynamicCache(), DynamicCache()
    ids = make_ids(B, S)
    for implementation, part in zip(
        ("eager", "flash_dmattn", "eager", "flash_dmattn"), ids.split([20, 9, 5, 6], 1), strict=True
    ):
        theirs = oracle(part, past_key_values=expected).logits
        ours.set_attn_implementation(implementation)
        logits = ours(part, past_key_values=cache).logits
        torch.testing.assert_close(logits, theirs.float(), atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("reads_counter", [True, False])  # not that of a GPU
def test_static_cache_with_keys_without_scores_raises(reads_counter, monkeypatch):
    if not reads_counter:
        monkeypatch.setattr(scored_cache, "_lacks_scores", lambda layer, state: False)
    model, ids = make_scored(), torch.randint(2, VOCABULARY, (B, S))
    cache = StaticCache(config=model.config, max_cache_len=80)
    model(ids[:, :20], past_key_values=cache)
    model.set_score_phase("off")
    model(ids[:, 20:29], past_key_values=cache)
    model.set_score_phase("hard")
    with pytest.raises(ValueError, match="got keys without scores in layer 0"):
        model(ids[:, 29:], past_key_values=cache)
    layers = len(cache.layers)
    cache.reset()
    logits = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert len(cache.layers) == layers


@since_transformers_5
@torch.no_grad()
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_cropped_cache_gets_scores_again(name):
    model, ids = make_scored(), torch.randint(2, VOCABULARY, (B, S))
    cache = caches(model.config)[name]
    model(ids[:, :20], past_key_values=cache)
    model.set_score_phase("off")(ids[:, 20:23], past_key_values=cache)
    cache.crop(-23)
    logits = model.set_score_phase("hard")(ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@since_transformers_5
@torch.no_grad()
def test_step_of_a_static_cache_reads_nothing(monkeypatch):
    monkeypatch.setattr(scored_cache, "_lacks_scores", lambda layer, state: False)
    model, ids = make_scored(rule="window"), torch.randint(2, VOCABULARY, (B, S))
    cache = StaticCache(config=model.config, max_cache_len=80)
    model(ids, past_key_values=cache)
    with OperatorsCalled() as called:
        model(ids[:, :1], past_key_values=cache)
    assert called.all and not called.reads()


def test_scores_have_a_gradient():
    """Scores of cached keys have a gradient, too."""
    _, ours = make_pair()
    cache = DynamicCache()
    ours(make_ids(B, S), past_key_values=cache)
    ours(make_ids(B, 3, seed=1), past_key_values=cache).logits.square().sum().backward()
    assert ours.model.layers[1].self_attn.A.grad.abs().min() > 0


@since_transformers_5
@torch.no_grad()
def test_static_cache_steps_share_one_graph():
    torch._dynamo.reset()
    oracle, ours = make_pair(num_hidden_layers=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    logits = []
    for model, step in ((oracle, oracle), (ours, compiled)):
        cache, ids = StaticCache(config=ours.config, max_cache_len=80), make_ids(B, S + 8)
        model(ids[:, :S], past_key_values=cache)
        steps = [step(ids[:, [i]], past_key_values=cache).logits for i in range(S, S + 8)]
        logits.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(logits[1], logits[0].float(), atol=2e-4, rtol=2e-4)
    (graph,) = counter.graphs
    projections = [node for node in graph.graph.nodes if node.target is ops.score_projection]
    assert [node.meta["example_value"].shape[2] for node in projections] == [1]
