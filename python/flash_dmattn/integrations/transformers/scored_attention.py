"""Attention of queries to the keys that a rule keeps by scores, of all keys of the text so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.checks import add_query_dimension, may_read
from ..._core.numerics import Numerics
from ..._dispatch import attention, with_lse
from ...keys.in_torch import rank_in_document
from ...keys.intervals import KeyIntervals
from ...keys.recognise import Memo, cached_result
from ...keys.rule import SelectionRule
from ...keys.select import select_key_intervals, select_visible
from ...keys.visible import Visible
from .._shared.layer_call import normalize_mask, shows_only_tokens
from .._shared.token_order import TokenOrder, counts_tokens


class KeyScores(NamedTuple):
    """The scores of a call's keys, and their use.

    rule: selects the keys that a query sees.
    bias: [B, Hkv, Sk], added for queries at least `delay` tokens after the key. The sinks of the rule have none.
    first_query: the column of the first query, in a static cache.
    """

    rule: SelectionRule
    scores: Tensor  # [B, Hkv, Sk]
    bias: Tensor | None = None
    delay: int = 0
    first_query: Tensor | int | None = None


class LayerOptions(NamedTuple):
    """The arguments of a layer's attention besides its keys. memo: results that the layers of one forward share."""

    numerics: Numerics
    sink_logits: Tensor | None = None  # [Hq]
    memo: Memo | None = None


# ---- What a mask shows ------------------------------------------------------------------------------


def visible_elements(
    mask: Tensor | KeyIntervals | None,
    query: Tensor,
    key: Tensor,
    memo: Memo | None = None,
    added_values_hide: bool = False,
) -> Visible:
    """Returns what a model's mask shows.

    mask: bool or additive, or intervals; it includes causality if it has queries. None: causality.
    added_values_hide: whether an element to which an additive mask adds another value than 0 is hidden; else it raises.
    """
    mask, intervals, additive = normalize_mask(mask, None, query, key, memo=memo)
    if additive is not None:
        if not added_values_hide:
            raise ValueError(
                "attention_mask: got an additive mask that adds other values than 0 to visible keys, expected a bool mask or key intervals"
            )
        mask = additive == 0
    has_queries = intervals is not None or (mask is not None and mask.dim() == 4)
    mask = mask if mask is None else add_query_dimension(mask)
    return Visible(mask, not has_queries, intervals)


def visible_tokens(
    mask: Tensor | KeyIntervals | None,
    first_query: Tensor | int | None = None,
    *,
    is_checked: bool = False,
) -> Visible:
    """Returns what a mask of causality and padding shows, without intervals. Raises ValueError for another mask.

    first_query: the column of the first query, in a static cache.
    is_checked: whether intervals are known to be such a mask.
    """
    if mask is None:
        return Visible(is_causal=True)
    if isinstance(mask, KeyIntervals):
        if is_checked or shows_only_tokens(mask, first_query):
            return Visible(mask.shown_keys()[:, :, None], True)
        mask = mask.intervals
    elif mask.dim() == 4 and mask.shape[1] == 1 and not mask.is_floating_point():
        mask = mask.bool()
        queries, keys = mask.shape[2:]
        if queries == 1:
            return Visible(mask, True)
        present = mask.any(2, keepdim=True)
        first = torch.arange(keys, device=mask.device)
        last = torch.arange(queries, device=mask.device)[:, None] + first_query
        if may_read() and torch.equal(mask, present & (first <= last)):
            return Visible(present, True)
    raise ValueError(
        f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with a static cache, expected padding [B, tokens]; a "
        "static cache has no other masks over several queries, those of packed texts among them"
    )


def shown_keys(visible: Visible) -> Tensor | None:
    """Returns the keys that some query sees, bool [B, H, Sk], where 1 stands for a dimension that makes no difference; None: all."""
    if visible.intervals is not None:
        return visible.intervals.shown_keys()
    return None if visible.mask is None else visible.mask.any(-2)


