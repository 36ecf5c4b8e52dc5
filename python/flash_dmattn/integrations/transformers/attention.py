"""The attention function of transformers' models under this package's names, and attention of layers whose keys have scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.checks import may_read, resolve_flag
from ..._core.numerics import Numerics
from ..._dispatch import attention, with_lse
from ...keys.in_torch import rank_in_document
from ...keys.intervals import KeyIntervals
from ...keys.recognise import Memo
from ...keys.rule import SelectionRule
from ...keys.select import select_key_intervals, select_visible
from ...keys.visible import Visible
from ...merge import add_sink
from ...scores import bias_to_learn
from .._shared.attention_interface.keywords import (
    PACKED_KEYWORDS,
    check_mask_keywords,
    check_probabilities,
)
from .._shared.attention_interface.layer_attention import attend_by_mask
from .._shared.attention_interface.layer_masks import (
    as_key_intervals,
    is_causal_mask,
    normalize_mask,
    present_tokens,
)
from .._shared.attention_interface.packed_sequences import hide_other_sequences
from .._shared.attention_interface.states import cast_states, swap_heads_and_tokens, target_dtype
from .._shared.attention_interface.token_order import TokenOrder, counts_tokens
from .cache_layer import DynamicMaskLayer
from .compat import CACHE, FLAG_WITH_EVERY_MASK_IN_4
from .family_table import FLAG_WITH_EVERY_MASK, type_of
from .learned_scores.layers import ScoreCall, of_keys, soft_bias


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    flash_dmattn_scores: ScoreCall | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes attention in the form of transformers' attention functions.

    In layers without scores, queries see what the mask shows.

    Args:
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Sk, D]. With a DynamicMaskCache, keys and values of the new tokens.
        attention_mask: as `key_interval_mask` makes it, or a mask of the user's.
        flash_dmattn_scores: of a layer with scores.

    Returns:
        output [B, Sq, Hq, D], and None in the place of the probabilities.
    """
    check_probabilities(dropout, kwargs)
    states = query, key, value, attention_mask
    if flash_dmattn_scores is None:
        return _attend_by_mask(module, *states, **kwargs), None
    out = _attend_with_scores(flash_dmattn_scores, *states, **kwargs)
    return out.contiguous(), None  # some layers call view() on it


def _attend_by_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,  # the mask includes packed texts and windows
    sliding_window: int | None = None,
    **kwargs,
) -> Tensor:
    """Computes attention in which the mask decides what a query sees, as in the eager attention of every model.

    Without a mask a query sees all keys, and under a mask [B, 1, 1, Sk] all keys that the mask shows. Offsets of packed sequences
    hide the keys of other sequences. A layer's `is_causal` is ignored: many layers have none, or a wrong one, because eager
    attention never reads it. Masks of `key_interval_mask` include causality. A caller of the model may choose keys by a bias.
    """
    if is_causal is not None:
        _check_causality(module, query, mask, resolve_flag(is_causal, "is_causal"))
    if query.numel() == 0:
        raise ValueError(f"query: got shape {tuple(query.shape)}, expected no dimension of size 0")
    has_causality = is_causal_mask(mask)
    mask = hide_other_sequences(mask, kwargs, query.shape[0], query.shape[2], key.shape[2])
    kwargs = {name: value for name, value in kwargs.items() if name not in PACKED_KEYWORDS}
    return attend_by_mask(
        module, *swap_heads_and_tokens(query, key, value), None if is_causal_mask(mask) else mask,
        has_causality, target_dtype(module, query), **kwargs,
    )  # fmt: skip


def _check_causality(
    module: nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool
) -> None:
    """Raises ValueError if is_causal asks for causality that the mask does not contain; a layer may pass its own flag."""
    if is_causal and mask is None and query.shape[2] > 1:
        raise ValueError(
            "is_causal: got True without a mask, expected a causal mask: under this attn_implementation the mask alone "
            "decides what a query sees"
        )
    contradicts = not is_causal and is_causal_mask(mask) and getattr(module, "is_causal", False)
    exempt = (*FLAG_WITH_EVERY_MASK, *FLAG_WITH_EVERY_MASK_IN_4)
    if contradicts and type_of(module.config) not in exempt:
        raise ValueError(
            "is_causal: got False with a causal mask, expected None; set is_causal=False in the model's config, by which "
            "its mask functions decide"
        )


