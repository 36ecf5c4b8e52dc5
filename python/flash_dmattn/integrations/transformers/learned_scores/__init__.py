"""Learned scores for the attention layers of any decoder of transformers: `add_learned_scores` and what belongs to it."""

from .add import add_learned_scores, remove_learned_scores, set_score_phase
from .files import load_scores, save_scores
from .scored_attention import NAMES, scored_attention_forward

__all__ = [
    "NAMES",
    "add_learned_scores",
    "load_scores",
    "remove_learned_scores",
    "save_scores",
    "scored_attention_forward",
    "set_score_phase",
]
