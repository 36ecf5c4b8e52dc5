"""MkDocs hook: draws the pictures of the site from the records of the benchmarks.

A page names a picture by `<!-- picture NAME: what it shows -->`, which GitHub does not show. `python tools/site/pictures.py`
draws the picture of README, which is in the repository. Text stays text, so that a picture is small.
"""

from __future__ import annotations

import dataclasses
import io
import posixpath
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from harness.case import Case  # noqa: E402
from harness.record import Row, read  # noqa: E402

plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flash_dmattn"}

RECORDS = ROOT / "benchmarks" / "records"
_MARKER = re.compile(r"<!-- picture ([\w-]+): (.*?) -->")
_AXES = {"seqlen": "sequence length N", "window": "window w"}
_VALUES = {"seconds": "seconds, forward + backward", "memory": "GB beyond q, k, v and bias"}
# {side: (label, colour)}
_SIDES = {
    "cuda": ("flash_dmattn, CUDA", "tab:blue"), "cpu": ("flash_dmattn, CPU", "tab:blue"),
    "triton": ("flash_dmattn, Triton", "tab:cyan"), "sdpa": ("torch SDPA, N×N mask", "tab:gray"),
    "flex": ("flex_attention", "tab:orange"),
}  # fmt: skip
_STYLES = {"bfloat16": ("s", "-"), "float32": ("o", "--")}


def sweep(record: str, along: str, kind: str = "per_query", fixed: int | None = None) -> dict:
    """Returns the rows of the record whose cases differ only in `along`, as {(side, dtype): {size: row}}. If there are several
    sets of cases, it takes the one with the most sizes.

    fixed: the window (or the length) of the cases.
    """
    groups: dict[tuple, dict] = {}
    for row in read(RECORDS / f"{record}.json").rows:
        case = Case.parse(row.case)
        if not case or case.kind != kind:
            continue
        other = case.window if along == "seqlen" else case.seqlen
        if fixed is None or fixed == (other or 0):
            points = groups.setdefault(dataclasses.replace(case, **{along: 0}), {})
            points.setdefault((row.side, row.dtype), {})[getattr(case, along)] = row
    return max(groups.values(), key=sizes_of, default={})


def newest(subject: str) -> str:
    """Returns the newest record of a subject that has several lengths."""
    paths = [path for path in RECORDS.glob(f"*/{subject}.json")]
    dates = {str(path.relative_to(RECORDS).with_suffix("")): read(path).date for path in paths}
    kind = "evicted" if subject == "evicted" else "per_query"
    return max(dates, key=lambda name: (sizes_of(sweep(name, "seqlen", kind)) > 1, dates[name]))


def sizes_of(rows: dict) -> int:
    return len({size for points in rows.values() for size in points})


def draw_sweep(axes: plt.Axes, rows: dict, along: str, value: str) -> None:
    """Draws a line for each side and dtype on logarithmic axes."""

    def number(row: Row) -> float:
        if value == "memory":
            return row.other["peak MB"] / 1e3
        return (row.ms["forward"] + row.ms["backward"]) / 1e3

    for (side, dtype), points in rows.items():
        label, colour = _SIDES[side]
        marker, style = _STYLES[dtype]
        line = sorted((size, number(row)) for size, row in points.items())
        axes.loglog(*zip(*line, strict=True), marker=marker, linestyle=style, markersize=4, color=colour, label=f"{label}, {dtype}")  # fmt: skip
    ticks = sorted({size for points in rows.values() for size in points})
    axes.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axes.xaxis.minorticks_off()
    axes.set(xlabel=_AXES[along], ylabel=_VALUES[value])
    one = Case.parse(next(iter(next(iter(rows.values())).values())).case)
    sizes = str(one).removeprefix(one.kind).split()
    title = " ".join(size for size in sizes if size[0] != {"seqlen": "N", "window": "w"}[along])
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)


def panel(record: str, along: str, value: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(4.2, 4.0), layout="constrained")
    draw_sweep(axes, sweep(record, along), along, value)
    figure.legend(loc="outside lower center", fontsize=9)  # no room over the lines
    return figure


