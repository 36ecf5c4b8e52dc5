"""The 1.x module of this name."""

from .functional import triton_dmattn_func

__all__ = ["triton_dmattn_func"]
