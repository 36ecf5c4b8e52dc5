"""One budget for all heads: its loss, its division into a threshold and caps, and models that follow it."""

import copy
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from flash_dmattn import ScoreBudget
from flash_dmattn.budgets import divide_scores, stochastic_gates
from flash_dmattn.integrations._shared.config_rules import LearnedScores
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    ScoreSchedule,
    add_learned_scores,
    budget_loss,
    divergence,
    divide_budget,
    freeze_all_but_scores,
    load_scores,
    save_scores,
    set_key_budgets,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from scored_models import make_base, make_ids, make_scored, spread_scores
from scores_by_definition import by_definition

pytestmark = pytest.mark.transformers
RECENT, SINKS, LENGTH = 3, 2, 40


def divided(model, mean_keys=15, texts=6, **options):
    return divide_budget(model, make_ids(LENGTH, batch=texts), mean_keys, progress=False, **options)


@pytest.mark.parametrize(
    "method, function",
    [
        (ScoreBudget.set_phase, set_score_phase),
        (ScoreBudget.loss, budget_loss),
        (ScoreBudget.divide, divide_budget),
        (ScoreBudget.follow, set_key_budgets),
    ],
)
def test_budgets_of_layers_and_of_models_take_the_same_arguments(method, function):
    own, other = (list(inspect.signature(f).parameters.values())[1:] for f in (method, function))
    assert own == [parameter for parameter in other if parameter.name != "progress"]


# ---- Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_budget_loss_is_the_excess_of_open_gates_over_the_target(per_head):
    model, ids = make_scored().set_score_phase("soft"), make_ids(LENGTH)
    shares = []
    for layer in scored_layers(model):
        layer.scorer.register_forward_hook(
            lambda _, __, scores: shares.append(scores[..., SINKS:-RECENT].exp().mean((0, 2)))
        )
    model(ids)
    share = torch.stack(shares)
    expected = (share - 0.4).clamp(min=0).mean() if per_head else (share.mean() - 0.4).clamp(min=0)
    torch.testing.assert_close(budget_loss(model, 0.4, per_head=per_head), expected)
    with pytest.raises(RuntimeError, match="^target: got a model without scores of a forward"):
        budget_loss(model, 0.4)


