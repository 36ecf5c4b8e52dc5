"""The manager and the cache of continuous batching."""

from __future__ import annotations

import types
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import transformers
from packaging import version
from transformers import PreTrainedModel

from .copied_functions import with_globals

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache_allocators import CacheAllocator
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )

# The attribute of a model that holds its manager, with `persistent_manager`.
KEPT_MANAGER = "_cached_continuous_batching_manager"
HAS_SLOTS_IN_BATCHES = version.parse(transformers.__version__).release[:2] == (5, 24)


def set_continuous_batching(
    model: PreTrainedModel, names: Container[str], make_manager: Callable | None
) -> None:
    """Lets `make_manager(model, ...)` make this model's manager of continuous batching under implementations of these
    names. If make_manager is None, the model refuses continuous batching when it starts.

    4.57: it begins with any implementation, in a thread whose errors are only logged, and answers are cut off. Later
    versions raise for unknown implementations; up to 5.24 none takes a cache of another kind. #48305 (open) asks for states of
    one size per request, and #48735 (open) for paging by call instead of by model. Remove with `create_processor`.
    """

    def init_continuous_batching(self, *args, **kwargs):
        name = str(self.config._attn_implementation)
        if name.removeprefix("paged|") not in names:
            drop_slot_manager(self)  # transformers would take it for its own manager
            return type(self).init_continuous_batching(self, *args, **kwargs)
        if make_manager is not None and name in names:
            return make_manager(self, *args, **kwargs)
        raise ValueError(
            f"attn_implementation: got {name!r}, expected another one: continuous batching (generate_batch) has a paged "
            "cache, which flash_dmattn does not support. For a Doge it has slots, with transformers 5.24 and "
            f"enable_flash_dmattn; this is {transformers.__version__}. Use generate"
        )

    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = types.MethodType(init_continuous_batching, model)


def restore_continuous_batching(model: PreTrainedModel) -> None:
    """Undoes `set_continuous_batching`."""
    drop_slot_manager(model)
    vars(model).pop("init_continuous_batching", None)


def drop_slot_manager(model: PreTrainedModel) -> None:
    """Ends a manager with slots that a model keeps: its slots depend on the rule, its CUDA graphs on the parameters."""
    if getattr(getattr(model, KEPT_MANAGER, None), "has_slots", False):
        model.destroy_cached_continuous_batching_manager()


def create_processor(
    manager: ContinuousBatchingManager, allocator: type[CacheAllocator]
) -> ContinuousBatchProcessor:
    """Calls transformers' `manager._create_batch_processor()` with a cache that uses this allocator for full attention.

    5.24: #47809 has an allocator for each type of attention, in a table that it does not let others extend. Remove when that table
    is a registry, or when a manager has an attribute for the class of its cache.
    """
    from transformers.generation.continuous_batching import cache as caches
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    class SlotCache(caches.PagedAttentionCache):
        def __init__(self, *args, **kwargs):
            table = {**caches.ATTN_TYPE_TO_ALLOCATOR, caches.FULL_ATTENTION: allocator}
            make = with_globals(caches.PagedAttentionCache.__init__, ATTN_TYPE_TO_ALLOCATOR=table)
            make(self, *args, **kwargs)

    create = ContinuousBatchingManager._create_batch_processor
    return with_globals(create, PagedAttentionCache=SlotCache)(manager)
