"""The attention function of layers with learned scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...._core.checks import may_read
from ...._core.numerics import Numerics
from ....dispatch import attention, with_lse
from ....keys.intervals import KeyIntervals
from ....keys.rule import KeySelection, rank_in_document
from ....keys.select_intervals import select_key_intervals
from ....keys.selection import Selection, apply_selection
from ....keys.visibility import Visibility
from ....merge import add_sink
from ....ragged import extend_ragged
from ...dtypes import cast_states, target_dtype
from ...keywords import check_mask_keywords
from ...layer_masks import as_key_intervals, is_causal_mask, normalize_mask, present_tokens
from ...named_attention import mask_driven_attention_forward
from ..cache_layer import DynamicMaskLayer
from .scored_layers import ScoredCall


def scored_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    flash_dmattn_scores: ScoredCall | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention in the form of transformers' functions. Layers without scores see what their mask shows.

    Args:
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Sk, D].
        attention_mask: as `key_interval_mask` makes it, or a mask of the user's.
        flash_dmattn_scores: of a layer with scores.

    Returns:
        output [B, Sq, Hq, D], and None in the place of the probabilities.
    """
    if flash_dmattn_scores is None:
        return mask_driven_attention_forward(
            module, query, key, value, attention_mask, dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"dropout: got {dropout}, expected 0: attention dropout is not supported")
    out = _attend(flash_dmattn_scores, query, key, value, attention_mask, **kwargs)
    return out.contiguous(), None  # of which some layers take a view


def _attend(
    call: ScoredCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,  # these layers are, whether their masks say it or not
    **kwargs,
) -> Tensor:
    if sliding_window is not None:
        raise ValueError(
            f"sliding_window: got {sliding_window} in a layer with learned scores, expected None"
        )
    if is_causal_mask(mask):
        mask = None
    layer = call.layer
    scores = call.scores_of(key, value)
    if scores.shape[1] != key.shape[1]:
        raise ValueError(
            f"scorer: got scores of {scores.shape[1]} heads, expected {key.shape[1]}, as many as keys have"
        )
    if call.batch is not None:
        return _attend_in_batch(call, query, key, value, scaling, softcap, s_aux)
    check_mask_keywords(kwargs, has_mask=mask is not None)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    query, key, value = cast_states((query, key, value), target_dtype(layer, query))
    numerics = Numerics.of(scaling, None, softcap, "saturate", None)
    if call.pieces is not None:
        return _attend_to_pieces(call, query, key, value, scores, numerics, s_aux)
    if call.slots is not None:
        return _attend_with_slots(
            call.slots, layer, query, key, value, scores, mask, numerics, s_aux
        )
    intervals = as_key_intervals(mask, query.shape[1], key.shape[1])
    mask = mask if intervals is None else intervals
    if layer.score_phase == "soft":
        out = _attend_to_all(call, query, key, value, scores, mask, numerics)
    else:
        out = _attend_to_chosen(call, query, key, value, scores, mask, numerics)
    return with_lse(*out, return_lse=False, sink_logits=s_aux)


Result = tuple[Tensor, Tensor | None]  # out and statistics
Mask = Tensor | KeyIntervals | None


def _attend_to_all(
    call: ScoredCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    mask: Mask,
    numerics: Numerics,
) -> Result:
    """The soft phase: old keys, neither recent ones nor sinks, have their log gates as a bias."""
    layer = call.layer
    if call.query_position is not None:
        raise ValueError(
            "cache: got a static one in the phase 'soft', expected a cache that grows, or the phase 'hard'"
        )
    visible = _visible_by_mask(mask, query, key, chooses=False)
    bias = _without_sinks(scores - layer.scorer.first_score, layer.score_rule, visible)
    delay = layer.score_rule.recent_window
    return attention(query, key, value, bias, visible, Selection(), numerics, bias_delay=delay)


def _visible_by_mask(mask: Mask, query: Tensor, key: Tensor, chooses: bool) -> Visibility:
    """The elements that the mask of a causal layer shows. chooses: as in normalize_mask."""
    mask, intervals, additive = normalize_mask(mask, None, query, key, chooses, None)
    if additive is not None:
        raise ValueError(
            "attention_mask: got one with other values than allowing and masking ones, expected a mask or key intervals"
        )
    return Visibility(mask, intervals is None, intervals)  # intervals include causality


