"""Whether this package can compute anything on this machine."""

from functools import cache


@cache
def is_flash_dmattn_available() -> bool:
    """Whether the package is importable and at least one backend runs here."""
    try:
        from flash_dmattn import get_available_backends
    except ImportError:
        return False
    return bool(get_available_backends())
