"""Selects the best keys of every query before attention. The result is a Visibility."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._core.checks import MASK_VALUE, add_query_dimension, selection_scores_argument
from .._core.gradients import repeat_interleave
from .dense import topk_mask
from .intervals import KeyIntervals, broadcasts, intersect
from .patterns import prefix_lm
from .recognise import Memo, intervals_of_mask, mask_of_intervals
from .rule import SelectionRule
from .select_intervals import select_among_intervals, select_by_rule
from .visibility import Visibility


class ScoredRule(NamedTuple):
    """A rule with the scores that it reads: the argument selection_scores of the public functions."""

    rule: SelectionRule = SelectionRule()
    scores: Tensor | None = None  # None: the bias

    @staticmethod
    def from_arguments(scores: Tensor | None, *rule: object) -> ScoredRule:
        """Makes a ScoredRule from arguments of the public functions. rule: the arguments of SelectionRule in order."""
        if scores is None and rule == _NO_PARTS:
            return NO_RULE
        return ScoredRule(SelectionRule(*rule), scores)

    def checked_rule(self, query: Tensor, key: Tensor) -> ScoredRule:
        if self is NO_RULE:
            return self
        rule = self.rule.checked_rule()
        if isinstance(rule.keep_window_size, tuple):
            rule.check_heads(key.shape[-2])
        if self.scores is None:
            return self if rule is self.rule else ScoredRule(rule)
        checked = selection_scores_argument(self.scores, query, key)
        if not rule.hides_keys():
            raise ValueError(
                f"selection_scores: got shape {tuple(self.scores.shape)} without keep_window_size, by which they select; "
                "expected both or neither"
            )
        return ScoredRule(rule, checked)


NO_RULE = ScoredRule()
_NO_PARTS = tuple(NO_RULE.rule)


def apply_selection(
    scored_rule: ScoredRule,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    visible: Visibility,
    uses_library_kernels: bool,
    memo: Memo | None = None,
) -> Visibility:
    """Selects the best of the visible keys for every query.

    bias: 3-d if it has one value per key.
    uses_library_kernels: whether the library's backends compute attention. They can select keys by the bias themselves.
    memo: results that the layers of one forward share, or None.

    A mask with a query dimension is read, and becomes intervals if it is one of the usual masks. It cannot be read in
    compiled code or while a CUDA graph is captured. Then, and for any other mask, the result is a mask of its size.
    """
    rule, shown, is_causal = scored_rule.rule, visible.keys, visible.is_causal
    queries = query.shape[1]
    if shown is None:
        rule.check_causality(is_causal)
        if uses_library_kernels and _is_by_bias(scored_rule, query, key, bias, visible.mask):
            return Visibility(is_causal=is_causal, window=rule.keep_window_size)
    scores, mask = scores_and_mask(query, key, visible.mask, bias, scored_rule)
    if rule.has_room_for(key.shape[1]) and scored_rule.scores is None:
        return visible  # a bias of NaN masks its key
    if queries == 0:
        return visible
    scores = scores.detach()
    is_dense = mask is not None and mask.shape[2] > 1
    if rule.selection == "global" or (shown is None and not is_dense):
        key_mask = None if mask is None else mask.any(2)
        if shown is not None:
            if rule.shows_unselected_keys():
                raise ValueError(
                    "selection: got 'global' with recent_window or sink_tokens and key_intervals, expected 'per_query'"
                )
            shown_keys = shown.shown_keys()
            if key_mask is not None:
                shown_keys = torch.logical_and(*match_heads(query, key, shown_keys, key_mask))
            key_mask = shown_keys
        if key_mask is not None:
            scores, key_mask = match_heads(query, key, scores, key_mask)
        heads = scores.shape[1] if key_mask is None else max(scores.shape[1], key_mask.shape[1])
        selected = select_by_rule(scores, key_mask, rule.rule_of_heads(heads), is_causal, queries)
        if shown is not None:
            best, intervals = match_heads(query, key, selected.intervals, shown.intervals)
            selected = intersect(selected.with_intervals(best), shown.with_intervals(intervals))
        # The selection does not include a mask with a query dimension.
        return Visibility(visible.mask if is_dense else None, False, selected)
    if mask is not None and torch._C._functorch.is_batchedtensor(mask):
        raise RuntimeError(
            "keep_window_size: got a window under torch.func.vmap over a mask with a query dimension, which attention "
            "does not support; expected the mask's own batch dimension"
        )
    if mask is not None:
        if shown is not None:
            mask = torch.logical_and(*match_heads(query, key, mask_of_intervals(shown, memo), mask))
        # A mask that is made here is no other layer's.
        shown = intervals_of_mask(mask, memo if mask is visible.mask else None)
    if shown is not None:
        causal = intersect(shown, causal_intervals(query, key)) if is_causal else shown
        some_scores, intervals = match_heads(query, key, scores, causal.intervals)
        if intervals is not causal.intervals:
            causal = causal.with_intervals(intervals)
        heads = max(some_scores.shape[1], causal.heads)
        selected = select_among_intervals(some_scores, causal, rule.rule_of_heads(heads), memo)
        if selected is not None:
            return Visibility(keys=selected)
    if not rule.is_window():
        raise ValueError(
            "keep_window_size: got a rule with recent keys, sinks, a threshold or a window for each head under a mask or bias "
            "with a query dimension that no key intervals of documents describe; expected padding [B, Sk], or key_intervals"
        )
    scores, mask = match_heads(
        query, key, scores, mask_of_intervals(shown, memo) if mask is None else mask
    )
    mask = mask & causal_intervals(query, key).to_mask() if is_causal else mask
    return Visibility(topk_mask(scores[:, :, None], mask, rule.keep_window_size, None), is_causal)


def _is_by_bias(
    scored_rule: ScoredRule, query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None
) -> bool:
    """Whether the operator select_and_attend makes the selection: a window that hides some key, by a bias for each key
    or for all heads."""
    rule = scored_rule.rule
    if bias is None or bias.dim() != 3 or mask is not None or scored_rule.scores is not None:
        return False
    if rule.selection != "per_query" or not rule.is_window():
        return False
    _, heads, length = bias.shape
    _, seqlen_k, heads_kv, _ = key.shape
    hides_keys = length == seqlen_k > rule.keep_window_size
    return hides_keys and broadcasts(heads, heads_kv) and query.shape[1] > 0


def causal_intervals(query: Tensor, key: Tensor) -> KeyIntervals:
    """Returns causality as intervals."""
    return prefix_lm(key.shape[1], 0, query_length=query.shape[1], device=key.device)


def select_elements(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    intervals: KeyIntervals | None,
    keep_window_size: int,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Selects the best allowed keys of every query by dense scores [B, H, Sq, Sk], as a mask.

    mask: bool [B, H, Sk] or [B, H, Sq, Sk]; at most one of mask and intervals is given.
    """
    if intervals is not None:
        mask = intervals.to_mask()
    if mask is not None:
        scores, mask = match_heads(query, key, scores, add_query_dimension(mask))
    if is_causal:
        past = causal_intervals(query, key).to_mask()
        mask = past if mask is None else past & mask
    return topk_mask(scores, mask, keep_window_size, MASK_VALUE[scores.dtype])


