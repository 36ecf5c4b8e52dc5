"""Measures forward, backward and peak memory of attention cases, with the sides run alternately."""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Iterator

import torch

from flash_dmattn import select_key_intervals

from .. import record, sides
from ..case import CASES, Case, cases_of
from ..clock import Rounds, costs, rounds_of_costs, timed


def side_names(name: str, device: str) -> tuple[str, ...]:
    """Returns the sides that `--side` can select for a case; none if the case ignores `--side`."""
    return () if name == "selection" else sides.names_on(device)


def expect_case_runs(name: str, options: argparse.Namespace) -> None:
    """Raises Declined for a case that exists only for another device."""
    if name != "selection" and name not in CASES[options.device]:
        raise sides.Declined(f"it has no sizes for {options.device}")


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    if name == "selection":
        yield from _selections(options)
        return
    chosen = options.side or sides.default_sides(options.device)
    names = [side for side in sides.NAMES if side in chosen]
    for case in _new_cases(name, options):
        for dtype in options.dtype:
            yield from measure(case, dtype, options.device, names, options.repeats)


def _new_cases(name: str, options: argparse.Namespace) -> list[Case]:
    """Returns the cases called `name`, without those that an earlier name includes. For example, `scaling` includes the case of
    `dynamic_mask`."""

    def listed(name: str) -> list[Case]:
        return cases_of(options.device, name, options.length, options.window)

    names_before = options.case[: options.case.index(name)]
    measured = {case for other in names_before for case in listed(other)}
    return [case for case in listed(name) if case not in measured]


_SELECTIONS = {
    "per_query": {},
    "global": {"selection": "global"},
    "recent 512": {"recent_window": 512, "recent_competes": True},
    "recent 512 before it competes": {"recent_window": 512},
    "4 sinks, recent 512, threshold": {"recent_window": 512, "sink_tokens": 4, "score_threshold": 0.0},
}  # fmt: skip


def _selections(options: argparse.Namespace) -> Iterator[dict]:
    """Times only the selection of keys, with the rules in a random order in every round."""
    draw = random.Random(0)
    for length in options.length or [32768, 524288]:
        scores = torch.randn(1, 8, length, device=options.device)

        def select_by_each_rule() -> dict[str, float]:
            times = {}
            for rule in draw.sample(list(_SELECTIONS), len(_SELECTIONS)):
                keywords = _SELECTIONS[rule]
                select = functools.partial(select_key_intervals, scores, 2048, **keywords)
                times[rule], _ = timed(select, options.device)
            return times

        rounds = Rounds(2 * options.repeats)
        times = rounds.time_all(select_by_each_rule)
        for rule in _SELECTIONS:
            case = f"selection {rule} 8 rows N{length} w2048"
            yield record.row(case, options.device, "float32", times[rule], **rounds.fields())


def measure(case: Case, dtype: str, device: str, names: list[str], repeats: int) -> list[dict]:
    """Returns the rows of one case, and prints the reason for each side that cannot run it."""

    def decline(names, reason: Exception) -> None:
        for name in names:
            if not sides.declines(reason, name in sides.RIVALS):
                raise reason
            print(record.declined(case, name, dtype, reason), flush=True)

    try:
        inputs = sides.draw(case, getattr(torch, dtype), device)
    except sides.REASONS as reason:
        decline(names, reason)
        return []
    steps = {}
    for name in names:
        try:
            step = sides.build(name, inputs)
            step.backward(step.forward())  # compiles, and raises if the side cannot run the case
            steps[name] = step
        except sides.REASONS as reason:
            decline([name], reason)
    rounds = rounds_of_costs(device, repeats)
    try:
        costs_by_side = costs(steps, device, rounds) if steps else {}
    except RuntimeError as reason:  # all sides together may need more memory than there is
        decline(steps, reason)
        return []
    return [
        record.row(
            case, name, dtype, cost.forward_ms, cost.backward_ms, **rounds.fields(), peak_mb=cost.peak_bytes / 1e6
        )
        for name, cost in costs_by_side.items()
    ]  # fmt: skip
