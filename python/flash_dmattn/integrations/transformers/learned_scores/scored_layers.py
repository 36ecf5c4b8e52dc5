"""Attention layers of transformers that give their keys scores, and the test for layers that can."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ....generation.ragged import RaggedBatch
from ....keys.rule import SelectionRule
from ..._shared.attention_interface.layout import swap_heads_and_tokens
from ..cache import DynamicMaskCache
from ..cache_layer import DynamicMaskLayer
from ..compat import CACHE, CACHE_NAMES, adds_a_bias, adopt_layer, calls_attention_interface
from ..names import BATCH, BATCHED_SCORES, PIECES, SCORED_CALL, SCORED_NAMES
from ..scored_cache import store_scores, update_keys

# Arguments of layers whose keys do not come from the layer's own input.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
_CACHE_NAMES = (*CACHE_NAMES, "layer_past")
# Reasons by `config.model_type` (without "_text") for layers that do more than their arguments tell.
_REASONS = {
    "diffllama": "attend twice by the same keys, to other values each time",
    "diffusion_gemma": "see later tokens of a block",
    "doge": "have scores of their own; call enable_flash_dmattn",
    "glm5_next": "choose keys by an indexer",
    "jetmoe": "repeat keys before the attention function gets them",
}
_LOCAL_KINDS = ("sliding", "chunked", "local", "window")


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
        """
        Args:
            batch: the sequences of a continuous batching step. Its cache has slots for each sequence.
            pieces: context_parallel.PieceForward, if this rank has a piece of each sequence; None: it has whole
                sequences.
        """
        self.layer, self.hidden, self.batch, self.pieces = layer, hidden, batch, pieces
        self.cache = getattr(cache, "self_attention_cache", cache)  # in an EncoderDecoderCache
        self.slots: DynamicMaskLayer | None = None
        self.new_tokens: int | None = None  # that the cache got; None: there is no cache
        self.score_place: tuple | None = None  # the arguments of store_scores
        self.query_position: Tensor | int | None = None  # None: the last query is the last key
        self.is_prompt = False  # the first tokens of a cache
        self.has_attended = False

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Returns all keys and values so far, as a cache does; with slots only the new ones, which attention adds.

        With latent attention these are latents, from which the layer makes keys and values. So scores are made when
        attention gets keys and values (`scores_of`).
        """
        self.new_tokens = new = key.shape[2]
        if isinstance(self.cache, DynamicMaskCache):
            self.slots = self.cache.slots_of(layer_idx)
            self.is_prompt = self.slots.is_empty
            return key, value
        if self.batch is not None:
            return key, value
        if not isinstance(self.cache, Cache):
            raise TypeError(
                f"{CACHE}: got {type(self.cache).__name__}, expected a transformers Cache, or the paged cache of "
                "model.init_continuous_batching or generate_batch"
            )
        self.query_position = _first_position(self.cache, layer_idx, args)
        key, value = update_keys(self.cache, key, value, layer_idx, args)
        self.score_place = (layer_idx, args)
        # The position in a static cache without tokens is a number, later a tensor.
        first = self.query_position
        self.is_prompt = key.shape[2] == new if first is None else isinstance(first, int)
        return key, value

    def __getattr__(self, name: str):
        """Returns any other attribute from the cache."""
        if name == "cache":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.cache, name)

    def scores_of(self, key: Tensor, value: Tensor) -> Tensor:
        """Makes and stores the scores of the new tokens, and returns those of all keys.

        Args:
            key, value: as attention gets them, [B, Hkv, Sk, D].

        Returns:
            [B, Hkv, Sk].
        """
        if self.has_attended:  # slots would take the keys a second time
            raise RuntimeError(
                f"scorer: got a second attention call in layer {self.layer.layer_idx}, expected one: the cache stores one value per key"
            )
        self.has_attended = True
        new = (self._take_new_tokens(states) for states in (key, value))
        scores = self.layer.scorer(self.hidden, *swap_heads_and_tokens(*new))
        if self.score_place is None:
            return scores
        scores = store_scores(self.cache, scores, *self.score_place)
        if scores is None:
            raise ValueError(
                f"{CACHE}: got keys without scores in layer {self.layer.layer_idx}, expected a cache that was filled by this model "
                "with its scores on (phase 'soft' or 'hard')"
            )
        return scores

    def _take_new_tokens(self, states: Tensor) -> Tensor:
        """Returns the new tokens of keys or values [B, Hkv, Sk, D]."""
        new, first = self.new_tokens, self.query_position
        if new is None or new == states.shape[2]:
            return states
        if first is None:
            return states[:, :, -new:]
        index = first + torch.arange(new, device=states.device)
        return states.index_select(2, index)


