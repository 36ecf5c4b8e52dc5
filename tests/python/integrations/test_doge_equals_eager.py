"""Compares transformers' Doge model with key intervals with its eager attention."""

import copy

import pytest
import torch
from transformers import DogeForCausalLM, DynamicCache

import doge_generation
from doge_generation import (
    VOCABULARY,
    WINDOW,
    brute_force_of,
    keep_recent_of_equal_scores,
    left_padding,
    make_ids,
    recorded_scores,
)
from flash_dmattn.integrations.transformers import enable_flash_dmattn
from largest_tensor import LargestTensor
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers

B, S = 2, 40
EPS = torch.finfo(torch.float32).eps


def make_model(**options):
    """Returns a small eager model that keeps the more recent of equal scores."""
    model = doge_generation.make_model(**{"num_hidden_layers": 2} | options)
    model.set_attn_implementation("eager")
    keep_recent_of_equal_scores(model)
    return model.train()


def padding(side):
    mask = left_padding(B, S, 13)
    return mask if side == "left" else mask.flip(1)


def enabled(model):
    return enable_flash_dmattn(copy.deepcopy(model))


def assert_same_training(eager, ours, ids, labels, **inputs):
    """Asserts that loss, logits and the gradients of all parameters are as near to eager in float64 as eager in float32 is.

    Eager attention keeps the keys of `ours`: where tokens repeat, scores tie up to rounding, which differs.
    Gradients of few elements (A) cancel, and the remainder is rounding noise of larger numbers. The bound therefore allows some
    units of float32 beyond twice eager's own error.
    """

    def trained(model):
        result = model(ids, labels=labels, **inputs)
        result.loss.backward()
        return result

    with recorded_scores() as scores:
        by_ours = trained(ours)
    keep_recent_of_equal_scores(eager, scores)
    exact = copy.deepcopy(eager).double()
    by_eager, expected = map(trained, (eager, exact))
    assert (by_ours.loss - expected.loss).abs() <= 16 * EPS * expected.loss
    error = (by_eager.logits - expected.logits).abs().max().item()
    torch.testing.assert_close(
        by_ours.logits.double(), expected.logits, atol=2e-5 + 2 * error, rtol=2e-5
    )
    errors, yardsticks = gradient_errors(ours, exact), gradient_errors(eager, exact)
    largest = max(p.grad.abs().max() for p in exact.parameters() if p.grad is not None)
    beyond = {
        name: EPS * (256 * p.grad.abs().max() + 16 * largest)
        for name, p in exact.named_parameters()
        if p.grad is not None
    }
    for seed in range(4):
        if all(error <= 2 * yardsticks[name] + beyond[name] for name, error in errors.items()):
            break
        # The error of a single rounding may be small by chance, which depends on the processor.
        nearby = rounded_anew(eager, seed)
        nearby_exact = copy.deepcopy(nearby).double()
        trained(nearby), trained(nearby_exact)
        for name, error in gradient_errors(nearby, nearby_exact).items():
            yardsticks[name] = max(yardsticks[name], error)
    for name, error in errors.items():
        assert error <= 2 * yardsticks[name] + beyond[name], (name, error, yardsticks[name])


def gradient_errors(model, exact):
    """Returns the largest error of each parameter's gradient."""
    errors = {}
    for (name, actual), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (actual.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            errors[name] = (actual.grad - wanted.grad).abs().max()
    return errors


def rounded_anew(model, seed):
    """Returns a copy in which every number rounds differently, because its embeddings differ by a unit in the last place."""
    nearby = copy.deepcopy(model)
    nearby.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    embeddings = nearby.get_input_embeddings().weight.data
    up = torch.rand(embeddings.shape, generator=generator) < 0.5
    embeddings.copy_(embeddings.nextafter(torch.where(up, torch.inf, -torch.inf)))
    return nearby


@pytest.mark.parametrize("pad", [None, "left", "right"])
@pytest.mark.parametrize("keep", [WINDOW, S])
def test_loss_and_gradients_equal_eager(pad, keep):
    model, ids = make_model(keep_window_size=keep), make_ids()
    mask = None if pad is None else padding(pad)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    assert_same_training(model, enabled(model), ids, labels, attention_mask=mask)


@pytest.mark.parametrize("window", [5, 20])
def test_sliding_window_layers_equal_eager(window):
    model, ids = make_model(sliding_window=window), make_ids()
    assert_same_training(model, enabled(model), ids, ids)


def test_packed_sequences_equal_eager():
    model, ids = make_model(), make_ids()
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None].expand(B, -1)
    assert_same_training(model, enabled(model), ids, ids, position_ids=positions)


