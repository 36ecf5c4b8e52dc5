"""The state of a sequence in one attention layer, and the memory of an engine as the states of many."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache import KVSlots
from ...keys.rule import KeySelection

_COUNTERS = ("counts", "seen")
_ORDER = (*_COUNTERS, "k", "v", "scores", "positions")
_ALIGNMENT = 128  # bytes: a cache line of a GPU, and more than its widest load


class SlotState(NamedTuple):
    """The sizes of the state that a sequence has in one layer, whatever its length: the slots of a KVSlots for each kv head.

    rule: which keys it keeps. dtype: of keys and values.
    """

    heads_kv: int
    rule: KeySelection
    head_dim: int
    dtype: torch.dtype

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors of a state by their names in `KVSlots.from_tensors`, in the order of memory. What
        is 0 in an empty state comes first."""
        slots = KVSlots(
            1,
            self.heads_kv,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device="meta",
            **self.rule._asdict(),
        )
        tensors = ((name, getattr(slots, name)) for name in _ORDER)
        return {name: (tuple(t.shape[1:]), t.dtype) for name, t in tensors}

    def nbytes(self) -> int:
        """A multiple of 128, so that states that follow each other are aligned."""
        return sum(_size(*part) for part in self.parts().values())

    def counter_nbytes(self) -> int:
        """The first bytes of a state. A state in which they are 0 is empty."""
        parts = self.parts()
        return sum(_size(*parts[name]) for name in _COUNTERS)

    def pool(self, blocks: Tensor, offset: int = 0) -> KVSlots:
        """The states in memory of an engine, as a cache of one row for each block.

        blocks: uint8 [rows, bytes], dense rows any distance apart. offset: of the state in each, a multiple of 128.
        """
        tensors = {}
        for name, (shape, dtype) in self.parts().items():
            part = blocks[:, offset : offset + prod(shape) * dtype.itemsize].view(dtype)
            tensors[name] = part.view(len(blocks), *shape)
            offset += _size(shape, dtype)
        return KVSlots.from_tensors(**tensors, **self.rule._asdict())


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = prod(shape) * dtype.itemsize
    return size + -size % _ALIGNMENT
