"""Prefix caching of a model with slots: a state is kept where prompts begin to differ.

By itself vLLM keeps the state of a prompt's last whole block, so prompts that share less than that block never hit. It
has a second place, `Request.shared_prefix_boundary`, at which its scheduler ends a chunk and keeps the state. vLLM finds
this boundary from the cached keys of attention layers, and a model with slots has none.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

REMEMBERED = 1 << 17  # blocks of earlier prompts; a block takes about 250 bytes


def make_scheduler(vllm_config, **options) -> Scheduler:
    """Makes vLLM's scheduler with shared prefixes. vLLM gets the name of this function as `scheduler_cls`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler = (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **options)
    manager = scheduler.kv_cache_manager
    manager.get_computed_blocks = _SharedPrefixes(manager.get_computed_blocks, scheduler.block_size)
    return scheduler


class _SharedPrefixes:
    """Finds cached blocks as vLLM does, and the boundary of what a request shares with earlier ones."""

    def __init__(self, find_cached: Callable, block_size: int):
        self._find_cached, self._block_size = find_cached, block_size
        self._first_requests: dict[bytes, str] = {}  # by the hash of a block and all before it

    def __call__(self, request) -> tuple:
        """Returns the blocks, the number of their tokens, and the boundary, or 0 if no further token is shared."""
        blocks, cached, boundary = self._find_cached(request)
        if not request.skip_reading_prefix_cache:
            boundary = max(boundary, self._shared_tokens(request))
        return blocks, cached, boundary if boundary > cached else 0

    def _shared_tokens(self, request) -> int:
        """Returns how many tokens an earlier request shares, in whole blocks and without the last token."""
        shared = 0
        for number, block in enumerate(request.block_hashes, 1):
            # A request that has to wait, or that was preempted, comes again and shares nothing with itself.
            first = self._first_requests.setdefault(block, request.request_id)
            if first != request.request_id:
                shared = number
        while len(self._first_requests) > REMEMBERED:
            del self._first_requests[next(iter(self._first_requests))]
        return min(shared, (request.num_tokens - 1) // self._block_size) * self._block_size
