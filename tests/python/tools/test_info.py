"""`python -m flash_dmattn info` names kernels, and recorded_kernels names the kernels that calls run."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import flash_dmattn
from flash_dmattn import flash_dmattn_func, is_available
from flash_dmattn.__main__ import main
from flash_dmattn.kernels import kernel_names, recorded_kernels


def test_missing_command_lists_the_commands(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert all(f"\n    {command} " in listed for command in ("info", "check"))


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flash_dmattn {flash_dmattn.__version__}\n"


def test_info_says_what_runs_and_why_the_rest_does_not(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"flash_dmattn {flash_dmattn.__version__}" in printed
    assert "instruction sets" in printed
    for backend in flash_dmattn.backends():
        assert backend.name in printed and backend.reason in printed


def test_info_prints_the_backend_of_float32_on_gpus(capsys):
    assert main(["info"]) == 0
    on_gpu = "triton" if is_available("triton") else "not available (needs triton)"
    assert f"float32 on CUDA GPUs: {on_gpu}" in capsys.readouterr().out


def test_case_is_printed_with_the_kernels_of_both_directions(capsys):
    assert main(["info", "--case", "plain_bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reference = lines.index("reference")
    assert lines[reference + 1 :] == ["  reference forward", "  reference backward"]
    cpu = lines.index("cpu")
    assert [line.strip() for line in lines[cpu + 1 : cpu + 3]] == kernel_names("cpu")


def test_unknown_case_prints_one_line_and_returns_2(capsys):
    assert main(["info", "--case", "nonsense"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_all_kernels_of_this_machine_are_listed(capsys):
    assert main(["info", "--kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(kernel_names("cpu") + kernel_names("reference")) <= set(lines)


def test_recorded_kernels_are_those_of_the_block_alone():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    flash_dmattn_func(q, q, q)
    with recorded_kernels() as kernels:
        out = flash_dmattn_func(q, q, q)
    out.sum().backward()
    assert kernels == [name for name in kernel_names("cpu") if "forward" in name]
    with recorded_kernels() as kernels:
        flash_dmattn_func(q, q, q).sum().backward()
    assert kernels == kernel_names("cpu")


def test_kernel_names_of_an_unknown_backend_raise():
    with pytest.raises(ValueError, match="backend"):
        kernel_names("nonsense")


def test_closed_pipe_is_no_error_and_missing_numpy_no_warning(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "flash_dmattn", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as info:
        info.stdout.close()
        assert info.stderr.read().decode() == ""
        assert info.wait() == 128 + signal.SIGPIPE