@pytest.mark.parametrize("additive", [None, 0.0, 0], ids=["bool", "floating", "integer"])
@pytest.mark.parametrize("kind", ["prefix", "arbitrary", "one row"])
def test_four_dimensional_mask_equals_eager(kind, additive):
    model, ids = make_model(), make_ids()
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    if kind == "prefix":
        allowed = allowed | (torch.arange(S) < 12)
    elif kind == "arbitrary":
        allowed = allowed & (torch.rand(B, 1, S, S) > 0.5) | torch.eye(S, dtype=torch.bool)
    else:
        allowed = (torch.arange(S) % 3 > 0)[None]
    allowed = allowed.expand(B, 1, -1, S)
    mask = allowed if additive is None else torch.where(allowed, additive, additive - 1)
    assert_same_training(model, enabled(model), ids, ids, attention_mask=mask)


@torch.no_grad()
def test_integers_over_two_keys_of_a_cache_mask_by_doges_rule():
    ours, ids, shown = (
        enabled(make_model()),
        make_ids(2, 2),
        torch.tensor([[True] * 2, [False, True]]),
    )

    def step(mask):
        cache = DynamicCache()
        ours(ids[:, :1], past_key_values=cache)
        return ours(ids[:, 1:], attention_mask=mask[:, None, None], past_key_values=cache).logits

    assert torch.equal(step(-(~shown).int()), step(shown))


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="DogeCDMoE of transformers 4 fails itself")
def test_mixture_of_experts_equals_eager():
    """The router of a mixture of experts also reads padding, whose queries see no key."""
    model, ids = make_model(is_moe=True, num_experts=16, num_experts_per_tok=4), make_ids()
    mask = padding("left")
    labels = ids.masked_fill(mask == 0, -100)
    options = {"attention_mask": mask, "output_router_logits": True}
    assert_same_training(model, enabled(model), ids, labels, **options)


def test_checkpointing_equals_eager():
    model, ids = make_model(), make_ids()
    ours = enabled(model).train()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    labels = ids.masked_fill(padding("left") == 0, -100)
    assert_same_training(model, ours, ids, labels, attention_mask=padding("left"))


@pytest.mark.parametrize("enable_first", [True, False])
def test_lora_equals_eager(enable_first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "dt_proj"], init_lora_weights=False
    )
    base, ids = make_model(), make_ids()
    eager = peft.get_peft_model(copy.deepcopy(base), config)
    ours = peft.get_peft_model(enabled(base) if enable_first else base, config)
    if not enable_first:
        ours = enable_flash_dmattn(ours)
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "doge_dynamic_mask_attention"
    assert_same_training(eager, ours, ids, ids)


@pytest.mark.parametrize("largest", [30.0, 60.0, 88.0])
def test_scores_up_to_float32_limit_equal_eager(largest):
    """The factor exp(x) of their gradient is capped beyond exp(32), where different scores get no gradient from the softmax."""
    eager = make_model()
    ids = make_ids()
    exponents = []
    hooks = [
        layer.self_attn.dt_proj.register_forward_hook(
            lambda _, __, step: exponents.append(torch.nn.functional.softplus(step))
        )
        for layer in eager.model.layers
    ]
    # A layer's values depend on the layers before it.
    for index, layer in enumerate(eager.model.layers):
        exponents.clear()
        eager(ids)
        layer.self_attn.A.data = largest / exponents[index].amax((0, 1))
    for hook in hooks:
        hook.remove()
    ours = enabled(eager)
    assert_same_training(eager, ours, ids, ids)


