"""Draws time and memory against the sequence length and against the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from .case import Case  # noqa: E402
from .side_table import SIDES  # noqa: E402

_STYLES = {"bfloat16": ("s", "-"), "float32": ("o", "--"), "float16": ("^", ":")}
_AXES = {"seqlen": "sequence length N", "window": "window w"}
PANEL = (4.2, 4.0)  # width and height in inches of a picture with one panel
_FIXED = ("kind", "batch", "heads_q", "heads_kv", "head_dim", "value_dim")


def seconds(row: dict) -> float | None:
    """Returns the seconds of forward plus backward, or None if one of them was not measured."""
    times = [row["both"]] if "both" in row else [row["forward"], row["backward"]]
    per_second = {"ms": 1e3, "us": 1e6, None: 1}[row["unit"]]
    return None if None in times else sum(times) / per_second


def expect_format(path: Path) -> None:
    """Raises ValueError if matplotlib cannot write the format that the path ends in."""
    formats = plt.Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(f"got {path}, expected a name that ends in one of {', '.join(formats)}")


def memory(row: dict) -> float | None:
    return row["peak_mb"] / 1e3 if "peak_mb" in row else None


def sweep(rows: Iterable[dict], along: str) -> list[dict]:
    """Returns the largest set of rows whose cases differ only in `along`, or an empty list if no set has several values of it. Each
    row also gets the fields of its case."""
    other = "window" if along == "seqlen" else "seqlen"
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        case = Case.parse(row["case"])
        fields = dataclasses.asdict(case) if case else {}
        if fields.get(along):  # dense attention has no window
            group = tuple(fields[key] for key in (*_FIXED, other))
            groups.setdefault(group, []).append(row | fields)
    sizes = {key: len({row[along] for row in group}) for key, group in groups.items()}
    best = max(groups, key=lambda key: sizes[key], default=None)
    return groups[best] if best is not None and sizes[best] > 1 else []


def _label(side: str, row: dict) -> str:
    masked = side == "sdpa" and row["window"]
    label = SIDES[side].label if side in SIDES else side
    return label + (", N×N mask" if masked else "")


def draw_sweep(
    axes: plt.Axes, rows: list[dict], along: str, value: Callable[[dict], float | None]
) -> None:
    """Draws one line per side and dtype on logarithmic axes."""
    one = rows[0]
    for side, dtype in dict.fromkeys((row["side"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["side"], row["dtype"]) == (side, dtype)]
        points = {row[along]: value(row) for row in mine if value(row) is not None}
        if not points:
            continue
        marker, style = _STYLES.get(dtype, ("x", "-."))
        axes.loglog(
            *zip(*sorted(points.items()), strict=True), marker=marker, linestyle=style, markersize=4,
            color=SIDES[side].colour if side in SIDES else None, label=f"{_label(side, one)}, {dtype}",
        )  # fmt: skip
    ticks = sorted({row[along] for row in rows})
    axes.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axes.xaxis.minorticks_off()
    axes.set_xlabel(_AXES[along])
    axes.set_ylabel(
        "seconds, forward + backward" if value is seconds else "GB beyond q, k, v and bias"
    )
    fixed = f"N = {one['seqlen']}"
    if along == "seqlen":
        fixed = f"w = {one['window']}" if one["window"] else one["kind"]
    axes.set_title(
        f"{fixed}, B{one['batch']} H{one['heads_q']} Hkv{one['heads_kv']} D{one['head_dim']}",
        fontsize=9,
    )
    axes.grid(alpha=0.3)


def _sweeps(rows: list[dict]) -> dict[str, list[dict]]:
    """Returns, for each parameter (N or w) that the rows vary, the rows of its sweep."""
    sweeps = {along: sweep(rows, along) for along in _AXES}
    return {along: rows for along, rows in sweeps.items() if rows}


def draw(rows: list[dict], path: Path) -> bool:
    """Draws time and memory, with a row of panels for each parameter (N or w) that the rows vary. Returns False if they vary
    neither."""
    sweeps = _sweeps(rows)
    if not sweeps:
        return False
    figure, panels = plt.subplots(
        len(sweeps), 2, figsize=(9, 3.4 * len(sweeps)), layout="constrained", squeeze=False
    )
    for (along, swept_rows), (left, right) in zip(sweeps.items(), panels, strict=True):
        draw_sweep(left, swept_rows, along, seconds)
        draw_sweep(right, swept_rows, along, memory)
        if left.lines:
            left.legend(fontsize=7)
    save(figure, path)
    return True


def draw_panels(rows: list[dict], folder: Path, name: str) -> None:
    """Writes each panel of `draw` to its own file, which is legible on a phone:
    <name>-<seqlen or window>-<seconds or memory>.svg."""
    for along, swept_rows in _sweeps(rows).items():
        for value in (seconds, memory):
            if any(value(row) is not None for row in swept_rows):
                figure, axes = plt.subplots(figsize=PANEL, layout="constrained")
                draw_sweep(axes, swept_rows, along, value)
                figure.legend(loc="outside lower center", fontsize=9)  # no room over the lines
                save(figure, folder / f"{name}-{along}-{value.__name__}.svg")


def save(figure: plt.Figure, path: Path) -> None:
    """Writes the figure reproducibly: the same numbers give the same file."""
    plt.rcParams["svg.hashsalt"] = "flash_dmattn"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
