"""Scores of keys beside the keys in transformers' own caches. A score is computed once, when its key is written.

The scores of a layer are one more layer among those of the cache: keys of one channel. So cropping, reordering, repeating and
resetting a cache act on keys and scores alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import may_read
from .compat import CACHE

# The attribute of a cache: {number of a layer: (index of its scores in cache.layers, whether each of its keys has one)}. torch 2.11
# does not compile a NamedTuple in it.
_STORED = "flash_dmattn_scores"


def check_cache(cache: object) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"{CACHE}: got {type(cache).__name__}, expected a transformers Cache")
    # Offloading would bring the layers of scores in place of those of keys.
    if getattr(cache, "offloading", False):
        raise ValueError(
            f"{CACHE}: got a {type(cache).__name__} with offloading=True, expected one without for a model with scores"
        )


class CacheState(NamedTuple):
    """The state of a layer's cache before it gets new keys.

    is_empty: whether the layer holds no key.
    position: the position of the first new token in a static cache, an integer before the first tokens and later a tensor.
        None: new tokens are the cache's last keys.
    arguments: further arguments of the update (transformers 4, and 5 until 5.3).
    """

    is_empty: bool
    position: Tensor | int | None = None
    arguments: tuple = ()

    @classmethod
    def of_layer(cls, cache: object, index: int, cache_position: Tensor | None) -> CacheState:
        """Raises as `check_cache`."""
        check_cache(cache)
        layer = cache.layers[index] if index < len(cache.layers) else None
        if layer is None:
            return cls(True)
        if isinstance(layer, _ScoreLayer):
            raise ValueError(
                f"{CACHE}: got a {type(cache).__name__} with scores in the place of layer {index}, expected one that has all layers: "
                f"{type(cache).__name__}(config=model.config)"
            )
        arguments = () if cache_position is None else ({"cache_position": cache_position},)
        position = None
        if getattr(layer, "is_compileable", False):
            if cache_position is not None:
                position = cache_position[0]
            else:
                position = layer.get_seq_length()  # a tensor, which the update changes
                position = position.clone() if isinstance(position, Tensor) else position
        scores = _complete_scores(cache, index)
        if not layer.is_initialized:
            is_empty = True
        elif isinstance(position, Tensor) and scores is not None:
            is_empty = not scores.holds_tokens
        else:  # reading breaks the compiled graph of a static cache that has memory, but no scores yet
            is_empty = int(layer.get_seq_length()) == 0
        return cls(is_empty, position, arguments)


def store_scores(
    cache: Cache,
    index: int,
    config: PretrainedConfig,
    scores: Tensor,
    state: CacheState,
    keys: Tensor,
) -> Tensor | None:
    """Stores the scores [B, Hkv, S] of tokens whose keys layer `index` has got.

    state: of the layer before it got them. keys: all of its keys [B, Hkv, Sk, D], as its update returned them.

    Returns the scores of all keys, [B, Hkv, Sk], or None if some keys came without scores.
    """
    if not hasattr(cache, _STORED):
        setattr(cache, _STORED, {})
    stored = getattr(cache, _STORED)
    if _complete_scores(cache, index) is None:
        if not (state.is_empty or (state.position is None and keys.shape[2] == scores.shape[2])):
            return None
        has_memory = isinstance(state.position, Tensor) and torch.compiler.is_compiling()
        make = _allocated_layer_of_scores if has_memory else _layer_of_scores
        layer = make(cache.layers[index], scores[..., None], state)
        if index not in stored:
            if cache.layer_class_to_replicate is not None:  # layers are made when they are used
                while len(cache.layers) < config.num_hidden_layers:
                    cache.layers.append(cache.layer_class_to_replicate())
            stored[index] = len(cache.layers), False
            cache.layers.append(layer)
        own, _ = stored[index]
        stored[index], cache.layers[own] = (own, True), layer
    layer = cache.layers[stored[index][0]]
    if not _lacks_scores(layer, state):
        states = scores[..., None]
        of_keys, _ = layer.update(states, states, *state.arguments)
        if of_keys.shape[2] == keys.shape[2]:
            return of_keys[..., 0]
    forget_scores(cache, index)
    return None


def forget_scores(cache: object, index: int) -> None:
    """Drops the scores of a layer that gets keys without scores. Does nothing for what is no cache with scores."""
    layer = _complete_scores(cache, index)
    if layer is not None:
        layer.reset()
        stored = getattr(cache, _STORED)
        stored[index] = stored[index][0], False


def _complete_scores(cache: object, index: int) -> CacheLayerMixin | None:
    """Returns the scores of a layer, or None if it has none, or keys without them."""
    own, is_complete = getattr(cache, _STORED, {}).get(index, (None, False))
    return cache.layers[own] if is_complete else None


def _lacks_scores(layer: CacheLayerMixin, state: CacheState) -> bool:
    """Whether a static cache is known to hold keys without scores. A number on a GPU is not read."""
    position = state.position
    if position is None or not may_read() or (isinstance(position, Tensor) and not position.is_cpu):
        return False
    return not state.arguments and int(layer.get_seq_length()) != int(position)


class _ScoreLayer:
    """A layer of scores, which says without reading a device whether it got tokens since its last reset."""

    holds_tokens = False

    def update(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.holds_tokens = True
        return super().update(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self.holds_tokens = False

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.holds_tokens = int(self.get_seq_length()) > 0


class _StaticScores(_ScoreLayer, cache_utils.StaticLayer):
    pass


class _StaticSlidingScores(_ScoreLayer, cache_utils.StaticSlidingWindowLayer):
    pass


class _DynamicScores(_ScoreLayer, cache_utils.DynamicLayer):
    pass


class _DynamicSlidingScores(_ScoreLayer, cache_utils.DynamicSlidingWindowLayer):
    pass


@torch.compiler.disable
def _allocated_layer_of_scores(
    layer: CacheLayerMixin, states: Tensor, state: CacheState
) -> CacheLayerMixin:
    """Makes a static layer with memory outside of a compiled graph. The next run of a CUDA graph writes over memory of its own."""
    scores, states = _layer_of_scores(layer), states.detach()
    scores.update(states, states, *state.arguments)
    scores.reset()
    return scores


def _layer_of_scores(layer: CacheLayerMixin, *_) -> CacheLayerMixin:
    if isinstance(layer, cache_utils.StaticSlidingWindowLayer):
        return _StaticSlidingScores(layer.max_cache_len, layer.max_cache_len)
    if isinstance(layer, cache_utils.StaticLayer):
        return _StaticScores(layer.max_cache_len)
    if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        return _DynamicSlidingScores(layer.sliding_window)
    return _DynamicScores()