def test_padding_does_not_count_in_the_budget_loss():
    model, ids = make_scored().set_score_phase("soft"), make_ids(LENGTH)
    model(ids)
    expected = budget_loss(model, 0.0)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (8, 0))
    padded = torch.nn.functional.pad(ids, (8, 0))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(budget_loss(model, 0.0, mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_keep_no_scores_after_backward():
    model = make_scored().train().set_score_phase("soft", temperature=0.3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(make_ids(LENGTH), use_cache=False).logits.square().mean() + budget_loss(model, 0.1)
    loss.backward()
    assert all(layer.scoring.record.scores is None for layer in scored_layers(model))
    assert all(p.grad.any() for n, p in model.named_parameters() if ".scorer." in n)


def test_copy_of_a_model_in_training_has_no_graph():
    model = make_scored().set_score_phase("soft")
    model(make_ids(LENGTH))
    other = copy.deepcopy(model)
    other(make_ids(LENGTH))
    torch.testing.assert_close(budget_loss(other, 0.1), budget_loss(model, 0.1))


def test_stochastic_gates_are_open_with_the_probability_of_their_scores():
    logits = torch.tensor([-2.0, 0.0, 3.0])
    scores = torch.nn.functional.logsigmoid(logits).expand(20_000, 3)
    opened = stochastic_gates(scores, 0.1).exp() > 0.5
    torch.testing.assert_close(opened.float().mean(0), logits.sigmoid(), atol=0.02, rtol=0)
    ends = torch.tensor([0.0, -1e-9, -80.0], requires_grad=True)
    stochastic_gates(ends, 0.1).sum().backward()
    assert ends.grad.isfinite().all()


def test_divergence_is_that_of_distributions():
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    p, q = teacher.softmax(-1), student.softmax(-1)
    each = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(divergence(student, teacher), each.mean())
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    torch.testing.assert_close(divergence(student, teacher, mask), each[mask.bool()].mean())


def test_schedule_narrows_then_hardens():
    schedule = ScoreSchedule(soft=0.75, narrowing=0.5, share=0.25)
    assert [schedule.target(p) for p in (0, 0.25, 0.5, 1)] == [1.0, 0.625, 0.25, 0.25]
    assert [schedule.phase(p) for p in (0, 0.7, 0.75, 1)] == ["soft", "soft", "hard", "hard"]


def test_loop_of_the_how_to_closes_gates_to_the_target():
    model, ids = make_scored(), make_ids(LENGTH, batch=4)
    optimizer = torch.optim.AdamW(freeze_all_but_scores(model), 0.05, weight_decay=0.0)
    schedule, steps, excess = ScoreSchedule(share=0.25), 40, []
    for step in range(steps):
        with torch.no_grad():
            teacher = model.set_score_phase("off")(ids).logits
        model.set_score_phase("soft", schedule.temperature)
        loss = divergence(model(ids).logits, teacher)
        excess.append(budget_loss(model, schedule.target(step / steps)))
        (loss + schedule.weight * excess[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert excess[-1] < 0.1


# ---- Division --------------------------------------------------------------------------------------


def test_divided_scores_keep_the_mean_and_bound_each_head():
    generator = torch.Generator().manual_seed(0)
    heads = torch.tensor([[0.0, -3.0], [2.0, -5.0]])  # few heads need most keys
    texts = [
        [torch.randn(2, 400, generator=generator) + heads[i][:, None] for i in range(2)]
        for _ in range(8)
    ]
    budgets = divide_scores(texts, 100, 16, 4, quantile=1.0)
    old = torch.stack([torch.cat(text) for text in texts])[:, :, 4:-16] >= budgets.threshold
    counts = old.sum(2)
    assert counts.double().mean().item() == pytest.approx(80, abs=0.05)
    assert [cap for layer in budgets.caps for cap in layer] == counts.amax(0).tolist()
    assert budgets.means[400] == counts.double().mean(0).view(2, 2).tolist()
    bounded = divide_scores(texts, 100, 16, 4, quantile=1.0, bound=0.5)
    caps = [cap for layer in bounded.caps for cap in layer]
    assert 0.9 * 160 < sum(caps) <= 160
    assert max(caps) < max(map(max, budgets.caps)) and min(caps) == min(map(min, budgets.caps))


@pytest.mark.parametrize("least", [0, 0.25, 1])
def test_numbers_of_heads_are_in_proportion_to_their_needs_above_the_least(least):
    scores = torch.full((4, 400), -9.0)
    for head, count in enumerate((0, 20, 100, 200)):
        scores[head, 10 : 10 + count] = 0.0
    budgets = divide_scores([[scores]] * 2, 100, 16, 4, least=least)
    expected = {0: (0, 20, 100, 200), 0.25: (20, 20, 93, 187), 1: (80,) * 4}[least]
    assert budgets.caps == (expected,)
    assert budgets.threshold is None
    without_others = divide_scores([[scores]] * 2, 2, 0, 0, least=least)
    assert min(without_others.caps[0]) == (2 if least == 1 else 1)  # no recent keys, no sinks
    runs = divide_scores([[[scores] * 3, scores - 1]] * 2, 100, 16, 4, least=least)
    sums = [sum(heads) for heads in runs.slots()]
    assert (3 * sums[0] + sums[1]) / 16 == pytest.approx(100, abs=0.5)


def test_heads_that_keep_a_share_of_the_text_are_named():
    scores = torch.full((2, 400), -9.0)
    scores[0, ::3] = 0.0  # a third of any text
    scores[1, 10:30] = 0.0  # twenty keys of any text
    budgets = divide_scores([[scores]] * 2, 93, 16, 4)
    assert budgets.heads_that_grow() == [(0, 0)]
    assert "1 of 2 heads keep a share of the text" in str(budgets)


@pytest.mark.parametrize("quantile", [None, 0.99])
def test_model_under_its_divided_budget_equals_the_definition(quantile):
    """The memory of a layer is the sum over its heads."""
    model = make_scored()
    budgets = divided(model, quantile=quantile)
    set_key_budgets(model, budgets)
    ids = make_ids(LENGTH)
    cache = DynamicMaskCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([25, 1, 1, 13], 1)]
        with by_definition(model):
            expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=5e-5, rtol=1e-4)
    for layer, places in zip(cache.layers, budgets.slots(), strict=True):
        parts = len(places) * 13  # of the last part
        assert layer.keys.shape[1:-1].numel() == sum(places) + parts


def test_caps_of_late_scores_are_the_numbers_of_keys():
    rule = {"recent_window": RECENT, "sink_tokens": SINKS}
    model = spread_scores(add_learned_scores(make_base(), LENGTH, late=True, **rule))
    for text in make_ids(LENGTH, batch=4):
        budgets = divide_budget(model, [text], 15, quantile=1.0, bound=1e9, progress=False)
        set_key_budgets(model, budgets)
        cache = DynamicMaskCache(model.config)
        with torch.no_grad():
            model(text[None], past_key_values=cache)
        slots = cache.layers[0].slots  # later layers get other inputs than in the division
        assert not slots.capped.any()
        assert slots.counts[0, :, 0].tolist() == [cap + RECENT + SINKS for cap in budgets.caps[0]]


def test_layers_that_run_twice_have_one_cap_for_each_head():
    model = make_scored()
    once = divided(model)
    for layer in list(model.model.layers):
        model.model.layers.append(layer)
    model.config.num_hidden_layers *= 2
    budgets = divided(model)
    set_key_budgets(model, budgets)
    assert [len(caps) for caps in budgets.caps] == [len(caps) for caps in once.caps]
    assert budgets.key_bytes == tuple(2 * size for size in once.key_bytes)


def test_budgets_are_saved_with_the_scores(tmp_path):
    model = make_scored()
    budgets = divided(model)
    numbers = tuple(map(tuple, np.array(budgets.caps)))  # which JSON has no numbers of
    set_key_budgets(model, replace(budgets, caps=numbers, recent_window=np.int64(3)))
    save_scores(model, tmp_path)
    loaded = load_scores(make_base(), tmp_path)
    rules = [[layer.scoring.rule for layer in scored_layers(m)] for m in (model, loaded)]
    assert rules[0] == rules[1] and rules[0][0] != rules[0][1]
    assert loaded.config.learned_scores == model.config.learned_scores
    make_scored().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="^folder: .* of other settings than those of its config"):
        load_scores(make_base(), tmp_path)


@pytest.mark.parametrize("windows", [[[4, 4], 5], [5, [4, 4]]], ids=str)
def test_rules_of_numbers_and_lists_come_back_from_the_config(windows):
    model = add_learned_scores(make_base(), windows, recent_window=2)
    stored = LearnedScores.from_config(model.config)
    assert list(stored.rules) == [layer.scoring.rule for layer in scored_layers(model)]


def test_division_leaves_phase_rules_and_modes_as_they_were():
    model, ids, seen = make_scored().train(), make_ids(LENGTH), []
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model.model.layers[1].register_forward_pre_hook(lambda m, _: seen.append(m.training))
    with torch.no_grad():
        expected = model(ids).logits
        divided(model)
        assert torch.equal(model(ids).logits, expected)
    assert [module.training for module in model.modules()] == modes
    assert seen == [True, *[False] * 6, True]


def test_division_of_an_offloaded_model_equals_that_before():
    accelerate, model = pytest.importorskip("accelerate"), make_scored()
    expected = divided(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert divided(model) == expected


def test_memory_of_budgets_counts_the_head_dimension_of_each_layer():
    transformers = pytest.importorskip("transformers", "5.24")
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=16, num_kv_shared_layers=0, sliding_window=6, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = add_learned_scores(transformers.Gemma4ForCausalLM(config), 4, recent_window=3).eval()
    budgets = divide_budget(model, make_ids(LENGTH, batch=4) % 64, 15, progress=False)
    set_key_budgets(model, budgets)
    cache = DynamicMaskCache(model.config)
    with torch.no_grad():
        model(make_ids(LENGTH)[:1] % 64, past_key_values=cache)
    slots = cache.layers[1].slots
    held = sum(t.nbytes for t in (slots.k, slots.v, slots.scores, slots.positions))
    assert held == sum(map(sum, budgets.slots())) * budgets.key_bytes[0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mean_keys": 5}, "mean_keys: got 5 for texts of 40 tokens"),
        ({"quantile": 2}, "quantile: got 2, expected 0 to 1"),
        ({"bound": -1}, "bound: got -1, expected a number above 0"),
        ({"length": 4}, "length: got texts of 4 tokens, expected more than 5"),
        ({"texts": ["a text"]}, "texts: got a str, expected token ids"),
        ({"texts": [[0.5] * 40]}, "texts: got a list, expected token ids"),
    ],
)
def test_refused_divisions_name_the_argument_before_a_forward(options, message):
    model = make_scored()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    arguments = {"texts": make_ids(LENGTH, batch=2), "mean_keys": 15} | options
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        divide_budget(model, **arguments, progress=False)


def test_scores_of_nan_and_rules_that_differ_under_one_number_are_refused():
    model = make_scored()
    with pytest.raises(ValueError, match="^texts: got NaN among the scores of layer 0"):
        divide_scores([[torch.full((1, 40), torch.nan)]], 15, 3, 2)
    set_key_budgets(model, divided(model))
    settings = LearnedScores.from_config(model.config)
    settings = settings._replace(layers=(0,) * len(settings.layers))
    model.config.learned_scores = settings.as_dict()
    with pytest.raises(ValueError, match="got different rules for layers that share the number 0"):
        DynamicMaskCache(model.config)
