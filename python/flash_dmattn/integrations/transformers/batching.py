"""Continuous batching with slots. In versions of transformers without a paged cache, models get no manager."""

from .compat import HAS_SLOTS_IN_BATCHES

if HAS_SLOTS_IN_BATCHES:
    from .slot_manager import PagedAttentionCache, batch_of, make_manager
else:
    PagedAttentionCache, batch_of, make_manager = (), None, None

__all__ = ["PagedAttentionCache", "batch_of", "make_manager"]
