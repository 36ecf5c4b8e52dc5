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

from harness import case, cases, machine, record, sides, tables

_CASES = (*case.NAMES, *(name for names, _ in cases.MODULES.values() for name in names))
_SIDES = dict.fromkeys((*sides.NAMES, *(s for _, names in cases.MODULES.values() for s in names)))


def run(options: argparse.Namespace) -> int:
    """Measures the cases. Prints each row and adds it to the record as soon as it is measured. Rows of other cases that the
    record has for this machine and commit stay.

    Returns 1 if there is no row, or if an error of ours prevented one.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, earlier, status = [], [], 0
    head = machine.head_of_record(options.device, options.commit)
    if options.json and options.json.exists():
        before = record.read(options.json)
        is_same = all(before[field] == head[field] for field in ("machine", "commit"))
        earlier = before["rows"] if is_same else []
    for row in _rows(options):
        if isinstance(row, cases.Failure):
            print(row, flush=True)
            is_rival = row.side in sides.RIVALS or row.side.startswith(("eager", "sdpa"))
            status = status if sides.is_reason(row.error, is_rival) else 1
            continue
        rates = [f"{way} {x:.4g} TFLOP/s" for way, x in case.useful_tflops(row).items()]
        print(", ".join([record.format_row(row), *rates]), flush=True)
        rows.append(row)
        kept = [one for one in earlier if one["case"] not in {row["case"] for row in rows}]
        if options.json:
            versions = {"versions": machine.versions()}  # of rivals that are imported by now
            record.write(options.json, head | versions | {"rows": kept + rows})
    is_first_rank = not (torch.distributed.is_initialized() and torch.distributed.get_rank())
    return status if rows or not is_first_rank else 1


def _rows(options: argparse.Namespace) -> Iterator[dict | cases.Failure]:
    modules = {"attention": case.NAMES} | {name: names for name, (names, _) in cases.MODULES.items()}  # fmt: skip
    for module, names in modules.items():
        if chosen := [name for name in options.case if name in names]:
            yield from importlib.import_module(f"harness.cases.{module}").measure_rows(
                chosen, options
            )


def compare(options: argparse.Namespace) -> int:
    """Prints the ratio after / before of each number that both records have."""
    before, after = (
        {(row["case"], row["side"], row["dtype"]): row for row in one["rows"]}
        for one in options.records
    )
    for one in options.records:
        print(f"{one['machine']}, commit {one['commit']}, {one['date']}")
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        ratios = [
            f"{name} {old[field][name]:.4g} -> {x:.4g} ({x / old[field][name]:.3f})"
            for field in ("ms", "other")
            for name, x in new[field].items()
            if name != "rounds" and old[field].get(name)
        ]
        print(f"{' '.join(key)}: {', '.join(ratios)}")
    return 0


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def _record(text: str) -> dict:
    try:
        return record.read(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure on this machine")
    one.set_defaults(call=run)
    add = one.add_argument
    add("--case", nargs="+", choices=_CASES, default=["dense", "dynamic_mask"], metavar="CASE",
        help=f"any of {', '.join(_CASES)}; default: dense dynamic_mask")  # fmt: skip
    add("--side", nargs="+", choices=_SIDES, default=[], metavar="SIDE",
        help=f"any of {', '.join(_SIDES)}; default: ours, and the rivals of torch that need no compilation")  # fmt: skip
    add("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16, on the CPU float32 too")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--length", nargs="+", type=_positive, metavar="N", help="instead of the case's lengths")
    add("--window", nargs="+", type=_positive, metavar="W", help="instead of the case's windows")
    add("--repeats", type=_positive, default=5, metavar="N", help="rounds, of which the median counts; default: 5")  # fmt: skip
    add("--threads", type=_positive, help="of the CPU; default: torch's")
    add("--commit", help="of the sources; default: that of Git")
    add("--json", type=Path, metavar="FILE", help="write a record there")
    one = commands.add_parser("compare", help="ratios of two records")
    one.set_defaults(call=compare)
    one.add_argument("records", nargs=2, type=_record, metavar="RECORD")
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