def _without_sinks(bias: Tensor, rule: KeySelection, visible: Visibility) -> Tensor:
    """A bias [B, Hkv, Sk] that is 0 for the first keys of each document, whose scores decide nothing.

    visible: what the mask of the layer shows. A document of a dense mask begins where a query sees itself alone.
    """
    if not rule.sink_tokens:
        return bias
    if visible.keys is not None:
        shown = _shown_keys(visible.keys)
        ranks = rank_in_document(shown, visible.keys.intervals[..., 1].cummax(-1).values)
    elif visible.mask is not None:
        shown = visible.mask.any(-2)
        ranks = shown.cumsum(-1) - 1
        if visible.mask.shape[-2] == ranks.shape[-1]:
            ranks = ranks - _shown_before_documents(visible.mask, shown)
    else:
        ranks = torch.arange(bias.shape[2], device=bias.device)
        shown = torch.ones_like(ranks, dtype=torch.bool)
    return torch.where(shown & (ranks < rule.sink_tokens), 0, bias)


def _shown_before_documents(mask: Tensor, shown: Tensor) -> Tensor:
    """How many keys some query sees before the document of each, [..., S], by a mask [..., S, S]."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    begins = torch.where(mask.int().argmax(-1) == places, places, 0).cummax(-1).values
    return F.pad(shown.cumsum(-1), (1, 0)).gather(-1, begins)


def _shown_keys(keys: KeyIntervals) -> Tensor:
    """Which keys some query sees, bool [B, H, Sk]."""
    first, last = keys.intervals.unbind(-1)
    return first < last


def _attend_to_chosen(
    call: ScoredCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    mask: Mask,
    numerics: Numerics,
) -> Result:
    """The hard phase: the keys that the rule leaves, as the base model attends to them.

    Scores decide which these are and change nothing else, so that a cache holds keys and no gates. The choice has no
    derivative; scores learn by that of a bias of old keys, sinks left out, whose value is 0.
    """
    rule = call.layer.score_rule
    bias, delay = _bias_to_learn(scores, rule)
    if bias is not None:
        bias = _without_sinks(bias, rule, _visible_by_mask(mask, query, key, chooses=False))
    scores = scores.detach()
    if call.is_prompt and call.layer.dense_prefill:
        visible = _visible_by_mask(mask, query, key, chooses=False)
    elif mask is None or _is_padding(mask, call, query.shape[1], key.shape[1]):
        key_mask = _present_keys(mask, call.query_position)
        visible = Visibility(
            keys=select_key_intervals(
                scores,
                **rule._asdict(),
                key_mask=key_mask,
                query_length=query.shape[1],
                query_position=call.query_position,
            )
        )
    else:
        visible = apply_selection(
            Selection(rule, scores),
            query,
            key,
            None,
            _visible_by_mask(mask, query, key, chooses=True),
            uses_library_kernels=False,
        )
    return attention(query, key, value, bias, visible, Selection(), numerics, bias_delay=delay)


def _bias_to_learn(scores: Tensor, rule: KeySelection) -> tuple[Tensor | None, int]:
    """The bias of value 0 through which scores learn, that of sinks still in it, and its delay; None where nothing learns."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return None, 0
    # A score of -inf, which never is among the best, has no gradient.
    return (scores - scores.detach()).nan_to_num(), rule.recent_window


def _attend_to_pieces(
    call: ScoredCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    numerics: Numerics,
    s_aux: Tensor | None,
) -> Tensor:
    """The hard phase over sequences of which this rank has a piece."""
    layer, slots = call.layer, call.slots
    try:
        _check_layer_of_pieces(layer, slots)
    except Exception as error:
        call.pieces.group.wire.raise_on_all_ranks(error)
    bias, delay = _bias_to_learn(scores, layer.score_rule)
    return call.pieces.attend(
        query,
        key,
        value,
        scores.detach(),
        layer.score_rule,
        slots,
        bias=bias,
        scale=numerics.scale,
        softcap=numerics.softcap,
        bias_delay=delay,
        sink_logits=s_aux,
    )


