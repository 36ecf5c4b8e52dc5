"""Compares the times of the sides of one record, of two records, or of two builds measured alternately."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import machine, record
from .options import INTERRUPTED, expect_output

_TIMES = (*record.TIMES, "both")
# Runs of one side with several statistics, joined by "and", are not in it either.
_COMPARABLE = tuple(name for name in record.STATISTICS if name != "unknown")
_WHEN = ("before", "after")
_PARTS = ("python", "_C.so", "commit")  # the files of a build's folder


def main(options: argparse.Namespace) -> int:
    paths = [Path(source).resolve() for source in options.sources]
    builds = [path for path in paths if path.is_dir()]
    if len(paths) > 2 or len(builds) not in (0, 2):
        options.fail("SOURCE: expected a record, two records, or two builds")
    status = 0
    if builds:
        _check_builds(builds, options)
        rows = []
        try:
            for new_record in _measure_builds(builds, options):
                rows = new_record["rows"]
                if options.json:
                    record.write(options.json, new_record)
        except KeyboardInterrupt:
            print(f"\nInterrupted after {len(rows)} rows.", file=sys.stderr)
            status = INTERRUPTED
    else:
        try:
            records = [record.read(path) for path in paths]
        except ValueError as error:
            options.fail(str(error))
        rows = records[0]["rows"] if len(records) == 1 else _before_and_after(*records)
        if len(records) == 2:
            for when, one_record in zip(_WHEN, records, strict=True):
                print(f"{when}: {one_record['machine']['name']}, commit {one_record['commit']}")
    lines = ratios(rows)
    if not lines and not builds:
        options.fail("SOURCE: got no times, expected some")
    print("\n".join(lines))
    return status


def ratios(rows: list[dict]) -> list[str]:
    """Returns one line per case and side: the medians of its runs and their ratios to the medians of the case's first side. Sides
    called "before X" and "after X" are compared only with each other, and times only with those of the same statistic."""
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        when, _, side = row["side"].partition(" ")
        group = groups.setdefault(
            (row["case"], row["dtype"], row["unit"], side if when in _WHEN else ""), {}
        )
        group.setdefault(row["side"], []).append(row)
    lines = []
    for (case, dtype, unit, _), runs_by_side in groups.items():
        base = base_statistic = None
        for side, runs in runs_by_side.items():
            values = {t: [run[t] for run in runs if run.get(t) is not None] for t in _TIMES}
            medians = {time: statistics.median(few) for time, few in values.items() if few}
            if not medians:  # a row of memory or of quality
                continue
            statistic = " and ".join(dict.fromkeys(run["statistic"] for run in runs))
            if base is None:
                base, base_statistic = medians, statistic
            times = " / ".join(f"{time:.4g}" for time in medians.values())
            ratio = " / ".join(f"{medians[t] / base[t]:.3f}" for t in medians if t in base)
            end = f"ratio {ratio}"
            if statistic != base_statistic or statistic not in _COMPARABLE:
                end = f"no ratio of {statistic} to {base_statistic}"
            lines.append(f"{case:<46} {dtype:<9}{side:<14} {times} {unit}, {end}")
    return lines


def _before_and_after(before: dict, after: dict) -> list[dict]:
    return [
        row | {"side": f"{when} {row['side']}"}
        for when, one_record in zip(_WHEN, (before, after), strict=True)
        for row in one_record["rows"]
    ]


def _check_builds(builds: list[Path], options: argparse.Namespace) -> None:
    """Ends the program before the first measurement if a build is incomplete or the record cannot be written."""
    for build in builds:
        missing = [name for name in _PARTS if not (build / name).exists()]
        if missing:
            options.fail(f"SOURCE: got {build} without {', '.join(missing)}, expected a build")
    if options.json:
        expect_output(options.json, "--json", options.fail)


def _measure_builds(builds: list[Path], options: argparse.Namespace) -> Iterator[dict]:
    """Measures both builds in every round, each in its own process and in random order. Yields the record so far after each
    measurement."""
    command = machine.command()
    rows: dict[str, list[dict]] = {when: [] for when in _WHEN}
    for number in range(options.rounds):
        for when in random.sample(_WHEN, 2):
            one_record = _measure(builds[_WHEN.index(when)], options)
            place = {"commit": one_record["commit"], "run": number}
            rows[when] += [
                row | place | {"side": f"{when} {row['side']}"} for row in one_record["rows"]
            ]
            print(f"round {number + 1} of {options.rounds}: {when}", flush=True)
            yield one_record | {"command": command, "rows": rows["before"] + rows["after"]}


def _measure(build: Path, options: argparse.Namespace) -> dict:
    """Runs this driver's `run` in a new process with the package of a build, and returns its record."""
    driver = Path(__file__).parents[1] / "bench.py"
    commit = (build / "commit").read_text().strip()
    package = {
        "PYTHONPATH": str(build / "python"),
        "FLASH_DMATTN_LIBRARY": str(build / "_C.so"),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        done = subprocess.run(
            [sys.executable, driver, "run", "--json", path, "--commit", commit, *options.run],
            capture_output=True, text=True, env=os.environ | package,
        )  # fmt: skip
        if done.returncode == 2:  # bad options
            options.fail(f"--run: {build}: {done.stderr.splitlines()[-1]}")
        if done.returncode != 0:
            raise SystemExit(f"{build}: {done.stdout}{done.stderr}")
        return record.read(path)
