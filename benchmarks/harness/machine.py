"""The hardware, the package versions and the commit that times depend on."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flash_dmattn import backends

from .record import Record

BENCHMARKS = Path(__file__).parents[1]
# A record has the version of each of these packages whose module is imported.
PACKAGES = {
    "transformers": "transformers", "triton": "triton", "flash_attn.cute": "flash-attn-4",
    "cudnn": "nvidia-cudnn-frontend", "cuequivariance_torch": "cuequivariance-torch",
}  # fmt: skip


def new_record(device: str, commit: str | None) -> Record:
    """Returns a record without rows. commit: None for that of Git."""
    today = str(datetime.date.today())
    return Record(
        machine_name(device), today, commit or _commit_of_git(), versions(), _command(), []
    )


def machine_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    isa = next(backend.reason for backend in backends() if backend.name == "cpu")
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return f"{model[1] if model else 'unknown processor'} ({isa}), {threads}"


def _commit_of_git() -> str:
    command = "git describe --always --dirty --abbrev=12 '--exclude=*' || echo unknown"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=BENCHMARKS)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    # torch.__version__ names its CUDA build; the version in torch's package metadata does not.
    loaded = {"torch": str(torch.__version__)}
    for module, package in PACKAGES.items():
        if module in sys.modules:
            with contextlib.suppress(PackageNotFoundError):
                loaded[package] = version(package)
    return loaded


def _command() -> str:
    # These variables choose kernels or add work to them.
    names = sorted(n for n in os.environ if re.match("FLASH_DMATTN_(?!LIBRARY)", n))
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    return " ".join([*settings, "benchmarks/bench.py", shlex.join(sys.argv[1:])])


def working_set() -> int:
    """Returns the bytes that a benchmark has to read to evict what it read first from the CPU's caches: four times the last-level
    cache, at least 256 MiB, at most a quarter of the available memory."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    largest = max((int(size.read_text().strip().removesuffix("K")) << 10 for size in caches), default=0)  # fmt: skip
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return min(max(4 * largest, 256 << 20), (int(available[1]) << 10) // 4)