def test_new_model_learns_its_scores():
    """A begins at 0, so all scores are equal and the choice is a sliding window. A must still get a gradient."""
    torch.manual_seed(0)
    model = enable_flash_dmattn(DogeForCausalLM(copy.deepcopy(make_model().config)))
    ids = make_ids()
    assert all((layer.self_attn.A == 0).all() for layer in model.model.layers)
    model(ids, labels=ids).loss.backward()
    assert all(layer.self_attn.A.grad.abs().min() > 0 for layer in model.model.layers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"use_cache": False},
        {"prefill_chunk_size": 16},
    ],
    ids=lambda options: "-".join(map(str, options)) or "greedy",
)
def test_tokens_generated_after_padding_equal_eager(options):
    """Tests only padded prompts; test_stored_scores.py has prompts without padding."""
    model, ids = make_model().eval(), make_ids()
    options = {
        "attention_mask": padding("left"),
        "max_new_tokens": 24,
        "do_sample": False,
        **options,
    }
    eager, ours = brute_force_of(model), enabled(model)
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def test_sixteen_thousand_tokens_train_without_a_pair_tensor():
    length = 16384
    model = enable_flash_dmattn(
        make_model(num_hidden_layers=1, keep_window_size=64, max_position_embeddings=length)
    )
    ids, padding = torch.randint(1, VOCABULARY, (1, length)), left_padding(1, length, 99)
    for mask in (None, padding):
        with LargestTensor() as largest:
            loss = model(ids, attention_mask=mask, labels=ids).loss
            loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
        assert largest.elements <= length * VOCABULARY  # the logits


def keep_keys_of_ours(eager, ids):
    """Makes eager attention keep the keys that an enabled copy keeps. Returns the scores of its layers."""
    with recorded_scores() as scores:
        enabled(eager)(ids)
    keep_recent_of_equal_scores(eager, scores)
    return scores


def test_switching_implementation_restores_eager():
    model, ids = make_model(), make_ids()
    scores = keep_keys_of_ours(model, ids)
    expected = model(ids).logits
    for name in ("flash_dmattn", "eager", "flash_dmattn"):
        model.set_attn_implementation(name)
        is_ours = model.config._attn_implementation == "doge_dynamic_mask_attention"
        assert is_ours == (name == "flash_dmattn")
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    named = DogeForCausalLM._from_config(
        copy.deepcopy(model.config), attn_implementation="flash_dmattn"
    )
    named.load_state_dict(model.state_dict())
    keep_recent_of_equal_scores(named, scores)
    with pytest.warns(UserWarning, match="transformers' own attention layers"):
        named(ids)
    torch.testing.assert_close(named(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_dispatched_model_equals_eager():
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = make_model(), make_ids()
    keep_keys_of_ours(model, ids)
    expected = model(ids).logits
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.self_attn, hooks.ModelHook())
    torch.testing.assert_close(
        enable_flash_dmattn(model)(ids).logits, expected, atol=1e-4, rtol=1e-4
    )


def test_bookkeeping_keywords_change_nothing():
    model = enable_flash_dmattn(make_model())
    ids, offsets = torch.arange(9)[None], torch.tensor([0, 4, 9])
    expected = model(ids).logits
    bookkeeping = {"num_items_in_batch": torch.tensor(9), "output_attentions": None, "cache": None}
    assert torch.equal(model(ids, **bookkeeping).logits, expected)
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    packed = {"position_ids": positions, "use_cache": False}
    alone = model(ids, **packed).logits
    lengths = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": 5,
        "max_length_k": 5,
    }
    assert torch.equal(model(ids, **packed, **lengths).logits, alone)
    assert not torch.equal(alone, expected)


def test_padding_mask_of_floats_equals_one_of_integers():
    ours, ids = enabled(make_model()), make_ids(2, 12)
    mask_of_numbers = torch.ones(2, 12)
    mask_of_numbers[0, :4] = 0
    expected = ours(ids, attention_mask=mask_of_numbers.long()).logits
    assert torch.equal(ours(ids, attention_mask=mask_of_numbers).logits, expected)
