"""The cases of `bench.py run`. Each module yields rows of records, and a Failure in the place of a row that could
not be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .. import case as sizes
from .. import sides
from ..clock import Rounds, count_kernels, elapsed_ms
from ..record import Failure, Row

# {module: (its cases, its sides)}. A module is imported only for its cases, which may need transformers.
MODULES = {
    "attention": (sizes.NAMES, sides.NAMES),
    "decode": (("decode",), ("ours", "rows", "sdpa", "fa2", "cudnn")),
    "token": (("token",), ("ours", "ours_compiled", "sdpa_compiled", "eager")),
    "host": (("host",), ("ours", "sdpa")),
    "training_step": (
        ("training_step", "scored_step"),
        ("ours", "eager", "ours_compiled", "eager_compiled", "soft", "hard", "cudnn", "fa2", "sdpa"),
    ),
    "budgets": (("budgets",), ("divided", "uniform", "sdpa_compiled")),
    "triangle": (("triangle",), ("ours", "cuequivariance", "flex", "formula")),
    "context_parallel": (("context_parallel",), ("one GPU", "direct", "two_hops")),
}  # fmt: skip
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}  # of cases that are measured in one dtype
# The numbers of a row: {name: milliseconds}, and the others.
Numbers = tuple[dict, dict]


def measure_sides(
    case: object, dtype: str, sides: dict[str, Callable[[], Numbers]], chosen: list[str]
) -> Iterator[Row | Failure]:
    """Measures one side after the other; all of them if none is chosen."""
    for side, measure in sides.items():
        if chosen and side not in chosen:
            continue
        try:
            yield Row(case, side, dtype, *measure())
        except Exception as error:  # the other sides are worth their time
            yield Failure(case, side, dtype, error)


def measure_step(step: Callable[[], object], device: str, rounds: Rounds) -> Numbers:
    """Returns the time of a step, launches included, and on a GPU its kernels."""
    ms = {"step": rounds.time_one(lambda: elapsed_ms(step, device))}
    other = {"rounds": rounds.count}
    if device == "cuda":
        other["kernels"], ms["kernels"] = count_kernels(step)
    return ms, other
