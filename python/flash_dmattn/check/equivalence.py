"""The check of some results alone, under the names and options of benchmarks/*_equivalence.py."""

import argparse
import sys
from collections.abc import Sequence

from . import options
from .run import check


def main(description: str, tensors: Sequence[str], arguments: list[str] | None = None) -> None:
    """Checks `tensors` on the table of cases, and exits as `python -m flash_dmattn check` does."""
    parser = argparse.ArgumentParser(description=description, epilog=options.EXIT_STATUS)
    backends = ("all", *options.BACKENDS)
    parser.add_argument("--test-type", dest="backend", choices=backends, default="all")
    options.add_common(parser)
    parser.set_defaults(tensors=tuple(tensors))
    sys.exit(check(parser.parse_args(arguments)))
