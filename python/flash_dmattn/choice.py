"""The choice of the best keys of every query, made before attention, as a form of visibility."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _ops
from ._arguments import MASK_VALUE, check_window, may_read, selection_scores_argument
from .allowed_keys import AllowedPairs, select_among
from .key_intervals import check_selection, intersect, prefix_lm, select
from .utils.mask import topk_mask
from .visibility import BestByBias, KeyList, KeyRanks, Visibility


class Choice(NamedTuple):
    """A choice of keys: keep_window_size, selection and selection_scores of the public functions."""

    window: int | None = None  # None: no choice
    selection: str = "per_query"
    scores: Tensor | None = None  # None: the bias

    def checked(self, query: Tensor, key: Tensor) -> Choice:
        window, selection, scores = self
        check_selection(selection)
        if window is not None:
            check_window(window)
        if scores is None:
            return self
        checked = selection_scores_argument(scores, query, key)
        if window is None:
            raise ValueError(
                f"selection_scores: got shape {tuple(scores.shape)} without keep_window_size, by which they choose; expected "
                "both or neither"
            )
        return Choice(window, selection, checked)


def choose(
    choice: Choice,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    visible: Visibility,
    by_library: bool,
) -> Visibility:
    """The best of the visible keys for every query.

    bias: 3-d where it has one value per key.
    by_library: the library's backends compute attention. They choose by the bias themselves, and on a GPU take lists and
        ranks.
    """
    if visible.keys is not None:
        raise ValueError(
            "key_intervals: got them together with keep_window_size, expected one of the two; "
            "keep_window_size chooses among all keys. Combine them with select_key_intervals and "
            "intersect, or use flash_dmattn_varlen_func for packed documents"
        )
    scores, allowed = _scores_and_allowed(query, key, visible.mask, bias, choice.scores)
    if choice.window >= key.shape[1] and choice.scores is None:
        return visible  # a key whose bias is NaN is masked by it
    if query.shape[1] == 0:
        return visible
    by_bias = choice.scores is None and allowed is None and choice.selection == "per_query"
    if by_library and by_bias and scores.shape[1] in (1, key.shape[2]):
        return Visibility(None, visible.is_causal, BestByBias(choice.window))
    if scores.requires_grad:
        scores = scores.detach()
    on_gpu = by_library and scores.is_cuda
    is_dense = allowed is not None and allowed.shape()[2] > 1
    if is_dense and choice.selection == "per_query":
        return _choose_under_dense_mask(
            choice.window, query, key, scores, allowed, visible.is_causal, on_gpu
        )
    key_mask = None
    if allowed is not None:
        scores, key_mask = match_heads(query, key, scores, allowed.to_any_query())
    remaining_mask = visible.mask if is_dense else None  # its part outside the choice
    scores, key_mask = _matched(scores, key_mask)
    if on_gpu and choice.selection == "global" and choice.window > 0:
        chosen = KeyList(*_ops.select_key_list(scores, key_mask, choice.window))
        return Visibility(remaining_mask, visible.is_causal, chosen)
    chosen = select(
        scores,
        key_mask,
        choice.window,
        choice.selection,
        visible.is_causal,
        query.shape[1],
    )
    return Visibility(remaining_mask, False, chosen)


def _matched(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both in one shape."""
    if key_mask is None:
        return scores, None
    shape = torch.broadcast_shapes(scores.shape, key_mask.shape)
    return scores.expand(shape), key_mask.expand(shape)


def _choose_under_dense_mask(
    window: int,
    query: Tensor,
    key: Tensor,
    scores: Tensor,
    allowed: AllowedPairs,
    is_causal: bool,
    by_rank: bool,
) -> Visibility:
    """The best keys among those that a mask with a query dimension allows.

    They are intervals under the usual masks, which are recognised by reading the mask. That can neither be compiled
    nor captured in a CUDA graph; then, and under any other mask, they are ranks beside the mask, or without the
    GPU's kernels a mask of the size of the given one.
    """
    if any(map(torch._C._functorch.is_batchedtensor, allowed.parts())):
        raise RuntimeError(
            "keep_window_size: got it under torch.func.vmap over a mask with a query dimension, which attention "
            "does not support; expected the mask's own batch dimension"
        )
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]

    def past():
        return prefix_lm(seqlen_k, 0, query_length=seqlen_q, device=scores.device)

    shown = allowed.to_intervals() if may_read() else None
    if shown is not None:
        shown = intersect(shown, past()) if is_causal else shown
        scores_of_heads, intervals = match_heads(query, key, scores, shown.intervals)
        chosen = select_among(scores_of_heads, shown.with_intervals(intervals), window)
        if chosen is not None:
            return Visibility(keys=chosen)
    if by_rank:
        ranks = KeyRanks(*_ops.rank_keys(scores, *allowed, window, is_causal))
        mask = allowed.mask
        if mask is None:  # attention applies its bias itself
            mask = scores.new_ones((1, 1, 1, seqlen_k), dtype=torch.bool)
        return Visibility(mask, is_causal, ranks)
    scores, mask = match_heads(query, key, scores, allowed.to_mask())
    mask = mask & past().to_mask() if is_causal else mask
    return Visibility(topk_mask(scores[:, :, None], mask, window, None))


def one_per_key(scores: Tensor | None) -> Tensor | None:
    """Scores or a bias as [B, H, Sk] where they are the same for every query."""
    has_one_query = scores is not None and scores.dim() == 4 and scores.shape[2] == 1
    return scores.squeeze(2) if has_one_query else scores


def _scores_and_allowed(query, key, mask, bias, selection_scores):
    """Scores [B, H, Sk], and the dense mask to choose under, or None for all keys."""
    seqlen_k = key.shape[1]
    name, scores, hiding = "attn_bias", bias, None
    if selection_scores is not None:
        name, scores = "selection_scores", one_per_key(selection_scores)
    if scores is None or scores.dim() != 3 or scores.shape[2] != seqlen_k:
        got = "no scores" if scores is None else f"{name} of shape {tuple(scores.shape)}"
        raise ValueError(
            f"keep_window_size: got {got}, expected one score per key in attn_bias or selection_scores: "
            f"[B, H, {seqlen_k}] or [B, H, 1, {seqlen_k}]. For scores per pair, build a mask with "
            "flash_dmattn.utils.mask.create_mask"
        )
    # A bias that masks hides its keys from the choice. Where it is the score, these are the worst keys anyway.
    if selection_scores is not None and bias is not None:
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
    return scores, AllowedPairs(mask, hiding)


def match_heads(query, key, *parts):
    """The parts for every query head, unless all of them are one for each key head or for all."""
    if all(part.shape[1] in (1, key.shape[2]) for part in parts):
        return parts
    return tuple(repeat_heads(part, query, key) for part in parts)


def repeat_heads(tensor: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Repeats the key heads of a mask or bias for every query head of their groups."""
    heads_q, heads_kv = query.shape[2], key.shape[2]
    if tensor is None or tensor.shape[1] in (1, heads_q):
        return tensor
    return tensor.repeat_interleave(heads_q // heads_kv, 1)
