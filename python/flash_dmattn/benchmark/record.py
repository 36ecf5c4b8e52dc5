"""Measurements as rows, as lines of a table and as a file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

from ..availability import backends
from .cases import OLD_NAMES, Case
from .clock import Cost
from .working_set import last_level_cache

HEADER = (
    f"{'case':<42} {'dtype':<9}{'who':<7}{'forward':>10}{'backward':>10} ms"
    f"{'forward':>11}{'backward':>10} useful TFLOP/s{'peak':>9} MB"
)


def row_of(case: Case, dtype: str, who: str, cost: Cost) -> dict:
    """Times in ms; the peak of memory beyond queries, keys, values and biases in MB."""
    flops = {way: case.useful_flops(way) for way in ("forward", "backward")}
    return {
        "case": str(case),
        **dataclasses.asdict(case),
        "dtype": dtype,
        "who": who,
        "forward_ms": round(cost.forward_ms, 3),
        "backward_ms": _rounded(cost.backward_ms),
        "forward_useful_tflops": round(flops["forward"] / cost.forward_ms * 1e-9, 3),
        "backward_useful_tflops": _rounded(
            cost.backward_ms and flops["backward"] / cost.backward_ms * 1e-9
        ),
        "peak_mb": round(cost.peak_bytes / 1e6, 1),
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def line(row: dict) -> str:
    def field(name: str, form: str, width: int) -> str:
        number = row.get(name)
        return f"{'-' if number is None else format(number, form):>{width}}"

    return (
        f"{row['case']:<42} {row['dtype']:<9}{row['who']:<7}{field('forward_ms', '.2f', 10)}"
        f"{field('backward_ms', '.2f', 10)}   {field('forward_useful_tflops', '.3g', 11)}"
        f"{field('backward_useful_tflops', '.3g', 10)}               {field('peak_mb', '.1f', 9)}"
    )


def machine(device: str) -> dict:
    """The hardware and settings on which times depend."""
    if device == "cuda":
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        return {
            "name": torch.cuda.get_device_name(),
            "driver, SM and memory clock now, highest SM clock": output_of(
                "nvidia-smi", query, "--format=csv,noheader"
            ),
        }
    cpuinfo = Path("/proc/cpuinfo")
    fields = dict(
        [part.strip() for part in text.split(":", 1)]
        for text in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if ":" in text
    )
    return {
        "name": fields.get("model name", "unknown"),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "isa": next(backend.reason for backend in backends() if backend.name == "cpu"),
        "last_level_cache_mib": round(last_level_cache() / 2**20, 1),
        "threads": torch.get_num_threads(),
    }


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def about(device: str, commit: str, repeats: int) -> dict:
    return {
        "machine": machine(device),
        "commit": commit,
        "torch": torch.__version__,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "method": f"medians of {repeats} turns, of all forwards and then all backwards, in an order drawn each time; whole calls, "
        "selection and schedule included, a rival's mask made before; of a GPU by events, launches ahead, L2 not flushed",
    }


def write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict:
    """A record, with the names that kinds of cases have now."""
    record = json.loads(path.read_text())
    for row in record.get("speed", []):
        kind, _, sizes = row["case"].partition(" ")
        if kind in OLD_NAMES:
            row["case"] = f"{OLD_NAMES[kind]} {sizes}"
        if row.get("kind") in OLD_NAMES:
            row["kind"] = OLD_NAMES[row["kind"]]
    return record
