"""Defines which keys a query sees under a rule, by a comparison of each query, key and competitor."""

import torch
from torch import Tensor


def visible_keys(
    scores, rule, *, is_causal, query_positions, query_documents, key_positions, key_documents, present, last_position
):  # fmt: skip
    """Returns bool [Sq, Sk].

    scores, key_positions, key_documents, present: [Sk]. query_positions, query_documents: [Sq].
    last_position: [documents], the position of each document's last query, at which global selection takes place.
    """
    scores = scores.double()
    window = len(scores) if rule.keep_window_size is None else rule.keep_window_size
    threshold = -torch.inf if rule.score_threshold is None else rule.score_threshold
    sink = torch.zeros(len(scores), dtype=torch.bool)
    for document in key_documents.unique():
        document_keys = ((key_documents == document) & present).nonzero()[:, 0]
        sink[document_keys[key_positions[document_keys].argsort()][: rule.sink_tokens]] = True
    later = key_positions[:, None] > key_positions
    beats = (scores[:, None] > scores) | ((scores[:, None] == scores) & later)
    same = query_documents[:, None] == key_documents
    age = query_positions[:, None] - key_positions
    chosen_at = query_positions
    if rule.selection == "global":
        chosen_at = last_position[query_documents]
    delay = 0 if rule.recent_competes else rule.recent_window
    competes = same & present & ~sink & (scores >= threshold)
    if is_causal:
        competes &= chosen_at[:, None] - key_positions >= delay
    beaten_by = competes.float() @ beats.float()  # competitors that beat the key, below 2**24
    kept = sink | (competes & (beaten_by < window))
    if is_causal:
        kept |= age < rule.recent_window
    seen = same & present & kept
    return seen & (age >= 0) if is_causal else seen


def select(scores: Tensor, window: int, allowed: Tensor) -> Tensor:
    """Returns the keys that fewer than `window` allowed keys beat, bool [B, H, Sq, Sk].

    scores: [B, H, Sk]. allowed: bool [B, H, Sq, Sk].
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    a, b = scores[..., :, None], scores[..., None, :]
    beats = (a > b) | ((a == b) & (position[:, None] > position))  # [.., j beats, j is beaten]
    candidates = allowed & ~scores.isnan()[:, :, None]
    return candidates & (candidates.float() @ beats.float() < window)


def causal_elements(seqlen_q: int, seqlen_k: int) -> Tensor:
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
