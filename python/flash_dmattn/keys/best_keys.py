"""The best keys of a row as a list of their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.checks import check_count
from .rule import SelectionRule
from .select_intervals import per_key_scores, select_by_rule


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
    window = SelectionRule(keep_window_size).checked_rule().keep_window_size
    return best_keys(*per_key_scores(scores, key_mask), window)


def best_keys(
    scores: Tensor, key_mask: Tensor | None, window: int | tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Does what `select_keys` does, for arguments in normal form: scores and key_mask [B, H, Sk]."""
    rule = SelectionRule(window)
    scores = rule.expand_scores(scores)
    size = min(max(rule.windows()), scores.shape[2])
    if size == 0:
        empty = scores.new_empty((*scores.shape[:2], 0), dtype=torch.int32)
        return empty, scores.new_zeros(scores.shape[:2], dtype=torch.int32)
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
