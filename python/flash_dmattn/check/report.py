"""The results of a check: a line per case, every failure in full, and a file."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .._core.availability import backends, gpu
from .compare import Verdict

PASS, FAIL, DECLINED = "pass", "FAIL", "declined"


@dataclass(frozen=True)
class Row:
    """The worst of one tensor of one case. `message` is that of a failure, or the reason why the backend declines."""

    backend: str
    case: str
    dtype: str
    tensor: str
    verdict: str
    error: float | None = None
    bound: float | None = None
    message: str = ""


def worst_rows(backend: str, case: str, dtype: str, verdicts: Iterable[Verdict]) -> list[Row]:
    """Returns one row for each tensor: its first failure, or else the result closest to its bound."""
    worst: dict[str, Verdict] = {}
    for verdict in verdicts:
        kept = worst.get(verdict.tensor)
        if kept is None or (kept.passed and _closeness(verdict) > _closeness(kept)):
            worst[verdict.tensor] = verdict
    return [
        Row(backend, case, dtype, v.tensor, PASS if v.passed else FAIL, v.error, v.bound, v.message)
        for v in worst.values()
    ]


def _closeness(verdict: Verdict) -> float:
    if not verdict.passed:
        return float("inf")
    return verdict.error / verdict.bound if verdict.error and verdict.bound else 0.0


def format_row(rows: list[Row]) -> str:
    """Formats the rows of one case: `error/bound` of every tensor, and the verdict on all of them."""
    first = rows[0]
    head = f"{first.backend:<9} {first.dtype:<5} {first.case:<34}"
    if first.verdict == DECLINED:
        return f"{head} declined: {first.message.splitlines()[0]}"
    failed = any(row.verdict == FAIL for row in rows)
    scale = 1e-6 if "MB" in first.case else 1.0
    cells = (
        f"{row.tensor} {_number(row.error, scale)}/{_number(row.bound, scale)}" for row in rows
    )
    return f"{head} {FAIL if failed else PASS}  {'  '.join(cells)}"


def _number(value: float | None, scale: float) -> str:
    return (
        "-" if value is None else f"{value * scale:.1e}" if scale == 1 else f"{value * scale:.1f}"
    )


def summary(rows: list[Row]) -> list[str]:
    """Returns a line per backend: the number of comparisons, and each tensor's closest approach to its bound."""
    lines = []
    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        count = {v: sum(row.verdict == v for row in mine) for v in (PASS, FAIL, DECLINED)}
        lines.append(
            f"{backend}: {count[PASS]} comparisons passed, {count[FAIL]} failed, "
            f"{count[DECLINED]} cases declined"
        )
        closest: dict[str, Row] = {}
        for row in mine:
            if row.verdict == PASS and row.error and row.bound:
                kept = closest.get(row.tensor)
                if kept is None or row.error * kept.bound > kept.error * row.bound:
                    closest[row.tensor] = row
        for name, row in closest.items():
            lines.append(
                f"  {name:<9} closest to its bound: {row.error / row.bound:4.0%}  ({row.case}, {row.dtype})"
            )
    return lines


def failed(rows: list[Row]) -> bool:
    """Whether a comparison failed, or all cases were declined (which proves nothing)."""
    verdicts = {row.verdict for row in rows}
    return FAIL in verdicts or PASS not in verdicts


def environment() -> dict:
    from .. import __version__

    return {
        "flash_dmattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.get_device_module(gpu()).get_device_name() if gpu() else None,
        "backends": [dataclasses.asdict(backend) for backend in backends()],
    }


def write(path: Path, rows: list[Row], complete: bool) -> None:
    report = {
        "environment": environment(),
        "complete": complete,
        "failed": failed(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
