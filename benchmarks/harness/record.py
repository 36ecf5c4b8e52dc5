"""The records of the benchmarks: one form for every case.

A record has five fields, and rows with five fields each:

    machine   name; of a CPU also its instruction set and the number of threads
    date      of the measurement, as in 2026-11-28
    commit    of the measured sources
    versions  {package: version} of torch and of the rivals
    command   as typed

    case      what was measured, with all its sizes
    side      who computed it: a backend of ours, or a rival
    dtype     of the tensors
    ms        {name: milliseconds}, as forward and backward
    other     {name and unit: number}, as "peak MB" and "rounds"
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

HEAD = {"machine": str, "date": str, "commit": str, "versions": dict, "command": str}
ROW = {"case": str, "side": str, "dtype": str, "ms": dict, "other": dict}


def make_row(case: object, side: str, dtype: str, ms: dict, other: dict) -> dict:
    """Returns a row with six digits for each number."""
    ms, other = (
        {name: x if isinstance(x, int) else float(f"{x:.6g}") for name, x in numbers.items()}
        for numbers in (ms, other)
    )
    return {"case": str(case), "side": side, "dtype": dtype, "ms": ms, "other": other}


def validate(record: dict) -> dict:
    """Returns the record. Raises ValueError if it has another form."""
    _check_fields(record, "record", HEAD | {"rows": list})
    for number, row in enumerate(record["rows"]):
        name = f"rows[{number}]"
        _check_fields(row, name, ROW)
        for field, x in [*row["ms"].items(), *row["other"].items()]:
            if not isinstance(x, (int, float)) or not math.isfinite(x) or x < 0:
                raise ValueError(f"{name}.{field}: got {x!r}, expected a finite number, 0 or more")
        if not row["ms"] and not row["other"]:
            raise ValueError(f"{name}: got no number, expected one")
    return record


def _check_fields(part: object, name: str, kinds: dict[str, type]) -> None:
    fields = sorted(part) if isinstance(part, dict) else part
    if fields != sorted(kinds):
        raise ValueError(f"{name}: got {fields}, expected the fields {', '.join(kinds)}")
    for field, kind in kinds.items():
        if not isinstance(part[field], kind):
            raise ValueError(f"{name}.{field}: got {part[field]!r}, expected {kind.__name__}")


def read(path: Path) -> dict:
    """Reads a record. Raises ValueError if the file does not hold one."""
    try:
        return validate(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(path: Path, record: dict) -> None:
    """Creates the folder and replaces the file, with one line per row. An interrupted program leaves the old file."""
    head = [f" {json.dumps(field)}: {json.dumps(validate(record)[field])}" for field in HEAD]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    text = "{\n" + ",\n".join([*head, f' "rows": [\n{rows}\n ]']) + "\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    os.replace(new, path)


def format_row(row: dict) -> str:
    numbers = [f"{name} {x:.5g} ms" for name, x in row["ms"].items()]
    numbers += [f"{name} {x:.5g}" for name, x in row["other"].items()]
    return f"{row['case']:<46} {row['side']:<13} {row['dtype']:<9} {', '.join(numbers)}"


def format_reason(case: object, side: str, dtype: str, reason: Exception) -> str:
    """Formats the line of a side that was not measured."""
    text = f"{type(reason).__name__}: {reason}".partition("\n")[0]
    return f"{case!s:<46} {side:<13} {dtype:<9} not measured: {text}"
