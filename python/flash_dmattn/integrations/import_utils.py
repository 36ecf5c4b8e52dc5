"""The 1.x module of this name."""

from .._core.availability import get_available_backends

__all__ = ["is_flash_dmattn_available"]


def is_flash_dmattn_available() -> bool:
    """Returns whether a backend runs here."""
    return bool(get_available_backends())
