"""Attention of one layer with the arguments that transformers passes. No module here imports transformers, so the 1.x names need none."""
