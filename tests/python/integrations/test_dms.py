"""Checkpoints and the training of DMS equal the formulas of NVIDIA's Model-Optimizer, written here with N×N masks."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from flash_dmattn.integrations.transformers import (
    DMS_SCHEDULE,
    DynamicMaskCache,
    add_dms_scores,
    budget_loss,
    divergence,
    freeze_all_but_scores,
    load_dms,
    load_scores,
    remove_learned_scores,
    save_scores,
)
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from scored_models import make_base, make_ids

pytestmark = pytest.mark.transformers
WINDOW, SCALE, OFFSET, LENGTH = 4, 3.0, 0.5, 40
CONFIG = {"dms_window_size": WINDOW, "dms_alpha_scale": SCALE, "dms_initial_alpha_offset": OFFSET}


def make_checkpoint(folder, family, form, per="head"):
    """Writes a checkpoint. Returns its model without DMS, and the adapters' tensors."""
    base, adapters = make_base(family), {}
    base.config.update({**CONFIG, "dms_separate_alpha": form == "adapter", "dms_alpha_per": per})
    if form == "query":
        with torch.no_grad():
            for block in base.model.layers:  # logits on both sides of 0
                block.self_attn.q_proj.weight.mul_(2)
    base.save_pretrained(folder)
    if form == "adapter":
        torch.manual_seed(5)
        hidden, heads = base.config.hidden_size, base.config.num_key_value_heads
        for number in range(len(base.model.layers)):
            part = f"model.layers.{number}.self_attn.dms_proj_alpha"
            adapters[f"{part}.weight"] = torch.randn(heads, hidden) / 4
            adapters[f"{part}_norm.weight"] = 1 + torch.randn(hidden) / 4
        path = folder / "model.safetensors"
        save_file({**load_file(path), **adapters}, path, {"format": "pt"})
    return base, adapters


def adapter_logit(model, adapters, number, x, normed):
    part, config = f"model.layers.{number}.self_attn.dms_proj_alpha", model.config
    norm = copy.deepcopy(model.model.layers[number].input_layernorm)
    norm.weight.data = adapters[f"{part}_norm.weight"]
    return (norm(x) @ adapters[f"{part}.weight"].T) * SCALE - OFFSET


def by_definition(model, ids, logit_of=None, noise=None, tau=0.1, per="head", window=WINDOW):
    """Returns logits, the decisions of each layer and what its last query sees, [B, Hkv, S].

    logit_of(number, x, normed) -> [B, S, Hkv]; None: the query's channel. noise: of each layer, for training.
    """
    x = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    decisions, seen = [], []
    for number, block in enumerate(model.model.layers):
        layer, normed = block.self_attn, block.input_layernorm(x)
        shape = (*ids.shape, -1, layer.head_dim)
        q, k, v = (proj(normed).view(shape) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        if hasattr(layer, "q_norm"):
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        group = q.shape[1] // k.shape[1]
        if logit_of is None:
            logit = q[:, ::group, :, -1].clone() * SCALE - OFFSET
            q[:, ::group, :, -1] = 0
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            q[:, ::group, :, -1] = 0
        else:
            logit = logit_of(number, x, normed).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        logit = logit[:, :1].expand_as(logit) if per == "layer" else logit
        if noise is not None:
            logit = (logit + noise[number]) / tau
            closed = logit.sigmoid()
            decisions.append((closed > 0.5).float() - closed.detach() + closed)
        late = F.pad(logit[..., 1:], (0, 1))[:, :, None]  # the token after a key decides
        if noise is not None:
            bias = torch.where(distance > window, F.logsigmoid(-late), 0.0)
        else:
            bias = torch.where((distance > window) & (late > 0), -math.inf, 0.0)
        seen.append(torch.isfinite(bias[:, :, -1]))
        bias = bias.masked_fill(distance < 0, -math.inf).repeat_interleave(group, 1)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        out = (q @ k.mT * layer.scaling + bias).softmax(-1) @ v
        x = x + layer.o_proj(out.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x)), decisions, seen


# ---- Checkpoints -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "form", "per"),
    [("Qwen3", "adapter", "head"), ("Llama", "adapter", "layer"), ("Qwen3", "query", "head"),
     ("Llama", "query", "layer")],
)  # fmt: skip
def test_loaded_checkpoint_equals_the_definition(tmp_path, family, form, per):
    base, adapters = make_checkpoint(tmp_path, family, form, per)
    model, ids = load_dms(tmp_path, keep_window_size=LENGTH), make_ids(LENGTH)

    def logit_of(*layer):
        return adapter_logit(base, adapters, *layer)

    expected, _, seen = by_definition(base, ids, logit_of if adapters else None, per=per)
    close = {"atol": 5e-5, "rtol": 1e-4}
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **close)
    slots = DynamicMaskCache(model.config)
    for cache in (slots, DynamicCache(), StaticCache(config=model.config, max_cache_len=64)):
        sizes = [25, 1, 1, 13] if cache is slots else [25, *[1] * 15]
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, **close)
    held = torch.stack([layer.slots._held_keys().sum(-1) for layer in slots.layers])
    assert torch.equal(held, torch.stack([keys.sum(-1) for keys in seen]))
    assert held.min() < 0.8 * LENGTH and not any(layer.slots.capped.any() for layer in slots.layers)


