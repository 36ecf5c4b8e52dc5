"""Compares our attention with eager attention in transformers' Doge model on the GPU, under autocast."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from demo import make_model, precision_of  # noqa: E402

LENGTH, WINDOW = 700, 64


@pytest.fixture
def model():
    model = make_model(LENGTH, WINDOW, layers=2).cuda()
    for layer in model.model.layers:  # else all scores tie, and eager keeps any of them
        torch.nn.init.normal_(layer.self_attn.A)
    return model


def step(model, implementation, ids, mask=None):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with precision_of(ids.device):
        loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_loss_and_gradients_equal_eager(model, padding):
    ids = torch.randint(256, (2, LENGTH), device="cuda")
    mask = None
    if padding:
        mask = torch.ones_like(ids)
        mask[0, :100] = 0
        mask = mask if padding == "left" else mask.flip(1)
    ours, gradients = step(model, "flash_dmattn", ids, mask)
    eager, expected = step(model, "eager", ids, mask)
    assert ours == pytest.approx(eager, rel=5e-3)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        if expected[name].norm() > 1e-3 and not name.endswith("self_attn.A"):
            alike = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
            assert alike > 0.98, f"{name}: {alike:.4f}"


def test_greedy_generation_with_a_cache_equals_eager(model):
    ids = torch.randint(256, (1, 100), device="cuda")
    texts = []
    for implementation in ("flash_dmattn", "eager"):
        model.set_attn_implementation(implementation)
        with precision_of(ids.device):
            texts.append(model.eval().generate(ids, max_new_tokens=20, do_sample=False))
    assert (texts[0] == texts[1]).float().mean() > 0.9  # a tie may fall the other way in bfloat16
