"""The compiled kernels of the C++ backends: which exist, which ones calls run, and what makes them slow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._core import ops

# From here on the backward of a CUDA kernel needs lse as two floats (src/cuda/stages/preprocess.cuh), and a single such row
# makes it compute the gradients of the whole call in double.
LARGE_LSE = 8192 * math.log(2)

_large_rows: list[Tensor] | None = None  # of the calls in a block of recorded_large_rows


def kernel_names(backend: str) -> list[str]:
    """Returns the names of the main kernels that the backend "cuda", "cpu" or "reference" can run on this machine.

    A name is family, direction, dtype and variant, separated by spaces. Raises ValueError for another backend.
    """
    if not isinstance(backend, str):
        raise TypeError(f'backend: got {backend!r}, expected "cuda", "cpu" or "reference"')
    return ops.kernel_names(backend).splitlines()


@contextmanager
def recorded_kernels() -> Iterator[list[str]]:
    """Yields a list that holds the main kernels of the block's calls once the block ends, in their order.

    Calls of all threads of the process count, as autograd runs backward on its own. Blocks do not nest.

    >>> with recorded_kernels() as kernels:
    ...     flash_dmattn_func(q, k, v).sum().backward()
    >>> kernels
    ['sm80 forward bf16 d128 key_range 163KB', 'sm80 backward bf16 d128 key_major 163KB']
    """
    names: list[str] = []
    ops.record_kernels(True)
    try:
        yield names
    finally:
        names += ops.record_kernels(False).splitlines()


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
