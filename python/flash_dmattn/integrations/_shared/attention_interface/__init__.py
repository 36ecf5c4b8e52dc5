"""Attention of one layer with the arguments that transformers passes.

No module here imports transformers, so the names of version 1.x work without it.
"""
