"""Texts of associative recall: filler with (key, value) pairs in the first half, and a last quarter that asks for the keys again."""

from __future__ import annotations

import torch
from torch import Tensor

_ASKED_PLACES = 4  # one quarter of the text asks for keys


class Texts:
    """Texts of words 0 to 2 `words` - 1. Keys and values are the lower half of the words and filler the upper half. With `same_words`,
    the filler is of the lower half, too."""

    def __init__(self, pairs: int, words: int, device: str, seed: int, same_words: bool = False):
        self.pairs, self.words, self.device, self.same_words = pairs, words, device, same_words
        self.random = torch.Generator(device).manual_seed(seed)

    def draw(self, length: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns texts [batch, length], the places that ask [batch, pairs] and their answers [batch, pairs].

        A short text has no more pairs than an eighth of its length.
        """
        half, asked = self.words // 2, length // _ASKED_PLACES
        pairs = min(self.pairs, length // 8)
        first, last = (0, self.words) if self.same_words else (self.words, 2 * self.words)
        text = torch.randint(first, last, (batch, length), **self._on())
        keys = self._distinct(half, batch, pairs)
        values = half + torch.randint(half, keys.shape, **self._on())
        stated = 2 * self._distinct(length // 4, batch, pairs)
        places = length - asked + self._distinct(asked, batch, pairs)
        text.scatter_(1, stated, keys).scatter_(1, stated + 1, values).scatter_(1, places, keys)
        return text, places, values

    def _on(self) -> dict:
        return {"device": self.device, "generator": self.random}

    def _distinct(self, high: int, batch: int, count: int) -> Tensor:
        """Returns [batch, count] numbers below `high`, distinct within a row."""
        return torch.rand(batch, high, **self._on()).argsort(1)[:, :count]
