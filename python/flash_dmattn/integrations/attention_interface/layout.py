"""The two orders of dimensions of queries, keys and values."""

from torch import Tensor


def swap_heads_and_tokens(*states: Tensor) -> tuple[Tensor, ...]:
    """Swaps two dimensions: this package's attention takes [B, S, H, D]; transformers and its caches take [B, H, S,
    D]."""
    return tuple(t.transpose(1, 2) for t in states)