def _attend_with_scores(
    call: ScoreCall,
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
    layer, rule = call.layer, call.layer.score_rule
    if sliding_window is not None:
        raise ValueError(
            f"sliding_window: got {sliding_window} in a layer with learned scores, expected None"
        )
    queries, keys = query.shape[2], key.shape[2]
    scores = call.scores_of(key, value)
    is_dense = layer.dense_prefill and call.is_prompt(queries, keys)
    if is_causal_mask(mask):
        mask = None
    check_mask_keywords(kwargs, has_mask=mask is not None)
    mask = hide_other_sequences(mask, kwargs, query.shape[0], queries, keys)
    states = swap_heads_and_tokens(call.query_of(query), key, value)
    states = cast_states(states, target_dtype(layer, query))
    numerics = Numerics.from_arguments(scaling, None, softcap, "saturate", None)
    options = {"numerics": numerics, "sink_logits": s_aux}
    if call.pieces is not None or call.slots is not None:
        _check_phase(call)
    if call.pieces is not None:
        if layer.scores_are_late:
            raise ValueError(
                "late: got True with context parallelism, expected False: the next token is another rank's"
            )
        bias, delay = _bias_to_learn(scores, rule)
        return call.pieces.attend(
            *states, scores.detach(), rule, call.slots, bias=bias, bias_delay=delay,
            scale=numerics.scale, softcap=numerics.softcap, sink_logits=s_aux,
        )  # fmt: skip
    if call.slots is not None:
        scores, present = scores.float(), present_tokens(mask, queries)
        if layer.scores_are_late and not call.slots.is_empty:
            call.slots.prefetch()
            call.slots.slots.rescore_last(
                scores[..., 0], None if present is None else present[:, 0]
            )
        scores = of_keys(layer, scores)
        if not is_dense:  # transformers' mask may be a dense one that only padding makes
            mask = None if present is None else KeyIntervals(mask, queries)
        prompt = KeyScores(rule, scores, hides=not is_dense, is_padding=True)
        return attend_with_slots(
            *states, mask, prompt, slots=call.slots, layer_idx=layer.layer_idx, present=present,
            scores_are_bias=False, **options,
        )  # fmt: skip
    intervals = as_key_intervals(mask, queries, keys)
    mask = mask if intervals is None else intervals
    if layer.score_phase == "soft":
        if call.query_position is not None:
            raise ValueError(
                f"{CACHE}: got a static one in the phase 'soft', expected a cache that grows, or the phase 'hard'"
            )
        bias = soft_bias(layer, scores)
        used = KeyScores(rule, scores, bias, rule.recent_window, hides=False)
    else:
        scores = of_keys(layer, scores)
        bias, delay = _bias_to_learn(scores, rule)
        # Intervals over keys of a cache are causality and padding; so are the masks of a static cache, others raise.
        is_padding = mask is None or (
            call.cache is not None and queries < keys and intervals is not None
        )
        is_padding = call.query_position is not None or (bias is None and is_padding)
        used = KeyScores(rule, scores, bias, delay, not is_dense, is_padding, call.query_position)
    return attend_with_keys(*states, mask, used, **options)


class KeyScores(NamedTuple):
    """The scores of a call's keys, and their use.

    rule: which keys a query sees by their scores, if `hides`.
    bias: [B, Hkv, Sk], added for queries at least `delay` tokens after the key. The sinks of a rule have none.
    is_padding: whether the mask is known to be causality and padding alone.
    first_query: the column of the first query, in a static cache.
    """

    rule: SelectionRule
    scores: Tensor  # [B, Hkv, Sk]
    bias: Tensor | None = None
    delay: int = 0
    hides: bool = True
    is_padding: bool = False
    first_query: Tensor | int | None = None


def attend_with_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | KeyIntervals | None,
    used: KeyScores,
    *,
    numerics: Numerics,
    sink_logits: Tensor | None = None,
    memo: Memo | None = None,
) -> Tensor:
    """Computes causal attention of queries [B, Sq, Hq, D] over all keys of the text so far. Returns [B, Sq, Hq, D].

    mask: of the model, bool or additive, or intervals; it includes causality if it has queries. None: causality.
    memo: results that the layers of one forward share.
    """
    rule, bias, order = used.rule, used.bias, None
    chooses_tokens = used.hides and used.is_padding
    shown = None
    if not chooses_tokens or (bias is not None and rule.sink_tokens):
        shown = _visible_elements(query, key, mask, memo)
    if bias is not None and rule.sink_tokens:
        bias = _without_sinks(bias, rule, shown)
    if chooses_tokens:
        present = _present_keys(mask, used.first_query)
        visible = Visible(intervals=_choose_tokens(used, present, query.shape[1]))
    else:
        order, scores, visible = _token_order(rule, shown), used.scores.detach(), shown
        if order is not None:
            scores, visible = (
                order.align(scores, 2),
                shown._replace(intervals=order.align_intervals(shown.intervals)),
            )
        if used.hides:
            visible = _choose_among_shown(query, key, rule, scores, visible, memo)
        if order is not None and bias is None:
            visible = visible._replace(intervals=order.restore_intervals(visible.intervals))
    if order is not None and bias is not None:  # the delay of the bias counts tokens
        query = order.align(query, 1, of_queries=True)
        key, value, bias = order.align(key, 1), order.align(value, 1), order.align(bias, 2)
    out, statistics = attention(
        query, key, value, bias, visible, numerics, bias_delay=used.delay, memo=memo
    )
    out = with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)
    return out if order is None or bias is None else order.restore(out, 1, of_queries=True)


