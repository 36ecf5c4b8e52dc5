"""The options of the check."""

import argparse
from pathlib import Path

BACKENDS = ("cuda", "triton", "flex", "cpu")
DTYPES = ("f32", "bf16", "f16")
EXIT_STATUS = "Exit status: 0 all passed, 1 something failed, 2 the named backend cannot run here, 130 interrupted."


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the check's options to its parser."""
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
