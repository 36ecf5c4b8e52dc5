"""The state of a sequence in one attention layer, and an engine's memory as the states of many sequences."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...generation.cache import KVSlots
from ...keys.rule import SelectionRule
from .._shared.config_rules import CONFIG_NAME, LearnedScores, head_dims_of, rules_of

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig

_ORDER = ("counts", "seen", "k", "v", "scores", "positions")
_ALIGNMENT = 128  # bytes; a GPU's cache line, which is larger than its widest load


class SlotState(NamedTuple):
    """The sizes of a sequence's state in one layer: the slots of a KVSlots for each kv head.

    The sizes do not depend on the sequence's length.
    rule: which keys the state keeps. dtype: the dtype of keys and values. value_dim: the head dimension of values;
    None: that of keys.
    """

    heads_kv: int
    rule: SelectionRule
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns each tensor's shape and dtype, by its name in `KVSlots.from_tensors`, in memory order.

        Tensors that are 0 in an empty state come first.
        """
        slots = KVSlots(
            1,
            self.heads_kv,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            device="meta",
            **self.rule._asdict(),
        )
        tensors = ((name, getattr(slots, name)) for name in _ORDER)
        return {name: (tuple(t.shape[1:]), t.dtype) for name, t in tensors}

    def nbytes(self) -> int:
        """Returns the size of a state in bytes. It is a multiple of 128, so that consecutive states are aligned."""
        return sum(_size(*part) for part in self.parts().values())

    def pool(self, blocks: Tensor, offset: int = 0) -> KVSlots:
        """Returns the states in an engine's memory as a cache with one row for each block.

        blocks: uint8 [rows, bytes]; rows are dense, and any distance apart.
        offset: the state's offset in each block, a multiple of 128.
        """
        tensors = {}
        for name, (shape, dtype) in self.parts().items():
            part = blocks[:, offset : offset + prod(shape) * dtype.itemsize].view(dtype)
            tensors[name] = part.view(len(blocks), *shape)
            offset += _size(shape, dtype)
        return KVSlots.from_tensors(**tensors, **self.rule._asdict())


def states_of(config: PretrainedConfig, dtype: torch.dtype, parts: int = 1) -> list[SlotState]:
    """Returns the states of the layers of a Doge, or of a model with learned scores.

    parts: the number of processes that share the key heads. Raises if the sequences cannot have states of one size.
    """
    name = type(config).__name__
    if getattr(config, "is_moe", False):
        raise ValueError(
            f"config.is_moe: got True in a {name}, expected False: the experts of a token depend on the other tokens of its "
            "step, in a batch thus on other requests"
        )
    scores = LearnedScores.from_config(config)
    layers = config.num_hidden_layers
    if scores is not None and len(scores.layers) < layers:
        raise ValueError(
            f"config.{CONFIG_NAME}: got scores in {len(scores.layers)} of {layers} layers, expected all: a layer without them "
            "has another cache"
        )
    if scores is not None and scores.late:
        raise ValueError(
            f"config.{CONFIG_NAME}: got late scores, expected late=False; transformers' generate follows them"
        )
    if scores is not None and scores.dense_prefill:
        raise ValueError(
            f"config.{CONFIG_NAME}: got dense_prefill, expected False: a prompt that comes in parts would attend to keys that "
            "have left"
        )
    rules = rules_of(config) if scores is None else [r.checked_cache_rule() for r in scores.rules]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % parts or config.num_attention_heads % parts:
        raise ValueError(
            f"num_key_value_heads: got {heads} in {parts} parts (tensor parallelism), expected a multiple of {parts}"
        )
    if parts > 1 and any(len(rule.windows()) > 1 for rule in rules):
        raise ValueError(
            f"keep_window_size: got windows of single heads in {parts} parts (tensor parallelism), expected one window"
        )
    head_dim, value_dim = head_dims_of(config)
    return [SlotState(heads // parts, rule, head_dim, dtype, value_dim) for rule in rules]


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = prod(shape) * dtype.itemsize
    return size + -size % _ALIGNMENT
