"""A bad option or argument of a program ends it with exit status 2 before it does any work."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import flash_dmattn.__main__
import flash_dmattn.check.run
from flash_dmattn.__main__ import main
from harness import record

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def work(*arguments, **options):
        raise AssertionError("work was begun")

    monkeypatch.setattr(bench, "_measured", work)
    monkeypatch.setattr(flash_dmattn.check.run, "steps_of", work)


def error_of(command, arguments, capsys):
    try:
        status = command(arguments)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], "invalid choice"),
        (["info", "--kernels", "--case", "plain_bf16"], "argument --case: not allowed with argument --kernels"),
        (["check", "--json", "{file}/x.json"], "--json: [Errno 17] File exists: '{file}'"),
    ],
)  # fmt: skip
def test_bad_option_prints_one_line(arguments, message, capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    error = error_of(main, [argument.format(file=file) for argument in arguments], capsys)
    assert message.format(file=file) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--case", "nonsense"], "argument --case: invalid choice: 'nonsense'"),
        (["run", "--side", "fa9"], "argument --side: invalid choice: 'fa9'"),
        (["run", "--length", "0"], "argument --length: got 0, expected 1 or more"),
        (["run", "--window", "many"], "argument --window: got many, expected 1 or more"),
        (["run", "--commit", "mine"], "argument --commit: got mine, expected a commit's hash"),
        (["run", "--device", "cpu", "--case", "dense", "groups"],
         "--case: got groups, which does not run here: it has no sizes for cpu"),
        (["run", "--device", "cpu", "--case", "dense", "memory"],
         "--case: got memory, which does not run here: it is about the memory of a GPU"),
        (["run", "--device", "cpu", "--case", "kernels", "--programs", "{folder}"],
         "--case: got kernels, which does not run here: --programs has no program {folder}/bench_core"),
        (["run", "--device", "cpu", "--json", "{folder}"], "--json: [Errno 21] Is a directory: '{folder}'"),
        (["run", "--device", "cpu", "--side", "fa3"], "--side: got fa3, which does not run on cpu"),
        (["run", "--device", "cpu", "--case", "dense", "--side", "rounded"],
         "--side: got rounded, expected one of cpu, sdpa for the case dense"),
        (["run", "--device", "cpu", "--case", "selection", "--side", "cpu"],
            "--side: got cpu, expected none for selection"),
        (["run", "--device", "cpu", "--case", "dense", "host", "--window", "64"],
            "--window: got one, expected none for dense host"),
        (["run", "--device", "cpu", "--case", "host", "dense", "--side", "ours"],
         "--side: got ours, expected one of cpu, sdpa for the case dense"),
        (["run", "--device", "cpu", "--json", "{file}/x.json"], "File exists: '{file}'"),
        (["show", "{file}"], "argument RECORD: {file}: Expecting value"),
        (["show", "{file}x"], "argument RECORD: [Errno 2] No such file or directory"),
        (["compare", "{file}", "{file}"], "{file}: Expecting value"),
        (["compare", "{folder}", "{folder}"], "SOURCE: got {folder} without python, _C.so, commit, expected a build"),
        (["compare", "{folder}"], "expected a record, two records, or two builds"),
    ],
)  # fmt: skip
def test_bench_names_the_option(arguments, message, capsys, tmp_path):
    names = {"file": tmp_path / "file", "folder": tmp_path}
    names["file"].touch()
    error = error_of(bench.main, [argument.format(**names) for argument in arguments], capsys)
    assert message.format(**names) in error


def test_case_without_its_package_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "harness.cases.presses", raising=False)
    error = error_of(bench.main, ["run", "--device", "cpu", "--case", "dense", "presses"], capsys)
    assert "--case: got presses, which does not run here: " in error and "kvpress" in error


def test_picture_of_unknown_format_is_refused(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    record_file = tmp_path / "record.json"
    row = record.row("a case", "cpu", "float32", forward=1.0, statistic="median")
    about = {"name": "a", "driver": "1", "clocks": "unknown"}
    origin = {
        "machine": about, "commit": "0123456", "command": "bench.py run", "versions": {"torch": "2"},
    }  # fmt: skip
    record.write(record_file, origin | {"rows": [row]})
    with pytest.raises(SystemExit):
        bench.main(["show", str(record_file), "--plot", "picture.xyz"])
    assert "--plot: got picture.xyz, expected a name that ends in one of" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["context_parallel", "long_context_steps"])
def test_program_for_torchrun_names_it_without_ranks(program, capsys, monkeypatch):
    pytest.importorskip("transformers.models.doge")
    module = importlib.import_module(program)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [f"{program}.py"])
    error = error_of(lambda arguments: module.main(), [], capsys)
    assert f"expected that of torchrun: torchrun --nproc_per_node 2 {program}.py" in error


def test_record_needs_a_commit(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.machine, "commit", lambda: "")
    error = error_of(bench.main, ["run", "--device", "cpu", "--json", str(tmp_path / "x")], capsys)
    assert "--commit: got none outside a Git checkout" in error


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("FLASH_DMATTN_MAX_SHARED_KB", "1025", "a number of KB in [1, 1024]"),
        ("FLASH_DMATTN_CHECK_FINITE", "maybe", "0 or 1"),
    ],
)
def test_meaningless_setting_is_refused(name, value, expected, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    error = error_of(main, ["info"], capsys)
    assert f"{name}: got {value}, expected {expected}" in error and error.count("\n") == 1


def test_refused_setting_prints_reason(capsys, monkeypatch):
    def no_backends():
        raise ValueError("FLASH_DMATTN_MAX_ISA: got bogus, expected one of generic, avx2")

    monkeypatch.setattr(flash_dmattn.__main__, "backends", no_backends)
    assert "FLASH_DMATTN_MAX_ISA: got bogus" in error_of(main, ["info"], capsys)


def test_missing_library_prints_one_line(tmp_path):
    missing = str(tmp_path / "_C.so")
    environment = os.environ | {"FLASH_DMATTN_LIBRARY": missing}
    command = [sys.executable, "-m", "flash_dmattn", "info"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert missing in run.stderr and run.stderr.count("\n") == 1
    importing = [sys.executable, "-c", "import flash_dmattn"]
    run = subprocess.run(importing, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "ImportError: flash_dmattn: the compiled" in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_missing_gpu_is_named(capsys):
    assert "argument --device: got cuda" in error_of(
        bench.main, ["run", "--device", "cuda"], capsys
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["check_wheel.sh"], "got nothing and 0 versions, expected a wheel and versions of torch"),
        (["check_wheel.sh", "none.whl", "2.10"], "got none.whl and 1 versions, expected a wheel"),
        (["build_wheels.sh", "cpu", "none"], "got none, expected cpu, aarch64 or cuda"),
        (["list_compile_seconds.sh"], "got 0 arguments, expected a build folder"),
        (["list_skipped.sh"], "got 0 arguments, expected a build folder"),
        (["provide_cpp_library.sh"], "got 0 arguments, expected a name, a folder and a compiler"),
        (["run_compute_sanitizer.sh"], "got 0 arguments, expected a tool and a test executable"),
        (["test_newest.sh"], "got nothing, expected packages"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_script_without_its_arguments_names_them(words, message):
    name, *arguments = words
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith(f"{name}: {message}")
    assert run.stderr.count("\n") == 1


def test_layout_that_cannot_be_written_is_refused_before_the_build(tmp_path):
    file = tmp_path / "file"
    file.touch()
    options = ["--namespace", "_name", "--build", tmp_path / "build"]
    command = [sys.executable, TOOLS / "write_kernels_layout.py", file / "folder", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and f"folder: [Errno 20] Not a directory: '{file}" in run.stderr
    assert not (tmp_path / "build").exists()


def test_layout_does_not_replace_the_sources_of_another_folder(tmp_path):
    source = tmp_path / "src" / "file"
    source.parent.mkdir()
    source.touch()
    options = ["--namespace", "_name", "--build", tmp_path / "build"]
    command = [sys.executable, TOOLS / "write_kernels_layout.py", tmp_path, *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "expected an empty folder or an earlier layout" in run.stderr
    assert source.exists() and not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    "text, status, printed",
    [
        ("", 0, "installed"),
        ("ERROR: No matching distribution found for name", 0, "SKIPPED test: pip finds no such"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", 1, "DO NOT MATCH THE HASHES"),
    ],
)
def test_failed_installation_skips_tests_only_without_the_package(text, status, printed, tmp_path):
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\necho "{text}"\n[ -z "{text}" ]\n')
    pip.chmod(0o755)
    script = f"set -euo pipefail; name=test folder={tmp_path}; source {TOOLS}/own_environment.sh; install a; echo installed"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == status and printed in run.stdout
    assert ("installed" in run.stdout) == (not text)
