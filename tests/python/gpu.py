"""What the tests of the GPU share."""

from __future__ import annotations

import pytest

from flash_dmattn import backends
from flash_dmattn.check.cases import to_device

_REASON = next(b.reason for b in backends() if b.name == "cuda")
needs_gpu = pytest.mark.skipif(
    not any(b.name == "cuda" and b.available for b in backends()), reason=_REASON
)


def on_gpu(value, device="cuda"):
    """A copy in GPU memory: of tensors with their strides, of problems and cases with all they hold."""
    return to_device(value, device)
