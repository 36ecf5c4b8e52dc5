"""`python -m flash_dmattn bench`: from the options to the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..availability import get_available_backends, unavailable_reason
from ..progress import progress
from ..usage import is_out_of_memory
from . import decode, record, sides
from .cases import Case, cases_of
from .clock import costs

INTERRUPTED = 130
NOTHING_TO_PLOT = (
    "--plot: got no case at several lengths or windows, expected one: --case scaling windows, or "
    "--length with several numbers"
)


def bench(options: argparse.Namespace) -> int:
    """Measures the cases that `options` select and prints them. Returns the exit status."""
    reason = _why_not(options)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    interrupted = False
    about = record.about(device_of(options), options.commit, options.repeats)
    rows, steps = [], []

    def write() -> None:
        found = {"decode_method": decode.METHOD, "decode": steps} if steps else {}
        record.write(options.json, {**about, "speed": rows} | found)

    if options.records:
        try:
            rows, steps = _recorded(options.records)
            lines = [record.HEADER, *map(record.line, rows)] if rows or not steps else []
            lines += [decode.HEADER, *map(decode.line, steps)] if steps else []
            drawn = _draw(rows, options)
        except OSError:
            raise
        except Exception as error:  # a file of any content fails in a way of its own
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"--from: got a file that --json did not write ({problem})", file=sys.stderr)
            return 2
        if not (rows or steps):
            names = " ".join(map(str, options.records))
            print(f"--from: got {names}, expected a file that holds rows", file=sys.stderr)
            return 2
        if not drawn:
            print(NOTHING_TO_PLOT, file=sys.stderr)
            return 2
        print("\n".join(lines))
    else:
        try:
            for found, source in ((rows, measured), (steps, measured_steps)):
                for row in source(options):
                    found.append(row)
                    if options.json:  # at once: an interrupted run keeps its rows
                        write()
        except KeyboardInterrupt:
            interrupted = True
            print(f"\nInterrupted after {len(rows) + len(steps)} rows.", file=sys.stderr)
        drawn = not rows or _draw(rows, options)
    if options.json and (rows or steps):
        write()
        print(f"wrote {options.json}")
    if not drawn:
        print(NOTHING_TO_PLOT, file=sys.stderr)
        return 2
    if options.plot and rows:
        print(f"wrote {options.plot}")
    return INTERRUPTED if interrupted else int(not rows and not steps)


def _recorded(paths: list[Path]) -> tuple[list[dict], list[dict]]:
    """The rows of these files, and those of decoding."""
    records = [record.read(path) for path in paths]
    rows = [row for found in records for row in found["speed"]]
    # A record that was put together may have decoding of another form under this name.
    steps = [row for found in records if "decode_method" in found for row in found["decode"]]
    return rows, steps


def _draw(rows: list[dict], options: argparse.Namespace) -> bool:
    """False if there is nothing to draw where --plot asks for it."""
    if options.plot is None:
        return True
    from . import pictures  # without matplotlib there are no pictures

    return pictures.draw(rows, options.plot)


def _decode_cases(options: argparse.Namespace) -> list[decode.DecodeCase]:
    if decode.NAME not in options.case:
        return []
    return decode.cases_of(device_of(options), options.length, options.window)


def _why_not(options: argparse.Namespace) -> str:
    """Why the options cannot be followed, found before any work; "" if they can."""
    if options.plot is not None:
        try:
            from . import pictures  # noqa: F401
        except ModuleNotFoundError as missing:
            return f"--plot needs {missing.name}: pip install 'flash-dmattn[bench]'"
        if options.plot == options.json:
            return f"--plot: got {options.plot}, the file of --json"
    if options.records:
        return ""
    device = device_of(options)
    for name in options.backend or ():
        reason = unavailable_reason(name)
        if not reason and (name == "cpu") != (device == "cpu"):
            reason = f"the device is {device}"
        if reason:
            return f"--backend: got {name}, which cannot run here: {reason}"
    for name in options.against or ():
        reason = sides.reason_against(name, device)
        if reason:
            return f"--against: got {name}, which cannot run here: {reason}"
    cases = cases_of(device, options.case, options.length, options.window)
    if not cases and not _decode_cases(options):
        return f"--case: got {' '.join(options.case)}, which has no work for a {device}"
    if options.plot is not None:
        kinds = [dataclasses.replace(case, seqlen=0) for case in cases]
        lengths_vary = len(set(kinds)) < len(kinds)
        kinds = [dataclasses.replace(case, window=0) for case in cases if case.window]
        if not lengths_vary and len(set(kinds)) == len(kinds):
            return NOTHING_TO_PLOT
    return ""


def device_of(options: argparse.Namespace) -> str:
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def dtypes_of(options: argparse.Namespace) -> list[str]:
    """Training is in bfloat16; the CPU has float32 as well."""
    if options.dtype:
        return options.dtype
    return ["bfloat16"] if device_of(options) == "cuda" else ["float32", "bfloat16"]


def names_of(options: argparse.Namespace) -> list[str]:
    """Ours, then the rivals."""
    device = device_of(options)
    if options.backend:
        ours = options.backend
    else:
        usable = [n for n in get_available_backends() if n in sides.OURS]
        ours = ["cpu"] if device == "cpu" else usable[:1]
    rivals = options.against
    if rivals is None:
        rivals = ["sdpa"] if device == "cpu" else ["sdpa", "fa2", "cudnn"]
    return list(dict.fromkeys([*ours, *rivals]))


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """A row for every case, dtype and side, printed as it is found."""
    device = device_of(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about = record.machine(device)
    threads = f", {about['threads']} threads" if "threads" in about else ""
    print(f"{about['name']}{threads}, torch {torch.__version__}", flush=True)
    cases = cases_of(device, options.case, options.length, options.window)
    work = [(case, dtype) for case in cases for dtype in dtypes_of(options)]
    if not work:
        return
    print(record.HEADER, flush=True)
    bar = progress(work, "measuring", "case")
    for case, dtype in bar:
        for row in measure(case, dtype, device, names_of(options), options.repeats, bar.write):
            bar.write(record.line(row))
            yield row


def measured_steps(options: argparse.Namespace) -> Iterator[dict]:
    """The rows of decoding."""
    cases = _decode_cases(options)
    if cases:
        device = device_of(options)
        yield from decode.measured(cases, dtypes_of(options), device, options.repeats)


def measure(
    case: Case, dtype: str, device: str, names: list[str], repeats: int, say=print
) -> list[dict]:
    """The rows of one case; `say` gets the reason why a side has none."""

    def decline(who: Iterable[str], reason: Exception) -> None:
        text = (str(reason) or type(reason).__name__).splitlines()[0]
        for name in who:
            say(f"{case!s:<42} {dtype:<9}{name:<7}  declined: {text}")

    try:
        inputs = sides.draw(case, getattr(torch, dtype), device)
    except sides.REASONS as reason:
        decline(names, reason)
        return []
    steps = {}
    for name in names:
        try:
            step = sides.build(name, inputs)
            step.backward(step.forward())  # compiles, and raises where it cannot
            steps[name] = step
        except sides.REASONS as reason:
            decline([name], reason)
    try:
        found = costs(steps, device, repeats) if steps else {}
    except RuntimeError as reason:  # all sides together may need more memory than there is
        if not is_out_of_memory(reason):
            raise
        decline(steps, reason)
        return []
    return [record.row_of(case, dtype, name, cost) for name, cost in found.items()]
