"""The records of the benchmarks: one form for every case."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Row:
    """What one side took for one case. Numbers are rounded to six digits."""

    case: str  # with all its sizes
    side: str  # a backend of ours, or a rival
    dtype: str
    ms: dict[str, float]  # {name: milliseconds}, as forward and backward
    other: dict[str, float]  # {name and unit: number}, as "peak MB" and "rounds"

    def __post_init__(self) -> None:
        self.case = str(self.case)
        self.ms, self.other = (
            {name: x if isinstance(x, int) else float(f"{x:.6g}") for name, x in numbers.items()}
            for numbers in (self.ms, self.other)
        )

    def __str__(self) -> str:
        numbers = [f"{name} {x:.5g} ms" for name, x in self.ms.items()]
        numbers += [f"{name} {x:.5g}" for name, x in self.other.items()]
        return f"{self.case:<46} {self.side:<13} {self.dtype:<9} {', '.join(numbers)}"


@dataclass
class Failure:
    """An exception in the place of the row that it prevented."""

    case: object
    side: str
    dtype: str
    error: Exception

    def __str__(self) -> str:
        reason = f"{type(self.error).__name__}: {self.error}".partition("\n")[0]
        return f"{self.case!s:<46} {self.side:<13} {self.dtype:<9} not measured: {reason}"


@dataclass
class Record:
    machine: str  # name; of a CPU also its instruction set and the number of threads
    date: str  # of the measurement, as in 2026-11-28
    commit: str  # of the measured sources
    versions: dict[str, str]  # of torch and of the packages of rivals
    command: str  # as typed
    rows: list[Row]


def read(path: Path) -> Record:
    """Reads a record. Raises ValueError if the file does not hold one."""
    try:
        record = json.loads(path.read_text())
        return Record(**record | {"rows": [Row(**row) for row in record["rows"]]})
    except (ValueError, TypeError, KeyError) as error:  # no JSON, or other fields
        raise ValueError(f"{path}: {error}") from error


def write(path: Path, record: Record) -> None:
    """Creates the folder and replaces the file, with one line per row. An interrupted program leaves the old file.
    Raises ValueError if a number is not finite."""
    fields = asdict(record)
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in fields.pop("rows"))
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n')
    os.replace(new, path)
