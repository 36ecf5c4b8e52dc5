"""Draws what recall and distil have written, a line through the mean of the seeds and their spread.

python -m learned_scores.pictures FOLDER    (with recall.json and seed*/results.json; gets recall.svg and budgets.svg)
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NAMES = {
    "dense": "all keys", "scores": "learned scores", "learned": "learned scores", "window": "window",
    "streaming": "sinks and recent keys", "key_norm": "key norm", "random": "random",
}  # fmt: skip
Curve = dict[int, list[float]]  # a value of each seed, by budget


def recall_curves(path: Path) -> tuple[int, dict[str, Curve]]:
    """The length, and recall at it by budget."""
    found = json.loads(path.read_text())
    length, curves = found["settings"]["length"], defaultdict(lambda: defaultdict(list))
    for row in found["rows"]:
        name = NAMES[row["kind"]] + (", filler of the same words" if row["same_words"] else "")
        curves[name][row["budget"]].append(row["recall"][str(length)])
    return length, curves


def quality_curves(paths: list[Path]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Loss and pass keys by budget."""
    loss, keys = (defaultdict(lambda: defaultdict(list)) for _ in range(2))
    for path in paths:
        for method, found in json.loads(path.read_text())["quality"].items():
            for budget, quality in found.items():
                loss[NAMES[method]][int(budget)].append(quality["loss"])
                keys[NAMES[method]][int(budget)].append(quality["pass_keys"])
    return loss, keys


def draw(axes: plt.Axes, curves: dict[str, Curve], label: str) -> None:
    for name, curve in curves.items():
        budgets = sorted(curve)
        means = [sum(curve[b]) / len(curve[b]) for b in budgets]
        if name == NAMES["dense"]:
            axes.axhline(means[-1], color="gray", linestyle="--", label=name)
            continue
        line = axes.plot(budgets, means, marker="o" if len(budgets) > 1 else "x", label=name)[0]
        ends = [[f(curve[b]) for b in budgets] for f in (min, max)]
        axes.fill_between(budgets, *ends, color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="keys that a query sees", ylabel=label)
    axes.grid(alpha=0.3)


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    plt.rcParams["svg.hashsalt"] = "flash_dmattn"  # the same numbers give the same file
    if (folder / "recall.json").exists():
        length, curves = recall_curves(folder / "recall.json")
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        draw(axes, curves, "right answers")
        axes.set_title(f"Associative recall in {length} tokens", fontsize=11)
        axes.legend(frameon=False, fontsize=8)
        save(figure, folder / "recall.svg")
    paths = sorted(folder.glob("seed*/results.json"))
    if paths:
        figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
        for axes, curves, label in zip(
            panels, quality_curves(paths), ("loss of a byte, nats", "right digits"), strict=True
        ):
            draw(axes, curves, label)
        panels[0].legend(frameon=False, fontsize=8)
        save(figure, folder / "budgets.svg")


if __name__ == "__main__":
    main()
