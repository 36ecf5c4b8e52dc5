"""The compiled kernels of the C++ backends: which exist, and which ones calls run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._core import ops


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
