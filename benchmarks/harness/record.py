"""Reads, checks and writes records. All measurements share one schema, with one line of JSON per row."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .case import useful_tflops
from .commands import split_commands
from .side_table import MODEL_PACKAGES, SIDES

_NUMBER = (int, float)
_NULLABLE = (int, float, type(None))
TIMES = ("forward", "backward")
_COMMIT = (str, type(None))  # None: a build that was never committed; the note describes it
_RECORD = {"machine": dict, "commit": str, "versions": dict, "rows": list}
# A record has a command, a method, or both.
_RECORD_OPTIONS = {
    "command": str,  # as typed, several joined by &&
    "method": str,  # how rows were measured that no program of the repository made; without a command all
    "build": str,  # the compiler and the options of the build, if they are not the usual ones
    "note": str,  # other facts that a reader needs
}
# "unknown" or null: not known, in records of programs that did not ask for it.
_GPU = {
    "name": str,
    "driver": str,
    "clocks": str,  # current SM and memory clock, highest SM clock
}
_CPU = {
    "name": str,
    "family_model": str,
    "isa": str,
    "last_level_cache_mib": _NULLABLE,
    "threads": int,
}
# The package that a side measures, whose version the record needs. Old records do not know that of cuDNN.
_PACKAGES = MODEL_PACKAGES | {
    side: about.package for side, about in SIDES.items() if about.package not in (None, "cudnn")
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ROW = {
    "case": str,
    "side": str,  # what ran the case: a backend, a rival, or before and after a change
    "dtype": str,
    "unit": (str, type(None)),  # unit of all times in the row; None if it has no times
    "statistic": (str, type(None)),  # one of STATISTICS; None if it has no times
    "forward": _NULLABLE,
    "backward": _NULLABLE,
}
_MEASUREMENTS = {
    "both": _NUMBER,  # time of forward and backward together
    "parts": dict,  # further times, by name; `kernels` is of one profiled call, `prompt` of one call
    "values": dict,  # other quantities, by name: [a number or a list of numbers, the unit]
    "peak_mb": _NUMBER,  # bytes / 1e6; for attention, without query, key, value and a bias per key
    "results_mb": _NUMBER,  # bytes / 1e6 of outputs and gradients, a part of peak_mb
    "cache_mib": _NUMBER,  # bytes / 2^20 of the KV cache
    "visited_mib": _NUMBER,  # bytes / 2^20 of all KV caches that cold calls cycle through
    "of_copy_bandwidth": _NUMBER,  # bandwidth of reading the cache / bandwidth of a copy
    "kernels": int,  # number of kernel launches
}
UNITS = (
    "share", "nats/byte", "nats/token", "bits/byte", "logits", "keys", "requests", "requests/s", "tokens/s", "TB/s", "MB", "bytes", "us",
)  # fmt: skip
# quantile: the name of each part says which. unknown: only in records with a method.
STATISTICS = ("median", "least", "mean", "quantile", "unknown")
_ROW_OPTIONS = {
    "rounds": int,  # how many rounds the statistic is of; absent if unknown. Parts may have others
    "commit": _COMMIT,  # the commit of this row's build, if it differs from the record's
    "run": int,  # number of the repetition
    "threads": int,  # if not those of the record's machine
}


_WORDS = {
    dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number", type(None): "null",
}  # fmt: skip


def validate(record: dict) -> dict:
    """Returns the record. Raises ValueError if the schema does not allow it."""
    _check(record, "record", _RECORD, _RECORD_OPTIONS)
    if "command" not in record and not record.get("method"):
        raise ValueError("record: got neither command nor method, expected one")
    if "command" in record:
        try:
            split_commands(record["command"])
        except ValueError as error:
            raise ValueError(f"record.command: {error}") from error
    _check(record["machine"], "machine", _CPU if "threads" in record["machine"] else _GPU, {})
    seen, sides = set(), set()
    for number, row in enumerate(record["rows"]):
        name = f"rows[{number}]"
        _check_row(row, name)
        sides.add(row["side"].split()[-1])
        if row["statistic"] == "unknown" and "method" not in record:
            raise ValueError(f"{name}.statistic: got unknown, expected that of the command")
        key = _key(row)
        if key in seen:
            raise ValueError(f"{name}: got {key} again, expected a `run` that tells them apart")
        seen.add(key)
    packages = ["torch", *(package for side, package in _PACKAGES.items() if side in sides)]
    versions = dict.fromkeys([*packages, *record["versions"]], str)
    _check(record["versions"], "versions", versions, {})
    return record


def _check_row(row: dict, name: str) -> None:
    """Raises ValueError unless the row has a measurement, and times with their unit and statistic or neither of these."""
    _check(row, name, _ROW, _MEASUREMENTS | _ROW_OPTIONS, may_be_zero=("run",))
    if row["dtype"] not in _DTYPES:
        raise ValueError(
            f"{name}.dtype: got {row['dtype']!r}, expected one of {', '.join(_DTYPES)}"
        )
    parts, values = row.get("parts", {}), row.get("values", {})
    for field in ("parts", "values"):
        if row.get(field) == {}:
            raise ValueError(f"{name}.{field}: got no entry, expected one or no field")
    _check(parts, f"{name}.parts", {}, dict.fromkeys(parts, _NUMBER), may_be_zero=parts)
    _check(values, f"{name}.values", {}, dict.fromkeys(values, list))
    for what, value in values.items():
        _check_value(value, f"{name}.values.{what}")
    measured = [field for field in (*TIMES, *_MEASUREMENTS) if row.get(field) is not None]
    if not measured:
        raise ValueError(f"{name}: got no measurement, expected one")
    has_times = _has_times(measured)
    for field, known in (("unit", ("ms", "us")), ("statistic", STATISTICS)):
        if row[field] not in (known if has_times else (None,)):
            expected = " or ".join(known) if has_times else "null, as it has no times"
            raise ValueError(f"{name}.{field}: got {row[field]!r}, expected {expected}")
    if row["statistic"] == "quantile" and set(measured) & {*TIMES, "both"}:
        raise ValueError(
            f"{name}.statistic: got quantile, expected it only for parts, whose names say which quantile"
        )
    if "rounds" in row and not has_times:
        raise ValueError(f"{name}.rounds: got {row['rounds']} without times, expected none")


def _has_times(fields: Iterable[str]) -> bool:
    return not {*TIMES, "both", "parts"}.isdisjoint(fields)


def _key(row: dict) -> tuple:
    """Returns the fields that identify a row within its record."""
    return tuple(row.get(field) for field in ("case", "side", "dtype", "commit", "run"))


def _check_value(value: list, name: str) -> None:
    """Raises ValueError unless `value` is [a number or a list of numbers, a known unit]."""
    number, unit = value if len(value) == 2 else (None, None)
    numbers = number if isinstance(number, list) else [number]
    if not numbers or not all(map(_is_number, numbers)) or unit not in UNITS:
        raise ValueError(
            f"{name}: got {value!r}, expected [number, unit], one of {', '.join(UNITS)}"
        )
    if unit == "share" and not all(0 <= n <= 1 for n in numbers):
        raise ValueError(f"{name}: got {value!r}, expected a share from 0 to 1")


def _is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def _check(
    part: object, name: str, required: dict, options: dict, may_be_zero: Iterable[str] = ()
) -> None:
    """Raises ValueError if `part` lacks a required field, has an unknown one, or has a value of the wrong type.

    may_be_zero: the fields whose number need not be positive.
    """
    if not isinstance(part, dict):
        raise ValueError(f"{name}: got {part!r}, expected an object")
    kinds = options | required
    for field in dict.fromkeys([*required, *part]):
        if field not in part:
            raise ValueError(f"{name}.{field}: got none, expected one")
        if field not in kinds:
            raise ValueError(f"{name}: got {field!r}, expected one of {', '.join(kinds)}")
        value, kind = part[field], kinds[field]
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds_of_field = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(_WORDS[one] for one in kinds_of_field)
            raise ValueError(f"{name}.{field}: got {value!r}, expected {expected}")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{name}.{field}: got a blank text, expected one")
        if isinstance(value, _NUMBER):
            _check_size(value, f"{name}.{field}", field in may_be_zero)
    commit = part.get("commit")
    if commit is not None and not is_commit(commit):
        raise ValueError(f"{name}.commit: got {commit!r}, expected a commit's hash")


def _check_size(number: float, name: str, may_be_zero: bool) -> None:
    """Raises ValueError unless a number is finite and positive, or 0 if that may be."""
    if not math.isfinite(number) or number < 0 or number == 0 and not may_be_zero:
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(f"{name}: got {number}, expected a finite number, {least}")


def is_commit(text: str) -> bool:
    """Returns whether the text is a valid commit for a record."""
    return re.fullmatch("[0-9a-f]{7,40}(-dirty)?", text) is not None


def row(
    case, side, dtype, forward=None, backward=None, unit="ms", statistic=None, rounds=None, **rest
) -> dict:
    """Returns a row with every number rounded to six digits. Fields of `rest` with the value None are left out.

    unit, statistic, rounds: of its times; a row without times has none of them.
    """
    measured = {key: value for key, value in rest.items() if value is not None}
    times = {"forward": forward, "backward": backward}
    if not _has_times([*measured, *(way for way in TIMES if times[way] is not None)]):
        unit = statistic = rounds = None
    fields = {"case": str(case), "side": side, "dtype": dtype, "unit": unit, "statistic": statistic}
    if rounds is not None:
        fields["rounds"] = rounds
    return _rounded(fields | times | measured)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def format_row(row: dict) -> str:
    """Formats a row for printing: forward / backward, the useful TFLOP/s of attention, then all other fields by name."""
    cells = []
    if row["statistic"] is not None:
        rounds = f" of {row['rounds']}" if "rounds" in row else ""
        cells.append(f"{row['statistic']}{rounds}:")
    if any(row[way] is not None for way in TIMES):
        cells.append(f"{forward_and_backward(row)} {row['unit']}")
    if rates := useful_tflops(row):
        cells.append(f"{forward_and_backward(dict(zip(TIMES, rates, strict=True)))} TFLOP/s")
    rest = {
        field: row[field] for field in (*_MEASUREMENTS, "commit", "run", "threads") if field in row
    }
    for name, number in rest.pop("parts", {}).items():
        cells.append(f"{name} {number:.5g} {row['unit']}")
    for name, (number, unit) in rest.pop("values", {}).items():
        shown = number if isinstance(number, list) else [number]
        cells.append(f"{name} {' '.join(f'{n:.5g}' for n in shown)} {unit}")
    cells += [f"{name} {value}" for name, value in rest.items()]
    return f"{row['case']:<46} {row['side']:<13} {row['dtype']:<9}  {', '.join(cells)}"


def declined(case: object, side: str, dtype: str, reason: Exception) -> str:
    """Formats the line that is printed for a side that could not be measured."""
    text = (str(reason) or type(reason).__name__).splitlines()[0]
    return f"{case!s:<46} {side:<13} {dtype:<9}  declined: {text}"


class Failure(NamedTuple):
    """An exception in the place of the row that it prevented. As a text it is the line of a side that failed."""

    case: object
    side: str
    dtype: str
    error: Exception

    def __str__(self) -> str:
        kind, text = type(self.error).__name__, str(self.error).partition("\n")[0]
        return f"{self.case!s:<46} {self.side:<13} {self.dtype:<9}  failed: {kind}: {text}"


def forward_and_backward(numbers: dict) -> str:
    """Formats forward / backward with three digits."""
    shown = [numbers[way] for way in TIMES]
    return " / ".join("–" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in shown)


def read(path: Path) -> dict:
    """Reads a record. Raises ValueError if the file is not a valid one."""
    try:
        return validate(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def with_row(rows: list[dict], row: dict) -> list[dict]:
    """Returns the rows and the new one. If they already have its configuration, the new row gets the number of its `run`, so that no
    measurement is lost."""
    keys = {_key(one) for one in rows}
    run = 0
    while _key(row) in keys:
        run += 1
        row = row | {"run": run}
    return [*rows, row]


def rows_to_extend(path: Path, commit: str) -> list[dict]:
    """Returns the rows of the record at `path`, none if there is no file. Raises ValueError if the record is of another commit."""
    if not path.exists():
        return []
    before = read(path)
    if before["commit"] != commit:
        raise ValueError(
            f"{path}: got rows of commit {before['commit']}, expected those of {commit}, or no file"
        )
    return before["rows"]


def expect_writable(path: Path) -> None:
    """Creates the folder. Raises OSError if `write` would fail. The file's content does not change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


def write(path: Path, record: dict) -> None:
    """Creates the folder and replaces the file atomically, so that an interrupted program leaves the old file intact."""
    fields = [
        f" {json.dumps(key)}: {json.dumps(value)}"
        for key, value in validate(record).items()
        if key != "rows"
    ]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    fields.append(f' "rows": [\n{rows}\n ]')
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "{\n" + ",\n".join(fields) + "\n}\n"
    if path.exists() and not path.is_file():  # a device, a pipe
        path.write_text(text)
        return
    path = path.resolve()  # a symbolic link remains one
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