def _check_layer_of_pieces(layer: nn.Module, slots: DynamicMaskLayer | None) -> None:
    if layer.score_phase != "hard":
        raise ValueError(
            f"phase: got {layer.score_phase!r} with context parallelism, expected 'hard': in the soft phase a query sees all keys "
            "of all earlier ranks"
        )
    if slots is None:
        return
    if layer.dense_prefill:
        raise ValueError(
            "dense_prefill: got True with a cache and context parallelism, expected False: a prompt would see all keys of "
            "all earlier ranks"
        )
    _check_rule(slots, layer)


def _is_padding(mask: Tensor | KeyIntervals, call: ScoredCall, queries: int, keys: int) -> bool:
    """Whether a mask is only causality and padding: every compact one with earlier keys is. A static cache knows where its
    queries stand, and a mask does not tell."""
    has_earlier = call.cache is not None and queries < keys
    return isinstance(mask, KeyIntervals) and has_earlier or call.query_position is not None


def _present_keys(mask: Mask, query_position: Tensor | int | None) -> Tensor | None:
    """Which keys some query sees, bool [B, 1, Sk]; None: all. query_position: of the first query, in a static cache."""
    if mask is None:
        return None
    if isinstance(mask, KeyIntervals):
        return _shown_keys(mask)
    if mask.dim() == 4 and mask.shape[1] == 1 and not mask.is_floating_point():
        mask = mask.bool()
        present = mask.any(2)
        queries, keys = mask.shape[2:]
        if queries == 1:
            return present
        first = torch.arange(keys, device=mask.device)
        last = torch.arange(queries, device=mask.device)[:, None] + query_position
        if may_read() and torch.equal(mask, present[:, :, None] & (first <= last)):
            return present
    raise ValueError(
        f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with a static cache, expected padding [B, tokens]; a "
        "static cache has no other masks over several queries, those of packed texts among them"
    )


def _attend_in_batch(
    call: ScoredCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of the tokens of a step, [1, H, T, D], each to its own sequence: [1, T, Hq, D]."""
    index = call.layer.layer_idx
    pool = call.cache.layer_to_allocator[index].pools[index]
    states = (t[0].transpose(0, 1).to(pool.k.dtype) for t in (query, key, value))
    out, lse = extend_ragged(
        pool,
        call.batch,
        *states,
        call.scores[0].float(),
        scale=scaling,
        softcap=softcap,
        scores_are_bias=False,
        return_lse=True,
    )
    out, lse = out.to(query.dtype)[None], lse[None]
    return out if s_aux is None else add_sink(out, lse, s_aux)[0]


def _attend_with_slots(
    slots: DynamicMaskLayer,
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    numerics: Numerics,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of new tokens to those that a DynamicMaskCache holds and to each other."""
    if layer.score_phase != "hard":
        raise ValueError(
            f"cache: got a DynamicMaskCache in the phase {layer.score_phase!r}, which attends to all keys; expected the phase "
            "'hard', or transformers' DynamicCache"
        )
    _check_rule(slots, layer)
    key_mask = present_tokens(mask, query.shape[1])
    scores = scores.float()
    key_heads_first = tuple(t.transpose(1, 2) for t in (key, value))
    if slots.is_empty:
        slots.check_kernels(key_heads_first[0])
        if layer.dense_prefill:
            visible = _visible_by_mask(mask, query, key, chooses=False)
        else:
            key_mask_of_heads = None if key_mask is None else key_mask[:, None]
            rule = layer.score_rule._asdict()
            visible = Visibility(
                keys=select_key_intervals(scores, **rule, key_mask=key_mask_of_heads)
            )
        out, statistics = attention(query, key, value, None, visible, Selection(), numerics)
        slots.fill(*key_heads_first, scores, key_mask)
        return with_lse(out, statistics, return_lse=False, sink_logits=s_aux)
    out, lse = slots.attend(
        query.transpose(1, 2),
        *key_heads_first,
        scores,
        key_mask,
        scale=numerics.scale,
        softcap=numerics.softcap,
        scores_are_bias=False,
    )
    return out if s_aux is None else add_sink(out, lse, s_aux)[0]


def _check_rule(slots: DynamicMaskLayer, layer: nn.Module) -> None:
    if slots.rule != layer.score_rule:
        raise ValueError(
            f"cache: got a DynamicMaskCache of the rule {slots.rule} in layer {layer.layer_idx}, expected "
            f"{layer.score_rule}: a DynamicMaskCache(model.config) of this model"
        )
