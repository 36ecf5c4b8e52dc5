"""The 1.x module of this name."""

from .functional import flex_dmattn_func

__all__ = ["flex_dmattn_func"]
