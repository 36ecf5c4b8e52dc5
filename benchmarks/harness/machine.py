"""The hardware, the versions and the sources that times depend on."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from flash_dmattn._core.availability import backends

BENCHMARKS = Path(__file__).parents[1]
RECORDS = BENCHMARKS / "records"
# A record has their versions, where they are imported. torch's own tells the build of CUDA, which its package on PyPI does not.
PACKAGES = ("torch", "transformers", "kvpress")


def output_of(*command: str) -> str:
    """Output of a command; "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit of the sources; "" outside a Git checkout."""
    return output_of("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def machine(device: str) -> dict:
    if device == "cuda":
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        gpus = output_of("nvidia-smi", query, "--format=csv,noheader")
        driver, _, clocks = gpus.partition("\n")[0].partition(", ")
        return {"name": torch.cuda.get_device_name(), "driver": driver, "clocks": clocks}
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text, re.MULTILINE))
    return {
        "name": fields.get("model name", "unknown"),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "isa": next(backend.reason for backend in backends() if backend.name == "cpu"),
        "last_level_cache_mib": round(last_level_cache() / 2**20, 1),
        "threads": torch.get_num_threads(),
    }


def origin(device: str, known_commit: str | None = None, launcher: str = "") -> dict:
    """The origin of the numbers of this program: the fields of a record that every program writes.

    known_commit: of the sources, where they have no history. launcher: the program that started this one.
    """
    words = [launcher] if launcher else []
    return {
        "machine": machine(device),
        "commit": known_commit or commit(),
        "command": " ".join([*words, Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            name: getattr(sys.modules[name], "__version__", None) or version(name)
            for name in PACKAGES
            if name in sys.modules
        },
    }


def record_path(name: str, machine: dict) -> Path:
    """records/<machine>/<date>-<name>.json"""
    words = re.sub(r"\(\w+\)|\b(NVIDIA|CPU|Processor)\b|@.*", "", machine["name"]).split()
    folder = "-".join([*words, machine.get("isa", "")]).strip("-").lower()
    return RECORDS / folder / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the highest level of the processor's caches; 0 where Linux does not tell."""
    levels = {
        int((index / "level").read_text()): (index / "size").read_text()
        for index in folder.glob("index*")
    }
    return int(levels[max(levels)].strip().removesuffix("K")) << 10 if levels else 0


def working_set() -> int:
    """Bytes that a benchmark has to go through until nothing that it read first is left in the processor's caches: four
    times the last level, at least 256 MiB, at most a quarter of the available memory."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return min(max(4 * last_level_cache(), 256 << 20), (int(available[1]) << 10) // 4)
