"""One call of an attention layer with learned scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ....ragged import RaggedBatch
from ..cache import DynamicMaskCache
from ..cache_layer import DynamicMaskLayer
from ..scored_cache import update_with_scores


class ScoredCall:
    """One call of a layer, as the attention function needs it in addition to the arguments of transformers.

    The layer takes it for the cache, whose `update` gets the keys before attention does.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden: Tensor,
        cache: Cache | None,
        batch: RaggedBatch | None = None,
        pieces: Any = None,
    ):
        """batch: the sequences of a step of continuous batching, whose cache has slots for each of them. pieces: attention over
        sequences of which this rank has a piece (context_parallel.Pieces); None: it has the whole."""
        self.layer, self.hidden, self.batch, self.pieces = layer, hidden, batch, pieces
        self.cache = getattr(cache, "self_attention_cache", cache)  # of an EncoderDecoderCache
        self.slots: DynamicMaskLayer | None = None
        self.scores: Tensor | None = None  # of all keys [B, Hkv, Sk]; of the new ones with slots
        self.query_position: Tensor | int | None = None  # None: the last query is the last key
        self.is_prompt = False  # the first tokens of a cache
        self.has_attended = False

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """As that of a cache: all keys and values so far. With slots the new ones, which attention adds later."""
        scores = self.make_scores(key, value)
        new = key.shape[2]
        if isinstance(self.cache, DynamicMaskCache):
            self.slots, self.scores = self.cache.layers[layer_idx], scores
            if not isinstance(self.slots, DynamicMaskLayer):
                raise ValueError(
                    f"cache: got a DynamicMaskCache whose layer {layer_idx} is a {type(self.slots).__name__}, expected slots: the "
                    "layers of this model have other numbers in its caches. Use transformers' DynamicCache"
                )
            self.is_prompt = self.slots.is_empty
            return key, value
        if self.batch is not None:
            self.scores = scores
            return key, value
        if not isinstance(self.cache, Cache):
            raise TypeError(
                f"cache: got {type(self.cache).__name__}, expected a transformers Cache, or the paged cache of "
                "model.init_continuous_batching or generate_batch"
            )
        self.query_position = _first_position(self.cache, layer_idx, args)
        key, value, self.scores = update_with_scores(
            self.cache, key, value, scores, layer_idx, args
        )
        if self.scores is None:
            raise ValueError(
                f"cache: got keys without scores in layer {layer_idx}, expected a cache that was filled by this model with its "
                "scores on (phase 'soft' or 'hard')"
            )
        # The position in a static cache without tokens is a number, later a tensor.
        first = self.query_position
        self.is_prompt = key.shape[2] == new if first is None else isinstance(first, int)
        return key, value

    def __getattr__(self, name: str):
        """Whatever else a layer asks its cache."""
        return getattr(self.cache, name)

    def make_scores(self, key: Tensor, value: Tensor) -> Tensor:
        """Scores [B, Hkv, S] of keys and values [B, Hkv, S, D]."""
        return self.layer.scorer(self.hidden, key.transpose(1, 2), value.transpose(1, 2))

    def scores_of(self, key: Tensor, value: Tensor) -> Tensor:
        if self.has_attended:  # slots would take the keys a second time
            raise RuntimeError(
                f"scorer: got a second attention in one call of layer {self.layer.layer_idx}, expected one: keys have one value"
            )
        self.has_attended = True
        return self.make_scores(key, value) if self.scores is None else self.scores


def _first_position(cache: Cache, index: int, update_arguments: tuple) -> Tensor | int | None:
    """The position of the first new token in a cache with room for later keys; None: new tokens are its last ones."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not getattr(layer, "is_compileable", False):
        return None
    for argument in update_arguments:  # transformers 4
        if isinstance(argument, dict) and argument.get("cache_position") is not None:
            return argument["cache_position"][0]
    position = layer.get_seq_length()  # a tensor, which `update` changes
    return position.clone() if isinstance(position, Tensor) else position
