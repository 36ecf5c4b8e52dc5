"""Tests generation with a cache of w keys on the GPU: accuracy against float32, CUDA graphs, compilation and offloading."""

import copy

import pytest
import torch

from gpu import capture

transformers = pytest.importorskip("transformers")

from doge_generation import (  # noqa: E402
    brute_force_of,
    left_padding,
    make_ids,
    make_model,
)
from flash_dmattn import DynamicMaskAttention  # noqa: E402
from flash_dmattn.integrations.transformers import (  # noqa: E402
    DynamicMaskCache,
    enable_flash_dmattn,
)
from scored_models import make_ids as make_scored_ids  # noqa: E402
from scored_models import make_scored  # noqa: E402

B, S, WINDOW, STEPS = 2, 300, 64, 40


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make_large(**options):
    """Returns a float32 model with sizes that the kernels support."""
    return make_model(
        **{"window": WINDOW, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096,
           **options}
    ).cuda()  # fmt: skip


def ours_in_bfloat16(model):
    return enable_flash_dmattn(copy.deepcopy(model).bfloat16())


def logits_of(model, ids, lengths, cache=None, mask=None):
    """Returns the logits of a text that is read in parts of these lengths."""
    cache = transformers.DynamicCache() if cache is None else cache
    parts, end = [], 0
    for part in ids.split(lengths, dim=1):
        end += part.shape[1]
        padding = {} if mask is None else {"attention_mask": mask[:, :end]}
        parts.append(model(part, past_key_values=cache, **padding).logits)
    return torch.cat(parts, dim=1).float()


PROMPT, CHUNKS, TURNS = [S, *[1] * 80], [100, 100, 100, *[1] * 80], [S, 30, 1, 49]


@pytest.mark.parametrize(
    "lengths, pad",
    [
        pytest.param(PROMPT, 0, id="prompt"),
        pytest.param(CHUNKS, 0, id="chunks"),
        pytest.param(TURNS, 0, id="turns"),
        pytest.param([*[1] * (S + 80)], 0, id="token by token"),
        pytest.param(PROMPT, 90, id="prompt, padded"),
        # One row has more padding than the first chunk.
        pytest.param(CHUNKS, 130, id="chunks, padded"),
        pytest.param(TURNS, S - 20, id="turns, padded"),  # one row has fewer tokens than the window
    ],
)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_logits_are_as_near_to_float32_as_eager(static, lengths, pad):
    """Compares the logits of all tokens; rows of padding are ignored."""
    model, ids = make_large(), make_ids(B, S + 80).cuda()
    mask = left_padding(B, S + 80, pad).to(ids.device) if pad else None
    exact = logits_of(brute_force_of(model), ids, [S + 80], mask=mask)
    eager = logits_of(brute_force_of(model).bfloat16(), ids, lengths, mask=mask)
    cache = DynamicMaskCache(model.config, static=static)
    ours = logits_of(ours_in_bfloat16(model), ids, lengths, cache, mask)
    errors = [(t - exact).abs() for t in (ours, eager)]
    if pad:
        errors = [error[mask.bool()] for error in errors]
    for norm in (torch.Tensor.mean, torch.Tensor.amax):
        error, yardstick = (norm(e).item() for e in errors)
        assert error <= 2 * yardstick, (norm.__name__, error, yardstick)


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
@pytest.mark.parametrize("pad", [0, 90])
def test_slots_and_full_cache_give_same_tokens(way, pad):
    """The same kernels choose the same keys: a token differs only where two logits nearly tie."""
    options = {"greedy": {}, "beams": {"num_beams": 3}, "sampling": {"do_sample": True}}[way]
    model, ids = ours_in_bfloat16(make_large()), make_ids(B, S).cuda()
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    texts = []
    for cache in (DynamicMaskCache(model.config), transformers.DynamicCache()):
        torch.manual_seed(1)
        texts.append(
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS,
                **{"do_sample": False, **options},
            )
        )  # fmt: skip
    same = (texts[0] == texts[1])[:, S:].int().cumprod(1).sum(1)
    assert same.float().mean() > STEPS / 3, same


def prefilled(model, ids):
    cache = DynamicMaskCache(model.config, static=True)
    model(ids, past_key_values=cache)
    return cache