def _first_position(cache: Cache, index: int, update_arguments: tuple) -> Tensor | int | None:
    """Returns the position of the first new token in a static cache. None: new tokens are the cache's last keys."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not getattr(layer, "is_compileable", False):
        return None
    for argument in update_arguments:  # transformers 4
        if isinstance(argument, dict) and argument.get("cache_position") is not None:
            return argument["cache_position"][0]
    position = layer.get_seq_length()  # a tensor, which `update` changes
    return position.clone() if isinstance(position, Tensor) else position


class ScoredAttention(nn.Module):
    """The part that an attention layer of any family gets for its scores.

    In the phase "off", and under an attention implementation that is not in `SCORED_NAMES`, the layer acts as its base
    class. It keeps nothing from one call to the next: the scores reach the attention function as arguments.
    """

    batched_name = BATCHED_SCORES
    scorer: nn.Module
    score_rule: SelectionRule
    score_phase: str
    dense_prefill: bool  # whether a prompt attends to all of itself
    base_attention: str  # the implementation of the phase "off"

    def forward(self, *args, **kwargs):
        if self.score_phase == "off" or self.config._attn_implementation not in SCORED_NAMES:
            return super().forward(*args, **kwargs)
        kwargs = dict(zip(self.argument_names, args, strict=False)) | kwargs
        name = next((name for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        steps = kwargs.pop(BATCH, None), kwargs.pop(PIECES, None)
        call = kwargs[SCORED_CALL] = ScoredCall(
            self, kwargs["hidden_states"], kwargs.get(name), *steps
        )
        if name is not None:
            kwargs[name] = call
        result = super().forward(**kwargs)
        if not call.has_attended:
            raise RuntimeError(
                f"{SCORED_CALL}: got no call of transformers' attention function with the keywords of {type(self).__name__}, "
                "expected one: its layers cannot have learned scores"
            )
        return result

    def __reduce__(self):
        return _empty_layer, (base_class(self),), vars(self)


@functools.cache
def scored_class(layer_class: type[nn.Module]) -> type[ScoredAttention]:
    """Makes the subclass of a family's attention layer that has scores."""
    names = tuple(inspect.signature(layer_class.forward).parameters)[1:]
    attributes = {
        "argument_names": names,
        "__module__": __name__,
    }
    return type(f"Scored{layer_class.__name__}", (ScoredAttention, layer_class), attributes)


def base_class(layer: ScoredAttention) -> type[nn.Module]:
    classes = type(layer).__mro__
    return classes[classes.index(ScoredAttention) + 1]


def with_scorer(
    layer: nn.Module, scorer: nn.Module, rule: SelectionRule, dense_prefill: bool
) -> ScoredAttention:
    """Returns a layer with scores, which takes over everything that `layer` has."""
    scored = adopt_layer(layer, scored_class(type(layer)))
    scored.base_attention = layer.config._attn_implementation
    scored.score_rule, scored.score_phase, scored.dense_prefill = rule, "hard", dense_prefill
    scored.scorer = scorer
    return scored


def without_scorer(layer: ScoredAttention) -> nn.Module:
    plain = adopt_layer(layer, base_class(layer))
    del plain.scorer
    for name in ("score_rule", "score_phase", "dense_prefill", "base_attention"):
        delattr(plain, name)
    return plain


def _empty_layer(layer_class: type[nn.Module]) -> ScoredAttention:
    scored = scored_class(layer_class)
    return scored.__new__(scored)


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention interface."""
    return isinstance(module, ScoredAttention) or calls_attention_interface(module)


def reason_against_scores(layer: nn.Module) -> str | None:
    """Returns why an attention layer cannot have scores, or None if it can."""
    parameters = inspect.signature(type(layer).forward).parameters
    has_keywords = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    config = getattr(layer, "config", None)
    if getattr(layer, "layer_idx", None) is None or config is None:
        return "are no layers of a decoder (no layer_idx)"
    if not getattr(layer, "is_causal", True):
        return "are not causal"
    has_other_sources = any(name in parameters for name in _OTHER_SOURCES)
    if has_other_sources and getattr(layer, "is_cross_attention", True):
        return "can attend to another input than their own"
    if "hidden_states" not in parameters or not has_keywords:
        return "do not pass keywords from their input to the attention function"
    if not set(_CACHE_NAMES) & set(parameters):
        return "have no cache"
    if adds_a_bias(layer):
        return "add a bias of their own"
    if config.model_type.removesuffix("_text") in _REASONS:
        return _REASONS[config.model_type.removesuffix("_text")]
    if getattr(layer, "is_kv_shared_layer", False):
        return "take their keys from another layer"
    if _window_of_its_own(layer):
        return "have a sliding window of their own"
    return None


def _window_of_its_own(layer: nn.Module) -> bool:
    kinds = getattr(layer.config, "layer_types", None)
    if kinds:
        return any(kind in kinds[layer.layer_idx] for kind in _LOCAL_KINDS)
    return any(getattr(owner, "sliding_window", None) for owner in (layer, layer.config))


def sizes_of(layer: nn.Module) -> tuple[int, int, int]:
    """Returns the number of features of the layer's input, of its key heads, and of features of all heads' values."""
    config = layer.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(layer, "v_head_dim", None) or getattr(layer, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    features = getattr(layer, "attention_hidden_size", config.hidden_size)
    return features, heads, heads * head_dim


def device_of(layer: nn.Module) -> torch.device:
    """Returns the device where a layer computes. accelerate's hooks bring parameters there from the CPU or a disk."""
    device = next(layer.parameters()).device
    return device if device.type != "meta" else next(_execution_devices(layer), device)


def _execution_devices(layer: nn.Module) -> Iterator[torch.device]:
    for module in layer.modules():
        hook = getattr(module, "_hf_hook", None)
        for own in getattr(hook, "hooks", (hook,)):
            device = getattr(own, "execution_device", None)
            if device is not None:
                yield torch.device(device)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps parameters of a module on the CPU or a disk, and gives it empty ones on "meta"."""
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    return is_meta and next(_execution_devices(module), None) is not None
