"""Counts the rows of a call that make the backward of a CUDA kernel slow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# From here on the backward of a CUDA kernel needs lse as two floats (src/cuda/stages/preprocess.cuh), and a single such row
# makes it compute the gradients of the whole call in double.
LARGE_LSE = 8192 * math.log(2)

_large_rows: list[Tensor] | None = None  # of the calls in a block of recorded_large_rows


@contextmanager
def recorded_large_rows() -> Iterator[list[int]]:
    """Yields a list that is filled when the block ends: for each call, the number of rows whose log-sum-exp exceeds
    5,678. On a GPU one such row makes the backward of the call compute in double, several times slower.

    Nothing waits for the device before the block ends. Calls in compiled code are left out, and so are the steps of KV
    caches, which have no gradients. Blocks do not nest.

    >>> with recorded_large_rows() as rows:
    ...     model(ids, labels=ids)
    >>> rows
    [0, 0, 371]
    """
    global _large_rows
    rows: list[int] = []
    _large_rows = []
    try:
        yield rows
    finally:
        rows += [int(count) for count in _large_rows]
        _large_rows = None


def record_large_rows(statistics: Tensor | None) -> None:
    """Records the large rows of a call if a recorded_large_rows block is active. statistics: its first row is lse."""
    if _large_rows is None or statistics is None or torch.compiler.is_compiling():
        return
    lse = statistics[0].detach()
    _large_rows.append(((lse.abs() > LARGE_LSE) & lse.isfinite()).sum())
