"""Draws what recall and distil have written, a line through the mean of the seeds and their spread.

python -m learned_scores.pictures FOLDER    (with recall*.json and seed*/results.json; gets recall.svg, lengths.svg, budgets.svg,
                                            recipes.svg and training.svg)
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
    "dense": "all keys", "scores": "learned scores", "soft_first": "learned scores, all keys first", "window": "window",
    "doge": "exp(A softplus(z))", "streaming": "sinks and recent keys", "key_norm": "key norm", "random": "random",
    "learned": "learned scores", "without_budget": "without the budget's term",
    "without_noise": "gates not drawn",
    "hard_from_the_first": "hard from the first step", "soft_to_the_last": "soft to the last step",
}  # fmt: skip
METHODS = ("dense", "learned", "streaming", "key_norm", "random")  # the lines of budgets.svg
SHARES = ("right answers", "right digits")
Curve = dict[int, list[float]]  # {budget or length: the value of each seed}


def recall_rows(folder: Path) -> tuple[int, list[dict]]:
    """Returns the last training length, and the rows of all recall*.json."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("recall*.json"))]
    length = records[0]["settings"]["lengths"][-1] if records else 0
    return length, [row for record in records for row in record["rows"]]


def name_of(row: dict) -> str:
    return NAMES[row["kind"]] + (", filler of the same words" if row["same_words"] else "")


def recall_by_budget(length: int, rows: list[dict]) -> dict[str, Curve]:
    curves = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if str(length) in row["recall"]:  # otherwise the row has only other lengths
            curves[name_of(row)][row["budget"]].append(row["recall"][str(length)])
    return curves


def recall_by_length(length: int, rows: list[dict]) -> dict[str, Curve]:
    """Returns the curves of all keys and of each budget of learned scores, without those that have not learned the task at `length`."""
    curves = defaultdict(lambda: defaultdict(list))
    for row in rows:
        is_scored = row["kind"] == "scores"
        if row["same_words"] or not (is_scored or row["kind"] == "dense"):
            continue
        name = f"{name_of(row)}, {row['budget']}" if is_scored else name_of(row)
        for tested, share in row["recall"].items():
            curves[name][int(tested)].append(share)
    return {name: curve for name, curve in curves.items() if min(curve.get(length, [0.0])) > 0.5}


def quality_curves(paths: list[Path]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Returns the curves of loss and of pass keys by budget, with the names in results.json."""
    loss, keys = (defaultdict(lambda: defaultdict(list)) for _ in range(2))
    for path in paths:
        for method, qualities in json.loads(path.read_text())["quality"].items():
            for budget, quality in qualities.items():
                loss[method][int(budget)].append(quality["loss"])
                keys[method][int(budget)].append(quality["pass_keys"])
    return loss, keys


def training_curves(paths: list[Path]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Returns the curves of loss and of the mean gate of old keys by training step, for each recipe."""
    loss, kept = (defaultdict(lambda: defaultdict(list)) for _ in range(2))
    for path in paths:
        for row in json.loads(path.read_text())["log"]:
            if "loss" in row:  # not the summary at the end
                loss[NAMES[row["recipe"]]][row["step"]].append(row["own_loss"])
                if "kept_share" in row:  # in the soft phase
                    kept[NAMES[row["recipe"]]][row["step"]].append(row["kept_share"])
    return loss, kept


def draw(
    axes: plt.Axes, curves: dict[str, Curve], label: str, xlabel: str = "keys that a query sees"
) -> None:
    for name, curve in curves.items():
        budgets = sorted(curve)
        means = [sum(curve[b]) / len(curve[b]) for b in budgets]
        if len(curve) == 1 and name == NAMES["dense"]:
            axes.axhline(means[-1], color="gray", linestyle="--", label=name)
            continue
        lowest, highest = ([f(curve[b]) for b in budgets] for f in (min, max))
        if len(budgets) == 1:
            spread = [[means[0] - lowest[0]], [highest[0] - means[0]]]
            axes.errorbar(budgets, means, spread, fmt="x", capsize=3, label=name)
            continue
        line = axes.plot(budgets, means, marker="o", label=name)[0]
        axes.fill_between(budgets, lowest, highest, color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=xlabel, ylabel=label)
    if label in SHARES:
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    plt.rcParams["svg.hashsalt"] = "flash_dmattn"  # the same numbers give the same file
    length, rows = recall_rows(folder)
    if rows:
        title = f"Associative recall in {length} tokens"
        draw_recall(folder / "recall.svg", recall_by_budget(length, rows), title)
        title = f"Trained to {length} tokens"
        draw_recall(folder / "lengths.svg", recall_by_length(length, rows), title, "tokens")
    paths = sorted(folder.glob("seed*/results.json"))
    if not rows and not paths:
        parser.error(f"folder: got {folder}, expected one with recall*.json or seed*/results.json")
    if paths:
        loss, keys = quality_curves(paths)
        recipes = ("dense", "learned", *(name for name in loss if name not in METHODS))
        draw_quality(folder / "budgets.svg", loss, keys, METHODS)
        draw_quality(folder / "recipes.svg", loss, keys, recipes)
        draw_training(folder / "training.svg", *training_curves(paths))


def draw_recall(path: Path, curves: dict[str, Curve], title: str, *xlabel: str) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    draw(axes, curves, "right answers", *xlabel)
    axes.set_title(title, fontsize=11)
    if curves:
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_quality(
    path: Path, loss: dict[str, Curve], keys: dict[str, Curve], methods: tuple[str, ...]
) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    labels = ("loss of a byte, nats", "right digits")
    for axes, curves, label in zip(panels, (loss, keys), labels, strict=True):
        draw(axes, {NAMES[name]: curves[name] for name in methods if name in curves}, label)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_training(path: Path, loss: dict[str, Curve], kept: dict[str, Curve]) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    labels = ("loss, nats", "mean gate of old keys")
    for axes, curves, label in zip(panels, (loss, kept), labels, strict=True):
        for name, curve in curves.items():
            steps = sorted(curve)
            seeds = [curve[step] for step in steps]
            line = axes.plot(steps, [sum(values) / len(values) for values in seeds], label=name)[0]
            lowest, highest = ([f(values) for values in seeds] for f in (min, max))
            axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
