"""Options of the command line that are checked before any work; a bad one is one line and exit status 2."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NoReturn

PICTURES = (".pdf", ".png", ".svg")


class Parser(argparse.ArgumentParser):
    """Says the one line that matters, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """A number of things, which fits the integers of torch."""
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer, 1 or more")
    return int(text)


def seed(text: str) -> int:
    """What torch.manual_seed takes."""
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"got {text}, expected -2^63 to 2^64 - 1")
    return number


def output_file(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, which is a folder, expected a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text}, which cannot be written to")
    _expect_writable(path.parent, text)
    return path


def output_folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a folder")
    path = Path(text)
    _expect_writable(path, text)
    return path


def picture_file(text: str) -> Path:
    path = output_file(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"got {text}, expected a name in {', '.join(PICTURES)}")
    return path


def input_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"got {text}, expected a file that can be read")
    return path


def _expect_writable(folder: Path, text: str) -> None:
    """Folders that do not exist are made later."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    try:
        # By os.access root may write anywhere, to /proc as well.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError:
        raise argparse.ArgumentTypeError(
            f"got {text}, but {nearest} is no folder to write to"
        ) from None


def device(text: str) -> str:
    """A device of torch that is there, or auto."""
    import torch

    if text == "auto":
        return text
    try:
        kind = torch.device(text).type
        torch.empty(0, device=text)
    except Exception as error:  # each kind of device fails in its own way
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"got {text!r}, which torch cannot use: {reason}"
        ) from None
    if kind == "meta":
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a device that computes")
    return text