def attend_with_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | KeyIntervals | None,
    used: KeyScores,
    *,
    slots: DynamicMaskLayer,
    layer_idx: int,
    present: Tensor | None,
    numerics: Numerics,
    scores_are_bias: bool,
    sink_logits: Tensor | None = None,
    memo: Memo | None = None,
) -> Tensor:
    """Computes attention of new tokens to the keys in a DynamicMaskCache and to each other. Returns [B, S, Hq, Dv].

    Args:
        query, key, value: of the new tokens, [B, S, Hq, D], [B, S, Hkv, D] and [B, S, Hkv, Dv].
        mask: the mask of a prompt, as in `attend_with_keys`.
        used: how a prompt uses its scores. The slots have to follow its rule.
        present: which new tokens are no padding, bool [B, S]; None: all.
        scores_are_bias: as in `KVSlots.step`.
    """
    slots.check_rule(used.rule, layer_idx)
    scores = used.scores.float()
    if slots.is_empty:
        slots.check_kernels(key, value)  # before attention that the slots could not take over
        out = attend_with_keys(
            query, key, value, mask, used, numerics=numerics, sink_logits=sink_logits, memo=memo
        )
        slots.fill(key, value, scores, present)
        return out
    out, lse = slots.attend(
        query, key, value, scores, present,
        scale=numerics.scale, softcap=numerics.softcap, scores_are_bias=scores_are_bias,
    )  # fmt: skip
    return out if sink_logits is None else add_sink(out, lse, sink_logits)[0]


def _check_phase(call: ScoreCall) -> None:
    layer, error = call.layer, None
    where = "context parallelism" if call.pieces is not None else "a DynamicMaskCache"
    if layer.score_phase != "hard":
        error = ValueError(
            f"phase: got {layer.score_phase!r} with {where}, expected 'hard': in another phase a query sees all earlier keys"
        )
    elif call.pieces is not None and call.slots is not None and layer.dense_prefill:
        error = ValueError(
            "dense_prefill: got True with a cache and context parallelism, expected False: a prompt would see all keys of "
            "all earlier ranks"
        )
    elif call.pieces is not None and call.slots is not None:
        try:
            call.slots.check_rule(layer.score_rule, layer.layer_idx)
        except ValueError as raised:
            error = raised
    if error is not None and call.pieces is not None:
        call.pieces.group.collectives.raise_on_all_ranks("begin_exchange", error)
    if error is not None:
        raise error


def _bias_to_learn(scores: Tensor, rule: SelectionRule) -> tuple[Tensor | None, int]:
    """Returns the bias of value 0 through which scores of old keys learn, and its delay. The bias is None if nothing learns.

    Scores choose keys and change nothing else, so a cache holds keys and no gates. The choice has no derivative.
    """
    bias = bias_to_learn(scores)
    return bias, 0 if bias is None else rule.recent_window


# ---- Which keys a query sees ------------------------------------------------------------------------


def _visible_elements(
    query: Tensor, key: Tensor, mask: Tensor | KeyIntervals | None, memo: Memo | None
) -> Visible:
    """Returns the elements that a mask shows."""
    mask, intervals, additive = normalize_mask(mask, None, query, key, chooses=False, memo=memo)
    if additive is not None:
        raise ValueError(
            "attention_mask: got an additive mask that adds other values than 0 to visible keys, expected a bool mask or key intervals"
        )
    has_queries = intervals is not None or (mask is not None and mask.dim() == 4)
    return Visible(mask, not has_queries, intervals)


