"""Runs Python in a separate process, because libraries read some variables only once and modules are imported only once."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess:
    """Runs Python. If the process fails, raises with its output. variables: environment variables to set, or to remove if None."""
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run
