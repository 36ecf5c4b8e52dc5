"""A compiled training step of a Doge on the GPU does not wait for the device, and the whole step is one CUDA graph."""

import copy

import pytest
import torch

from gpu import capture

transformers = pytest.importorskip("transformers", minversion="5")

from demo import make_model  # noqa: E402

B, LENGTH, WINDOW = 2, 300, 64
# aot_eager alone runs softplus_backward with strides that differ from those of its trace.
BACKEND = "aot_eager_decomp_partition"


@pytest.fixture
def model():
    model = make_model(LENGTH, WINDOW, layers=2).to("cuda", torch.bfloat16)
    model.config.use_cache = False
    for layer in model.model.layers:  # else all scores tie
        torch.nn.init.normal_(layer.self_attn.A)
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
def test_compiled_step_reads_nothing_from_the_device(model, kind):
    ids, options = inputs(kind)
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
def test_captured_step_equals_eager_step(model, kind, compiled):
    ids, options = inputs(kind)
    step = step_of(model, ids, options, compiled)
    graph, captured = capture(step)
    for first in (200, 70):
        ids.random_(256)
        if kind == "packed":  # other texts in the row, too
            options["position_ids"].copy_(positions(first))
        graph.replay()
        assert_same(captured, step(), in_float32(model, ids, options))


def test_captured_optimizer_step_equals_eager_step(model):
    ids, options = inputs("plain")
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
