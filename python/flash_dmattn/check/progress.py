"""A progress bar where tqdm is installed, and none where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class _Quiet:
    """The part of tqdm that is used here."""

    def __init__(self, steps: Iterable):
        self._steps = steps

    def __iter__(self) -> Iterator:
        return iter(self._steps)

    def write(self, text: str) -> None:
        print(text, flush=True)


def progress(steps: list, description: str, unit: str):
    """Iterates over `steps`; `.write` prints above the bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _Quiet(steps)
    # disable=None: no bar in a file or a pipe.
    return tqdm(steps, desc=description, unit=unit, dynamic_ncols=True, disable=None)
