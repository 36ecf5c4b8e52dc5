"""The 1.x module of this name."""

from ..padding import pad_input, unpad_input

__all__ = ["pad_input", "unpad_input"]
