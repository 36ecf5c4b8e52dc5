"""Scripts of tools/ with missing or wrong arguments: a line and exit status 2, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize(
    "words, message",
    [
        (["check_wheel.sh"], "got nothing and 0 versions, expected a wheel and versions of torch"),
        (["check_wheel.sh", "none.whl", "2.10"], "got none.whl and 1 versions, expected a wheel"),
        (["wheels.sh", "none"], "got none, expected cpu, aarch64 or cuda"),
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
    command = [sys.executable, TOOLS / "kernels_layout.py", file / "folder", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and f"folder: [Errno 20] Not a directory: '{file}" in run.stderr
    assert not (tmp_path / "build").exists()
