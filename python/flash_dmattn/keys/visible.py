"""Visible, the one value that tells the operators which keys a query sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .intervals import KeyIntervals


class Visible(NamedTuple):
    """A query sees the keys that the mask, causality and intervals all show. A bias may hide some of them."""

    mask: Tensor | None = None  # bool [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]
    is_causal: bool = False  # row i sees keys up to i + Sk - Sq
    intervals: KeyIntervals | None = None  # with Hq heads, every query head needs its own key head
    # The number of keys with the highest bias that a query sees of its past keys. The operator select_and_attend makes
    # this selection, the most frequent one: it saves a trip through the dispatcher, views and an autograd function.
    window: int | None = None
