"""A bad option of the command line is one line and exit status 2, before any work is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_dmattn.__main__
import flash_dmattn.benchmark.run
import flash_dmattn.check.run
from flash_dmattn.__main__ import main


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def work(*arguments, **options):
        raise AssertionError("work was begun")

    monkeypatch.setattr(flash_dmattn.benchmark.run, "measure", work)
    monkeypatch.setattr(flash_dmattn.check.run, "steps_of", work)


def said(arguments, capsys):
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "--json", "{file}/x.json"], "argument --json: got {file}/x.json"),
        (["check", "--json", "{folder}"], "which is a folder, expected a file"),
        (["bench", "--json", "{file}/x.json"], "argument --json: got"),
        (["bench", "--plot", "{file}/x.png"], "argument --plot: got"),
        (["bench", "--plot", "{folder}/x.nothing"], "expected a name in .pdf, .png, .svg"),
        (["bench", "--from", "{folder}/missing.json"], "expected a file that can be read"),
        (["bench", "--from", "{file}"], "--from: got a file that --json did not write"),
        (["bench", "--from", "{json}"], "--from: got a file that --json did not write"),
        (["bench", "--from", "{list}"], "--from: got a file that --json did not write"),
        (["bench", "--device", "bogus"], "got 'bogus', expected cpu or cuda"),
        (["bench", "--case", "dense", "--length", "64", "--device", "cpu", "--plot", "{folder}/x.png"],
         "--plot: got no case at several lengths"),
        (["demo", "--device", "bogus"], "got 'bogus', which torch cannot use"),
        (["demo", "--output", "{file}"], "is no folder to write to"),
        (["info", "--kernels", "--case", "plain_bf16"], "argument --case: not allowed with argument --kernels"),
        (["bench", "--length", "many"], "argument --length: got 'many', expected an integer, 1 or more"),
        (["bench", "--threads", "9999999999"], "argument --threads: got '9999999999', expected"),
        (["bench", "--json", ""], "expected a file"),
        (["demo", "--output", ""], "argument --output: got '', expected a folder"),
        (["demo", "--seed", "99999999999999999999"], "argument --seed: got 99999999999999999999, expected"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)  # fmt: skip
def test_of_every_command(arguments, message, capsys, tmp_path):
    texts = {"file": "not json", "json": '{"speed": [{"who": 1}]}', "list": "[]"}
    names = {"folder": tmp_path}
    for name, text in texts.items():
        names[name] = tmp_path / name
        names[name].write_text(text)
    arguments = [argument.format(**names) for argument in arguments]
    assert message.format(**names) in said(arguments, capsys)


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="is about a folder that root cannot write to"
)
@pytest.mark.parametrize("option", ["check --json", "bench --json", "demo --output"])
def test_folders_that_only_seem_to_be_writable(option, capsys):
    assert "/proc is no folder to write to" in said([*option.split(), "/proc/x.json"], capsys)


def test_settings_without_a_meaning(capsys, monkeypatch):
    def no_backends():
        raise ValueError("FLASH_DMATTN_MAX_ISA: got bogus, expected one of generic, avx2")

    monkeypatch.setattr(flash_dmattn.__main__, "backends", no_backends)
    assert "FLASH_DMATTN_MAX_ISA: got bogus" in said(["info"], capsys)


def test_a_finite_check_without_a_meaning(capsys, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_CHECK_FINITE", "maybe")
    assert "FLASH_DMATTN_CHECK_FINITE: got maybe, expected 0 or 1" in said(["check"], capsys)


def test_a_library_that_is_not_there(tmp_path):
    missing = str(tmp_path / "_C.so")
    environment = os.environ | {"FLASH_DMATTN_LIBRARY": missing}
    command = [sys.executable, "-m", "flash_dmattn", "info"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert missing in run.stderr and run.stderr.count("\n") == 1
    importing = [sys.executable, "-c", "import flash_dmattn"]
    run = subprocess.run(importing, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "ImportError: flash_dmattn: the compiled" in run.stderr


@needs_no_gpu
@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_gpu_that_is_not_there(command, capsys):
    assert "got 'cuda', which torch cannot use" in said([command, "--device", "cuda"], capsys)


@needs_no_gpu
def test_a_backend_that_cannot_run(capsys):
    arguments = ["bench", "--backend", "cuda", "--device", "cpu"]
    assert "--backend: got cuda, which cannot run here" in said(arguments, capsys)
