"""The attention functions have the same names and defaults, and backends that cannot run raise clear errors."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_dmattn
from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import boundary_places, context_parallel_dmattn
from flash_dmattn.keys.rule import SelectionRule


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
