"""Selects the best keys of every query before attention. The result is a Visibility."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._core.checks import MASK_VALUE, add_query_dimension, may_read, selection_scores_argument
from .._core.gradients import repeat_interleave
from .dense import topk_mask
from .intervals import KeyIntervals, broadcasts, intersect
from .patterns import prefix_lm
from .recognise import AllowedElements, Memo, mask_of_intervals
from .rule import SelectionRule
from .select_intervals import select_among_intervals, select_by_rule
from .visibility import TopKeysByBias, Visibility


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
    """
    rule = scored_rule.rule
    if visible.keys is None:
        rule.check_causality(visible.is_causal)
        if uses_library_kernels and _is_by_bias(scored_rule, query, key, bias, visible.mask):
            return Visibility(None, visible.is_causal, TopKeysByBias(rule.keep_window_size))
    scores, allowed = scores_and_allowed(query, key, visible.mask, bias, scored_rule)
    if rule.has_room_for(key.shape[1]) and scored_rule.scores is None:
        return visible  # a bias of NaN masks its key
    if query.shape[1] == 0:
        return visible
    if scores.requires_grad:
        scores = scores.detach()
    selection = _Selection(rule, query, key, scores, visible.is_causal, memo)
    if visible.keys is not None:
        return selection.among_intervals(visible.keys, allowed)
    is_dense = allowed is not None and allowed.shape()[2] > 1
    if is_dense and rule.selection == "per_query":
        return selection.under_dense_mask(allowed)
    key_mask = None
    if allowed is not None:
        scores, key_mask = match_heads(query, key, scores, allowed.seen_by_any_query())
    # The part of the mask that the selection does not include.
    remaining_mask = visible.mask if is_dense else None
    scores, key_mask = _expand_heads_together(scores, key_mask)
    rule = rule.rule_of_heads(scores.shape[1])
    selected = select_by_rule(scores, key_mask, rule, visible.is_causal, query.shape[1])
    return Visibility(remaining_mask, False, selected)


def _is_by_bias(
    scored_rule: ScoredRule, query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None
) -> bool:
    """Whether TopKeysByBias describes the selection: a window that hides some key, by a bias for each key or for
    all heads."""
    rule = scored_rule.rule
    if bias is None or bias.dim() != 3 or mask is not None or scored_rule.scores is not None:
        return False
    if rule.selection != "per_query" or not rule.is_window():
        return False
    _, heads, length = bias.shape
    _, seqlen_k, heads_kv, _ = key.shape
    hides_keys = length == seqlen_k > rule.keep_window_size
    return hides_keys and broadcasts(heads, heads_kv) and query.shape[1] > 0


