"""The hardware, the package versions and the commit that times depend on."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from flash_dmattn import backends

BENCHMARKS = Path(__file__).parents[1]
# A record has the version of each of these packages whose module is imported.
PACKAGES = {
    "transformers": "transformers", "triton": "triton", "fa3_fwd_interface": "fa3-fwd", "flash_attn.cute": "flash-attn-4",
}  # fmt: skip
# These variables choose kernels or add work to them.
SETTINGS = (
    "FLASH_DMATTN_CHECK_FINITE", "FLASH_DMATTN_MAX_ISA", "FLASH_DMATTN_CUDA_FAMILY", "FLASH_DMATTN_MAX_SHARED_KB",
    "FLASH_DMATTN_CUDA_NO_OVERLAP",
)  # fmt: skip


def head_of_record(device: str, commit: str | None) -> dict:
    """Returns the fields of a record that its rows share. commit: None for that of Git."""
    return {
        "machine": machine_name(device),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "commit": commit or _commit_of_git(),
        "versions": _versions(),
        "command": _command(),
    }


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
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS)
    return done.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    # torch.__version__ names its CUDA build; the version in torch's package metadata does not.
    loaded = {package for module, package in PACKAGES.items() if module in sys.modules}
    return {"torch": str(torch.__version__)} | {package: version(package) for package in loaded}


def _command() -> str:
    settings = [
        f"{name}={shlex.quote(os.environ[name])}" for name in SETTINGS if name in os.environ
    ]
    return " ".join([*settings, "benchmarks/bench.py", shlex.join(sys.argv[1:])])


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Returns the size in bytes of the CPU's last-level cache, or 0 if Linux does not report it."""
    levels = {
        int((index / "level").read_text()): (index / "size").read_text()
        for index in folder.glob("index*")
    }
    return int(levels[max(levels)].strip().removesuffix("K")) << 10 if levels else 0


def working_set() -> int:
    """Returns the bytes that a benchmark has to read to evict what it read first from the CPU's caches: four times the last-level
    cache, at least 256 MiB, at most a quarter of the available memory."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return min(max(4 * last_level_cache(), 256 << 20), (int(available[1]) << 10) // 4)
