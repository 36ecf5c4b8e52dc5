"""Python in a process of its own: libraries read some variables once, and modules are imported once."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess:
    """Fails with the output of a process that fails. variables: of its environment, None without them."""
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run
