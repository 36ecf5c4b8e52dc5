"""A Doge language model trained on real text with dynamic mask attention: `python -m flash_dmattn demo`."""
