"""Types of the examples' options for argparse. A wrong value prints one line that names the option, before any training."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
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
    return _number(text, 0, float("inf"), "a number above 0")


def share(text: str) -> float:
    return _number(text, 0, 1, "a number above 0, at most 1")


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = least
    if not least < number <= most or number == float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")
    return number


def device(text: str) -> str:
    """Parses a device that torch can use, or auto."""
    import torch

    try:
        torch.empty(0, device="cpu" if text == "auto" else text)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"got {text}: {reason}") from None
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option --device, by default the GPU if there is one."""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, choices=("cpu", "cuda"), default=default)


def new_file(text: str) -> Path:
    """Parses the path of a file that can be written. Creates its folder and does not change the file."""
    path = Path(text)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not existed:
        path.unlink()
    return path


def new_picture(text: str) -> Path:
    """Parses the path of a .svg or .png file that matplotlib can write."""
    if Path(text).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a name that ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib, which is not installed")
    return new_file(text)


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


def run_program(main: Callable[[], object]) -> None:
    """Runs a program. An interrupt ends it with one line."""
    try:
        main()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


def check_texts(parser: argparse.ArgumentParser, options: argparse.Namespace, length: int) -> None:
    """Ends the program if the recall texts, at most `length` tokens long, have no room for their pairs, or the width none for its
    heads."""
    pairs = min(options.pairs, length // 8)
    if options.words < 2 * pairs:
        parser.error(f"--words: got {options.words}, expected {2 * pairs} or more, 2 for each pair")
    if options.width % (2 * options.heads):
        expected = f"a multiple of {2 * options.heads}, 2 for each of --heads"
        parser.error(f"--width: got {options.width}, expected {expected}")
