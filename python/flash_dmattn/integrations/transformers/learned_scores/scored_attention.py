"""The attention function of layers with learned scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...._core.checks import may_read
from ...._core.numerics import Numerics
from ...._dispatch import attention, with_lse
from ....keys.in_torch import rank_in_document
from ....keys.intervals import KeyIntervals
from ....keys.rule import SelectionRule
from ....keys.select import select_key_intervals, select_visible
from ....keys.visible import Visible
from ....merge import add_sink
from ..._shared.attention_interface.dtypes import cast_states, target_dtype
from ..._shared.attention_interface.keywords import check_mask_keywords
from ..._shared.attention_interface.layer_masks import (
    as_key_intervals,
    is_causal_mask,
    normalize_mask,
)
from ..._shared.attention_interface.layout import swap_heads_and_tokens
from ..._shared.attention_interface.named_attention import mask_driven_attention_forward
from ..._shared.attention_interface.packed_sequences import hide_other_sequences
from ..._shared.attention_interface.token_order import TokenOrder, counts_tokens
from ..cache_layer import DynamicMaskLayer
from ..compat import CACHE
from ..slot_attention import attend_in_batch, attend_with_slots
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
    """Computes attention in the form of transformers' attention functions.

    In layers without scores, queries see what the mask shows.


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
        states = swap_heads_and_tokens(query, key, value)
        return _attend_in_batch(call, states, scores, scaling, softcap, s_aux)
    check_mask_keywords(kwargs, has_mask=mask is not None)
    mask = hide_other_sequences(mask, kwargs, query.shape[0], query.shape[2], key.shape[2])
    states = swap_heads_and_tokens(query, key, value)
    states = cast_states(states, target_dtype(layer, query))
    numerics = Numerics.from_arguments(scaling, None, softcap, "saturate", None)
    states = _States(*states, scores, mask, numerics, s_aux)
    if call.pieces is not None:
        return _attend_to_pieces(call, states)
    if call.slots is not None:
        return _attend_with_cache(call, states)
    intervals = as_key_intervals(mask, query.shape[2], key.shape[2])
    if intervals is not None:
        states = states._replace(mask=intervals)
    return (_attend_to_all if layer.score_phase == "soft" else _attend_to_chosen)(call, states)


class _States(NamedTuple):
    """The arguments of causal attention: query, key and value [B, S, H, D], scores [B, Hkv, S], and the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    mask: Tensor | KeyIntervals | None
    numerics: Numerics
    sink_logits: Tensor | None

    def visible(self) -> Visible:
        """Returns the elements that the mask shows. A mask with a query dimension includes causality."""
        mask, intervals, additive = normalize_mask(
            self.mask, None, self.query, self.key, chooses=False, memo=None
        )
        if additive is not None:
            raise ValueError(
                "attention_mask: got an additive mask that adds other values than 0 to visible keys, expected a bool mask or key intervals"
            )
        has_queries = intervals is not None or (mask is not None and mask.dim() == 4)
        return Visible(mask, not has_queries, intervals)

    def attend(self, bias: Tensor | None, visible: Visible, bias_delay: int = 0) -> Tensor:
        out, statistics = attention(*self[:3], bias, visible, self.numerics, bias_delay=bias_delay)
        return with_lse(out, statistics, return_lse=False, sink_logits=self.sink_logits)

    def attend_in_order(
        self, bias: Tensor | None, visible: Visible, bias_delay: int, order: TokenOrder | None
    ) -> Tensor:
        """Computes attention in which the delay of the bias counts tokens. order: None: the columns count them."""
        if order is None or bias is None:
            return self.attend(bias, visible, bias_delay)
        aligned = self._replace(
            query=order.align(self.query, 1, of_queries=True),
            key=order.align(self.key, 1),
            value=order.align(self.value, 1),
        )
        keys = order.align_intervals(visible.intervals)
        out = aligned.attend(order.align(bias, 2), visible._replace(intervals=keys), bias_delay)
        return order.restore(out, 1, of_queries=True)


def _attend_to_all(call: ScoredCall, states: _States) -> Tensor:
    """Computes the soft phase: the log gates of old keys are their bias. Recent keys and sinks have no bias."""
    layer = call.layer
    if call.query_position is not None:
        raise ValueError(
            f"{CACHE}: got a static one in the phase 'soft', expected a cache that grows, or the phase 'hard'"
        )
    visible = states.visible()
    rule = layer.score_rule
    bias = _without_sinks(states.scores - layer.scorer.first_score, rule, visible)
    return states.attend_in_order(bias, visible, rule.recent_window, _token_order(rule, visible))


def _token_order(rule: SelectionRule, visible: Visible) -> TokenOrder | None:
    """Returns the order in which columns count tokens for the rule's recent window; None: they do already."""
    shown = visible.intervals
    if not counts_tokens(rule) or not isinstance(shown, KeyIntervals) or shown.heads > 1:
        return None
    return TokenOrder.of_padding(shown.shown_keys()[:, 0], shown.query_length)


