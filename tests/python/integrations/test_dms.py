"""Checkpoints and the training of DMS equal the formulas of NVIDIA's Model-Optimizer, written here with N×N masks."""

import copy
import itertools
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
from transformers_version import recording, within_limit

pytestmark = pytest.mark.transformers
WINDOW, SCALE, OFFSET, LENGTH = 4, 3.0, 0.5, 40
CONFIG = {"dms_window_size": WINDOW, "dms_alpha_scale": SCALE, "dms_initial_alpha_offset": OFFSET}
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


def make_checkpoint(folder, family, form):
    """Writes a checkpoint. Returns its model without DMS and the logits of its adapters, (number, x, normed) -> [B, S, Hkv]."""
    base, adapters = make_base(family), {}
    base.config.update({**CONFIG, "dms_separate_alpha": form == "adapter"})
    base.save_pretrained(folder)
    if form == "query":
        return base, None
    generator = torch.Generator().manual_seed(5)
    features, heads = base.config.hidden_size, base.config.num_key_value_heads
    for number in range(len(base.model.layers)):
        part = f"model.layers.{number}.self_attn.dms_proj_alpha"
        adapters[f"{part}.weight"] = torch.randn(heads, features, generator=generator) / 4
        adapters[f"{part}_norm.weight"] = 1 + torch.randn(features, generator=generator) / 4
    path = folder / "model.safetensors"
    save_file({**load_file(path), **adapters}, path, {"format": "pt"})

    def logit_of(number, x, normed):
        part = f"model.layers.{number}.self_attn.dms_proj_alpha"
        x = F.rms_norm(x, x.shape[-1:], adapters[f"{part}_norm.weight"], base.config.rms_norm_eps)
        return x @ adapters[f"{part}.weight"].T * SCALE - OFFSET

    return base, logit_of


def by_definition(model, ids, logit_of, noise=None):
    """Returns logits, the decisions of each layer in training, and the number of keys that its last query sees, [B, Hkv].

    logit_of: as of make_checkpoint; None: the query's channel. noise: of each layer, for training.
    """
    x, positions = model.model.embed_tokens(ids), torch.arange(ids.shape[1])
    rotation = model.model.rotary_emb(x, positions[None])
    distance = positions[:, None] - positions
    decisions, seen = [], []
    for number, block in enumerate(model.model.layers):
        layer, normed = block.self_attn, block.input_layernorm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (-1, layer.head_dim))
            for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if hasattr(layer, "q_norm"):
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        group = q.shape[1] // k.shape[1]
        if logit_of is None:
            logit = q[:, ::group, :, -1] * SCALE - OFFSET
            q[:, ::group, :, -1] = 0
        else:
            logit = logit_of(number, x, normed).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        if logit_of is None:
            q[:, ::group, :, -1] = 0
        if noise is not None:
            logit = (logit + noise[number]) / 0.1
            closed = logit.sigmoid()
            decisions.append((closed > 0.5).float() - closed.detach() + closed)
        late = F.pad(logit[..., 1:], (0, 1))[:, :, None]  # the token after a key decides
        bias = torch.where(late > 0, -math.inf, 0.0) if noise is None else F.logsigmoid(-late)
        bias = torch.where(distance > WINDOW, bias, 0.0)
        seen.append(bias[:, :, -1].isfinite().sum(-1))
        bias = bias.masked_fill(distance < 0, -math.inf).repeat_interleave(group, 1)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        out = (q @ k.mT * layer.scaling + bias).softmax(-1) @ v
        x = x + layer.o_proj(out.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x)), decisions, torch.stack(seen)


@torch.no_grad()
@pytest.mark.parametrize("form", ["adapter", "query"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_loaded_checkpoint_equals_the_definition(tmp_path, family, form):
    base, logit_of = make_checkpoint(tmp_path, family, form)
    model, ids = load_dms(tmp_path, LENGTH), make_ids(LENGTH)
    expected, _, seen = by_definition(base, ids, logit_of)
    logits = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, **CLOSE)
    slots = DynamicMaskCache(model.config)
    for cache in (slots, DynamicCache(), StaticCache(config=model.config, max_cache_len=64)):
        sizes = [25, 1, 1, 13] if cache is slots else [25, *[1] * 15]
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)
    held = torch.stack([layer.slots._held_keys().sum(-1) for layer in slots.layers])
    assert torch.equal(held, seen) and seen.min() < 0.8 * LENGTH
    assert torch.equal(copy.deepcopy(model)(ids, use_cache=False).logits, logits)
    if form == "adapter":
        save_scores(model, tmp_path)
        assert torch.equal(load_scores(make_base(family), tmp_path)(ids).logits, logits)
    plain = remove_learned_scores(model)(ids).logits
    torch.testing.assert_close(plain, base(ids).logits, **CLOSE)


