"""The one driver of the benchmarks: measures, shows and compares records, and writes the tables of the documents.

python benchmarks/bench.py run --case dense dynamic_mask --json mine.json
python benchmarks/bench.py show mine.json --plot mine.svg
python benchmarks/bench.py compare BEFORE.json AFTER.json
python benchmarks/bench.py exchange --window 1024
python benchmarks/bench.py report
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from harness import cases, machine, record, sides
from harness.options import INTERRUPTED, Different, commit, expect_commit, expect_output, positive

# Options of `run` that not every case reads.
_CASE_OPTIONS = ("length", "window", "dtype", "repeats", "programs", "threads")


def run(options: argparse.Namespace) -> int:
    """Measures the cases. Prints each row as soon as it is measured and writes it to the record.

    Returns the exit status, 1 if a side or a program failed.
    """
    _check_cases(options)
    _check_sides(options)
    _check_ignored_options(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    new_record = machine.origin(options.device, options.commit) | {"rows": []}
    path = options.json
    if options.record:
        path = machine.record_path(options.record, new_record["machine"])
    if path:
        expect_commit(new_record, options.fail)
        expect_output(path, "--record" if options.record else "--json", options.fail)
    print(f"{new_record['machine']['name']}, torch {torch.__version__}", flush=True)
    status = 0
    try:
        for row in _measured(options):
            if isinstance(row, record.Failure):
                is_declined = sides.declines(row.error)
                print(record.declined(*row) if is_declined else row, flush=True)
                status = status if is_declined else 1
                continue
            print(record.format_row(row), flush=True)
            new_record["rows"] = record.with_row(new_record["rows"], row)
            if path:
                record.write(path, new_record)
    except KeyboardInterrupt:
        print(f"\nInterrupted after {len(new_record['rows'])} rows.", file=sys.stderr)
        return INTERRUPTED
    if not new_record["rows"]:
        print(f"Nothing was measured: no side ran {' '.join(options.case)}.", file=sys.stderr)
        return 1
    if path:
        print(f"wrote {path}")
    return status


def _check_cases(options: argparse.Namespace) -> None:
    """Ends the program for a case that cannot be measured here."""
    for name in options.case:
        try:
            cases.module_of(name).expect_case_runs(name, options)
        except (ImportError, sides.Declined) as reason:
            options.fail(f"--case: got {name}, which does not run here: {reason}")


def _check_sides(options: argparse.Namespace) -> None:
    """Ends the program for a side that cannot run here, or for a case that no given side measures."""
    for side in set(options.side).intersection(sides.NAMES):
        try:
            sides.expect_runs(side, options.device)
        except sides.Declined as reason:
            options.fail(f"--side: got {side}, which {reason}")
    sides_of = {
        name: cases.module_of(name).side_names(name, options.device) for name in options.case
    }
    got = ", ".join(options.side)
    if options.side and not any(sides_of.values()):
        options.fail(f"--side: got {got}, expected none for {' '.join(options.case)}")
    for name, known in sides_of.items():
        if options.side and known and not set(options.side).intersection(known):
            options.fail(
                f"--side: got {got}, expected one of {', '.join(known)} for the case {name}"
            )


def _check_ignored_options(options: argparse.Namespace) -> None:
    """Ends the program for an option that no case reads."""
    if options.threads and options.device != "cpu":
        options.fail(
            f"--threads: got {options.threads} with --device {options.device}, expected none"
        )
    for option in options.given:
        if not any(option in cases.options_of(name) for name in options.case):
            options.fail(f"--{option}: got one, expected none for {' '.join(options.case)}")


def _measured(options: argparse.Namespace) -> Iterator[dict | record.Failure]:
    for name in options.case:
        try:
            yield from cases.module_of(name).measure_rows(name, options)
        except (sides.Declined, MemoryError, RuntimeError) as reason:
            if not sides.declines(reason):
                raise
            print(record.declined(name, "", "", reason), flush=True)


def show(options: argparse.Namespace) -> int:
    rows = [row for one_record in options.records for row in one_record["rows"]]
    print("\n".join(map(record.format_row, rows)))
    if options.plot is None:
        return 0
    try:
        from harness import pictures  # only pictures needs matplotlib

        pictures.expect_format(options.plot)
    except (ImportError, ValueError) as error:
        options.fail(f"--plot: {error}")
    if not pictures.draw(rows, options.plot):
        options.fail("--plot: got no attention at several lengths or windows, expected some")
    return 0


def _call(module: str) -> Callable[[argparse.Namespace], int]:
    """Returns a function that imports a harness module and calls its `main`."""
    return lambda options: importlib.import_module(f"harness.{module}").main(options)


def _case(text: str) -> str:
    """Returns the name of a case. Older records have commands with the former names `dma` and `pairs`."""
    return {"dma": "dynamic_mask", "pairs": "dense_masks"}.get(text, text)


def _record(text: str) -> dict:
    try:
        return record.read(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:  # torch has no CUDA, or the machine no GPU
        raise argparse.ArgumentTypeError(f"got {text}: {str(error).splitlines()[0]}") from None
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("run", help="measure on this machine")
    one.set_defaults(call=run, fail=one.error)
    add = one.add_argument
    add("--case", nargs="+", action=Different, type=_case, choices=cases.NAMES, default=["dense", "dynamic_mask", "scaling"], metavar="CASE",
        help=f"any of {', '.join(cases.NAMES)}; default: dense dynamic_mask scaling")  # fmt: skip
    add("--side", nargs="+", action=Different, choices=cases.SIDES, default=[], metavar="SIDE",
        help=f"any of {', '.join(cases.SIDES)}; default: ours, and the rivals of torch that run here without compiling")  # fmt: skip
    add("--dtype", nargs="+", action=Different, choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16, on the CPU float32 too")  # fmt: skip
    add("--device", type=_device, choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--length", nargs="+", action=Different, type=positive, metavar="N",
        help="instead of the case's lengths")  # fmt: skip
    add("--window", nargs="+", action=Different, type=positive, metavar="W",
        help="instead of the case's windows")  # fmt: skip
    add("--repeats", type=positive, metavar="N",
        help="rounds of attention, of which the median counts (the selection alone has twice as many), and replays of a decode step; "
        "default: 5")  # fmt: skip
    add("--threads", type=positive, help="of the CPU; default: torch's")
    add("--programs", type=Path, metavar="FOLDER",
        help="of the programs that the case `kernels` runs; default: build/bench/benchmarks, on a GPU build/cuda/benchmarks")  # fmt: skip
    add("--commit", type=commit, help="of the sources; default: Git's")
    output = one.add_mutually_exclusive_group()
    output.add_argument("--json", type=Path, metavar="FILE", help="write a record there")
    output.add_argument("--record", metavar="NAME",
        help="write the record benchmarks/records/<machine>/<date>-NAME.json")  # fmt: skip

    one = commands.add_parser("show", help="print records, and draw them")
    one.set_defaults(call=show, fail=one.error)
    one.add_argument("records", nargs="+", type=_record, metavar="RECORD")
    one.add_argument("--plot", type=Path, metavar="FILE", help="time and memory against N and w")

    one = commands.add_parser("compare", help="ratios of sides, of records, or of two builds")
    one.set_defaults(call=_call("compare"), fail=one.error)
    one.add_argument("sources", nargs="+", metavar="SOURCE",
        help="a record: its sides; two records or two builds: before and after. A build is a folder with three things: "
        "python/ of a checkout, _C.so, which is in bindings/torch of its build folder, and a file named commit that holds its commit. Both "
        "builds are measured alternately, in random order")  # fmt: skip
    one.add_argument("--rounds", type=positive, default=5, help="of two builds")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the record of two builds")
    one.add_argument("--run", nargs=argparse.REMAINDER, metavar="OPTION", help="of `run`, for two builds",
        default=["--case", "dense", "dynamic_mask", "groups", "sliding", "dense_masks", "--side", "cuda"])  # fmt: skip

    one = commands.add_parser("evidence", help="a record of the quality of learned scores")
    one.set_defaults(call=_call("evidence"), fail=one.error)
    one.add_argument("folder", type=Path, metavar="FOLDER", help="of `make evidence`")
    one.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="write the record there"
    )
    one.add_argument("--commit", type=commit, help="of the sources; default: Git's")

    one = commands.add_parser("exchange", help="the bytes of context parallelism, on paper")
    one.set_defaults(call=_call("exchange_table"), fail=one.error)
    for name, size in (("heads", 16), ("heads-kv", 8), ("head-dim", 128), ("window", 2048)):
        one.add_argument(f"--{name}", type=positive, default=size, help=f"default: {size}")

    one = commands.add_parser("report", help="write the documents' tables and pictures")
    one.set_defaults(call=_call("report"), fail=one.error)

    options = parser.parse_args(arguments)
    if options.command == "run":
        options.given = [name for name in _CASE_OPTIONS if getattr(options, name)]
        options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = options.device == "cuda"
        options.dtype = options.dtype or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
        options.repeats = options.repeats or 5
        build = Path("build/cuda" if on_gpu else "build/bench")
        options.programs = options.programs or build / "benchmarks"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return options.call(options)
    except OSError as error:  # an output that cannot be written
        options.fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
