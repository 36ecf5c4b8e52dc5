"""Scripts of tools/ with missing or wrong arguments: a line and exit status 2, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

import check_wgmma

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize(
    "words, message",
    [
        (["check_wheel.sh"], "got nothing and 0 versions, expected a wheel and versions of torch"),
        (["check_wheel.sh", "none.whl", "2.10"], "got none.whl and 1 versions, expected a wheel"),
        (["compile_seconds.sh"], "got nothing, expected a build folder with .ninja_log"),
        (["compute_sanitizer.sh", "memcheck"], "got 1 arguments, expected TOOL TEST ARGUMENT..."),
        (["cpp_library.sh", "googletest"], "got 1 arguments, expected NAME FOLDER COMPILER..."),
        (["list_skipped.sh", "none"], "got none, expected a build folder in which ctest has run"),
        (["wheels.sh", "none"], "got none, expected cpu, aarch64 or cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_script_without_its_arguments_names_them(words, message):
    name, *arguments = words
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith(f"{name}: {message}")
    assert run.stderr.count("\n") == 1


def test_check_of_machine_code_without_a_compiler_names_it(monkeypatch, capsys):
    monkeypatch.setattr(check_wgmma.sys, "argv", ["check_wgmma.py", "cuobjdump"])
    assert check_wgmma.main() == 2
    assert "expected CUOBJDUMP COMPILER" in capsys.readouterr().err


def test_layout_that_cannot_be_written_is_refused_before_the_build(tmp_path):
    file = tmp_path / "file"
    file.touch()
    options = ["--namespace", "_name", "--build", tmp_path / "build"]
    command = [sys.executable, TOOLS / "kernels_layout.py", file / "folder", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and f"folder: [Errno 20] Not a directory: '{file}" in run.stderr
    assert not (tmp_path / "build").exists()
