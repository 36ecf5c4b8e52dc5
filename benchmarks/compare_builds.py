"""The same cases of the CUDA backend on two builds, measured in turns on one GPU.

    python benchmarks/compare_builds.py BEFORE AFTER [--rounds N] [--case CASE...] [--json FILE]

BEFORE and AFTER are folders with python/, _C.so and commit, as benchmarks/gpu_session.sh packs them. A round measures both in
processes of their own, in random order; the median of the rounds counts.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = ("forward_ms", "backward_ms")


def measure(build: Path, cases: list[str]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        # In `folder`, so that no package but the build's is on the path.
        done = subprocess.run(
            [sys.executable, "-m", "flash_dmattn", "bench", "--backend", "cuda", "--against", "none",
             "--case", *cases, "--json", record],
            cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(build / "python"), "FLASH_DMATTN_LIBRARY": str(build / "_C.so")},
        )  # fmt: skip
        if done.returncode != 0 or not record.exists():
            raise SystemExit(f"{build.name}: {done.stdout}{done.stderr}")
        return json.loads(record.read_text())["speed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs=2, type=Path, metavar="BUILD")
    parser.add_argument("--rounds", type=int, default=5)
    # `pairs`: dense_masks by the name that older builds have for it.
    parser.add_argument("--case", nargs="+", default=["dense", "dma", "groups", "sliding", "pairs"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before, after = (path.resolve() for path in options.builds)

    measured = {before: [], after: []}
    for _ in range(options.rounds):
        for build in random.sample([before, after], 2):
            measured[build].append(measure(build, options.case))
            print(f"{build.name}: {len(measured[build])} of {options.rounds}", flush=True)

    commits = [(build / "commit").read_text().strip() for build in (before, after)]
    print(
        f"\nms forward / backward at {commits[0]}, at {commits[1]}, and their ratio (> 1: slower)"
    )
    rows = []
    for of_before, of_after in zip(
        zip(*measured[before], strict=True), zip(*measured[after], strict=True), strict=True
    ):
        sizes = [
            {k: v for k, v in row.items() if isinstance(v, int)}
            for row in (of_before[0], of_after[0])
        ]
        if sizes[0] != sizes[1]:
            raise SystemExit(
                f"the builds have different cases: {of_before[0]['case']}, {of_after[0]['case']}"
            )
        row = {"case": of_after[0]["case"], "dtype": of_after[0]["dtype"]}
        for way in WAYS:
            times = [[r[way] for r in side] for side in (of_before, of_after)]
            row[way] = {"before": times[0], "after": times[1],
                        "ratio": round(statistics.median(times[1]) / statistics.median(times[0]), 4)}  # fmt: skip
        rows.append(row)
        columns = ["{:>9.3f} /{:>8.3f}".format(*(statistics.median(row[way][side]) for way in WAYS))
                   for side in ("before", "after")]  # fmt: skip
        ratios = " / ".join(f"{row[way]['ratio']:.3f}" for way in WAYS)
        print(f"{row['case']:<46}{columns[0]} {columns[1]}    {ratios}")
    if options.json:
        options.json.write_text(json.dumps({"commits": commits, "rows": rows}, indent=1) + "\n")


main()
