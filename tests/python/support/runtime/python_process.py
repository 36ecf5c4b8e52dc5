"""Runs Python in a separate process, because libraries read some variables only once and modules are imported only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


def run_python(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess:
    """Runs Python. If the process fails, raises with its output. variables: environment variables to set, or to
    remove if None."""
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


# Copies of itself run the programs that it reads.
_FORKS = """
import json, os, sys, traceback, torch
for line in sys.stdin:
    program, variables, files = json.loads(line)
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(variables)
        failed = False
        try:
            exec(program, {})
        except BaseException:
            failed = True
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)  # gloo's threads outlive the interpreter
    print(os.waitpid(child, 0)[1], flush=True)
"""


@cache
def _forking_process() -> subprocess.Popen:
    # Freed arrays go back to the system immediately, so that the peak memory counts only memory in use at the same time.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", _FORKS]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def run_forked(program: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a program in a process that has imported torch and nothing else. If it fails, raises with its output.

    It is forked from one process for all tests, because most of the time of such a program is the import of torch.
    """
    server = _forking_process()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        print(
            json.dumps((program, variables, list(map(str, files)))), file=server.stdin, flush=True
        )
        status = int(server.stdout.readline())
        run = subprocess.CompletedProcess(program, status, *(file.read_text() for file in files))
    assert status == 0, run.stdout + run.stderr
    return run
