"""Forward, backward and peak memory of attention, with the sides run alternately."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .. import sides
from ..case import Case, cases_of
from ..clock import Step, peak_mb, times_of_steps
from ..record import Failure, Row


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    chosen = options.side or sides.default_sides(options.device)
    chosen = [side for side in sides.NAMES if side in chosen]
    cases = cases_of(options.device, names, options.length, options.window)
    if not cases:
        yield Failure(names[0], "", "", sides.Declined(f"has no sizes for {options.device}"))
    for case in cases:
        for dtype in options.dtype:
            yield from measure(case, dtype, options.device, chosen, options.repeats)


def measure(
    case: Case, dtype: str, device: str, names: list[str], repeats: int
) -> Iterator[Row | Failure]:
    """Yields the rows of one case."""
    try:
        inputs = sides.draw(case, getattr(torch, dtype), device)
    except Exception as error:
        yield Failure(case, "", dtype, error)
        return
    builders = {name: partial(sides.build, name, inputs) for name in names}
    yield from measure_steps(case, dtype, device, builders, repeats)


def measure_steps(
    case: object, dtype: str, device: str, builders: dict[str, Callable[[], Step]], repeats: int
) -> Iterator[Row | Failure]:
    """Yields a row for each side whose step can be built and run."""
    steps = {}
    torch._dynamo.reset()
    for name, build in builders.items():
        try:
            step = build()
            step.backward(step.forward())  # compiles, and raises if the side cannot run the case
            steps[name] = step
        except Exception as error:
            yield Failure(case, name, dtype, error)
    try:
        times = times_of_steps(steps, device, repeats) if steps else {}
        for name, step in steps.items():
            other = {"peak MB": peak_mb(step, device), "rounds": repeats}
            yield Row(case, name, dtype, times[name], other)
    except RuntimeError as error:  # all sides together may need more memory than there is
        yield Failure(case, "", dtype, error)