def _choose_tokens(
    scores: Tensor,
    rule: SelectionRule,
    present: Tensor | None,
    query_length: int,
    query_position: Tensor | int | None = None,
) -> KeyIntervals:
    """Chooses keys under causality and padding. The recent window counts tokens.

    present: bool [B, 1, Sk]; None: all. query_position: the column of the first query, Sk - Sq by default.
    """
    order = None
    if present is not None and counts_tokens(rule):
        order = TokenOrder.of_padding(present[:, 0], query_length, query_position)
    place = {"query_length": query_length, "query_position": query_position}
    if order is None:
        return select_key_intervals(scores, **rule._asdict(), key_mask=present, **place)
    # With all padding on the left, that after a static cache's last token too, the last query is at the last key.
    chosen = select_key_intervals(
        order.align(scores, 2),
        **rule._asdict(),
        key_mask=order.align(present, 2),
        query_length=query_length,
    )
    return order.restore_intervals(chosen)


def _without_sinks(bias: Tensor, rule: SelectionRule, visible: Visible) -> Tensor:
    """Sets a bias [B, Hkv, Sk] to 0 for the sinks of each document, because their scores decide nothing.

    visible: what the layer's mask shows. In a dense mask, a document begins where a query sees only itself.
    """
    if not rule.sink_tokens:
        return bias
    if visible.intervals is not None:
        shown = visible.intervals.shown_keys()
        ranks = rank_in_document(shown, visible.intervals.intervals[..., 1].cummax(-1).values)
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
    """Returns, for each key, how many shown keys come before its document, [..., S]. mask: [..., S, S]."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    begins = torch.where(mask.int().argmax(-1) == places, places, 0).cummax(-1).values
    return F.pad(shown.cumsum(-1), (1, 0)).gather(-1, begins)


def _attend_to_chosen(call: ScoredCall, states: _States) -> Tensor:
    """Computes the hard phase: attention of the base model to the keys that the rule keeps.

    Scores choose these keys and change nothing else, so a cache holds keys and no gates. The choice has no derivative.
    Scores learn through the gradient of a bias of value 0 on old keys, without sinks.
    """
    rule = call.layer.score_rule
    bias, delay = _bias_to_learn(states.scores, rule)
    order = None
    if bias is not None:
        shown = states.visible()
        bias, order = _without_sinks(bias, rule, shown), _token_order(rule, shown)
    scores, queries = states.scores.detach(), states.query.shape[1]
    if call.is_prompt and call.layer.dense_prefill:
        visible = states.visible()
    elif states.mask is None or _is_padding(states.mask, call, queries, states.key.shape[1]):
        present = _present_keys(states.mask, call.query_position)
        visible = Visible(
            intervals=_choose_tokens(scores, rule, present, queries, call.query_position)
        )
    else:
        visible = _choose_among_shown(states, rule, scores)
    return states.attend_in_order(bias, visible, delay, order)


def _choose_among_shown(states: _States, rule: SelectionRule, scores: Tensor) -> Visible:
    """Chooses keys among those that a mask with queries shows. The recent window counts tokens."""
    shown = states.visible()
    if shown.intervals is None and shown.mask.dim() == 4 and rule.shows_unselected_keys():
        raise ValueError(
            "attention_mask: got a mask that no key intervals describe with recent keys or sinks, expected padding [B, tokens], "
            "causality, or packed texts"
        )
    order = _token_order(rule, shown)
    if order is not None:
        scores = order.align(scores, 2)
        shown = shown._replace(intervals=order.align_intervals(shown.intervals))
    chosen = select_visible(rule, scores, states.query, states.key, None, shown, by_operator=False)
    if order is None:
        return chosen
    return chosen._replace(intervals=order.restore_intervals(chosen.intervals))


def _bias_to_learn(scores: Tensor, rule: SelectionRule) -> tuple[Tensor | None, int]:
    """Returns the bias of value 0 through which scores learn, and its delay. The bias is None if nothing learns.

    It still includes sinks.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return None, 0
    # A key with a score of -inf is never among the best, so it gets no gradient.
    return (scores - scores.detach()).nan_to_num(), rule.recent_window


