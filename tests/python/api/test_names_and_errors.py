"""The attention functions and their helpers keep their names and defaults, and raise clear errors."""

import importlib
import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_dmattn
from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import boundary_places, context_parallel_dmattn
from flash_dmattn.keys.rule import SelectionRule
from flash_dmattn.utils.padding import pad_input, unpad_input
from python_process import run_forked


def qkv(dtype=torch.float32):
    return [torch.randn(2, 9, heads, 8, dtype=dtype) for heads in (4, 2, 2)]


# ---- Names -------------------------------------------------------------------------------------------


def test_names_that_other_programs_use_exist():
    from flash_dmattn.flash_dmattn_flex import flex_dmattn_func
    from flash_dmattn.flash_dmattn_interface import flash_dmattn_func, flash_dmattn_varlen_func
    from flash_dmattn.flash_dmattn_triton import triton_dmattn_func

    for function in (
        flash_dmattn_func, flash_dmattn_varlen_func, triton_dmattn_func, flex_dmattn_func
    ):  # fmt: skip
        assert getattr(flash_dmattn, function.__name__) is function
    assert all(hasattr(flash_dmattn, name) for name in flash_dmattn.__all__)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # its import raises
import flash_dmattn.integrations.flash_dynamic_mask_attention
import flash_dmattn.integrations.import_utils
import flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils
from flash_dmattn import *
from flash_dmattn._core import availability
assert availability.backends.cache_info().currsize == 0
"""


def test_modules_of_1_x_import_without_transformers_and_do_not_initialise_cuda():
    """Once a process has initialised CUDA, its forked children cannot use the GPU."""
    run_forked(WITHOUT_TRANSFORMERS)


SIGNATURES = [
    ("flash_dmattn_interface", "flash_dmattn_func",
     "query key value attn_mask attn_bias softmax_scale is_causal softcap deterministic return_attn_probs",
     "scale keep_window_size selection selection_scores key_intervals nonfinite"),
    ("flash_dmattn_interface", "flash_dmattn_varlen_func",
     "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale is_causal softcap "
     "deterministic return_attn_probs block_table",
     "attn_bias keep_window_size selection nonfinite"),
    ("keys.select", "select_key_intervals",
     "scores keep_window_size", "selection is_causal key_mask query_length"),
    ("utils.mask", "create_mask",
     "attention_bias attention_mask batch_size query_len key_len window_size min_dtype block_size type", ""),
    ("utils.mask", "topk_indices", "attention_bias window_size", ""),
    ("utils.mask", "topk_mask", "attention_bias attention_mask window_size min_dtype block_size", ""),
    ("utils.mask", "relu_mask", "attention_bias attention_mask min_dtype block_size", ""),
    ("utils.padding", "pad_input", "hidden_states indices batch seqlen", ""),
    ("utils.padding", "unpad_input", "hidden_states attention_mask", ""),
    ("integrations.import_utils", "is_flash_dmattn_available", "", ""),
    ("integrations.modeling_flash_dynamic_mask_attention_utils", "_flash_dynamic_mask_attention_forward",
     "query_states key_states value_states attention_mask attention_bias query_length key_length is_causal "
     "softmax_scale softcap keep_window_size deterministic target_dtype implementation", "window_size"),
    ("integrations.modeling_flash_dynamic_mask_attention_utils", "fdma_peft_integration_check",
     "q k v bias target_dtype", ""),
    ("integrations.flash_dynamic_mask_attention", "flash_dynamic_mask_attention_forward",
     "module query key value attention_mask attention_bias scaling window_size softcap", "position_bias"),
]  # fmt: skip


@pytest.mark.parametrize("module, name, in_order, by_name", SIGNATURES)
def test_arguments_keep_their_names_and_order(module, name, in_order, by_name):
    function = getattr(importlib.import_module(f"flash_dmattn.{module}"), name)
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(in_order.split())] == in_order.split()
    assert set(by_name.split()) <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("name", ["triton_dmattn_func", "flex_dmattn_func"])
def test_backend_functions_have_arguments_of_general_function(name):
    function = getattr(flash_dmattn, name)
    parameters, general_parameters = (
        dict(inspect.signature(f).parameters) for f in (function, flash_dmattn_func)
    )
    assert parameters.keys() == general_parameters.keys() - {"backend"}
    assert all(parameters[n].annotation == general_parameters[n].annotation for n in parameters)
    assert all(
        parameters[n].default == general_parameters[n].default
        for n in parameters.keys() - {"is_causal"}
    )
    for wrong in ("windwo", "backend"):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword .*{wrong}"):
            function(*qkv(), **{wrong: "cpu"})


@pytest.mark.parametrize(
    "name, expected",
    [
        ("causal", "is_causal"),
        ("window_size", "keep_window_size=0, recent_window=W"),
        ("alibi_slopes", "forgetting_attention"),
        ("dropout_p", "no such argument: there is no attention dropout"),
        ("k", "key"),
    ],
)
@pytest.mark.parametrize(
    "function",
    ["flash_dmattn_func", "flash_dmattn_varlen_func", "flash_dmattn_with_kvcache", "triton_dmattn_func",
     "flash_dmattn_func_auto"],
)  # fmt: skip
def test_arguments_of_flash_attention_say_what_to_pass(function, name, expected):
    arguments = () if function == "flash_dmattn_func_auto" else qkv()
    with pytest.raises(TypeError, match=f"^{function}: got {name}, expected {expected}"):
        getattr(flash_dmattn, function)(*arguments, **{name: 1})


@pytest.mark.parametrize(
    "function",
    [flash_dmattn.flash_dmattn_func, flash_dmattn.flash_dmattn_varlen_func, flash_dmattn.flash_dmattn_with_kvcache,
     flash_dmattn.select_key_intervals, flash_dmattn.KVSlots, flash_dmattn.KVSlots.from_tensors,
     flash_dmattn.DynamicMaskAttention, context_parallel_dmattn, boundary_places],
)  # fmt: skip
def test_function_of_a_rule_lists_every_part_with_its_default(function):
    parameters = inspect.signature(function).parameters
    for part, default in SelectionRule._field_defaults.items():
        assert part in parameters
        assert part == "keep_window_size" or parameters[part].default == default


@pytest.mark.parametrize(
    "call",
    [
        lambda **rule: flash_dmattn_func(*qkv(), attn_bias=torch.zeros(1, 1, 4), **rule),
        lambda **rule: flash_dmattn.select_key_intervals(torch.zeros(1, 1, 4), **rule),
        lambda **rule: flash_dmattn.KVSlots(1, 1, head_dim=8, **rule),
        lambda **rule: flash_dmattn.DynamicMaskAttention(16, 2, **rule),
    ],
)
def test_unknown_argument_of_function_with_rule_is_named(call):
    with pytest.raises(
        TypeError, match="^recent_windw: got an unknown argument, expected .*recent_window"
    ):
        call(keep_window_size=2, recent_windw=1)


# ---- Backends ----------------------------------------------------------------------------------------


def test_available_backends_run_and_others_give_a_reason():
    names = flash_dmattn.get_available_backends()
    assert names[0] != "reference" and names[-1] == "reference"
    q, k, v = qkv()
    expected = flash_dmattn_func(q, k, v, is_causal=True)
    for backend in flash_dmattn.backends():
        assert backend.reason
        if backend.available:
            assert backend.name in names
            function = flash_dmattn.flash_dmattn_func_auto(backend=backend.name, is_causal=True)
            on_gpu = backend.name in ("cuda", "triton", "flex")  # available only where there is one
            place = {"device": "cuda", "dtype": torch.float16} if on_gpu else {}
            inputs = (tensor.detach().to(**place) for tensor in (q, k, v))
            tolerance = 4e-3 if on_gpu else 1e-5
            torch.testing.assert_close(
                function(*inputs).to(expected), expected, rtol=tolerance, atol=tolerance / 10
            )
        else:
            message = f"backend: got '{backend.name}', which cannot run"
            with pytest.raises(RuntimeError, match=message):
                flash_dmattn.flash_dmattn_func_auto(backend=backend.name)


@pytest.mark.parametrize("name", ["triton_dmattn_func", "flex_dmattn_func"])
def test_missing_backend_raises_reason(name, monkeypatch):
    missing = "this machine is too small"
    monkeypatch.setattr("flash_dmattn._core.availability.unavailable_reason", lambda name: missing)
    monkeypatch.setattr("flash_dmattn._core.checks._runs_on_cpu", lambda backend: False)
    with pytest.raises(RuntimeError, match=f"backend: got .*, which cannot run: {missing}"):
        getattr(flash_dmattn, name)(*qkv())


def test_float32_on_a_cuda_gpu_takes_triton(monkeypatch):
    taken = []

    def run_in_python(query, key, value, bias, visible, numerics, backend):
        taken.append(backend)
        return query, None

    monkeypatch.setattr("flash_dmattn._dispatch._run_in_python", run_in_python)
    with FakeTensorMode():
        inputs = [torch.empty(2, 9, heads, 8, device="cuda") for heads in (4, 2, 2)]
        monkeypatch.setattr("flash_dmattn._core.checks.unavailable_reason", lambda backend: "")
        flash_dmattn_func(*inputs)
        assert taken == ["triton"]
        with pytest.raises(TypeError, match="query: got torch.float32 on cuda"):
            flash_dmattn_func(*inputs, backend="cuda")
        reason = "there is none"
        monkeypatch.setattr("flash_dmattn._core.checks.unavailable_reason", lambda backend: reason)
        with pytest.raises(TypeError, match="float32 takes Triton's kernels, but there is none"):
            flash_dmattn_func(*inputs)


def test_declining_backend_raises_reason():
    q, k, v = qkv(torch.float64)
    with pytest.raises((ValueError, RuntimeError), match="cpu.*f64"):
        flash_dmattn.flash_dmattn_func_auto("cpu")(q, k, v)


# ---- Padding -----------------------------------------------------------------------------------------


def test_pad_input_inverts_unpad_input():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    states = torch.randn(3, 4, 5, 2, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(states, mask)
    assert torch.equal(packed, states[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 5]
    assert cu_seqlens.tolist() == [0, 3, 4, 4] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and used.tolist() == [3, 1, 0] and used.dtype == torch.int32
    padded = pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, states * mask[..., None, None])
    padded.sum().backward()
    assert torch.equal(states.grad, mask[..., None, None].expand_as(states).float())


def test_unpad_drops_unused_tokens():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    unused = torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 1), mask, unused)
    assert indices.tolist() == [0, 1, 3, 4] and cu_seqlens.tolist() == [0, 2, 4]
    assert longest == 2 and used.tolist() == [1, 2] and len(packed) == 4