# ---- Attention --------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    key_scores: KeyScores,
    options: LayerOptions,
    *,
    chooses: bool = True,
) -> Tensor:
    """Computes attention of queries [B, Sq, Hq, D] to the visible keys that the rule chooses. Returns [B, Sq, Hq, D].

    chooses: False: to all visible keys; scores act only as the bias.
    """
    numerics, sink_logits, memo = options
    bias, order = _bias(key_scores, visible), None
    if chooses or bias is not None:
        order = _token_order(key_scores, visible, query.shape[1], memo)
    if chooses:
        visible = _choose(query, key, key_scores, visible, order, memo)
        if bias is None and order is not None:
            visible, order = Visible(intervals=order.restore_intervals(visible.intervals)), None
    elif order is not None:
        visible = order.align_visible(visible)
    if order is not None:
        query = order.align(query, 1, of_queries=True)
        key, value, bias = order.align(key, 1), order.align(value, 1), order.align(bias, 2)
    out, statistics = attention(
        query, key, value, bias, visible, numerics, bias_delay=key_scores.delay, memo=memo
    )
    if sink_logits is not None:
        out = with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)
    return out if order is None else order.restore(out, 1, of_queries=True)


# ---- Which keys a query sees ------------------------------------------------------------------------


def _token_order(
    key_scores: KeyScores, visible: Visible, query_length: int, memo: Memo | None
) -> TokenOrder | None:
    """Returns the order in which columns count tokens for the rule's recent window; None: they do already."""
    mask, _, shown, _ = visible
    is_dense = mask is not None and mask.shape[2] > 1
    if not counts_tokens(key_scores.rule) or is_dense or (mask is None and shown is None):
        return None

    def find(_: Tensor) -> TokenOrder | None:
        present = shown_keys(visible)
        if present.shape[1] > 1:
            return None
        return TokenOrder.of_padding(present[:, 0], query_length, key_scores.first_query)

    return cached_result(memo, "token order", mask if shown is None else shown.intervals, find)


def _choose(
    query: Tensor,
    key: Tensor,
    key_scores: KeyScores,
    visible: Visible,
    order: TokenOrder | None,
    memo: Memo | None,
) -> Visible:
    """Chooses keys among the visible ones. The result is in the given order."""
    rule, scores = key_scores.rule, key_scores.scores.detach()
    # An order moves padding to the left, with it a static cache's free columns, so the last query is at the last key.
    if order is not None:
        scores, visible = order.align(scores, 2), order.align_visible(visible)
    elif key_scores.first_query is not None:
        chosen = select_key_intervals(
            scores,
            **rule._asdict(),
            key_mask=None if visible.mask is None else visible.mask[:, :, 0],
            query_length=query.shape[1],
            query_position=key_scores.first_query,
        )
        return Visible(intervals=chosen)
    is_dense = visible.mask is not None and visible.mask.shape[2] > 1
    if is_dense and rule.shows_unselected_keys():
        raise ValueError(
            "attention_mask: got a mask that no key intervals describe with recent keys or sinks, expected padding [B, tokens], "
            "causality, or packed texts"
        )
    return select_visible(rule, scores, query, key, None, visible, by_operator=False, memo=memo)


def _bias(key_scores: KeyScores, visible: Visible) -> Tensor | None:
    """Returns the bias, 0 for the sinks of each document, because their scores decide nothing.

    visible: what the layer's mask shows. In a dense mask, a document begins where a query sees only itself.
    """
    bias, sinks = key_scores.bias, key_scores.rule.sink_tokens
    if bias is None or not sinks:
        return bias
    shown = shown_keys(visible)
    if visible.intervals is not None:
        ranks = rank_in_document(shown, visible.intervals.intervals[..., 1].cummax(-1).values)
    elif visible.mask is not None:
        ranks = shown.cumsum(-1) - 1
        if visible.mask.shape[-2] == ranks.shape[-1]:
            ranks = ranks - _shown_before_documents(visible.mask, shown)
    else:
        ranks = torch.arange(bias.shape[2], device=bias.device)
        shown = torch.ones_like(ranks, dtype=torch.bool)
    return torch.where(shown & (ranks < sinks), 0, bias)


def _shown_before_documents(mask: Tensor, shown: Tensor) -> Tensor:
    """Returns, for each key, how many shown keys come before its document, [..., S]. mask: [..., S, S]."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    begins = torch.where(mask.int().argmax(-1) == columns, columns, 0).cummax(-1).values
    return F.pad(shown.cumsum(-1), (1, 0)).gather(-1, begins)
