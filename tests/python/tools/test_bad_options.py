"""A bad option of the command line is one line and exit status 2, before any work is done."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_dmattn.__main__
import flash_dmattn.benchmark.run
import flash_dmattn.check.run
import flash_dmattn.demo.corpus as demo_corpus
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


LONG = 300 * "x"
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
        (["bench", "--length", "many"], "argument --length: got 'many', expected an integer, 1 to"),
        (["bench", "--threads", "9999999999"], "argument --threads: got '9999999999', expected"),
        (["bench", "--json", ""], "expected a file"),
        (["demo", "--output", ""], "argument --output: got '', expected a folder"),
        (["demo", "--seed", "99999999999999999999"], "argument --seed: got 99999999999999999999, expected"),
        (["check", "--json", LONG], f"--json: got {LONG}, expected a file to write: File name too long"),
        (["bench", "--json", LONG], f"--json: got {LONG}, expected a file to write: File name too long"),
        (["bench", "--json", LONG + "/x.json"], "expected a file to write: File name too long"),
        (["bench", "--plot", LONG + ".png"], f"--plot: got {LONG}.png, expected a file to write: File name too long"),
        (["bench", "--from", LONG], f"--from: got {LONG}, expected a file that can be read: File name too long"),
        (["demo", "--output", LONG], f"--output: got {LONG}, expected a folder: File name too long"),
        (["bench", "--json", "{file}/"], "which is a folder, expected a file"),
        (["bench", "--json", "{file}/."], "which is a folder, expected a file"),
        (["bench", "--from", "{json}/"], "expected a file that can be read: Not a directory"),
        (["bench", "--json", "{link}"], "which cannot be written to"),
        (["demo", "--output", "{link}/x"], "is no folder to write to"),
        (["bench", "--json", "{folder}/x.svg", "--plot", "{folder}/x.svg"], "--plot: got {folder}/x.svg, the file of --json"),
        (["bench", "--json", "two\nlines/"], "which is a folder, expected a file"),
        (["bench", "--from", "{deep}"], "--from: got a file that --json did not write (RecursionError"),
        (["bench", "--from", "{empty}"], "--from: got {empty}, expected a file that holds rows"),
        (["bench", "--from", "{empty}", "--plot", "{folder}/x.png"], "expected a file that holds rows"),
        (["bench", "--from", "{huge}"], "--from: got a file that --json did not write (OverflowError"),
        (["bench", "--from", "{odd}", "--plot", "{folder}/x.png"], "--from: got a file that --json did not write (KeyError"),
        (["bench", "--case", "decode", "--device", "cpu", "--plot", "{folder}/x.png"], "--plot: got no case at several lengths"),
        (["bench", "--case", "dense", "--length", "2000000000"], "--length: got '2000000000', expected an integer, 1 to 16777216"),
        (["bench", "--window", "2000000000"], "--window: got '2000000000', expected an integer, 1 to 16777216"),
        (["bench", "--repeats", "2000000000"], "--repeats: got '2000000000', expected an integer, 1 to 1000"),
        (["bench", "--threads", "2000000000"], "--threads: got '2000000000', expected an integer, 1 to"),
        (["bench", "--device", "cpu", "--against", "fa3"], "--against: got fa3, which cannot run here: needs a GPU"),
        (["bench", "--device", "cpu", "--against", "sdpa,flex"], "--against: got flex, which cannot run here: needs a GPU"),
        (["demo", "--context", "2000000000"], "--context: got '2000000000', expected an integer, 2 to 32768"),
        (["demo", "--context", "1"], "--context: got '1', expected an integer, 2 to 32768"),
        (["demo", "--window", "2000000000"], "--window: got '2000000000', expected an integer, 1 to 32768"),
        (["demo", "--batch-size", "2000000000"], "--batch-size: got '2000000000', expected an integer, 1 to 1024"),
        (["nonsense"], "invalid choice"),
    ],
)  # fmt: skip
def test_of_every_command(arguments, message, capsys, tmp_path):
    row = '{"case": "dense", "dtype": "float32", "who": "cpu"'
    texts = {
        "file": "not json",
        "json": '{"speed": [{"who": 1}]}',
        "list": "[]",
        "deep": "[" * 100_000,
        "empty": '{"speed": []}',
        "huge": f'{{"speed": [{row}, "peak_mb": 1{"0" * 400}}}]}}',
        "odd": f'{{"speed": [{row}, "seqlen": 64}}]}}',
    }
    names = {"folder": tmp_path, "link": tmp_path / "link"}
    names["link"].symlink_to(tmp_path / "missing" / "x.json")
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


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("FLASH_DMATTN_CUDA_FAMILY", "bogus", "sm90, sm80"),
        ("FLASH_DMATTN_MAX_SHARED_KB", "abc", "a number of KB in [1, 1024]"),
        ("FLASH_DMATTN_MAX_SHARED_KB", "1025", "a number of KB in [1, 1024]"),
    ],
)
def test_settings_of_the_cuda_kernels_without_a_meaning(name, value, expected, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    assert f"{name}: got {value}, expected {expected}" in said(["info"], capsys)


def test_a_context_beyond_the_held_out_text(capsys, monkeypatch, tmp_path):
    demo = pytest.importorskip("flash_dmattn.demo.run")
    few = torch.zeros(100, dtype=torch.uint8)
    monkeypatch.setattr(demo, "standard_library", lambda: demo_corpus.Corpus(few, few, 2))
    arguments = ["demo", "--context", "101", "--output", str(tmp_path / "output")]
    assert "--context: got 101, expected at most the 100 bytes" in said(arguments, capsys)
    assert not (tmp_path / "output").exists()


def test_pictures_need_the_extra_of_the_benchmark(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "flash_dmattn.benchmark.pictures", raising=False)
    monkeypatch.delattr(flash_dmattn.benchmark, "pictures", raising=False)
    arguments = ["bench", "--plot", str(tmp_path / "x.png")]
    assert "pip install 'flash-dmattn[bench]'" in said(arguments, capsys)


def test_a_disk_that_is_full_is_one_line(capsys, monkeypatch, tmp_path):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(flash_dmattn.benchmark.record, "write", full)
    monkeypatch.setattr(flash_dmattn.benchmark.run, "measure", lambda *rest, **options: [{}])
    monkeypatch.setattr(flash_dmattn.benchmark.record, "line", str)
    arguments = ["bench", "--case", "dense", "--device", "cpu", "--json", str(tmp_path / "x.json")]
    assert main(arguments) == 1
    assert capsys.readouterr().err.endswith(f"No space left on device: '{tmp_path}'\n")


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
