"""The two orders of dimensions of queries, keys and values."""

from torch import Tensor


def swap_heads_and_tokens(*states: Tensor) -> tuple[Tensor, ...]:
    """Returns views that swap [B, S, H, D], the order of this package, and [B, H, S, D], the order of transformers."""
    return tuple(t.transpose(1, 2) for t in states)
