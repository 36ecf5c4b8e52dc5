"""A Doge language model trained on real text with dynamic mask attention: `python examples/demo.py`."""
