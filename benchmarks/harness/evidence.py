"""Writes a record of the quality of learned scores from the results of examples/learned_scores in a folder (`make evidence`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import transformers  # noqa: F401 - for its version

from . import machine, record
from .options import expect_commit

_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # the dtype of a training, by device
_NOTE = (
    "distil: a method, or a recipe of training, by the keys that a query sees; recall: a score, and the keys that a query sees. "
    "Values are of held-out texts"
)


def rows(folder: Path) -> Iterator[dict]:
    """Yields a row per method and budget of distil (results.json), and a row per training of recall (recall*.json)."""
    for results in _read(folder, "results.json", ("settings", "quality")):
        settings = results["settings"]
        unit = "nats/byte" if settings["model"] == "None" else "nats/token"
        for method, budgets in results["quality"].items():
            for budget, quality in budgets.items():
                case = f"distil seed {settings['seed']} keys {budget}"
                values = {
                    "loss": [quality["loss"], unit],
                    "right digits": [quality["pass_keys"], "share"],
                }
                yield record.row(case, method, _DTYPES[settings["device"]], values=values)
    for results in _read(folder, "recall*.json", ("settings", "rows")):
        settings = results["settings"]
        lengths = ", ".join(f"{length:,}" for length in settings["lengths"])
        task = f"recall {settings['pairs']} pairs of {2 * settings['words']:,} words in {lengths} tokens"
        for run in results["rows"]:
            case = f"{task}{', filler of the same words' if run['same_words'] else ''} seed {run['seed']}"
            values = {f"recall {n}": [share, "share"] for n, share in run["recall"].items()}
            if "recall_with_all_keys" in run:
                values["recall with all keys"] = [run["recall_with_all_keys"], "share"]
            side = f"{run['kind']} {run['budget']}"
            yield record.row(case, side, _DTYPES[settings["device"]], values=values)


def _read(folder: Path, name: str, fields: tuple[str, ...]) -> Iterator[dict]:
    """Yields the contents of all files called `name`. Raises ValueError for a file that is truncated or that another program wrote."""
    for path in sorted(folder.glob(f"**/{name}")):
        try:
            results = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(results, dict) or not results.keys() >= set(fields):
            raise ValueError(f"{path}: got no {' and '.join(fields)}, expected them")
        yield results


def main(options: argparse.Namespace) -> int:
    new_rows: list[dict] = []
    try:
        for row in rows(options.folder):
            new_rows = record.with_row(new_rows, row)
    except ValueError as error:
        options.fail(f"FOLDER: {error}")
    if not new_rows:
        options.fail(f"FOLDER: got no results.json and no recall*.json in {options.folder}")
    device = "cuda" if new_rows[0]["dtype"] == _DTYPES["cuda"] else "cpu"
    origin = machine.origin(device, options.commit)
    expect_commit(origin, options.fail)
    record.write(options.json, origin | {"note": _NOTE, "rows": new_rows})
    print(f"wrote {options.json}")
    return 0
