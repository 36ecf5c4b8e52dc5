"""Selection: from a rule, scores and what is visible to the keys that each query keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core import ops
from .._core.checks import (
    MASK_VALUE,
    add_query_dimension,
    check_count,
    check_tensor,
    resolve_flag,
    squeeze_query_dimension,
)
from .among_intervals import select_among_intervals
from .in_torch import best_elements, intervals_of_rule
from .intervals import (
    KeyIntervals,
    broadcast_shapes,
    intersect,
    unchecked_intervals,
)
from .patterns import causal_intervals
from .positions import KeyPositions, check_length
from .recognise import Memo, intervals_of_mask, mask_of_intervals
from .rule import RuleParts, SelectionRule, takes_rule
from .visible import Visible, match_heads


@takes_rule
def select_key_intervals(
    scores: Tensor,
    keep_window_size: int | Sequence[int] | None = None,
    *,
    is_causal: bool = True,
    key_mask: Tensor | None = None,
    query_length: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_position: int | Tensor | None = None,
    **rule: Unpack[RuleParts],
) -> KeyIntervals:
    """Returns the intervals of the keys that a rule keeps for each query by their scores.

    scores: [B, H, key_length] (or [B, H, 1, key_length], or [B, key_length]), any floating dtype. The
        selection is not differentiable: no gradient flows to the scores.
    keep_window_size, rule: a KeyRule.
    is_causal: query row i may see keys up to i + key_length - query_length. True by default, unlike in flash_dmattn_func.
    key_mask: bool [B, key_length] or [B, H, key_length]; False: the key is not present.
    query_length: defaults to key_length.
    cu_seqlens_k, cu_seqlens_q: offsets of documents packed one after the other, as in packed_documents: int32
        [documents + 1], or [B, documents + 1] if rows of the batch have documents of their own. A query selects among
        the keys of its own document.
    key_positions: the position of each key in its row, if it is not the key's index: integers [key_length],
        [B, key_length] or [B, H, key_length]. No two keys of a row may have the same position. With documents,
        cu_seqlens_k are offsets of positions.
    query_position: the position of the first query row, an integer or integers [B]. The other rows follow it. The
        default is key_length - query_length, or 0 with documents.

    Returns intervals of shape [B, H, key_length, 2], which include is_causal. The time is
    O(key_length log keep_window_size); with documents or positions the keys are sorted first.
    """
    rule = SelectionRule.from_arguments(keep_window_size, rule)
    is_causal = resolve_flag(is_causal, "is_causal")
    if rule is None:
        raise TypeError("keep_window_size: got None, expected a number of keys, or score_threshold")
    rule.check_causality(is_causal)
    scores, key_mask = _per_key_scores(scores, key_mask)
    query_length = scores.shape[2] if query_length is None else query_length
    check_length(query_length, "query_length")
    if all(t is None for t in (cu_seqlens_k, cu_seqlens_q, key_positions, query_position)):
        return select_by_rule(scores, key_mask, rule, is_causal, query_length)
    keys = KeyPositions.from_arguments(
        scores.shape[2],
        query_length,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        key_mask=key_mask,
        key_positions=key_positions,
        query_position=query_position,
        device=scores.device,
        batch_and_heads=scores.shape[:2],
    )
    return select_at(keys, scores, rule, is_causal)


def select_keys(
    scores: Tensor, keep_window_size: int | Sequence[int], key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the positions of the `keep_window_size` best keys of each row.

        keys, counts = select_keys(scores, 1024)
        best = key.gather(1, keys.clamp(min=0).transpose(1, 2)[..., None].expand(-1, -1, -1, D).long())

    scores: [B, H, Sk] (or [B, H, 1, Sk], or [B, Sk]), any floating dtype. The selection has no gradient.
    keep_window_size: the number w of keys to select, 0 or more; a sequence has one number for each head.
    key_mask: bool [B, Sk] or [B, H, Sk]; False: the key is not present.

    Higher scores win; of two keys with equal scores, the more recent one wins. Keys that are hidden or have the score
    NaN are never selected. The host waits for no device. The time is O(Sk log w).

    Returns (keys, counts):
        keys: int32 [B, H, min(w, Sk)] with the largest w, ascending positions, padded with -1.
        counts: int32 [B, H], the number of selected keys.
    """
    if not isinstance(keep_window_size, Sequence):
        check_count(keep_window_size, "keep_window_size")
    rule = SelectionRule(keep_window_size).checked_rule()
    return best_keys(*_per_key_scores(scores, key_mask), rule)


