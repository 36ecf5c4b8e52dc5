"""A 16-bit Doge keeps the same keys as the float32 model, because its scores are float32."""

import pytest
import torch
from transformers.models.doge.modeling_doge import DogeAttention

from doge_gradients import LENGTH, SCORED, make_doge, median_distances
from flash_dmattn.integrations.transformers import doge as integration
from flash_dmattn.integrations.transformers import enable_flash_dmattn
from gpu import devices


@pytest.fixture
def scores_of_calls(monkeypatch):
    """Returns a list that collects the scores of every call of our attention, in order."""
    seen = []
    attend = integration.attend

    def watch(query, key, value, visible, used, options, **keywords):
        seen.append(used.scores.detach())
        return attend(query, key, value, visible, used, options, **keywords)

    monkeypatch.setattr(integration, "attend", watch)
    return seen


def in_precision(model, precision):
    """Returns the model, and the context to run it in."""
    if precision == "autocast":
        return model, torch.autocast("cpu", torch.bfloat16)
    return model.to(getattr(torch, precision)), torch.autocast("cpu", enabled=False)


# On the CPU one seed is enough, because the distances are at most half of what the tests allow.
SEEDS = {"cpu": 1, "cuda": 5}


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_nearer_to_float32_than_eager(dtype, device):
    distances = median_distances(dtype, device, seeds=SEEDS[device])
    for kind, ours in distances["ours"].items():
        eager = distances["eager"][kind]
        assert ours <= (0.5 if kind in SCORED else 1.0) * eager, (kind, ours, eager)


@devices
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_of_A_without_selection_is_near_float32(autocast, device):
    """On a CPU the ratio of our error to that of eager attention is 0.2 to 0.5; it would be 1.5 to 5 if the error of delta added
    up."""
    options = {"autocast": autocast, "window": LENGTH, "seeds": SEEDS[device]}
    distances = median_distances(torch.bfloat16, device, **options)
    ours, eager = (distances[side]["A"] for side in ("ours", "eager"))
    assert ours <= (2 if device == "cuda" else 1) * eager, (ours, eager)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_scores_are_float32_in_training(precision, scores_of_calls):
    model, ids = make_doge(0)
    with torch.no_grad():
        exact = model(ids, labels=ids).loss
    model, context = in_precision(enable_flash_dmattn(model), precision)
    with context:
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 2e-3 * exact
    assert len(scores_of_calls) == 3
    assert all(scores.dtype == torch.float32 for scores in scores_of_calls)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.isfinite().all(), name


def test_scores_of_a_float64_model_are_float64(scores_of_calls):
    model, ids = make_doge(0)
    enable_flash_dmattn(model.double())(ids[:, :120])
    assert all(scores.dtype == torch.float64 for scores in scores_of_calls)


@pytest.mark.parametrize(
    ("precision", "cache"),
    [
        ("bfloat16", "dynamic"),
        ("bfloat16", "static"),
        ("float16", "static"),
        ("autocast", "dynamic"),  # the static cache has one dtype for keys and values
    ],
)
def test_scores_are_float32_in_generation(precision, cache, scores_of_calls):
    model, ids = make_doge(0, window=16)
    model, context = in_precision(enable_flash_dmattn(model).eval(), precision)
    with context:
        model.generate(
            ids[:, :40], attention_mask=torch.ones_like(ids[:, :40]), max_new_tokens=4,
            do_sample=False, cache_implementation=cache,
        )  # fmt: skip
    assert len(scores_of_calls) >= 4 * 3
    assert all(scores.dtype == torch.float32 for scores in scores_of_calls)


@torch.no_grad()
def test_cached_keys_keep_their_scores(scores_of_calls):
    """In the first layer, scores token by token equal those of all tokens at once, up to the rounding of a projection."""
    model, ids = make_doge(0, window=16)
    model = enable_flash_dmattn(model.bfloat16()).eval()
    model(ids[:, :40], use_cache=False)
    whole, cache = scores_of_calls[0], None
    for part in ids[:, :40].split([33, 1, 5, 1], dim=1):
        scores_of_calls.clear()
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values
        scores = scores_of_calls[0]
        torch.testing.assert_close(scores, whole[..., : scores.shape[-1]], rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_rounding_option_gives_scores_of_eager(precision, scores_of_calls, monkeypatch):
    model, ids = make_doge(0)
    model, context = in_precision(model, precision)
    eager_scores = []
    prepare = DogeAttention.prepare_dynamic_mask

    def watch(self, hidden_states, dt_states, *args, **kwargs):
        eager_scores.append(dt_states.detach())
        return prepare(self, hidden_states, dt_states, *args, **kwargs)

    monkeypatch.setattr(DogeAttention, "prepare_dynamic_mask", watch)
    with torch.no_grad(), context:
        model(ids)
        enable_flash_dmattn(model, round_scores_like_eager=True)(ids)
        enable_flash_dmattn(model)(ids)
    expected, rounded, wide = eager_scores[0], scores_of_calls[0], scores_of_calls[3]
    assert rounded.dtype == expected.dtype and torch.equal(rounded, expected)
    assert wide.dtype == torch.float32
    if precision == "bfloat16":
        assert len(wide.unique()) > 2 * len(rounded.unique())


@pytest.mark.parametrize("kind", ["padding", "arbitrary", "additive"])
def test_masks_with_float32_scores_equal_the_float32_model(kind):
    """The loss of a bf16 model equals the float32 model's for every form of mask."""
    model, ids = make_doge(0)
    mask = torch.ones_like(ids)
    if kind == "padding":
        mask[0, :100] = 0
    else:
        pairs = torch.ones(400, 400, dtype=torch.bool).tril() & (torch.rand(400, 400) > 0.3)
        mask = (pairs | torch.eye(400, dtype=torch.bool))[None, None]
        if kind == "additive":
            mask = torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min)
    with torch.no_grad():
        exact = model(ids, attention_mask=mask, labels=ids).loss
    ours = enable_flash_dmattn(model.bfloat16())
    if kind == "additive":
        mask = mask.bfloat16()
    loss = ours(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 2e-3 * exact
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
