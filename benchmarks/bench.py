"""`python -m flash_dmattn bench`, with a record in this folder.

python benchmarks/bench.py --record cpu          and benchmarks/records/<machine>/<date>-cpu.json
python benchmarks/bench.py --help                every other option
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from flash_dmattn.benchmark import options
from flash_dmattn.benchmark.record import machine
from flash_dmattn.benchmark.run import bench, device_of

RECORDS = Path(__file__).parent / "records"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RECORDS.parent, check=False)
    return done.stdout.strip() or "unknown"


def place(name: str, about: dict) -> Path:
    """<machine>/<date>-<name>.json"""
    machine_name = re.sub(r"\(\w+\)|\b(NVIDIA|CPU|Processor)\b|@.*", "", about["name"])
    words = [" ".join(machine_name.split()), about.get("isa", "")]
    slug = "-".join(word.strip().lower().replace(" ", "-") for word in words if word)
    return RECORDS / slug / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", metavar="NAME", help="write a record under this name")
    options.add_to(parser)
    parser.set_defaults(commit=commit())
    chosen = parser.parse_args()
    if chosen.record:
        chosen.json = place(chosen.record, machine(device_of(chosen)))
    return bench(chosen)


if __name__ == "__main__":
    sys.exit(main())