def best_keys(
    scores: Tensor, key_mask: Tensor | None, rule: SelectionRule
) -> tuple[Tensor, Tensor]:
    """Does what `select_keys` does, for scores and key_mask [B, H, Sk] and a rule that is windows alone."""
    scores = rule.expand_scores(scores)
    size = min(max(rule.windows()), scores.shape[2])
    selected = select_by_rule(scores, key_mask, rule, True, 1).intervals
    return indices_of_true(selected[..., 1] > 0, size)


def indices_of_true(mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Finds the elements of a mask [.., L] that are true. Returns (indices, counts).

    indices: int32 [.., size], the first `size` true elements, ascending, padded with -1.
    counts: int32 [..], how many elements are true.
    """
    rank = mask.cumsum(-1, dtype=torch.int32)
    counts = rank[..., -1] if mask.shape[-1] else rank.sum(-1, dtype=torch.int32)
    # An additional last element takes all other indices.
    rank_or_end = torch.where(mask, rank - 1, size).clamp(max=size)
    index = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    indices = index.new_full((*mask.shape[:-1], size + 1), -1)
    indices.scatter_(-1, rank_or_end.long(), index.expand(mask.shape))
    return indices[..., :size], counts


def select_by_rule(
    scores: Tensor,
    key_mask: Tensor | None,
    rule: SelectionRule,
    is_causal: bool,
    query_length: int,
) -> KeyIntervals:
    """Does what select_key_intervals does, for arguments in normal form: scores and key_mask [B or 1, H or 1, Sk]."""
    if not ops.has_kernels_for(scores):
        keys = KeyPositions.from_arguments(
            scores.shape[2], query_length, key_mask=key_mask, device=scores.device
        )
        return select_at(keys, scores, rule, is_causal)
    scores, windows, operands, bound = rule.select_operands(scores, is_causal)
    if key_mask is not None:
        scores, key_mask = torch.broadcast_tensors(scores, key_mask)
    intervals = ops.select_key_intervals(
        scores, key_mask, windows, rule.selection, is_causal, query_length, *operands
    )
    return unchecked_intervals(intervals, query_length, bound)


def select_at(
    keys: KeyPositions, scores: Tensor, rule: SelectionRule, is_causal: bool
) -> KeyIntervals:
    """Selects keys in documents, or keys whose position is not their index. scores: [B, H, key_length]."""
    selected = intervals_of_rule(
        keys.scores_by_position(scores),
        keys.shown_keys(is_causal),
        rule,
        is_causal,
        keys.query_length,
    )
    bound = None
    if keys.same_length:
        bound = rule.key_bound(is_causal, documents=keys.document is not None)
    return unchecked_intervals(keys.intervals_by_index(selected), keys.query_length, bound)


def select_visible(
    rule: SelectionRule,
    own_scores: Tensor | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    visible: Visible,
    by_operator: bool,
    memo: Memo | None = None,
    bias_delay: int = 0,
) -> Visible:
    """Selects the best of the visible keys for every query.

    own_scores: the argument selection_scores, or None: the bias has the scores.
    bias: 3-d if it has one value per key.
    by_operator: whether the operator select_and_attend, of the library's backends, may make the selection.
    memo: results that the layers of one forward share, or None.
    bias_delay: as in `flash_dmattn_func`.

    A mask with a query dimension is read, and becomes intervals if it is one of the usual masks. It cannot be read in
    compiled code or while a CUDA graph is captured. Then, and for any other mask, the result is a mask of its size.
    """
    shown, is_causal, queries = visible.intervals, visible.is_causal, query.shape[1]
    by_operator = by_operator and own_scores is None and shown is None and visible.mask is None
    by_operator = by_operator and rule.selection == "per_query"
    if by_operator and bias is not None and bias.dim() == 3 and rule.is_window():
        _, heads, length = bias.shape
        hides_keys = length == key.shape[1] > rule.keep_window_size
        if hides_keys and (heads == 1 or heads == key.shape[2]) and queries > 0:
            return Visible(None, is_causal, None, rule.keep_window_size)
    if isinstance(rule.keep_window_size, tuple):
        rule.check_heads(key.shape[2])
    if shown is None and not is_causal:
        rule.check_causality(is_causal)
    scores, mask = scores_and_mask(rule, own_scores, query, key, bias, visible.mask)
    if queries == 0:
        return visible
    if own_scores is None and not bias_delay and rule.has_room_for(key.shape[1]):
        return visible  # a bias of NaN masks its key, but not before its delay
    is_dense = mask is not None and mask.shape[2] > 1
    if rule.selection == "per_query" and (shown is not None or is_dense):
        return _select_among(rule, scores, query, key, mask, visible, memo)
    # One selection for the row, among the keys that any query sees.
    key_mask = None if mask is None else mask.any(2)
    if shown is not None:
        if rule.shows_unselected_keys():
            raise ValueError(
                "selection: got 'global' with recent_window or sink_tokens and key_intervals, expected 'per_query'"
            )
        key_mask = _both(query, key, shown.shown_keys(), key_mask)
    rule, scores, key_mask = with_common_heads(rule, query, key, scores, key_mask)
    selected = select_by_rule(scores, key_mask, rule, is_causal, queries)
    if shown is not None:
        parts = match_heads(query, key, selected.intervals, shown.intervals)
        selected = intersect(*map(KeyIntervals.with_intervals, (selected, shown), parts))
    # The selection does not include a mask with a query dimension.
    return Visible(visible.mask if is_dense else None, False, selected)


def _select_among(
    rule: SelectionRule,
    scores: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    visible: Visible,
    memo: Memo | None,
) -> Visible:
    """Selects for each query among the keys that intervals, or a mask with a query dimension, show it."""
    shown, is_causal = visible.intervals, visible.is_causal
    if mask is not None:
        if torch._C._functorch.is_batchedtensor(mask):
            raise RuntimeError(
                "keep_window_size: got a window under torch.func.vmap over a mask with a query dimension, which attention "
                "does not support; expected the mask's own batch dimension"
            )
        if shown is not None:
            mask = _both(query, key, mask_of_intervals(shown, memo), mask)
        # A mask that is made here is no other layer's.
        shown = intervals_of_mask(mask, memo if mask is visible.mask else None)
    if shown is not None:
        allowed = intersect(shown, causal_intervals(query, key)) if is_causal else shown
        own_rule, own_scores, intervals = with_common_heads(
            rule, query, key, scores, allowed.intervals
        )
        if intervals is not allowed.intervals:
            allowed = allowed.with_intervals(intervals)
        selected = select_among_intervals(own_scores, allowed, own_rule, memo)
        if selected is not None:
            return Visible(intervals=selected)
    if not rule.is_window():
        raise ValueError(
            "keep_window_size: got a rule with recent keys, sinks, a threshold or a window for each head under a mask or bias "
            "with a query dimension that no key intervals of documents describe; expected padding [B, Sk], or key_intervals"
        )
    elements = Visible(mask_of_intervals(shown, memo) if mask is None else mask, is_causal)
    window, by_key = rule.keep_window_size, scores[:, :, None]
    return elements._replace(mask=select_elements(by_key, elements, window, query, key))


def select_elements(
    scores: Tensor,
    visible: Visible,
    count: int,
    query: Tensor,
    key: Tensor,
    least: float | None = None,
) -> Tensor:
    """Selects the `count` best visible keys of every query by scores [B, H, 1 or Sq, Sk], as a mask.

    visible: with a mask or intervals, not both. least: a score at or below it is never selected.
    """
    mask, is_causal, intervals, _ = visible
    if intervals is not None:
        mask = intervals.to_mask()
    if mask is None:
        mask = torch.ones(1, 1, 1, key.shape[1], dtype=torch.bool, device=key.device)
    scores, mask = match_heads(query, key, scores.detach(), add_query_dimension(mask))
    if is_causal:
        mask = mask & causal_intervals(query, key).to_mask()
    return best_elements(scores, mask, count, least)


def scores_and_mask(
    rule: SelectionRule,
    own_scores: Tensor | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns scores [B, H, Sk], and the elements that mask and bias show, bool [B or 1, H or 1, Sq or 1, Sk], or None
    if they show all. The arguments are those of `select_visible`."""
    seqlen_k = key.shape[1]
    name, scores = "attn_bias", bias
    if own_scores is not None:
        name, scores = "selection_scores", squeeze_query_dimension(own_scores)
    elif (bias is None or bias.dim() == 4) and not rule.reads_scores():
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
    if bias is not None and (bias.dim() == 4 or rule.sink_tokens > 0):
        unmasked = add_query_dimension(bias.detach() > MASK_VALUE[bias.dtype])
        mask = _both(query, key, unmasked, mask)
    elif bias is not None and scores is not bias:
        unmasked = bias.detach() > MASK_VALUE[bias.dtype]
        scores, unmasked = match_heads(query, key, scores, unmasked)
        scores = torch.where(unmasked, scores, float("nan"))
    if mask is not None and mask.shape[3] != seqlen_k:
        mask = mask.expand(-1, -1, -1, seqlen_k)
    return scores.detach(), mask


def _both(query: Tensor, key: Tensor, mask: Tensor, other: Tensor | None) -> Tensor:
    """Returns the elements that both masks show. Their heads may be those of queries or of keys."""
    return mask if other is None else torch.logical_and(*match_heads(query, key, mask, other))


def with_common_heads(
    rule: SelectionRule, query: Tensor, key: Tensor, scores: Tensor, other: Tensor | None
) -> tuple[SelectionRule, Tensor, Tensor | None]:
    """Repeats scores and another tensor [B, H, ..] as `match_heads` does, and returns them with the rule for their
    heads."""
    if other is not None:
        scores, other = match_heads(query, key, scores, other)
    if isinstance(rule.keep_window_size, tuple):
        heads = max(part.shape[1] for part in (scores, other) if part is not None)
        rule = rule.rule_of_heads(heads)
    return rule, scores, other


def _per_key_scores(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checks scores and key_mask, and returns both in normal form, [B, H, key_length]."""
    scores = _per_key(scores, "scores").detach()
    if not scores.is_floating_point():
        raise TypeError(f"scores: got {scores.dtype}, expected a floating dtype")
    if key_mask is not None:
        key_mask = _per_key(key_mask, "key_mask")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: got {key_mask.dtype}, expected torch.bool")
        shape = broadcast_shapes(scores.shape, key_mask.shape, "key_mask")
        scores, key_mask = scores.expand(shape), key_mask.expand(shape)
    return scores, key_mask


def _per_key(tensor: Tensor, argument: str) -> Tensor:
    """Returns a tensor with one value per key as [B, H, key_length]."""
    check_tensor(tensor, argument)
    if tensor.dim() == 2:
        return tensor[:, None]
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() == 4 and tensor.shape[2] == 1:
        return tensor[:, :, 0]
    raise ValueError(
        f"{argument}: got shape {tuple(tensor.shape)}, expected one value per key: [B, H, key_length], "
        "[B, H, 1, key_length] or [B, key_length]"
    )
