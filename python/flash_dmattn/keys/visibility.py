"""Visibility, the one value that tells the operators which keys a query sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .intervals import KeyIntervals


class Operands(NamedTuple):
    """The operators' arguments that say which keys a query sees, in order."""

    key_intervals: Tensor | None = None
    key_bound: tuple[int, ...] = ()  # KeyIntervals.bound_operand()


_ALL_KEYS = Operands()


class TopKeysByBias(NamedTuple):
    """The keys with the highest bias among a query's past keys.

    The operator select_and_attend makes this selection itself, because it is the most frequent one: this saves a trip
    through the dispatcher, views and an autograd function.
    """

    keep_window_size: int


class Visibility(NamedTuple):
    """A query sees the keys that the mask, causality and `keys` all show. A bias may hide some of them."""

    mask: Tensor | None = None  # bool [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]
    is_causal: bool = False  # row i sees keys up to i + Sk - Sq
    keys: KeyIntervals | TopKeysByBias | None = None

    # A method, as in all named tuples here: torch.compile of torch 2.10 cannot trace properties of one.
    def heads(self) -> int:
        """Returns the number of heads of `keys`: 1, Hkv, or Hq if every query head needs its own key head.

        A bias for each query head is never a TopKeysByBias.
        """
        return self.keys.heads if isinstance(self.keys, KeyIntervals) else 1

    def operands(self) -> Operands:
        if self.keys is None:
            return _ALL_KEYS
        if isinstance(self.keys, KeyIntervals):
            return Operands(key_intervals=self.keys.intervals, key_bound=self.keys.bound_operand())
        return self.keys.operands()
