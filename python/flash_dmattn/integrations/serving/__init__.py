"""Support for engines that serve many sequences, such as vLLM.

An engine provides the memory and the rows. `flash_dmattn.extend_ragged` computes the attention of its steps.
"""