def squeeze_query_dimension(scores: Tensor | None) -> Tensor | None:
    """Returns scores or a bias as [B, H, Sk] if they are the same for every query."""
    has_one_query = scores is not None and scores.dim() == 4 and scores.shape[2] == 1
    return scores.squeeze(2) if has_one_query else scores


def scores_and_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, scored_rule: ScoredRule
) -> tuple[Tensor, Tensor | None]:
    """Returns scores [B, H, Sk], and the elements that mask and bias show, bool [B or 1, H or 1, Sq or 1, Sk], or None
    if they show all."""
    seqlen_k = key.shape[1]
    name, scores = "attn_bias", bias
    if scored_rule.scores is not None:
        name, scores = "selection_scores", squeeze_query_dimension(scored_rule.scores)
    elif not scored_rule.rule.reads_scores() and (bias is None or bias.dim() == 4):
        scores = query.new_zeros((1, 1, seqlen_k))
    if scores is None or scores.dim() != 3 or scores.shape[2] != seqlen_k:
        got = "no scores" if scores is None else f"{name} of shape {tuple(scores.shape)}"
        raise ValueError(
            f"keep_window_size: got {got}, expected one score per key in attn_bias or selection_scores: "
            f"[B, H, {seqlen_k}] or [B, H, 1, {seqlen_k}]. For a score per element, build a mask with "
            "flash_dmattn.utils.mask.create_mask"
        )
    # A bias that masks hides its keys from the selection. If the bias is the score, these keys are the worst ones
    # anyway, but they could still be sinks.
    if bias is not None and (bias.dim() == 4 or scored_rule.rule.sink_tokens > 0):
        unmasked = add_query_dimension(bias.detach() > MASK_VALUE[bias.dtype])
        if mask is not None:
            unmasked = torch.logical_and(*match_heads(query, key, mask, unmasked))
        mask = unmasked
    elif bias is not None and scores is not bias:
        unmasked = bias.detach() > MASK_VALUE[bias.dtype]
        scores, unmasked = match_heads(query, key, scores, unmasked)
        scores = torch.where(unmasked, scores, float("nan"))
    if mask is not None and mask.shape[3] != seqlen_k:
        mask = mask.expand(-1, -1, -1, seqlen_k)
    return scores, mask


def match_heads(query: Tensor, key: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Repeats the parts for every query head, unless each part has one head for each key head, or one for all heads."""
    if all(broadcasts(part.shape[1], key.shape[2]) for part in parts):
        return parts
    return tuple(repeat_heads(part, query, key) for part in parts)


def repeat_heads(
    tensor: Tensor | None, query: Tensor, key: Tensor, saturate: bool = True
) -> Tensor | None:
    """Repeats the key heads of a mask or bias for every query head of their groups."""
    heads_q, heads_kv = query.shape[2], key.shape[2]
    if tensor is None or broadcasts(tensor.shape[1], heads_q):
        return tensor
    return repeat_interleave(tensor, heads_q // heads_kv, 1, saturate)