class _Selection(NamedTuple):
    """Selects the best keys among those that intervals, or a mask with a query dimension, show."""

    rule: SelectionRule
    query: Tensor
    key: Tensor
    scores: Tensor  # [B, H, Sk]
    is_causal: bool
    memo: Memo | None

    def among_intervals(self, shown: KeyIntervals, allowed: AllowedElements | None) -> Visibility:
        """Selects the best of the keys that `shown` shows. allowed: a mask or a bias that hides some of them."""
        if self.rule.selection == "global":
            return self._global_among_intervals(shown, allowed)
        if allowed is None:
            selected = self._best_of_intervals(shown)
            if selected is not None:
                return Visibility(keys=selected)
            return self.under_dense_mask(AllowedElements(mask_of_intervals(shown, self.memo), None))
        mask = mask_of_intervals(shown, self.memo)
        if allowed.mask is not None:
            mask = torch.logical_and(*match_heads(self.query, self.key, mask, allowed.mask))
        return self.under_dense_mask(allowed._replace(mask=mask))

    def _global_among_intervals(
        self, shown: KeyIntervals, allowed: AllowedElements | None
    ) -> Visibility:
        rule = self.rule
        if rule.shows_unselected_keys():
            raise ValueError(
                "selection: got 'global' with recent_window or sink_tokens and key_intervals, expected 'per_query'"
            )
        key_mask = shown.shown_keys()
        if allowed is not None:
            key_mask = key_mask & allowed.seen_by_any_query()
        scores, key_mask = _expand_heads_together(
            *match_heads(self.query, self.key, self.scores, key_mask)
        )
        rule = rule.rule_of_heads(scores.shape[1])
        best = select_by_rule(scores, key_mask, rule, self.is_causal, shown.query_length)
        best, intervals = match_heads(self.query, self.key, best.intervals, shown.intervals)
        selected = intersect(
            KeyIntervals(best, shown.query_length), shown.with_intervals(intervals)
        )
        is_dense = allowed is not None and allowed.shape()[2] > 1
        return Visibility(allowed.mask if is_dense else None, False, selected)

    def _best_of_intervals(self, shown: KeyIntervals) -> KeyIntervals | None:
        """Returns the best keys as intervals, or None if intervals cannot describe the result."""
        if self.is_causal:
            shown = intersect(shown, causal_intervals(self.query, self.key))
        scores, intervals = match_heads(self.query, self.key, self.scores, shown.intervals)
        if intervals is not shown.intervals:
            shown = shown.with_intervals(intervals)
        rule = self.rule.rule_of_heads(max(scores.shape[1], shown.heads))
        return select_among_intervals(scores, shown, rule, self.memo)

    def under_dense_mask(self, allowed: AllowedElements) -> Visibility:
        """Selects the best of the keys that a mask with a query dimension allows.

        The usual masks are recognised by reading them, and the result is intervals. A mask cannot be read in compiled
        code or while a CUDA graph is captured. Then, and for any other mask, the result is a mask of the same size.
        """
        if any(map(torch._C._functorch.is_batchedtensor, allowed.parts())):
            raise RuntimeError(
                "keep_window_size: got a window under torch.func.vmap over a mask with a query dimension, which attention "
                "does not support; expected the mask's own batch dimension"
            )
        query, key, scores = self.query, self.key, self.scores
        shown = allowed.to_intervals(self.memo) if may_read() else None
        if shown is not None:
            selected = self._best_of_intervals(shown)
            if selected is not None:
                return Visibility(keys=selected)
        if not self.rule.is_window():
            raise ValueError(
                "keep_window_size: got a rule with recent keys, sinks, a threshold or a window for each head under a mask or bias "
                "with a query dimension that no key intervals of documents describe; expected padding [B, Sk], or key_intervals"
            )
        window = self.rule.keep_window_size
        scores, mask = match_heads(query, key, scores, allowed.to_mask())
        mask = mask & causal_intervals(query, key).to_mask() if self.is_causal else mask
        return Visibility(topk_mask(scores[:, :, None], mask, window, None), self.is_causal)


def causal_intervals(query: Tensor, key: Tensor) -> KeyIntervals:
    """Returns causality as intervals."""
    return prefix_lm(key.shape[1], 0, query_length=query.shape[1], device=key.device)


def _expand_heads_together(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Expands scores and key_mask to their common shape."""
    if key_mask is None:
        return scores, None
    shape = torch.broadcast_shapes(scores.shape, key_mask.shape)
    return scores.expand(shape), key_mask.expand(shape)


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


def scores_and_allowed(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, scored_rule: ScoredRule
) -> tuple[Tensor, AllowedElements | None]:
    """Returns scores [B, H, Sk], and the elements that mask and bias allow, or None if they allow all."""
    seqlen_k = key.shape[1]
    name, scores, hiding = "attn_bias", bias, None
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
    if bias is not None and bias.dim() == 3 and scored_rule.rule.sink_tokens > 0:
        hiding = bias.detach()[:, :, None]
    elif scores is not bias and bias is not None:
        if bias.dim() == 4:
            hiding = bias.detach()
        else:
            unmasked = bias.detach() > MASK_VALUE[bias.dtype]
            scores, unmasked = match_heads(query, key, scores, unmasked)
            scores = torch.where(unmasked, scores, float("nan"))
    if mask is None and hiding is None:
        return scores, None
    mask, hiding = (
        t if t is None or t.shape[3] == seqlen_k else t.expand(-1, -1, -1, seqlen_k)
        for t in (mask, hiding)
    )
    return scores, AllowedElements(mask, hiding)


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