def test_calls_do_not_wait_for_the_device():
    model, ids = ours_in_bfloat16(make_large()), make_ids(B, S).cuda()
    cache = prefilled(model, ids)
    token, mask = ids[:, :1].clone(), torch.ones(B, S + 9, dtype=torch.long, device="cuda")
    # Kernels are loaded at their first use.
    model(token, past_key_values=cache, attention_mask=mask)
    model(token, past_key_values=cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(token, past_key_values=cache)
            model(token, past_key_values=cache, attention_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_graph_serves_all_tokens(is_compiled):
    """A thousand replays, far beyond the window, equal the same steps without a graph."""
    torch._dynamo.reset()
    model, ids = ours_in_bfloat16(make_large()), make_ids(B, S).cuda()
    forward = torch.compile(model, fullgraph=True) if is_compiled else model
    caches = [prefilled(model, ids) for _ in range(2)]
    tokens = [ids[:, :1].clone() for _ in caches]
    # The table has the next token for each token, so there are no near ties.
    table = torch.randint(397, (397,), device="cuda")

    def step(i):
        logits = forward(tokens[i], past_key_values=caches[i]).logits
        tokens[i].copy_(table[tokens[i]])
        return logits

    # One step runs without a graph; capturing a step does not run it.
    graph, logits = capture(lambda: step(0))
    step(1)
    for turn in range(1000):
        graph.replay()
        if turn % 100 == 99 or turn < 3:
            expected = step(1)
            assert (logits - expected).abs().max() <= 0.02 * expected.abs().max()
        else:
            step(1)
    assert all(
        layer.slots.seen.tolist() == [S + 1001] * B for cache in caches for layer in cache.layers
    )


def test_generate_compiles_a_static_cache():
    torch._dynamo.reset()
    model, ids = ours_in_bfloat16(make_large()), make_ids(1, S).cuda()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    texts = [
        model.generate(
            ids, past_key_values=DynamicMaskCache(model.config, static=static), **options
        )
        for static in (True, False)
    ]
    same = (texts[0] == texts[1])[0, S:].int().cumprod(0).sum()
    assert same > STEPS / 3, same


def test_generate_compiles_prompts_of_a_scored_model():
    """With prefill_chunk_size it compiles the prompt, whose static cache has memory before its first tokens."""
    torch._dynamo.reset()
    model = make_scored(head_dim=32, max_position_embeddings=512).cuda()
    options = {"max_new_tokens": 12, "do_sample": False}
    for ids in make_scored_ids(180).cuda().split(90, 1):
        texts = [
            model.generate(ids, attention_mask=torch.ones_like(ids), **options, **cache)
            for cache in ({"cache_implementation": "static", "prefill_chunk_size": 32}, {})
        ]
        same = (texts[0] == texts[1])[:, 90:].int().cumprod(1).sum(1)
        assert same.min() > 4, same


@pytest.mark.parametrize("way", ["all layers", "one layer", "prefetch", "rows"])
def test_offloading_between_turns_keeps_tokens(way):
    model, ids = ours_in_bfloat16(make_large()), make_ids(B, S + 20).cuda()
    cache = DynamicMaskCache(model.config)
    model(ids[:, :S], past_key_values=cache)
    stayed, parts = copy.deepcopy(cache), [1, 9, 1, 1, 1, 7]
    before = torch.cuda.memory_allocated()
    cache.offload(*([1] if way == "one layer" else []))
    moved = cache.layers[1:2] if way == "one layer" else cache.layers
    assert {t.device.type for layer in moved for t in layer.slots.tensors} == {"cpu"}
    freed = sum(t.nbytes for layer in moved for t in layer.slots.tensors)
    assert torch.cuda.memory_allocated() <= before - freed
    if way == "prefetch":
        cache.prefetch()
    elif way == "rows":
        for moving in (cache, stayed):
            moving.reorder_cache(torch.tensor([1, 0], device="cuda"))
    assert torch.equal(*(logits_of(model, ids[:, S:], parts, c) for c in (cache, stayed)))
    for ours, theirs in zip(cache.layers, stayed.layers, strict=True):
        for name in ("k", "v", "scores", "positions", "counts", "seen"):
            moved, expected = (getattr(layer.slots, name) for layer in (ours, theirs))
            assert moved.device.type == "cuda" and torch.equal(moved, expected), name


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_slots_of_latent_attention_are_as_near_to_float32_as_all_keys(static):
    """Keys have 16 columns, values 8. Scores of a single layer do not depend on attention."""
    model, ids = make_scored("DeepseekV3", num_hidden_layers=1), make_scored_ids(60)
    exact = logits_of(model, ids, [60])
    model, lengths = model.bfloat16().cuda(), [20, 9, 1, 1, 1, 8, *[1] * 20]
    caches = (DynamicMaskCache(model.config, static=static), transformers.DynamicCache())
    logits = (logits_of(model, ids.cuda(), lengths, cache).cpu() for cache in caches)
    error, yardstick = ((t - exact).abs().mean().item() for t in logits)
    assert error <= 2 * yardstick, (error, yardstick)


def test_captured_layer_equals_eager():
    attention = DynamicMaskAttention(512, 8, 4, WINDOW, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(B, S + STEPS, 512, device="cuda", dtype=torch.bfloat16)
    whole, cache = attention(hidden), attention.make_cache(B)
    attention(hidden[:, :S], cache=cache)
    token = hidden[:, S : S + 1].clone()
    graph, out = capture(lambda: attention(token, cache=cache))
    for i in range(S + 1, S + STEPS):
        token.copy_(hidden[:, i : i + 1])
        graph.replay()
        torch.testing.assert_close(out, whole[:, i : i + 1], atol=0.02, rtol=0.02)
