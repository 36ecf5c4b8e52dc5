"""Layers of one's own share a budget: phases, the loss that closes gates, and keys by one threshold and caps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from dense_in_double import dense_in_double
from flash_dmattn import DynamicMaskAttention, ScoreBudget

B, S, HIDDEN, HEADS, KV_HEADS, RECENT, SINKS = 2, 40, 32, 4, 2, 3, 2


def make_model(**options):
    torch.manual_seed(0)
    rule = {"recent_window": RECENT, "sink_tokens": SINKS, **options}
    layers = [DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, S, **rule) for _ in range(2)]
    for layer in layers:
        torch.nn.init.normal_(layer.scores.proj.weight, std=0.5)
    return torch.nn.Sequential(*layers)


def hidden_of(batch=B):
    return torch.randn(batch, S, HIDDEN, generator=torch.Generator().manual_seed(1))


def dense(layer, hidden, seen, bias):
    """seen, bias: [B, Hkv, S, S]."""
    q, k, v = (
        project(hidden).view(len(hidden), S, -1, layer.head_dim)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    group = HEADS // KV_HEADS
    bias, seen = bias.repeat_interleave(group, 1), seen.repeat_interleave(group, 1)
    return layer.o_proj(dense_in_double(q, k, v, bias, seen)[0].to(q.dtype).flatten(2))


def test_soft_phase_adds_gates_of_old_keys_alone():
    model, hidden = make_model(), hidden_of()
    ScoreBudget(model).set_phase("soft")
    query, key = torch.arange(S)[:, None], torch.arange(S)
    causal, expected = (key <= query).expand(B, KV_HEADS, S, S), hidden
    for layer in model:
        bias = layer.scores(expected)[:, :, None].expand(-1, -1, S, -1)
        is_old = (query - key >= RECENT) & (key >= SINKS)
        expected = dense(layer, expected, causal, torch.where(is_old, bias, 0))
    torch.testing.assert_close(model(hidden), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("quantile", [None, 0.99])
def test_divided_budget_shows_each_head_its_keys_and_its_cache_the_same(quantile):
    model, hidden = make_model(), hidden_of()
    budget = ScoreBudget(model)
    budgets = budget.divide(list(hidden_of(6).split(1)), mean_keys=15, quantile=quantile)
    budget.follow(budgets)
    assert len({cap for caps in budgets.caps for cap in caps}) > 1
    threshold = -torch.inf if quantile is None else budgets.threshold
    query, key = torch.arange(S)[:, None], torch.arange(S)
    expected = hidden
    for layer, caps in zip(model, budgets.caps, strict=True):
        scores, keeps = layer.scores(expected), []
        for head, cap in enumerate(caps):
            old = (query - key >= RECENT) & (key >= SINKS)
            old = old & (scores[:, head, None] >= threshold)
            ranked = scores[:, head, None].expand(-1, S, -1).masked_fill(~old, -torch.inf)
            best = torch.zeros_like(old).scatter(-1, ranked.topk(cap).indices, True)
            always = (query - key < RECENT) | (key < SINKS)
            keeps.append((key <= query) & (always | (old & best)))
        seen = torch.stack(keeps, 1)
        expected = dense(layer, expected, seen, torch.zeros(B, KV_HEADS, S, S))
    torch.testing.assert_close(model(hidden), expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        caches = [layer.make_cache(B) for layer in model]
        parts = []
        for part in hidden.split([20, 1, 1, 18], 1):
            for layer, cache in zip(model, caches, strict=True):
                part = layer(part, cache=cache)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)


class InOrder(torch.nn.Module):
    def __init__(self, layers, order):
        super().__init__()
        self.layers, self.order = layers, order

    def forward(self, hidden):
        for index in self.order:
            hidden = self.layers[index](hidden)
        return hidden


def test_division_cuts_texts_to_the_length():
    budget, texts = ScoreBudget(make_model()), list(hidden_of(6).split(1))
    expected = budget.divide([text[:, :30] for text in texts], 12)
    assert budget.divide(texts, 12, length=30) == expected
    assert budget.divide([texts[0][:, :30], *texts[1:]], 12) == expected


def test_loss_of_sampled_gates_counts_open_ones_in_each_text():
    model = make_model()
    budget = ScoreBudget(model)
    budget.set_phase("soft", temperature=0.3)
    model(hidden_of())
    gates = torch.stack([layer.soft_scores.samples.exp() for layer in model])
    shares = (gates >= 0.5).float().mean((0, 2, 3))
    expected = (shares - 0.2).clamp(min=0).mean()
    torch.testing.assert_close(budget.loss(0.2, sampled=True), expected)


@pytest.mark.parametrize("order", [(1, 0), (0, 1, 1)])
def test_divided_caps_are_those_of_the_layer_whose_scores_they_count(order):
    model, runs = InOrder(make_model(), order), {}
    for layer in model.layers:
        runs[layer.scores] = []
        layer.scores.register_forward_hook(lambda scorer, _, out: runs[scorer].append(out[0]))
    texts = list(hidden_of(6).split(1))
    budgets = ScoreBudget(model).divide(texts, mean_keys=15, quantile=1.0, bound=math.inf)
    for scores, caps in zip(runs.values(), budgets.caps, strict=True):
        counts = (torch.stack(scores)[:, :, SINKS:-RECENT] >= budgets.threshold).sum(2)
        assert counts.amax(0).tolist() == list(caps)
    of_one_run = min(budgets.key_bytes)
    assert budgets.key_bytes == tuple(of_one_run * order.count(i) for i in range(2))


def test_training_closes_gates_to_the_target_and_copies_have_no_graph():
    model, hidden = make_model(), hidden_of(4)
    budget = ScoreBudget(model)
    budget.set_phase("soft", temperature=0.3)
    optimizer, goal = torch.optim.Adam(model.parameters(), 0.05), torch.zeros(4, S, HIDDEN)
    for _ in range(60):
        loss = F.mse_loss(model(hidden), goal)
        excess = budget.loss(0.25)
        optimizer.zero_grad()
        (loss + 4 * excess).backward()
        optimizer.step()
    assert excess < 0.05
    model(hidden)
    copy.deepcopy(model)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_saved_layers_keep_the_rule_of_their_budget(tmp_path, follows, strict):
    model, other, hidden = make_model(), make_model(), hidden_of()
    old_state, budget = model.state_dict(), ScoreBudget(model)
    if follows:
        budget.follow(budget.divide(list(hidden_of(6).split(1)), mean_keys=15))
    torch.save(model.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True), strict=strict)
    for loaded in (other, copy.deepcopy(other)):
        assert [layer.rule for layer in loaded] == [layer.rule for layer in model]
        assert torch.equal(loaded(hidden), model(hidden))
    without_rules = {name: t for name, t in old_state.items() if "_extra_state" not in name}
    for state in (
        old_state,
        without_rules,
    ):  # of a model without a budget, and of an earlier version
        other.load_state_dict(state, strict=strict)
        assert torch.equal(other(hidden), model(hidden))
    budget.remove()
    assert not model._forward_pre_hooks


def test_rules_survive_casts_and_averages_of_states():
    model, other = make_model(), make_model()
    budget = ScoreBudget(model)
    budget.follow(budget.divide(list(hidden_of(6).split(1)), mean_keys=15))
    for change in (torch.Tensor.bfloat16, lambda t: 0.7 * t + 0.3 * t, lambda t: t.to(torch.int8)):
        other.load_state_dict({name: change(t) for name, t in model.state_dict().items()})
        assert [layer.rule for layer in other] == [layer.rule for layer in model]


@pytest.mark.parametrize(
    "words, state",
    [
        (r"shape \(7,\), expected \(7, 64\)", torch.zeros(7)),
        ("dict, expected a torch.Tensor", {}),
        ("numbers between 0 and 1.*different rules", torch.full((7, 64), 0.5)),
        ("numbers between 0 and 1", torch.full((7, 64), torch.nan)),
    ],
)
def test_states_with_wrong_rules_raise_the_errors_of_all_layers(words, state):
    model = make_model()
    rules = [layer.rule for layer in model]
    with pytest.raises(
        RuntimeError, match=rf"(?s)0\._extra_state: got {words}.*1\._extra_state: got"
    ):
        model.load_state_dict({f"{i}._extra_state": state for i in (0, 1)}, strict=False)
    assert [layer.rule for layer in model] == rules


def test_distributed_checkpoints_keep_the_rule_of_a_budget(tmp_path):
    model, other, hidden = make_model(), make_model(), hidden_of()
    budget = ScoreBudget(model)
    budget.follow(budget.divide(list(hidden_of(6).split(1)), mean_keys=15))
    checkpoint.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    wrapped = torch.compile(other)  # whose names of parameters have a prefix
    state = get_model_state_dict(wrapped)
    checkpoint.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(wrapped, state)
    assert torch.equal(other(hidden), model(hidden))


def test_hard_phase_teaches_scores_by_the_gradient_of_old_keys():
    model = make_model()
    ScoreBudget(model)
    model(hidden_of()).square().mean().backward()
    assert all(layer.scores.proj.weight.grad.any() for layer in model)
