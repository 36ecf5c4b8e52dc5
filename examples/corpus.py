"""Texts to train with and held-out ones: the sources of Python's standard library, split by file, or the files of a folder."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
_HELD_OUT_ONE_IN = 20
_ENDINGS = {".c", ".h", ".md", ".py", ".rst", ".txt"}


@dataclass
class Corpus:
    """Training and held-out text, uint8 [bytes] each. A zero byte separates files, and no file is in both parts."""

    training: torch.Tensor
    held_out: torch.Tensor
    files: int

    def texts(self) -> list[str]:
        """Returns the training and the held-out text."""
        return [
            bytes(part.numpy()).decode(errors="ignore") for part in (self.training, self.held_out)
        ]


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


def text_files(folder: Path) -> list[Path]:
    """Returns the files of a folder whose endings are those of sources and texts, in the order of their names."""
    return [
        path for path in sorted(folder.rglob("*")) if path.suffix in _ENDINGS and path.is_file()
    ]


def random_batch(
    text: torch.Tensor, batch_size: int, context: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns sequences that begin at random places: uint8 [bytes] -> int64 [batch_size, context]."""
    starts = torch.randint(len(text) - context + 1, (batch_size,), generator=generator)
    return torch.stack([text[start : start + context] for start in starts.tolist()]).long()
