"""Times each stage of the C++ library without torch, with the Google Benchmark programs that FLASH_DMATTN_BENCHMARKS builds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from itertools import groupby

from .. import record
from ..sides import Declined
from . import all_sides as side_names  # noqa: F401

PROGRAMS = {"cpu": "bench_core", "cuda": "bench_selection"}
# The CPU program measures cases that harness/cases/attention.py measures too, there with the side `cpu`.
SIDES = {"cpu": "library", "cuda": "cuda"}
ROUNDS = 15
OPTIONS = (
    "--benchmark_format=json",
    f"--benchmark_repetitions={ROUNDS}",
    "--benchmark_report_aggregates_only",
)


def expect_case_runs(name: str, options: argparse.Namespace) -> None:
    """Raises Declined if the program is not built."""
    program = options.programs / PROGRAMS[options.device]
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise Declined(f"--programs has no program {program}")


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict | record.Failure]:
    """Runs the program at its own sizes. Yields a row per case and dtype, with the medians of its benchmarks; last, a failure."""
    program = PROGRAMS[options.device]
    command = [options.programs / program, *OPTIONS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.stdout.rstrip().endswith("}"):  # otherwise the program ended too early
        # The program has a thread for each processor of the machine.
        threads = os.cpu_count() if options.device == "cpu" else None
        benchmarks = json.loads(done.stdout)["benchmarks"]
        yield from rows_of(benchmarks, SIDES[options.device], threads)
    if done.returncode != 0:
        error = RuntimeError(f"got exit status {done.returncode}, expected 0")
        yield record.Failure(program, SIDES[options.device], "", error)


def rows_of(benchmarks: list[dict], side: str, threads: int | None) -> Iterator[dict]:
    """Yields rows of a record from benchmarks named <case>/<dtype>/<part>/...; Google Benchmark adds what comes after the part."""
    medians = [b for b in benchmarks if b.get("aggregate_name") == "median"]
    for (case, dtype), group in groupby(medians, lambda b: tuple(b["run_name"].split("/")[:2])):
        group = list(group)
        times = {b["run_name"].split("/")[2]: b["real_time"] for b in group}
        ways = {way: times.pop(way, None) for way in record.TIMES}
        unit = group[0]["time_unit"]
        yield record.row(
            case, side, dtype, **ways, unit=unit, statistic="median", rounds=ROUNDS, parts=times or None, threads=threads,
        )  # fmt: skip
