"""Stores the scores of keys in transformers' own caches. A score is computed when its key is written.

A cache layer of the same class as the keys' layer stores the scores, as keys of one channel, so that cropping,
reordering and repeating act on keys and scores alike.
"""

from __future__ import annotations

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin


def update_with_scores(
    past: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: torch.Tensor,
    index: int,
    update_arguments: tuple,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Calls `past.update` for layer `index`, and stores the scores of the new tokens.

    Args:
        key, value: the new tokens, [B, Hkv, S, D].
        scores: scores of the new tokens, [B, Hkv, S].
        update_arguments: further arguments of `update`.

    Returns:
        The keys and values of all tokens, and their scores [B, Hkv, Sk]. If some tokens came without a score, None
        replaces the scores: the caller then has to compute all scores again from the values.
    """
    key, value = update_keys(past, key, value, index, update_arguments)
    return key, value, store_scores(past, scores, index, update_arguments)


def update_keys(
    past: Cache, key: torch.Tensor, value: torch.Tensor, index: int, update_arguments: tuple
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the first half of `update_with_scores`: calls `past.update`. `store_scores` has to follow."""
    layer = past.layers[index] if index < len(past.layers) else None
    is_first = layer is None or _is_empty(layer)
    if isinstance(layer, _ScoredLayer) and layer.lacks_scores:
        past.layers[index] = layer.without_scores()
    states = past.update(key, value, index, *update_arguments)
    layer = past.layers[index]
    if is_first and not isinstance(layer, _ScoredLayer):
        past.layers[index] = _add_scores(layer)
    return states


def store_scores(
    past: Cache, scores: torch.Tensor, index: int, update_arguments: tuple
) -> torch.Tensor | None:
    """Does the second half of `update_with_scores`: stores the scores of the new tokens. Returns all scores, or None."""
    layer = past.layers[index]
    if not isinstance(layer, _ScoredLayer):
        return None
    scores, _ = layer.score_layer.update(scores[..., None], scores[..., None], *update_arguments)
    layer.lacks_scores = False
    return scores[..., 0]


class _ScoredLayer(CacheLayerMixin):
    """A cache layer with a second layer for scores. The scores stay on the device when the layer is offloaded."""

    score_layer: CacheLayerMixin
    lacks_scores: bool  # whether some tokens have come without scores

    def update(self, *args, **kwargs):
        self.lacks_scores = True
        return super().update(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self.score_layer.reset()
        self.lacks_scores = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.score_layer.reorder_cache(beam_idx)

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self.score_layer.crop(tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.score_layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.score_layer.batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        for layer in (super(), self.score_layer):
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def without_scores(self) -> CacheLayerMixin:
        """Returns a layer of transformers' own class with the same tokens."""
        attributes = {**vars(self)}
        del attributes["score_layer"], attributes["lacks_scores"]
        return _make_layer(type(self).__mro__[2], attributes)

    def __reduce__(self):
        return _make_scored, (type(self).__mro__[2], vars(self))


def _add_scores(layer: CacheLayerMixin) -> _ScoredLayer:
    """Returns a layer with the same tokens as a layer of transformers, and with room for their scores."""
    attributes = {**vars(layer), "score_layer": _layer_of_scores(layer), "lacks_scores": True}
    return _make_scored(type(layer), attributes)


def _make_class(layer_class: type[CacheLayerMixin]) -> type[_ScoredLayer]:
    return type(layer_class.__name__, (_ScoredLayer, layer_class), {})


# Made before any compilation: an instance of a class that is made within compiled code cannot leave it.
_SCORED_CLASSES = {
    layer_class: _make_class(layer_class)
    for layer_class in list(vars(cache_utils).values())
    if isinstance(layer_class, type) and issubclass(layer_class, CacheLayerMixin)
}


def _scored_class(layer_class: type[CacheLayerMixin]) -> type[_ScoredLayer]:
    if layer_class not in _SCORED_CLASSES:
        _SCORED_CLASSES[layer_class] = _make_class(layer_class)
    return _SCORED_CLASSES[layer_class]


def _make_scored(layer_class: type[CacheLayerMixin], attributes: dict) -> _ScoredLayer:
    return _make_layer(_scored_class(layer_class), attributes)


def _make_layer(layer_class: type[CacheLayerMixin], attributes: dict) -> CacheLayerMixin:
    layer = layer_class.__new__(layer_class)
    vars(layer).update(attributes)
    return layer


def _is_empty(layer: CacheLayerMixin) -> bool:
    """Whether a layer is known to hold no key. False in compiled code, where finding out would break the graph."""
    if not layer.is_initialized:
        return True
    return not torch.compiler.is_compiling() and int(layer.get_seq_length()) == 0


def _layer_of_scores(layer: CacheLayerMixin) -> CacheLayerMixin:
    if isinstance(layer, cache_utils.StaticSlidingWindowLayer):
        return cache_utils.StaticSlidingWindowLayer(layer.max_cache_len, layer.max_cache_len)
    if isinstance(layer, cache_utils.StaticLayer):
        return cache_utils.StaticLayer(layer.max_cache_len)
    if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        return cache_utils.DynamicSlidingWindowLayer(layer.sliding_window)
    return cache_utils.DynamicLayer()
