"""A bad option or argument of a program ends it with exit status 2 before it does any work."""

from pathlib import Path

import pytest

import flash_dmattn.__main__
import flash_dmattn.check.run
from flash_dmattn.__main__ import main
from python_process import run_forked

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def work(*arguments, **options):
        raise AssertionError("work was begun")

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


WITHOUT_LIBRARY = """
import runpy, sys
sys.argv, sys.orig_argv = ["-m", "info"], ["python", "-m", "flash_dmattn", "info"]
try:
    runpy.run_module("flash_dmattn", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 2
sys.argv = [""]
try:
    import flash_dmattn
except ImportError as error:
    print(error)
"""


def test_missing_library_prints_one_line(tmp_path):
    missing = str(tmp_path / "_C.so")
    run = run_forked(WITHOUT_LIBRARY, FLASH_DMATTN_LIBRARY=missing)
    assert missing in run.stderr and run.stderr.count("\n") == 1
    assert run.stdout.startswith("flash_dmattn: the compiled")