def _attend_to_pieces(call: ScoredCall, states: _States) -> Tensor:
    """Computes the hard phase under context parallelism: this rank has a piece of each sequence."""
    layer, slots = call.layer, call.slots
    try:
        _check_layer_of_pieces(layer, slots)
    except Exception as error:
        call.pieces.group.wire.raise_on_all_ranks("begin_exchange", error)
    bias, delay = _bias_to_learn(states.scores, layer.score_rule)
    return call.pieces.attend(
        *states[:3],
        states.scores.detach(),
        layer.score_rule,
        slots,
        bias=bias,
        scale=states.numerics.scale,
        softcap=states.numerics.softcap,
        bias_delay=delay,
        sink_logits=states.sink_logits,
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
    slots.check_rule(layer.score_rule, layer.layer_idx)


def _is_padding(mask: Tensor | KeyIntervals, call: ScoredCall, queries: int, keys: int) -> bool:
    """Whether a mask consists of causality and padding alone.

    Masks of intervals do, if the cache holds earlier keys. For a static cache the answer is always yes: `_present_keys`
    refuses its other masks.
    """
    if call.query_position is not None:  # a static cache
        return True
    return isinstance(mask, KeyIntervals) and call.cache is not None and queries < keys


def _present_keys(
    mask: Tensor | KeyIntervals | None, query_position: Tensor | int | None
) -> Tensor | None:
    """Returns whether any query sees each key, bool [B, 1, Sk], or None for all keys.

    query_position: the position of the first query, in a static cache.
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
        last = torch.arange(queries, device=mask.device)[:, None] + query_position
        if may_read() and torch.equal(mask, present[:, :, None] & (first <= last)):
            return present
    raise ValueError(
        f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)} with a static cache, expected padding [B, tokens]; a "
        "static cache has no other masks over several queries, those of packed texts among them"
    )


def _attend_in_batch(
    call: ScoredCall,
    states: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Computes attention of a step's tokens, [1, T, H, D], each to its own sequence. Returns [1, T, Hq, D]."""
    out, lse = attend_in_batch(
        call.cache,
        call.layer.layer_idx,
        call.batch,
        states,
        scores,
        scale=scaling,
        softcap=softcap,
        scores_are_bias=False,
        return_lse=True,
    )
    out = out.to(states[0].dtype)
    return out if s_aux is None else add_sink(out, lse, s_aux)[0]


def _attend_with_cache(call: ScoredCall, states: _States) -> Tensor:
    """Computes attention of new tokens to the keys in a DynamicMaskCache and to each other."""
    slots, layer = call.slots, call.layer
    if layer.score_phase != "hard":
        raise ValueError(
            f"{CACHE}: got a DynamicMaskCache in the phase {layer.score_phase!r}, which attends to all keys; expected the phase "
            "'hard', or transformers' DynamicCache"
        )
    scores = states.scores.float()

    def attend_to_prompt(key_mask: Tensor | None) -> Tensor:
        if layer.dense_prefill:
            visible = states.visible()
        else:
            present = None if key_mask is None else key_mask[:, None]
            chosen = _choose_tokens(scores, layer.score_rule, present, scores.shape[2])
            visible = Visible(intervals=chosen)
        return states.attend(None, visible)

    return attend_with_slots(
        slots,
        layer.score_rule,
        layer.layer_idx,
        states[:3],
        scores,
        states.mask,
        attend_to_prompt,
        scale=states.numerics.scale,
        softcap=states.numerics.softcap,
        scores_are_bias=False,
        sink_logits=states.sink_logits,
    )
