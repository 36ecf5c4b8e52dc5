"""Visible, the one value that tells the operators which keys a query sees, and the heads of its parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._core.gradients import repeat_interleave
from .intervals import KeyIntervals, broadcasts


class Visible(NamedTuple):
    """A query sees the keys that the mask, causality and intervals all show. A bias may hide some of them."""

    mask: Tensor | None = None  # bool [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]
    is_causal: bool = False  # row i sees keys up to i + Sk - Sq
    intervals: KeyIntervals | None = None  # with Hq heads, every query head needs its own key head
    # The number of keys with the highest bias that a query sees of its past keys. The operator select_and_attend makes
    # this selection, the most frequent one: it saves a trip through the dispatcher, views and an autograd function.
    window: int | None = None


def match_heads(query: Tensor, key: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Repeats the parts for every query head, unless each part has one head for each key head, or one for all heads."""
    if all(broadcasts(part.shape[1], key.shape[2]) for part in parts):
        return parts
    return tuple(repeat_heads(part, query, key) for part in parts)


def repeat_heads(
    tensor: Tensor | None, query: Tensor, key: Tensor, saturate: bool = True
) -> Tensor | None:
    """Repeats the key heads of a mask or bias for every query head of their groups."""
    heads_q, heads_kv = query.shape[2], key.shape[2]
    if tensor is None or broadcasts(tensor.shape[1], heads_q):
        return tensor
    return repeat_interleave(tensor, heads_q // heads_kv, 1, saturate)
