"""The two orders of dimensions of queries, keys and values."""

from torch import Tensor


def swap_heads_and_tokens(*states: Tensor) -> tuple[Tensor, ...]:
    """Views [B, S, H, D], the order of this package's attention, of [B, H, S, D], that of transformers and of its caches, and back."""
    return tuple(t.transpose(1, 2) for t in states)
