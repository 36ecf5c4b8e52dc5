"""Runs `python -m flash_dmattn check`: from the options to the exit status."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .._core.availability import backends, gpu
from .._core.numerics import default_deterministic
from ..functional import flash_dmattn_func_auto, triton_dmattn_func
from . import report
from .cases import CASES, make_case, run, shrink_case, to_device
from .compare import Verdict, compare_result
from .report import Row

QUICK_ONE_IN = 6
INTERRUPTED = 130


@dataclass(frozen=True)
class Step:
    backend: str
    case: str
    dtype: str
    verdicts: Callable[[], Iterable[Verdict]]


def check(options: argparse.Namespace) -> int:
    """Runs the check that `options` select, and prints it. Returns the exit status; see command_line/check.py."""
    if options.json:
        try:
            report.write(options.json, [], complete=False)  # before the work rather than after it
        except OSError as error:
            print(f"--json: {error}", file=sys.stderr)
            return 2
    requested = None if options.backend == "all" else options.backend
    for backend in backends():
        if backend.name == requested == "triton" and interpreted(requested):
            print("triton is interpreted: small cases, without bfloat16")
            continue
        if (
            backend.available
            or requested not in (None, backend.name)
            or backend.name == "reference"
        ):
            continue
        print(f"{backend.name} cannot run here: {backend.reason}", file=sys.stderr)
        if requested is not None:
            return 2
    names = [b.name for b in backends() if b.available and b.name != "reference"]
    steps = [
        step
        for name in (names if requested is None else [requested])
        for step in steps_of(name, options.dtype, options.full)
    ]
    rows: list[Row] = []
    interrupted = False
    bar = _progress(steps)
    try:
        with poisoned_memory():
            for step in bar:
                step_rows = run_step(step)
                rows += step_rows
                if step_rows:
                    bar.write(report.format_row(step_rows))
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        print("\n" + "\n".join(report.summary(rows)))
    failures = [row for row in rows if row.verdict == report.FAIL]
    for row in failures:
        print(f"\nFAILED {row.backend} {row.dtype} {row.case}\n  {row.message}")
    if options.json:
        report.write(options.json, rows, complete=not interrupted)
        print(f"\nwrote {options.json}")
    if interrupted:
        print(f"\nInterrupted after {len(rows)} comparisons.", file=sys.stderr)
        return INTERRUPTED
    return int(report.failed(rows))


class _Quiet:
    """The part of tqdm that `check` uses, without a bar."""

    def __init__(self, steps: Iterable):
        self._steps = steps

    def __iter__(self) -> Iterator:
        return iter(self._steps)

    def write(self, text: str) -> None:
        print(text, flush=True)


def _progress(steps: list[Step]):
    """Iterates over `steps` with a progress bar if tqdm is installed. `.write` prints above the bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _Quiet(steps)
    # disable=None: no bar in a file or a pipe.
    return tqdm(steps, desc="checking", unit="case", dynamic_ncols=True, disable=None)


def steps_of(backend: str, dtypes: list[str] | None, full: bool) -> Iterator[Step]:
    """Yields the cases of the table, a sixth of them unless `full`."""
    small = interpreted(backend)
    function = triton_dmattn_func if small else flash_dmattn_func_auto(backend)
    device = device_of(backend)
    for dtype in dict.fromkeys(dtypes or dtypes_of(backend)):
        names = [n for n, row in CASES.items() if row["dtype"] == dtype]
        if not full:
            names = [n for n in names if CASES[n]["slow"] == "0"][::QUICK_ONE_IN]
        for name in names:
            if backend == "flex" and CASES[name]["inputs"] == "limits":
                continue  # flex_dmattn_func does not promise results for scores beyond fp32
            yield Step(
                backend, name, dtype, lambda name=name: case_verdicts(name, function, device, small)
            )


def case_verdicts(
    name: str, function: Callable, device: str, small: bool = False
) -> Iterator[Verdict]:
    row = shrink_case(CASES[name]) if small else CASES[name]
    case = to_device(make_case(row), device)
    result = run(case, function)
    yield from compare_result(result, case.problem, case.nonfinite == "saturate")


def device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" or interpreted(backend) else gpu() or "cpu"


def dtypes_of(backend: str) -> tuple[str, ...]:
    if backend == "cuda":
        return ("bf16", "f16")
    if interpreted(backend):
        return ("f32", "f16")  # the interpreter multiplies bf16 wrongly
    return ("f32", "bf16", "f16")


def interpreted(backend: str) -> bool:
    """Whether Triton's kernels run on the CPU (TRITON_INTERPRET=1), at about a thousand elements a second."""
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def run_step(step: Step) -> list[Row]:
    try:
        return report.worst_rows(step.backend, step.case, step.dtype, step.verdicts())
    except Exception as error:
        verdict = report.DECLINED if is_refusal(error) else report.FAIL
        message = f"{type(error).__name__}: {error}"
        return [Row(step.backend, step.case, step.dtype, "-", verdict, message=message)]


def is_refusal(error: Exception) -> bool:
    """Whether a backend declines a case, rather than failing at it.

    It names the argument: "query: got ...". An error of the C++ library is a ValueError or a RuntimeError,
    depending on the version of torch.
    """
    if isinstance(error, NotImplementedError):
        return True
    if isinstance(error, (TypeError, ValueError)):
        return ": got " in str(error)
    return isinstance(error, RuntimeError) and "expected one that supports" in str(error)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills uninitialised memory of torch with NaN, so that comparisons find elements that are never written."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # torch fills memory only while it is deterministic. Attention itself stays as it would be otherwise.
    try:
        with default_deterministic(False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