@torch.no_grad()
def test_slots_of_late_scores_equal_all_keys_with_padding_drafts_and_a_cap(tmp_path):
    make_checkpoint(tmp_path, "Qwen3", "adapter")
    for cap in (3, [3, 6]):
        model, ids = load_dms(tmp_path, cap), torch.arange(2, 2 + LENGTH)[None]  # no equal scores
        cache = DynamicMaskCache(model.config)
        sizes = [25, *[1] * 15]
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, **CLOSE)
        assert cache.layers[0].slots.capped.any()
    model, ids = load_dms(tmp_path, LENGTH), make_ids(LENGTH)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 999}
    alone = model.generate(ids[:1, 9:], past_key_values=DynamicCache(), **options)[:, -12:]
    ids[0, :9] = 0
    mask = (torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long()
    recorded, plain = caches = [DynamicMaskCache(model.config) for _ in range(2)]
    recorded.activate_past_recording()
    for start, end in itertools.pairwise([0, *range(25, LENGTH + 1)]):
        part = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        part["position_ids"] = (mask.cumsum(1) - mask)[:, start:end]
        logits = [model(**part, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*logits, **CLOSE)
    for rows, given in (
        (ids, {"attention_mask": mask}),
        (ids[:1, 9:], {"prompt_lookup_num_tokens": 3}),
    ):
        cache = recording(DynamicMaskCache(model.config))
        written = model.generate(rows, past_key_values=cache, **given, **options)[:1]
        assert torch.equal(within_limit(written, rows.shape[1] + 12)[:, -12:], alone)


def test_query_channel_under_an_adapter_of_its_projection_or_copied_by_peft_raises(tmp_path):
    peft = pytest.importorskip("peft")
    make_checkpoint(tmp_path, "Llama", "query")
    for options, message in (
        ({"target_modules": ["q_proj"]}, "q_proj: got a Linear around"),
        ({"target_modules": ["v_proj"], "modules_to_save": ["scorer"]}, "scorer: got a copy"),
    ):
        model = peft.get_peft_model(load_dms(tmp_path, 16), peft.LoraConfig(**options))
        with pytest.raises((TypeError, RuntimeError), match=message):
            model(make_ids(LENGTH))


def test_training_step_has_the_loss_and_gradient_of_the_definition(tmp_path):
    base, ids, target = make_base("Qwen3"), make_ids(LENGTH), 0.25
    model = add_dms_scores(make_base("Qwen3"), window_size=WINDOW)
    parameters = freeze_all_but_scores(model)
    projections = [layer.scorer.scores.proj for layer in scored_layers(model)]
    assert all((proj.bias == 5).all() for proj in projections)
    with_mlp = add_dms_scores(make_base("Qwen3"), None, WINDOW, scorer="mlp")
    assert (with_mlp.model.layers[0].self_attn.scorer.scores.function["2"].bias == 5).all()
    save_scores(with_mlp, tmp_path)
    for new in (with_mlp, load_scores(make_base("Qwen3"), tmp_path)):
        torch.testing.assert_close(
            new.set_score_phase("soft")(ids).logits, base(ids).logits, **CLOSE
        )
    path = tmp_path / "learned_scores.json"
    path.write_text(path.read_text().replace('"first_logit": 5.0,', ""))  # as older files are
    load_scores(with_mlp, tmp_path)
    with torch.no_grad():
        for parameter in parameters:  # logits around 0
            parameter.normal_()
    teacher = base(ids).logits.detach()
    torch.manual_seed(7)
    logits = model.set_score_phase("soft", DMS_SCHEDULE.temperature)(ids).logits
    loss = divergence(teacher, logits) + budget_loss(model, target, sampled=True)
    torch.manual_seed(7)
    shape = (2, base.config.num_key_value_heads, LENGTH)
    # The difference of two Gumbel variables, DMS' noise, has this distribution, which is symmetric.
    noise = [-torch.rand(shape).clamp(1e-6, 1 - 1e-6).logit() for _ in projections]
    expected, decisions, _ = by_definition(
        base, ids, lambda number, x, normed: -projections[number](normed), noise
    )
    student = expected.log_softmax(-1)
    distance = (student.exp() * (student - teacher.log_softmax(-1))).sum(-1).mean()
    excess = 1 - target - torch.stack([each.mean((1, 2)) for each in decisions]).mean(0)
    expected_loss = distance + excess.clamp(min=0).mean()
    assert (excess > 0).all()
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    gradients = (torch.autograd.grad(each, parameters) for each in (loss, expected_loss))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    for step in (0, 34, 272, 510, 544):
        assert DMS_SCHEDULE.target(step / 544) == pytest.approx(1 / min(16, 1 + step / 34))
