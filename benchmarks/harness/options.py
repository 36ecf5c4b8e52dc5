"""Checks the options of the benchmarks. A wrong one ends the program before the first measurement, with a line that names the value
it got and what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from . import record

INTERRUPTED = 130  # the exit status


def positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def commit(text: str) -> str:
    if not record.is_commit(text):
        raise argparse.ArgumentTypeError(
            f"got {text}, expected a commit's hash of 7 digits or more"
        )
    return text


class Different(argparse.Action):
    """An option with several values. Repeated ones are dropped, so that no configuration is measured twice."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def expect_output(path: Path, option: str, fail: Callable[[str], None]) -> None:
    """Calls `fail` if the record cannot be written to this path."""
    try:
        record.expect_writable(path)
    except OSError as error:
        fail(f"{option}: {error}")


def expect_commit(origin: dict, fail: Callable[[str], None]) -> None:
    """Calls `fail` if the commit of the sources is unknown."""
    if not origin["commit"]:
        fail("--commit: got none outside a Git checkout, expected that of the sources")
