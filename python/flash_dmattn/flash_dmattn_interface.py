"""The 1.x module of this name."""

from ._core.availability import get_available_backends
from .functional import flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_varlen_func

__all__ = [
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "get_available_backends",
]
