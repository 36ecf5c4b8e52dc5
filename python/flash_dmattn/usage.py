"""Options of the command line that are checked before any work; a bad one is one line and exit status 2."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CUDA_FAMILIES = ("sm90", "sm80")  # also where this build has no CUDA kernels
_MOST = 2**31 - 1  # that fits the integers of torch


class Parser(argparse.ArgumentParser):
    """Says the one line that matters, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.splitlines())}\n")


def between(least: int, most: int = _MOST) -> Callable[[str], int]:
    """A number of things."""
    expected = f"{least} or more" if most == _MOST else f"{least} to {most}"

    def number(text: str) -> int:
        if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer, {expected}")
        return int(text)

    return number


positive = between(1)


def seed(text: str) -> int:
    """What torch.manual_seed takes."""
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"got {text}, expected -2^63 to 2^64 - 1")
    return number


@contextmanager
def _or_else(message: str) -> Iterator[None]:
    """Errors of the system are those of an option."""
    try:
        yield
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{message}: {error.strerror}") from None


def output_folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a folder")
    with _or_else(f"got {text}, expected a folder"):
        _expect_writable(Path(text), text)
    return Path(text)


def _expect_writable(folder: Path, text: str) -> None:
    """Folders that do not exist are made later."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if _is_there(path)
    )
    try:
        # By os.access root may write anywhere, to /proc as well.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError:
        raise argparse.ArgumentTypeError(
            f"got {text}, but {nearest} is no folder to write to"
        ) from None


def _is_there(path: Path) -> bool:
    """Also as a link to nothing, of which no folder can be made. Raises for names that are too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


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


def check_settings() -> None:
    """Raises for values in the environment that have no meaning, in the words of the builds that read them."""
    family = os.environ.get("FLASH_DMATTN_CUDA_FAMILY", "")
    if family not in ("", *CUDA_FAMILIES):
        expected = ", ".join(CUDA_FAMILIES)
        raise ValueError(f"FLASH_DMATTN_CUDA_FAMILY: got {family}, expected {expected}")
    shared = os.environ.get("FLASH_DMATTN_MAX_SHARED_KB", "")
    try:
        between(1, 1024)(shared or "1")
    except argparse.ArgumentTypeError:
        expected = "a number of KB in [1, 1024]"
        raise ValueError(f"FLASH_DMATTN_MAX_SHARED_KB: got {shared}, expected {expected}") from None


def is_out_of_memory(error: Exception) -> bool:
    """On the CPU torch has no class of errors for it."""
    import torch

    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
