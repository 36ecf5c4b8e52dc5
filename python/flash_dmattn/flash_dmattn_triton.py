"""The Triton backend's function."""

from .availability import unavailable_reason


def triton_dmattn_func(*args, **kwargs):
    """Takes the arguments of flash_dmattn_func. This version has no Triton backend: it always raises."""
    raise RuntimeError(
        f"triton_dmattn_func: {unavailable_reason('triton')}. Use flash_dmattn_func instead."
    )
