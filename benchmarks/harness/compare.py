"""Compares the sides of one record, of two records, or of two builds measured alternately."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import machine, record
from .options import INTERRUPTED, expect_output

_TIMES = (*record.TIMES, "both")
# {(quantity, unit): the field of a row}
_FIELDS = {
    ("launches", None): "kernels", ("peak_mb", "MB"): "peak_mb", ("results_mb", "MB"): "results_mb",
    ("cache_mib", "MiB"): "cache_mib", ("visited_mib", "MiB"): "visited_mib",
    ("of_copy_bandwidth", "share"): "of_copy_bandwidth",
}  # fmt: skip
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
        options.fail("SOURCE: got no rows, expected some")
    print("\n".join(lines))
    return status


def ratios(rows: list[dict]) -> list[str]:
    """Returns a title for each case, which names its base, the first side, and below it a line for each side and quantity: the median
    over the runs, the lowest and highest value if there are several, and the ratio to the base.

    Sides called "before X" and "after X" are compared only with each other. Builds of several commits are sides of their own.
    """
    cases: dict[tuple, dict[tuple, list[dict]]] = {}
    for row in rows:
        when, _, side = row["side"].partition(" ")
        sides = cases.setdefault((row["case"], row["dtype"], side if when in _WHEN else ""), {})
        sides.setdefault((row["side"], row.get("commit")), []).append(row)
    lines = []
    for (case, dtype, side_of_builds), runs_by_side in cases.items():
        names = _names(runs_by_side)
        is_alone = side_of_builds and len(names) == 1
        base = None if is_alone else next(iter(runs_by_side.values()))
        lines.append(f"{case}, {dtype}; {'only' if is_alone else 'base:'} {names[0]}")
        for name, runs in zip(names, runs_by_side.values(), strict=True):
            lines += [f"  {name:<24} {line}" for line in _lines_of_side(runs, base)]
    return lines


def _names(sides: Iterable[tuple[str, str | None]]) -> list[str]:
    """Returns the name of each (side, commit), with the commit where a side has several."""
    count = Counter(side for side, _ in sides)
    return [
        f"{side} {commit or 'of the record'}" if count[side] > 1 else side for side, commit in sides
    ]


def _lines_of_side(runs: list[dict], base: list[dict] | None) -> list[str]:
    """Returns a line for each quantity of the runs. A tilde marks the ratio of ranges that overlap.

    base: the runs to compare with; None: there are none.
    """
    kinds_of_time = {(run["unit"], run["statistic"]) for run in [*runs, *(base or [])]}
    are_alike = len(kinds_of_time) == 1 and runs[0]["statistic"] != "unknown"
    times = {*_TIMES, *(part for run in runs for part in run.get("parts", {}))}
    base_values = _quantities(base or [])
    lines = []
    for (name, unit), values in _quantities(runs).items():
        others = base_values.get((name, unit), [])
        median, base_median = (statistics.median(few or [0]) for few in (values, others))
        extent = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
        ratio = "no ratio"
        if base_median and (are_alike or name not in times):
            overlaps = min(values) <= max(others) and min(others) <= max(values)
            is_uncertain = overlaps and len(values) > 1 and len(others) > 1 and runs is not base
            ratio = f"{'~' if is_uncertain else ''}{median / base_median:.3f}"
        lines.append(f"{name:<18} {median:>9.4g} {unit or '':<10} {extent:<20} {ratio:>8}")
    return lines


def _quantities(runs: list[dict]) -> dict[tuple[str, str | None], list[float]]:
    """Returns the values of all runs by quantity and unit: times, parts, memory, launches and other single numbers."""
    values: dict[tuple[str, str | None], list[float]] = {}
    for run in runs:
        measured = {(name, run["unit"]): run.get(name) for name in _TIMES}
        measured |= {(name, run["unit"]): ms for name, ms in run.get("parts", {}).items()}
        measured |= {key: run.get(field) for key, field in _FIELDS.items()}
        measured |= {(name, unit): number for name, (number, unit) in run.get("values", {}).items()}
        for key, number in measured.items():
            if isinstance(number, (int, float)):
                values.setdefault(key, []).append(number)
    return values


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
        # With status 1 a side failed, and its line says why. A run that an error ended has not printed that it wrote the record.
        if done.returncode not in (0, 1) or not done.stdout.endswith(f"wrote {path}\n"):
            raise SystemExit(f"{build}: {done.stdout}{done.stderr}")
        for line in done.stdout.splitlines():
            if "failed: " in line or "declined: " in line:
                print(line)
        return record.read(path)
