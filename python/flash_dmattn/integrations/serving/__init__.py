"""Engines that serve many sequences: the states of sequences in transformers' continuous batching and in vLLM, and the server of
transformers. An engine gives the memory and the rows; `flash_dmattn.extend_ragged` is the attention of its steps."""
