"""Attention of new tokens to the slots of a cache, for layers of Doge and for layers with learned scores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...generation.ragged import RaggedBatch, extend_ragged
from ...keys.rule import SelectionRule
from ...merge import add_sink
from .._shared.attention_interface.layer_masks import present_tokens
from .cache_layer import DynamicMaskLayer


def attend_with_slots(
    slots: DynamicMaskLayer,
    rule: SelectionRule,
    layer_idx: int,
    states: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    mask: object,
    attend_to_prompt: Callable[[Tensor | None], Tensor],
    *,
    sink_logits: Tensor | None = None,
    **options,
) -> Tensor:
    """Computes attention of new tokens to the keys in a DynamicMaskCache and to each other. Returns [B, S, Hq, Dv].

    Args:
        rule: the rule of the attention layer `layer_idx`. The slots have to follow it.
        states: query [B, S, Hq, D], key [B, S, Hkv, D] and value [B, S, Hkv, Dv].
        scores: [B, Hkv, S].
        mask: the layer's mask. Only its padding is read.
        attend_to_prompt: computes attention of the cache's first tokens. Its argument says which of them are present,
            bool [B, S] (None: all).
        options: scale, softcap and scores_are_bias of `DynamicMaskLayer.attend`.
    """
    slots.check_rule(rule, layer_idx)
    key_mask = present_tokens(mask, states[0].shape[1])
    scores = scores.float()
    query, key, value = states
    if slots.is_empty:
        slots.check_kernels(key, value)  # before attention that the slots could not take over
        out = attend_to_prompt(key_mask)
        slots.fill(key, value, scores, key_mask)
        return out
    out, lse = slots.attend(query, key, value, scores, key_mask, **options)
    return out if sink_logits is None else add_sink(out, lse, sink_logits)[0]


def attend_in_batch(
    cache: object,
    layer_idx: int,
    batch: RaggedBatch,
    states: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of a continuous batching step. Each token attends to its own sequence.

    Args:
        cache: transformers' paged cache, whose allocators hold slots (slot_manager).
        states: query [1, T, Hq, D], key [1, T, Hkv, D] and value [1, T, Hkv, Dv].
        scores: [1, Hkv, T].
        options: the options of `extend_ragged`.

    Returns:
        [1, T, Hq, Dv] in the dtype of the pool. With return_lse, also the log-sum-exp [1, Hq, T].
    """
    pool = cache.layer_to_allocator[layer_idx].pools[layer_idx]
    query, key, value = (t[0].to(pool.k.dtype) for t in states)
    result = extend_ragged(pool, batch, query, key, value, scores[0].float(), **options)
    return tuple(t[None] for t in result) if isinstance(result, tuple) else result[None]
