"""The model's own norm gives the same bits, replacements of the norm and of the rotary embedding are called, and hooks run."""

import copy
import functools
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention, DogeRMSNorm

from flash_dmattn.integrations.transformers import enable_flash_dmattn
from flash_dmattn.integrations.transformers.doge import FlashDogeRMSNorm
from scored_models import make_base

pytestmark = pytest.mark.transformers

LAYERS, B, S, D = 2, 2, 11, 8


def make_model(enabled=True):
    model = make_base("Doge", use_cache=False)
    return enable_flash_dmattn(model) if enabled else model


def make_layer():
    """Returns the attention module of a layer, and the inputs that its model passes to it."""
    model = make_model()
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(B, S, 32)
    positions = torch.arange(S).expand(B, -1)
    return layer, {
        "hidden_states": hidden,
        "position_embeddings": model.model.rotary_emb(hidden, positions),
    }


def results_of(layer, hidden_states, position_embeddings, dtype=None):
    """Returns the output, and the gradients of input and parameters."""
    leaves = [hidden_states.detach().requires_grad_(), *layer.parameters()]
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out, _ = layer(leaves[0], position_embeddings)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def names_of_calls(function):
    with torch.profiler.profile() as profile:
        function()
    return [event.name for event in profile.events()]


def with_norms_of_base_class(layer, monkeypatch):
    """Makes norms compute as their base class does."""
    monkeypatch.setattr(
        FlashDogeRMSNorm,
        "forward",
        lambda norm, states, is_fused=False: DogeRMSNorm.forward(norm, states),
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_gives_same_bits(dtype, autocast, monkeypatch):
    layer, inputs = make_layer()
    layer.to(dtype)
    hidden = inputs["hidden_states"].to(dtype)
    embeddings = [t.to(dtype) for t in inputs["position_embeddings"]]
    actual = results_of(layer, hidden, embeddings, autocast)
    with_norms_of_base_class(layer, monkeypatch)
    expected = results_of(layer, hidden, embeddings, autocast)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_norms_of_unmodified_layer_are_torchs_function():
    model, ids = make_model(), torch.arange(S)[None]
    calls = names_of_calls(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert calls.count("aten::rms_norm") == 2 * LAYERS


def test_compiled_norm_is_not_torchs_function():
    torch._dynamo.reset()
    layer, inputs = make_layer()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs)[0], layer(**inputs)[0])
    (graph,) = counter.graphs
    called = " ".join(str(node.target) for node in graph.graph.nodes)
    assert "rsqrt" in called and "rms_norm" not in called


def test_transforms_are_refused_by_attention():
    """Tensors of a transform have no memory whose changes could be counted."""
    model, ids = make_model(), torch.arange(S)[None]

    def loss(parameters):
        inputs = {"input_ids": ids, "labels": ids}
        return torch.func.functional_call(model, parameters, (), inputs).loss

    with pytest.raises(RuntimeError, match="a tensor of torch.func.grad"):
        torch.func.grad(loss)(dict(model.named_parameters()))


def doubled(norm, states):
    return 2 * DogeRMSNorm.forward(norm, states)


def replace_forward(layer, monkeypatch):
    layer.q_norm.forward = types.MethodType(doubled, layer.q_norm)


def replace_forward_of_class(layer, monkeypatch):
    forward = DogeRMSNorm.forward

    @functools.wraps(forward)
    def double(norm, states):
        return 2 * forward(norm, states)

    monkeypatch.setattr(DogeRMSNorm, "forward", double)


def replace_class(layer, monkeypatch):
    class Doubled(DogeRMSNorm):
        forward = doubled

    norm = Doubled(D)
    norm.load_state_dict(layer.q_norm.state_dict())
    layer.q_norm = norm


def replace_module(layer, monkeypatch):
    layer.q_norm = torch.nn.LayerNorm(D)


def hook(layer, monkeypatch):
    layer.q_norm.register_forward_hook(lambda norm, inputs, output: 2 * output)


def pre_hook(layer, monkeypatch):
    layer.q_norm.register_forward_pre_hook(lambda norm, inputs: (inputs[0].abs(),))


def replace_rotary_embedding(layer, monkeypatch):
    rotate = modeling_doge.apply_rotary_pos_emb

    @functools.wraps(rotate)
    def slower(query, key, cos, sin, unsqueeze_dim):
        return rotate(query, key, cos, sin / 2, unsqueeze_dim=unsqueeze_dim)

    monkeypatch.setattr(modeling_doge, "apply_rotary_pos_emb", slower)