@torch.no_grad()
@pytest.mark.parametrize("form", ["adapter", "query"])
def test_padded_rows_and_assisted_decoding_equal_a_row_alone(tmp_path, form):
    make_checkpoint(tmp_path, "Qwen3", form)
    model = load_dms(tmp_path, keep_window_size=LENGTH)
    ids = make_ids(LENGTH)
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = model.generate(ids[:1, 9:], past_key_values=DynamicCache(), **options)[:, -12:]
    ids[0, :9] = 0
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache = DynamicMaskCache(model.config)
    padded = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(padded[:1, -12:], alone)
    cache = DynamicMaskCache(model.config)
    options["prompt_lookup_num_tokens"] = 3
    assisted = model.generate(ids[:1, 9:], past_key_values=cache, **options)
    assert torch.equal(assisted[:, -12:], alone)


@torch.no_grad()
def test_loaded_scores_are_removed_copied_and_saved(tmp_path):
    ids = make_ids(LENGTH)
    for form in ("adapter", "query"):
        base, _ = make_checkpoint(tmp_path / form, "Qwen3", form)
        model = load_dms(tmp_path / form)
        logits = model(ids).logits
        assert torch.equal(copy.deepcopy(model)(ids).logits, logits)
        if form == "adapter":
            save_scores(model, tmp_path / "scores")
            loaded = load_scores(make_base("Qwen3"), tmp_path / "scores")
            assert torch.equal(loaded(ids).logits, logits)
        plain = remove_learned_scores(model)
        torch.testing.assert_close(plain(ids).logits, base(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "^config.model_type: got 'qwen2'"),
        ({"dms_disable_eviction": True}, "^config.dms_disable_eviction: got True"),
        ({"dms_window_size": None}, "^config.dms_window_size: got None"),
        ({"dms_separate_alpha": True}, r"dms_proj_alpha_norm.weight'\): got shapes \[None, None\]"),
    ],
)
def test_checkpoint_of_another_form_raises(change, words):
    model = make_base("Qwen3")
    for name, value in {**CONFIG, **change}.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=words):
        load_dms(model)
    assert not hasattr(model, "set_score_phase")


def test_late_score_of_a_key_that_competes_at_once_raises():
    with pytest.raises(ValueError, match="^late: got True with recent_window=1"):
        add_dms_scores(make_base(), window_size=0)


# ---- Training --------------------------------------------------------------------------------------


def test_training_step_has_the_loss_and_gradient_of_the_definition():
    model, base, ids = make_base("Qwen3"), make_base("Qwen3"), make_ids(LENGTH)
    model = add_dms_scores(model, window_size=WINDOW)
    parameters = freeze_all_but_scores(model)
    projections = [layer.scorer.scores.proj for layer in scored_layers(model)]
    assert all((proj.bias == 5).all() for proj in projections)
    with torch.no_grad():
        for proj in projections:  # logits around 0
            proj.weight.normal_()
            proj.bias.fill_(1.0)
    teacher, target = base(ids).logits.detach(), 0.25
    torch.manual_seed(7)
    logits = model.set_score_phase("soft", DMS_SCHEDULE.temperature)(ids).logits
    loss = divergence(teacher, logits) + budget_loss(model, target, sampled=True)
    gradients = torch.autograd.grad(loss, parameters)

    torch.manual_seed(7)
    shape = (2, base.config.num_key_value_heads, LENGTH)
    draws = [torch.rand(shape).clamp(1e-6, 1 - 1e-6).logit() for _ in projections]
    # The difference of two Gumbel variables, DMS' noise, has this distribution, which is symmetric.
    expected, decisions, _ = by_definition(
        base, ids, lambda number, x, normed: -projections[number](normed), [-d for d in draws]
    )
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    student = expected.log_softmax(-1)
    distance = (student.exp() * (student - teacher.log_softmax(-1))).sum(-1).mean()
    closed = torch.stack([each.mean((1, 2)) for each in decisions]).mean(0)
    expected_loss = distance + (1 - target - closed).clamp(min=0).mean()
    torch.testing.assert_close(loss, expected_loss, atol=1e-4, rtol=1e-4)
    assert (closed < 1 - target).all()
    expected_gradients = torch.autograd.grad(expected_loss, parameters)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    with pytest.raises(ValueError, match="^sampled: got False with late=True"):
        budget_loss(model, target)


def test_schedule_adds_one_to_the_compression_ratio_in_34_steps():
    for step in (0, 34, 272, 510, 544):
        ratio = min(16, 1 + step / 34)
        assert DMS_SCHEDULE.target(step / 544) == pytest.approx(1 / ratio)
