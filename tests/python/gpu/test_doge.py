"""transformers' Doge model on the GPU: results are near those of eager attention, and a training step is one CUDA graph."""

import copy
from functools import partial

import pytest
import torch

from gpu import capture

pytest.importorskip("transformers")

from transformers.models.doge.modeling_doge import DogeRMSNorm  # noqa: E402

from demo import make_model, precision_of  # noqa: E402
from flash_dmattn.integrations.transformers.doge import FlashDogeRMSNorm  # noqa: E402

WINDOW = 64


def make_doge(length, dtype=torch.float32):
    model = make_model(length, WINDOW, layers=2).to("cuda", dtype)
    for layer in model.model.layers:  # else all scores tie, and eager keeps any of them
        torch.nn.init.normal_(layer.self_attn.A)
    return model


# ---- Results near those of eager attention -----------------------------------------------------------


def loss_and_gradients(model, implementation, ids, mask=None):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with precision_of(ids.device):
        loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_loss_and_gradients_under_autocast_are_near_eager(padding):
    model, ids = make_doge(700), torch.randint(256, (2, 700), device="cuda")
    mask = None
    if padding:
        mask = torch.ones_like(ids)
        mask[0, :100] = 0
        mask = mask if padding == "left" else mask.flip(1)
    ours, gradients = loss_and_gradients(model, "flash_dmattn", ids, mask)
    eager, expected = loss_and_gradients(model, "eager", ids, mask)
    assert ours == pytest.approx(eager, rel=5e-3)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        if expected[name].norm() > 1e-3 and not name.endswith("self_attn.A"):
            alike = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
            assert alike > 0.98, f"{name}: {alike:.4f}"


def test_greedy_generation_with_a_cache_equals_eager():
    model, ids = make_doge(700), torch.randint(256, (1, 100), device="cuda")
    texts = []
    for implementation in ("flash_dmattn", "eager"):
        model.set_attn_implementation(implementation)
        with precision_of(ids.device):
            texts.append(model.eval().generate(ids, max_new_tokens=20, do_sample=False))
    assert (texts[0] == texts[1]).float().mean() > 0.9  # a tie may fall the other way in bfloat16


def results_of(function, states, weight):
    states = states.detach().requires_grad_()
    out = function(states)
    seed = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, (states, weight), seed)]


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_equals_model_norm_within_rounding(dtype, is_autocast):
    """torch's kernel for the norms of query and key rounds where DogeRMSNorm does."""
    norm = DogeRMSNorm(128).cuda().to(torch.float32 if is_autocast else dtype)
    torch.nn.init.normal_(norm.weight)
    fused = copy.copy(norm)
    fused.__class__ = FlashDogeRMSNorm
    norms = partial(fused, is_fused=True), norm
    states = torch.randn(2, 300, 4, 128, device="cuda").to(dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
        actual, expected = (results_of(function, states, norm.weight) for function in norms)
    eps = torch.finfo(dtype).eps
    for ours, theirs, tolerance in zip(actual, expected, (eps, 4 * eps, 16 * eps), strict=True):
        assert ours.dtype == theirs.dtype
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest)
    # A different order of the sum changes few roundings; rounding at a different place changes every third.
    if dtype != torch.float32:
        assert (actual[0] != expected[0]).float().mean() < 0.02


# ---- A step of training is one graph -----------------------------------------------------------------

B, LENGTH = 2, 300
# aot_eager alone runs softplus_backward with strides that differ from those of its trace.
BACKEND = "aot_eager_decomp_partition"


def make_training_doge():
    pytest.importorskip("transformers", minversion="5")
    model = make_doge(LENGTH, torch.bfloat16)
    model.config.use_cache = False
    return model


def inputs(kind):
    ids = torch.randint(256, (B, LENGTH), device="cuda")
    if kind == "padding":
        mask = torch.ones_like(ids)
        mask[0, :40] = 0
        return ids, {"attention_mask": mask}
    if kind == "packed":
        return ids[:1], {"position_ids": positions(200)}
    return ids, {}


def positions(first):
    """Returns the positions of a row with two texts, the first of `first` tokens."""
    return torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None].cuda()


def step_of(model, ids, options, compiled):
    def loss(ids, options):
        return model(input_ids=ids, labels=ids, **options).loss

    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, backend=BACKEND, fullgraph=True)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step():
        step_loss = loss(ids, options)
        return [step_loss, *torch.autograd.grad(step_loss, parameters, allow_unused=True)]

    return step


def assert_same(actual, expected, exact):
    """Asserts that two steps differ at most as much as bf16 differs from float32, because operators may round at different places.

    The loss is a single number whose error may be small by chance, so it may differ by a sixteenth of bf16's unit of rounding.
    """
    for i, (got, wanted, wide) in enumerate(zip(actual, expected, exact, strict=True)):
        if wanted is None:
            assert got is None
            continue
        got, wanted, wide = (t.float().cpu() for t in (got, wanted, wide))
        off, bf16 = torch.dist(got, wanted), torch.dist(wanted, wide)
        what = "loss" if i == 0 else f"gradient {i} of shape {tuple(got.shape)}"
        chance = 2.0**-12 if i == 0 else 1e-6
        assert off <= bf16 + chance * wide.norm(), f"{what}: off by {off}, bf16 by {bf16}"


def in_float32(model, ids, options):
    wide = copy.deepcopy(model).to("cpu", torch.float32)
    options = {name: t.cpu() for name, t in options.items()}
    return step_of(wide, ids.cpu(), options, compiled=False)()


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
def test_compiled_step_reads_nothing_from_the_device(kind):
    model, (ids, options) = make_training_doge(), inputs(kind)
    expected = step_of(model, ids, options, compiled=False)()
    step = step_of(model, ids, options, compiled=True)
    assert_same(step(), expected, in_float32(model, ids, options))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
def test_captured_step_equals_eager_step(kind, compiled):
    model, (ids, options) = make_training_doge(), inputs(kind)
    step = step_of(model, ids, options, compiled)
    graph, captured = capture(step)
    for first in (200, 70):
        ids.random_(256)
        if kind == "packed":  # other texts in the row, too
            options["position_ids"].copy_(positions(first))
        graph.replay()
        assert_same(captured, step(), in_float32(model, ids, options))


def test_captured_optimizer_step_equals_eager_step():
    model, (ids, options) = make_training_doge(), inputs("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = capture(step)
    first = None
    for _ in range(20):
        graph.replay()
        first = loss.item() if first is None else first
    assert loss.item() < first
