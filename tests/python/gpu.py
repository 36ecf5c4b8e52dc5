"""What the tests of the GPU share."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from cases import Case
from flash_dmattn import backends
from oracle import Problem

_REASON = next(b.reason for b in backends() if b.name == "cuda")
needs_gpu = pytest.mark.skipif(
    not any(b.name == "cuda" and b.available for b in backends()), reason=_REASON
)


def on_gpu(value, device="cuda"):
    """A copy in GPU memory: of tensors with their strides, of problems and cases with all they hold."""
    if isinstance(value, Tensor):
        storage = torch.empty(0, dtype=value.dtype).set_(value.detach().untyped_storage())
        copy = storage.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, Problem):
        tensors = {f.name: getattr(value, f.name) for f in fields(value)}
        moved = {n: on_gpu(t, device) for n, t in tensors.items() if isinstance(t, Tensor)}
        return replace(value, **moved)
    if isinstance(value, Case):
        intervals = value.key_intervals
        return Case(
            on_gpu(value.problem, device),
            None if intervals is None else intervals.to(device),
            value.nonfinite,
        )
    raise TypeError(type(value).__name__)
