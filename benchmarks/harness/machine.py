"""Describes the hardware, the package versions and the source commit that times depend on."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flash_dmattn._core.availability import backends

from .side_table import SIDES

# The environment variables that choose kernels or add work to them.
SETTINGS = (
    "FLASH_DMATTN_CHECK_FINITE", "FLASH_DMATTN_MAX_ISA", "FLASH_DMATTN_CUDA_FAMILY", "FLASH_DMATTN_MAX_SHARED_KB",
    "FLASH_DMATTN_CUDA_NO_OVERLAP",
)  # fmt: skip
BENCHMARKS = Path(__file__).parents[1]
RECORDS = BENCHMARKS / "records"
# {module: its package}. A record has the version of each package whose module is imported.
PACKAGES = {
    "torch": "torch", "transformers": "transformers", "kvpress": "kvpress", "vllm": "vllm",
} | {about.module: about.package for about in SIDES.values() if about.module}  # fmt: skip


def output_of(*command: str) -> str:
    """Returns a command's output, or "" if the command fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Returns the commit of the sources, or "" outside a Git checkout."""
    return output_of("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def machine(device: str) -> dict:
    if device == "cuda":
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        gpus = output_of("nvidia-smi", query, "--format=csv,noheader")
        driver, _, clocks = gpus.partition("\n")[0].partition(", ")
        about = {"driver": driver or "unknown", "clocks": clocks or "unknown"}
        return {"name": torch.cuda.get_device_name()} | about
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text, re.MULTILINE))
    return {
        "name": fields.get("model name", "unknown"),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "isa": next(backend.reason for backend in backends() if backend.name == "cpu"),
        "last_level_cache_mib": round(last_level_cache() / 2**20, 1) or None,
        "threads": torch.get_num_threads(),
    }


def origin(device: str, known_commit: str | None = None, launcher: str = "python") -> dict:
    """Returns the fields that say where a record's numbers come from: machine, commit, command and versions.

    known_commit: the commit of the sources if they are not a Git checkout.
    launcher: the program that started this one, with its options.
    """
    return {
        "machine": machine(device),
        "commit": known_commit or commit(),
        "command": command(launcher),
        "versions": versions(),
    }


def command(launcher: str = "python") -> str:
    """Returns the command of this process, with the program's path in the repository, as a shell takes it at the root.

    The SETTINGS of the environment precede it.
    """
    settings = [
        f"{name}={shlex.quote(os.environ[name])}" for name in SETTINGS if name in os.environ
    ]
    program = os.path.relpath(sys.argv[0], BENCHMARKS.parent)
    if program.startswith(".."):  # not a program of the repository
        program = Path(program).name
    return " ".join([*settings, launcher, shlex.join([program, *sys.argv[1:]])])


def versions() -> dict[str, str]:
    """Returns the version of each imported package of PACKAGES, "unknown" if it does not name one, and that of torch's cuDNN."""
    versions_of_packages = {
        package: _version(module, package)
        for module, package in PACKAGES.items()
        if module in sys.modules
    }
    if torch.backends.cudnn.is_available():
        versions_of_packages["cudnn"] = str(torch.backends.cudnn.version())
    return versions_of_packages


def _version(module: str, package: str) -> str:
    # `torch.__version__` names its CUDA build; the version in torch's package metadata does not.
    if named := getattr(sys.modules[module], "__version__", None):
        return str(named)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def record_path(name: str, machine: dict) -> Path:
    """Returns the path records/<machine>/<date>-<name>.json."""
    words = re.sub(r"\(\w+\)|\b(NVIDIA|CPU|Processor)\b|@.*", "", machine["name"]).split()
    folder = "-".join([*words, machine.get("isa", "")]).strip("-").lower()
    return RECORDS / folder / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Returns the size in bytes of the CPU's last-level cache, or 0 if Linux does not report it."""
    levels = {
        int((index / "level").read_text()): (index / "size").read_text()
        for index in folder.glob("index*")
    }
    return int(levels[max(levels)].strip().removesuffix("K")) << 10 if levels else 0


def working_set() -> int:
    """Returns how many bytes a benchmark must read to evict what it read first from the CPU's caches: four times the last-level
    cache, at least 256 MiB, at most a quarter of the available memory."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return min(max(4 * last_level_cache(), 256 << 20), (int(available[1]) << 10) // 4)
