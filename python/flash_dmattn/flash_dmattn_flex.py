"""The FlexAttention backend's function."""

from .availability import unavailable_reason


def flex_dmattn_func(*args, **kwargs):
    """Takes the arguments of flash_dmattn_func. This version has no such backend: it always raises."""
    raise RuntimeError(
        f"flex_dmattn_func: {unavailable_reason('flex')}. Use flash_dmattn_func instead."
    )
