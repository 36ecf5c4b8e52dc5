"""The peak memory of a piece of Python, measured in a process of its own."""

import os
import subprocess
import sys

# VmHWM belongs to the memory of the process. The maximum of getrusage does not: a new process starts with
# that of the one that started it, here all of pytest's.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""


def run_measured(code: str) -> list[int]:
    """The numbers that `code` prints. It may call peak(), the most bytes it has held so far."""
    # Freed arrays go back to the system at once: the peak is of what was in use at one time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(
        [sys.executable, "-c", PEAK + code], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.split()]
