"""The command line's errors: one line and exit status 2, before any work."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Prints the one line that matters, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.splitlines())}\n")


def check_settings() -> None:
    """Raises ValueError for a meaningless setting, with the text of src/cuda/device.cu. Triton reads it in every build."""
    shared = os.environ.get("FLASH_DMATTN_MAX_SHARED_KB", "") or "1"
    if not (shared.isdecimal() and len(shared) <= 4 and 1 <= int(shared) <= 1024):
        expected = "a number of KB in [1, 1024]"
        raise ValueError(f"FLASH_DMATTN_MAX_SHARED_KB: got {shared}, expected {expected}")
