"""`python -m flash_dmattn check` accepts a correct backend, and fails for a wrong or a missing one."""

import json

import pytest
import torch

import flash_dmattn
from flash_dmattn import flash_dmattn_func
from flash_dmattn.__main__ import main
from flash_dmattn.check import run as check_run
from flash_dmattn.check.cases import CASES

NAMES = ("plain_f32", "plain_bf16", "per_query_f32", "bias_nan_f16", "propagate_select_bf16")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(check_run, "CASES", {name: CASES[name] for name in NAMES})
    monkeypatch.setattr(check_run, "QUICK_ONE_IN", 1)


def check_of(function, monkeypatch, *arguments):
    """Runs the check with `function` in place of the CPU backend, and returns its exit status."""
    monkeypatch.setattr(check_run, "flash_dmattn_func_auto", lambda backend: function)
    return main(["check", "--backend", "cpu", *arguments])


def test_check_of_correct_backend_passes(small, capsys, tmp_path):
    file = tmp_path / "check.json"
    assert main(["check", "--backend", "cpu", "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "cpu: " in printed and " 0 failed" in printed and "dbias" in printed
    report = json.loads(file.read_text())
    assert report["complete"] and not report["failed"]
    assert report["environment"]["torch"] == torch.__version__
    assert {row["case"] for row in report["rows"]} == {*NAMES}
    for row in report["rows"]:
        assert row["verdict"] == "pass" and (row["error"] is None or row["error"] <= row["bound"])


class Spoilt(torch.autograd.Function):
    """A function whose gradient has one wrong element."""

    @staticmethod
    def forward(ctx, tensor, value):
        ctx.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, 7, 0, 3] = ctx.value
        return gradient, None


@pytest.mark.parametrize("value, words", [(40.0, "maximum error"), (torch.nan, "got nan")])
def test_wrong_backend_fails(small, capsys, monkeypatch, tmp_path, value, words):
    file = tmp_path / "check.json"

    def spoilt(q, k, v, **options):
        return flash_dmattn_func(q, k, Spoilt.apply(v, value), **options)

    assert check_of(spoilt, monkeypatch, "--dtype", "f32", "--json", str(file)) == 1
    printed = capsys.readouterr().out
    assert "FAILED cpu f32 plain_f32" in printed and words in printed
    assert "[0, 7, 0, 3]" in printed and "expected" in printed
    wrong = [row for row in json.loads(file.read_text())["rows"] if row["verdict"] == "FAIL"]
    assert {row["tensor"] for row in wrong} == {"dv"}, wrong


def test_backend_that_declines_everything_fails_check(small, capsys, monkeypatch):
    def declines(*args, **kwargs):
        raise NotImplementedError("not today")

    assert check_of(declines, monkeypatch, "--dtype", "f32") == 1
    assert "declined: NotImplementedError: not today" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("illegal memory access"),
        TypeError("f() got an unexpected keyword argument 'x'"),
    ],
)
def test_error_other_than_refusal_fails(small, capsys, monkeypatch, error):
    def breaks(*args, **kwargs):
        raise error

    assert check_of(breaks, monkeypatch, "--dtype", "f32") == 1
    expected = f"FAILED cpu f32 plain_f32\n  {type(error).__name__}: {error}"
    assert expected in capsys.readouterr().out


def test_repeated_dtype_is_checked_once():
    steps = list(check_run.steps_of("cpu", ["f32", "f32"], full=False))
    assert len(steps) == len({(step.case, step.dtype) for step in steps})


def test_interrupt_keeps_finished_results(small, capsys, monkeypatch, tmp_path):
    calls = []

    def interrupted(*args, **options):
        calls.append(options)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return flash_dmattn_func(*args, **options)

    file = tmp_path / "check.json"
    assert check_of(interrupted, monkeypatch, "--json", str(file)) == 130
    assert "Interrupted after" in capsys.readouterr().err
    report = json.loads(file.read_text())
    assert not report["complete"] and {row["case"] for row in report["rows"]} == {"plain_f32"}


def test_missing_backend_prints_reason(capsys, tmp_path):
    backends, file = flash_dmattn.backends(), tmp_path / "check.json"
    missing = [b for b in backends if not b.available and not check_run.interpreted(b.name)]
    for backend in missing:
        assert main(["check", "--backend", backend.name, "--json", str(file)]) == 2
        assert f"{backend.name} cannot run here: {backend.reason}" in capsys.readouterr().err
        report = json.loads(file.read_text())
        assert report["failed"] and backend.reason in json.dumps(report["environment"])
    if not missing:
        pytest.skip("every backend runs on this machine")


@pytest.mark.parametrize("gpu_device", ["cuda", "xpu"])
def test_check_uses_the_device_of_each_backend(gpu_device, monkeypatch):
    monkeypatch.setattr(check_run, "gpu", lambda: gpu_device)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert [check_run.device_of(name) for name in ("cpu", "flex", "triton")] == [
        "cpu",
        gpu_device,
        gpu_device,
    ]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert check_run.device_of("triton") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_is_checked_in_its_interpreter(small, capsys):
    pytest.importorskip("triton")
    assert main(["check", "--backend", "triton", "--dtype", "f32"]) == 0
    printed = capsys.readouterr().out
    assert "triton is interpreted: small cases" in printed and " 0 failed" in printed
    assert "per_query_f32" in printed
