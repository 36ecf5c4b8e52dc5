"""Attention of queries to the keys that a rule keeps by scores: to all keys of the text so far, or to slots of a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.checks import may_read
from ..._core.numerics import Numerics
from ..._dispatch import attention, with_lse
from ...keys.in_torch import rank_in_document
from ...keys.intervals import KeyIntervals
from ...keys.recognise import Memo
from ...keys.rule import SelectionRule
from ...keys.select import select_by_rule, select_key_intervals, select_visible
from ...keys.visible import Visible
from ...merge import add_sink
from .._shared.layer_call import normalize_mask
from .cache_layer import DynamicMaskLayer
from .token_order import ScoredTokens, TokenOrder, counts_tokens


class KeyScores(NamedTuple):
    """The scores of a call's keys, and their use.

    rule: selects the keys that a query sees.
    hides: False: every shown key stays visible, and scores act only as the bias.
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


class LayerOptions(NamedTuple):
    """The arguments of a layer's attention besides its keys. memo: results that the layers of one forward share."""

    numerics: Numerics
    sink_logits: Tensor | None = None  # [Hq]
    memo: Memo | None = None


def attend_with_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | KeyIntervals | None,
    used: KeyScores,
    options: LayerOptions,
) -> Tensor:
    """Computes causal attention of queries [B, Sq, Hq, D] over all keys of the text so far. Returns [B, Sq, Hq, D].

    mask: of the model, bool or additive, or intervals; it includes causality if it has queries. None: causality.
    """
    numerics, sink_logits, memo = options
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
            scores = order.align(scores, 2)
            visible = shown._replace(intervals=order.align_intervals(shown.intervals))
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
    if sink_logits is not None:
        out = with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)
    return out if order is None or bias is None else order.restore(out, 1, of_queries=True)


def attend_with_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | KeyIntervals | None,
    used: KeyScores,
    options: LayerOptions,
    slots: DynamicMaskLayer,
    present: Tensor | None,
    scores_are_bias: bool,
) -> Tensor:
    """Computes attention of new tokens to the keys in a DynamicMaskCache and to each other. Returns [B, S, Hq, Dv].

    Args:
        query, key, value: of the new tokens, [B, S, Hq, D], [B, S, Hkv, D] and [B, S, Hkv, Dv].
        mask: the mask of a prompt, as in `attend_with_keys`.
        used: how a prompt uses its scores. The slots follow its rule.
        present: which new tokens are no padding, bool [B, S]; None: all.
        scores_are_bias: as in `KVSlots.step`.
    """
    tokens = ScoredTokens(key, value, used.scores.float(), present)
    if slots.is_empty:
        slots.check_kernels(key, value)  # before attention that the slots could not take over
        out = attend_with_keys(query, key, value, mask, used, options)
        slots.fill(tokens)
        return out
    scale, softcap, *_ = options.numerics
    out, lse = slots.attend(
        query, tokens, scale=scale, softcap=softcap, scores_are_bias=scores_are_bias
    )
    return out if options.sink_logits is None else add_sink(out, lse, options.sink_logits)[0]


# ---- Which keys a query sees ------------------------------------------------------------------------


def _visible_elements(
    query: Tensor, key: Tensor, mask: Tensor | KeyIntervals | None, memo: Memo | None
) -> Visible:
    """Returns the elements that a mask shows."""
    mask, intervals, additive = normalize_mask(mask, None, query, key, memo=memo)
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
    if order is not None:
        # With all padding on the left, that after a static cache's last token too, the last query is at the last key.
        scores, present = order.align(scores, 2), order.align(present, 2)
        chosen = select_by_rule(scores, present, rule, True, query_length)
        return order.restore_intervals(chosen)
    if used.first_query is None:
        return select_by_rule(scores, present, rule, True, query_length)
    return select_key_intervals(
        scores,
        **rule._asdict(),
        key_mask=present,
        query_length=query_length,
        query_position=used.first_query,
    )


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
