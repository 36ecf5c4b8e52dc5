"""The driver of the benchmarks: measures, compares records, and writes the tables of the documents.

python benchmarks/bench.py run --case dense dynamic_mask --json mine.json
torchrun --nproc_per_node 2 benchmarks/bench.py run --case context_parallel --json mine.json
python benchmarks/bench.py compare before.json after.json
python benchmarks/bench.py tables
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from harness import cases, machine, record, sides, tables
from harness.case import useful_tflops

CASES = [name for names, _ in cases.MODULES.values() for name in names]
SIDES = list(dict.fromkeys(side for _, names in cases.MODULES.values() for side in names))


def run(options: argparse.Namespace) -> int:
    """Measures the cases. Prints each row and adds it to the record as soon as it is measured. Rows of other cases that the
    record has for this machine and commit stay.

    Returns 1 if there is no row, or if an error of ours prevented one.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    status, rows, earlier = 0, [], []
    mine = machine.new_record(options.device, options.commit)
    if options.json and options.json.exists():
        before = record.read(options.json)
        if (before.machine, before.commit) == (mine.machine, mine.commit):
            earlier = before.rows
    for row in _rows(options):
        if isinstance(row, record.Failure):
            print(row, flush=True)
            status = status if sides.is_reason(row.side, row.error) else 1
            continue
        rates = [f"{way} {x:.4g} TFLOP/s" for way, x in useful_tflops(row).items()]
        print(row, *rates, sep=", ", flush=True)
        rows.append(row)
        if options.json:
            measured = {row.case for row in rows}
            mine.rows = [one for one in earlier if one.case not in measured] + rows
            mine.versions = machine.versions()  # of rivals that are imported by now
            record.write(options.json, mine)
    is_first_rank = not (torch.distributed.is_initialized() and torch.distributed.get_rank())
    return status if rows or not is_first_rank else 1


def _rows(options: argparse.Namespace) -> Iterator[record.Row | record.Failure]:
    for module, (names, _) in cases.MODULES.items():
        if chosen := [name for name in options.case if name in names]:
            measure_rows = importlib.import_module(f"harness.cases.{module}").measure_rows
            yield from measure_rows(chosen, options)


def compare(options: argparse.Namespace) -> int:
    """Prints the ratio after / before of each number that both records have."""
    records = [record.read(path) for path in options.records]
    for one in records:
        print(f"{one.machine}, commit {one.commit}, {one.date}")
    before, after = ({(row.case, row.side, row.dtype): row for row in one.rows} for one in records)
    for key, new in after.items():
        if (old := before.get(key)) is None:
            continue
        ratios = [
            f"{name} {was[name]:.4g} -> {x:.4g} ({x / was[name]:.3f})"
            for was, now in ((old.ms, new.ms), (old.other, new.other))
            for name, x in now.items()
            if name != "rounds" and was.get(name)
        ]
        print(f"{' '.join(key)}: {', '.join(ratios)}")
    return 0


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure on this machine")
    one.set_defaults(call=run)
    add = one.add_argument
    add("--case", nargs="+", choices=CASES, default=["dense", "dynamic_mask"], metavar="CASE",
        help=f"any of {', '.join(CASES)}; default: dense dynamic_mask")  # fmt: skip
    add("--side", nargs="+", choices=SIDES, default=[], metavar="SIDE",
        help=f"any of {', '.join(SIDES)}; default: ours, and the rivals of torch that need no compilation")  # fmt: skip
    add("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16, on the CPU float32 too")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--length", nargs="+", type=positive, metavar="N", help="instead of the case's lengths")
    add("--window", nargs="+", type=positive, metavar="W", help="instead of the case's windows")
    add("--repeats", type=positive, default=5, metavar="N", help="rounds, of which the median counts; default: 5")  # fmt: skip
    add("--threads", type=positive, help="of the CPU; default: torch's")
    add("--commit", help="of the sources; default: that of Git")
    add("--json", type=Path, metavar="FILE", help="write a record there")
    one = commands.add_parser("compare", help="ratios of two records")
    one.set_defaults(call=compare)
    one.add_argument("records", nargs=2, type=Path, metavar="RECORD")
    one = commands.add_parser("tables", help="write the tables of the documents from the records")
    one.set_defaults(call=tables.main)
    options = parser.parse_args(arguments)
    if options.command == "run":
        options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = options.device == "cuda"
        options.dtype = options.dtype or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return options.call(options)


if __name__ == "__main__":
    sys.exit(main())
