"""Measures the peak memory of Python code in a separate process."""

from python_process import run_forked

# VmHWM belongs to the memory of the process. The maximum of getrusage does not: a new process starts with
# that of the one that started it, here all of pytest's.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""


def run_measured(code: str) -> list[int]:
    """Runs `code` and returns the numbers that it prints. The code may call peak() for the most bytes it has held so far."""
    return [int(line) for line in run_forked(PEAK + code).stdout.split()]
