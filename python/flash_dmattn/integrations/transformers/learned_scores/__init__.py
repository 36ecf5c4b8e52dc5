"""Learned scores for the attention layers of any decoder of transformers: `add.add_learned_scores` and what belongs to it."""
