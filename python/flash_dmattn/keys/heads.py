"""Masks, biases and scores of key heads beside those of query heads."""

from __future__ import annotations

from torch import Tensor

from .._core.gradients import repeat_interleave
from .intervals import broadcasts


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
