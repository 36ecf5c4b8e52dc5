"""Types of command line options. A bad option ends a program before any work, with a line that names it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def between(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Returns an argparse type for a whole number in this range."""

    def number(text: str) -> int:
        if not text.strip().lstrip("+-").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {text}, expected {least} to {most}")
        return int(text)

    return number


def rate(text: str) -> float:
    """Parses a learning rate."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number, 0 or more")
    return number


def device(text: str) -> str:
    """Parses a device that torch can use."""
    import torch

    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"got {text}: {reason}") from None
    return text


def new_folder(text: str) -> Path:
    """Parses the path of a writable folder, and creates the folder."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {path}, expected a folder that can be written")
    return path
