"""The cases of `bench.py run`. Each module yields rows of records, and a Failure in the place of a row that could
not be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .. import record

# {module: (its cases besides those of attention, its sides)}.
# A module is imported only for its cases, which may need transformers.
MODULES = {
    "decode": (("decode",), ("ours", "rows", "sdpa", "fa2", "cudnn")),
    "token": (("token",), ("ours", "ours_compiled", "sdpa_compiled", "eager")),
    "host": (("host",), ("ours", "sdpa")),
    "training_step": (
        ("training_step", "scored_step"),
        ("ours", "eager", "ours_compiled", "eager_compiled", "soft", "hard", "cudnn", "fa2", "sdpa"),
    ),
    "serving": (("serving",), ("ours",)),
    "triangle": (("triangle",), ("ours", "cuequivariance", "flex", "formula")),
    "context_parallel": (("context_parallel",), ("one GPU", "direct", "two_hops")),
}  # fmt: skip


class Failure(NamedTuple):
    """An exception in the place of the row that it prevented."""

    case: object
    side: str
    dtype: str
    error: Exception

    def __str__(self) -> str:
        return record.format_reason(*self)


# The numbers of a row: {name: milliseconds}, and the others.
Numbers = tuple[dict, dict]


def measure_sides(
    case: object, dtype: str, sides: dict[str, Callable[[], Numbers]], chosen: list[str]
) -> Iterator[dict | Failure]:
    """Measures one side after the other; all of them if none is chosen."""
    for side, measure in sides.items():
        if chosen and side not in chosen:
            continue
        try:
            yield record.make_row(case, side, dtype, *measure())
        except Exception as error:  # the other sides are worth their time
            yield Failure(case, side, dtype, error)
