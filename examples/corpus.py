"""Reads the sources of Python's standard library as bytes, split by file into training and held-out text."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
_HELD_OUT_ONE_IN = 20


@dataclass
class Corpus:
    """Training and held-out text, uint8 [bytes] each. A zero byte separates files, and no file is in both parts."""

    training: torch.Tensor
    held_out: torch.Tensor
    files: int


def standard_library() -> Corpus:
    """Reads the .py files of this interpreter, without tests and tables. The files' names decide the split."""
    root = Path(sysconfig.get_path("stdlib"))
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            checksum = zlib.crc32(name.as_posix().encode())
            part = training if checksum % _HELD_OUT_ONE_IN else held_out
            part.append(path.read_bytes() + b"\0")
    if not (training and held_out):
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    parts = (
        torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in (training, held_out)
    )
    return Corpus(*parts, files=len(training) + len(held_out))


def random_batch(
    text: torch.Tensor, batch_size: int, context: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns sequences that begin at random places: uint8 [bytes] -> int64 [batch_size, context]."""
    starts = torch.randint(len(text) - context + 1, (batch_size,), generator=generator)
    return torch.stack([text[start : start + context] for start in starts.tolist()]).long()
