"""Measures the peak memory of a call in torch's allocators."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def peak_bytes(call: Callable[[], object], device: str) -> tuple[int, object]:
    """Returns the peak in bytes beyond earlier allocations, and the result of the call."""
    # Tensors in cycles that earlier calls left could be freed during this one. If a cycle holds an autograd graph that
    # holds another cycle, one collection frees only the first.
    while gc.collect():
        pass
    if torch.device(device).type != "cpu":
        gpu = torch.get_device_module(torch.device(device))
        gpu.synchronize()
        before = gpu.memory_allocated()
        gpu.reset_peak_memory_stats()
        kept = call()
        gpu.synchronize()
        return gpu.max_memory_allocated() - before, kept
    # Otherwise torch prints a line at every start and stop, and warnings about events that do not exist.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        kept = call()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        now += change
        peak = max(peak, now)
    return peak, kept


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
