"""Loads the library with the C++ operators."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

PACKAGE = __package__.rpartition(".")[0]  # may differ from flash_dmattn


def _load_library() -> str:
    """Loads _C.so of this package, or the file that FLASH_DMATTN_LIBRARY names (a build that is not installed).

    A library with a namespace of its own (FLASH_DMATTN_NAMESPACE in CMake) is named after it: NAMESPACE.abi3.so.

    Returns:
        The namespace of the library's operators.
    """
    named = os.environ.get("FLASH_DMATTN_LIBRARY")
    folders = sys.modules[PACKAGE].__path__
    candidates = [Path(named)] if named else [Path(folder) / "_C.so" for folder in folders]
    if not named:
        candidates += (path for folder in folders for path in Path(folder).glob("*.abi3.so"))
    for path in candidates:
        if path.is_file():
            torch.ops.load_library(str(path))
            name = path.name.partition(".")[0]
            return "flash_dmattn" if name == "_C" else name
    message = (
        f"flash_dmattn: the compiled operators are missing ({', '.join(map(str, candidates))}). "
        "Install the package with `pip install .`, or set FLASH_DMATTN_LIBRARY to a built _C.so."
    )
    if _is_command_line():
        print(message, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(message)


def _is_command_line() -> bool:
    """Whether this is `python -m flash_dmattn`, which imports the package before its __main__ can catch an error."""
    options = sys.orig_argv[1:]
    return sys.argv[:1] == ["-m"] and "-m" in options and PACKAGE in options


# The namespace of the operators in torch.ops. One process can load two builds that have different namespaces.
NAMESPACE = _load_library()
