"""The command `python -m flash_dmattn check`: its options."""

import argparse
import sys
from pathlib import Path

BACKENDS = ("cuda", "triton", "flex", "cpu")
DTYPES = ("f32", "bf16", "f16")
EXIT_STATUS = "Exit status: 0 all passed, 1 something failed, 2 the named backend cannot run here, 130 interrupted."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=(*BACKENDS, "all"), default="all", help="all: what runs here")
    add("--dtype", nargs="+", choices=DTYPES, help="default: all that the backend has")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="full", action="store_false", help="a sixth of the table (the default)"
    )
    size.add_argument("--full", action="store_true", help="every case, at full size")
    add("--json", type=Path, metavar="FILE", help="write all results there, for a report")
    parser.set_defaults(full=False)


def run(options: argparse.Namespace, program: str) -> int:
    """Runs the check, and returns the exit status. program: the name of the command line, for errors."""
    from ..check.run import check  # slow to import

    try:
        return check(options)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that was removed
        print(f"{program}: {error}", file=sys.stderr)
        return 1