def evicted() -> plt.Figure:
    """Draws time against length with eviction of old keys. The left panel keeps a share of them, the right a fixed number."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for one, window, kept in zip(axes, (0, 2048), ("1/8", "2048"), strict=True):
        draw_sweep(one, sweep(newest("evicted"), "seqlen", "evicted", window), "seqlen", "seconds")
        one.set_title(f"the last 512 keys, and {kept} of the older ones", fontsize=9)
    axes[0].legend(fontsize=7, loc="lower right")
    return figure


def draw_intervals(axes: plt.Axes) -> None:
    """Draws which keys each query sees, for 96 keys, w = 16 and scores with a few strong keys."""
    draw, n, w = random.Random(3), 96, 16
    scores = [draw.gauss(0, 1) + 3 * (draw.random() < 0.06) for _ in range(n)]
    seen = [[0.0] * n for _ in range(n)]
    for query in range(n):
        for key in sorted(range(query + 1), key=lambda j: (scores[j], j))[-w:]:
            seen[query][key] = 1.0
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title="16 best keys of every query:\none interval a key")


def intervals() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(4.2, 4.0), layout="constrained")
    draw_intervals(axes)
    return figure


def slots() -> plt.Figure:
    """Draws which tokens a cache of 5 slots and two key heads holds after each of 14 tokens."""
    draw, window, tokens = random.Random(5), 5, 14
    figure, panels = plt.subplots(1, 2, figsize=(4.7, 4.4), sharey=True, gridspec_kw={"wspace": 0}, layout="constrained")  # fmt: skip
    for head, axes in enumerate(panels):
        scores = [draw.random() for _ in range(tokens)]
        held: list[int] = []
        for token in range(tokens):
            if len(held) < window:
                held.append(token)
            else:
                victim = min(range(window), key=lambda slot: scores[held[slot]])
                if scores[token] >= scores[held[victim]]:
                    held[victim] = token
                else:
                    axes.text(window + 0.2, token + 0.5, f"{token} is worse", va="center", fontsize=8, color="tab:red")  # fmt: skip
            for slot, position in enumerate(held):
                new = {"edgecolor": "black", "zorder": 2} if position == token else {"edgecolor": "white"}  # fmt: skip
                colour = plt.cm.Blues(0.1 + 0.7 * scores[position])
                axes.add_patch(plt.Rectangle((slot, token), 1, 1, facecolor=colour, lw=1.5, **new))
                text = "white" if scores[position] > 0.6 else "black"
                axes.text(slot + 0.5, token + 0.5, position, color=text, ha="center", va="center", fontsize=8, zorder=3)  # fmt: skip
        axes.set(
            xlim=(0, window + 2.6), ylim=(tokens, 0), xlabel="slot", title=f"key head {head}",
            xticks=[s + 0.5 for s in range(window)], xticklabels=range(window),
            yticks=[t + 0.5 for t in range(tokens)], yticklabels=range(tokens),
        )  # fmt: skip
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_ylabel("token that arrives")
    return figure


def overview() -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_intervals(left)
    draw_sweep(right, sweep(CPU, "seqlen"), "seqlen", "seconds")
    right.legend(fontsize=7, loc="lower right")
    return figure


CPU = newest("cpu")
GPU = "h200/flex"
PICTURES: dict[str, Callable[[], plt.Figure]] = {
    "intervals": intervals, "slots": slots, "evicted": evicted,
    **{
        f"{name}-{along}-{value}": partial(panel, record, along, value)
        for name, record, along in (("cpu", CPU, "seqlen"), ("gpu", GPU, "seqlen"))
        for value in _VALUES if sizes_of(sweep(record, along)) > 1
    },
}  # fmt: skip
README = {"overview": overview}


def svg(draw: Callable[[], plt.Figure]) -> str:
    """Returns the picture as SVG. The same numbers give the same text."""
    figure, text = draw(), io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def on_files(files, config):
    """Adds every picture to the site."""
    from mkdocs.structure.files import File

    for name, draw in PICTURES.items():
        files.append(File.generated(config, f"images/{name}.svg", content=svg(draw)))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Replaces markers by pictures. A sweep without several sizes in its record has none."""
    folder = posixpath.relpath("images", posixpath.dirname(page.file.src_uri) or ".")

    def picture(match: re.Match) -> str:
        return f"![{match[2]}]({folder}/{match[1]}.svg)" if match[1] in PICTURES else ""

    return _MARKER.sub(picture, markdown)


if __name__ == "__main__":
    for picture, drawing in README.items():
        (ROOT / "docs" / "images" / f"{picture}.svg").write_text(svg(drawing))
