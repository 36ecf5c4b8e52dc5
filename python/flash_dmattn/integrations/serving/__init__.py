"""Dynamic mask attention for engines that serve many sequences: their states, and the attention of a ragged step. An engine
that this package supports (transformers' continuous batching) gives the memory and the rows."""
