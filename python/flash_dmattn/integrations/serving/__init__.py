"""The states of sequences in engines that serve many of them (transformers' continuous batching, vLLM). An engine gives the
memory and the rows; `flash_dmattn.extend_ragged` is the attention of its steps."""
