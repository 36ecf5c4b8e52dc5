"""The stages of the C++ library one by one, without torch: the programs of FLASH_DMATTN_BENCHMARKS."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator

PROGRAMS = {"cpu": ("bench_core",), "cuda": ("bench_attention", "bench_selection")}


def side_names(name: str, device: str) -> tuple[str, ...]:
    return ()


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """The rows that the programs print. They run at their own sizes."""
    for program in PROGRAMS[options.device]:
        command = [options.programs / program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            yield from map(json.loads, running.stdout)
        if running.returncode != 0:
            print(f"{program} failed with status {running.returncode}", flush=True)
