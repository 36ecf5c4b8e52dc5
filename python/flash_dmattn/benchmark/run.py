"""`python -m flash_dmattn bench`: from the options to the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator

import torch

from ..availability import get_available_backends, unavailable_reason
from ..progress import progress
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
    if options.plot is not None:
        try:
            from . import pictures
        except ModuleNotFoundError as missing:
            print(f"--plot needs {missing.name}: pip install 'flash-dmattn[demo]'", file=sys.stderr)
            return 2
    reason = _why_not(options)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    if not options.records and not _has_work(options):
        names = " ".join(options.case)
        print(f"--case: got {names}, which has no work for a {device_of(options)}", file=sys.stderr)
        return 2
    interrupted = False
    about = record.about(device_of(options), options.commit, options.repeats)
    rows, steps = [], []

    def write() -> None:
        found = {"decode_method": decode.METHOD, "decode": steps} if steps else {}
        record.write(options.json, {**about, "speed": rows} | found)

    if options.records:
        try:
            records = [record.read(path) for path in options.records]
            rows = [row for found in records for row in found["speed"]]
            # A record that was put together may have decoding of another form under this name.
            steps = [
                row for found in records if "decode_method" in found for row in found["decode"]
            ]
            lines = [record.HEADER, *map(record.line, rows)] if rows or not steps else []
            lines += [decode.HEADER, *map(decode.line, steps)] if steps else []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            print(f"--from: got a file that --json did not write ({problem})", file=sys.stderr)
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
    if options.json and (rows or steps):
        write()
        print(f"wrote {options.json}")
    if options.plot and rows:
        if not pictures.draw(rows, options.plot):
            print(NOTHING_TO_PLOT, file=sys.stderr)
            return 2
        print(f"wrote {options.plot}")
    return INTERRUPTED if interrupted else int(not rows and not steps)


def _has_work(options: argparse.Namespace) -> bool:
    return bool(cases_of(device_of(options), options.case) or _decode_cases(options))


def _decode_cases(options: argparse.Namespace) -> list[decode.DecodeCase]:
    if decode.NAME not in options.case:
        return []
    return decode.cases_of(device_of(options), options.length, options.window)


def _why_not(options: argparse.Namespace) -> str:
    """Why the options cannot be followed, found before any work; "" if they can."""
    if options.records:
        return ""
    for name in options.backend or ():
        reason = unavailable_reason(name)
        if reason:
            return f"--backend: got {name}, which cannot run here: {reason}"
    cases = cases_of(device_of(options), options.case, options.length, options.window)
    if options.plot is not None and cases:
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
    inputs = sides.draw(case, getattr(torch, dtype), device)
    steps = {}
    for name in names:
        try:
            step = sides.build(name, inputs)
            step.backward(step.forward())  # compiles, and raises where it cannot
            steps[name] = step
        except (sides.Declined, RuntimeError, TypeError, ValueError) as reason:
            text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
            say(f"{case!s:<42} {dtype:<9}{name:<7}  declined: {text}")
    found = costs(steps, device, repeats) if steps else {}
    return [record.row_of(case, dtype, name, cost) for name, cost in found.items()]