REPLACEMENTS = [
    replace_forward,
    replace_forward_of_class,
    replace_class,
    replace_module,
    hook,
    pre_hook,
    replace_rotary_embedding,
]


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda function: function.__name__)
def test_replaced_functions_of_doge_are_called(replace, monkeypatch):
    layer, inputs = make_layer()
    before = results_of(layer, **inputs)[0]
    replace(layer, monkeypatch)
    actual = results_of(layer, **inputs)
    assert not torch.allclose(actual[0], before)
    with_norms_of_base_class(layer, monkeypatch)
    assert all(map(torch.equal, actual, results_of(layer, **inputs)))


def make_doubled_norms(model):
    """Replaces the norms as kernels of the hub do, by a `forward` of the instance."""
    for module in model.modules():
        if type(module) is DogeRMSNorm:
            module.forward = types.MethodType(doubled, module)
    return model


def test_norms_replaced_before_enabling_are_called():
    layer, inputs = make_layer()
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        norm.forward = types.MethodType(doubled, norm)
    model = make_doubled_norms(make_model(enabled=False))
    other = enable_flash_dmattn(model).model.layers[0].self_attn
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(**inputs)[0], layer(**inputs)[0])


def test_forward_of_class_replaced_before_enabling_is_called(monkeypatch):
    layer, inputs = make_layer()
    replace_forward_of_class(layer, monkeypatch)
    other = make_layer()[0]
    other.load_state_dict(layer.state_dict())
    out = other(**inputs)[0]
    assert torch.equal(out, layer(**inputs)[0])
    monkeypatch.undo()
    assert not torch.allclose(out, layer(**inputs)[0])


def test_norms_of_an_enabled_model_are_initialised_by_transformers():
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    for part in (*model.modules(), *model.parameters()):
        if hasattr(part, "_is_hf_initialized"):
            del part._is_hf_initialized
    model.init_weights()
    norms = [module.weight for module in model.modules() if isinstance(module, DogeRMSNorm)]
    assert len(norms) == 4 * LAYERS + 1 and all((weight == 1).all() for weight in norms)


def test_hooks_of_norms_run():
    layer, inputs = make_layer()
    seen = []
    layer.q_norm.register_full_backward_hook(lambda *arguments: seen.append("backward"))
    layer.k_norm.register_full_backward_pre_hook(lambda *arguments: seen.append("pre-backward"))
    handle = register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        results_of(layer, **inputs)
    finally:
        handle.remove()
    assert {"backward", "pre-backward", layer.q_norm, layer.k_norm} <= set(seen)


def test_changed_sines_are_read_again():
    """No state of the first call remains, also after inference mode and if the sines require a gradient."""
    layer, inputs = make_layer()
    cos, sin = inputs["position_embeddings"]
    before = layer(**inputs)[0]
    with torch.inference_mode():
        assert torch.equal(layer(**inputs)[0], before)
    sin.mul_(0.5).requires_grad_()
    out = layer(**inputs)[0]
    assert torch.equal(out, layer(inputs["hidden_states"], (cos, sin.detach().clone()))[0])
    (gradient,) = torch.autograd.grad(out.square().sum(), sin)
    assert gradient.abs().max() > 0


def test_eager_attention_stays_unchanged():
    model, ids = enable_flash_dmattn(make_model(), cache="dynamic_mask"), torch.arange(S)[None]
    expected = make_model(enabled=False)
    expected.load_state_dict(model.state_dict())
    model.set_attn_implementation("eager")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits, eager = (m(input_ids=ids, use_cache=True).logits for m in (model, expected))
            assert torch.equal(logits, eager)
    calls = names_of_calls(lambda: copy.deepcopy(model)(input_ids=ids))
    assert "aten::rms_norm" not in calls
    assert isinstance(model.model.layers[0].self_attn, DogeAttention)


def test_eager_attention_reaches_a_norm_that_peft_copied():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["q_norm"])
    adapted, ids = peft.get_peft_model(make_model(), options), torch.arange(S)[None]
    adapted.base_model.model.set_attn_implementation("eager")
    assert "aten::rms_norm" not in names_of_calls(lambda: adapted(input_ids=ids))