def _token_order(rule: SelectionRule, visible: Visible) -> TokenOrder | None:
    """Returns the order in which columns count tokens for the rule's recent window; None: they do already."""
    shown = visible.intervals
    if not counts_tokens(rule) or not isinstance(shown, KeyIntervals) or shown.heads > 1:
        return None
    return TokenOrder.of_padding(shown.shown_keys()[:, 0], shown.query_length)


def _choose_tokens(used: KeyScores, present: Tensor | None, query_length: int) -> KeyIntervals:
    """Chooses keys under causality and padding. The recent window counts tokens. present: bool [B, 1, Sk]; None: all."""
    rule, scores, order = used.rule, used.scores.detach(), None
    if present is not None and counts_tokens(rule):
        order = TokenOrder.of_padding(present[:, 0], query_length, used.first_query)
    options = {**rule._asdict(), "query_length": query_length}
    if order is None:
        return select_key_intervals(
            scores, **options, key_mask=present, query_position=used.first_query
        )
    # With all padding on the left, that after a static cache's last token too, the last query is at the last key.
    aligned, present = order.align(scores, 2), order.align(present, 2)
    return order.restore_intervals(select_key_intervals(aligned, **options, key_mask=present))


def _choose_among_shown(
    query: Tensor,
    key: Tensor,
    rule: SelectionRule,
    scores: Tensor,
    shown: Visible,
    memo: Memo | None,
) -> Visible:
    """Chooses keys among those that a mask shows."""
    is_dense = shown.intervals is None and shown.mask is not None and shown.mask.dim() == 4
    if is_dense and rule.shows_unselected_keys():
        raise ValueError(
            "attention_mask: got a mask that no key intervals describe with recent keys or sinks, expected padding [B, tokens], "
            "causality, or packed texts"
        )
    return select_visible(rule, scores, query, key, None, shown, by_operator=False, memo=memo)


def _present_keys(
    mask: Tensor | KeyIntervals | None, first_query: Tensor | int | None
) -> Tensor | None:
    """Returns whether any query sees each key, bool [B, 1, Sk], or None for all keys.

    first_query: the column of the first query, in a static cache.
    """
    if mask is None:
        return None
    if isinstance(mask, KeyIntervals):
        return mask.shown_keys()
    if mask.dim() == 4 and mask.shape[1] == 1 and not mask.is_floating_point():
        mask = mask.bool()
        present = mask.any(2)
        queries, keys = mask.shape[2:]
        if queries == 1:
            return present
        first = torch.arange(keys, device=mask.device)
        last = torch.arange(queries, device=mask.device)[:, None] + first_query
        if may_read() and torch.equal(mask, present[:, :, None] & (first <= last)):
            return present
    raise ValueError(
        f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with a static cache, expected padding [B, tokens]; a "
        "static cache has no other masks over several queries, those of packed texts among them"
    )


def _without_sinks(bias: Tensor, rule: SelectionRule, visible: Visible) -> Tensor:
    """Sets a bias [B, Hkv, Sk] to 0 for the sinks of each document, because their scores decide nothing.

    visible: what the layer's mask shows. In a dense mask, a document begins where a query sees only itself.
    """
    if visible.intervals is not None:
        shown = visible.intervals.shown_keys()
        ranks = rank_in_document(shown, visible.intervals.intervals[..., 1].cummax(-1).values)
    elif visible.mask is not None:
        shown = visible.mask.any(-2) if visible.mask.dim() == 4 else visible.mask
        ranks = shown.cumsum(-1) - 1
        if visible.mask.dim() == 4 and visible.mask.shape[-2] == ranks.shape[-1]:
            ranks = ranks - _shown_before_documents(visible.mask, shown)
    else:
        ranks = torch.arange(bias.shape[2], device=bias.device)
        shown = torch.ones_like(ranks, dtype=torch.bool)
    return torch.where(shown & (ranks < rule.sink_tokens), 0, bias)


def _shown_before_documents(mask: Tensor, shown: Tensor) -> Tensor:
    """Returns, for each key, how many shown keys come before its document, [..., S]. mask: [..., S, S]."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    begins = torch.where(mask.int().argmax(-1) == places, places, 0).cummax(-1).values
    return F.pad(shown.cumsum(-1), (1, 0)).gather(-1, begins)
