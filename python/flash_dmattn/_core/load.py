"""Loads the library with the C++ operators."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from . import is_command_line

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
    if is_command_line():  # the package is imported before its __main__ can catch an error
        print(message, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(message)


# The namespace of the operators in torch.ops. One process can load two builds that have different namespaces.
NAMESPACE = _load_library()
