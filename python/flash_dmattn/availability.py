"""What can compute attention here, in order of preference, and why the rest cannot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from . import _ops


@dataclass(frozen=True)
class Backend:
    """One backend. `reason` says what it runs on when it is available, and else why it is not."""

    name: str
    available: bool
    reason: str


_NOT_IN_THIS_VERSION = {
    "triton": "this version has no Triton backend",
    "flex": "this version has no FlexAttention backend",
}


@cache
def backends() -> tuple[Backend, ...]:
    """All backends, those that run first and in order of preference."""
    built = []
    for line in _ops.backends().splitlines():
        name, available, reason = line.split("\t")
        if name == "cuda" and available == "1" and not torch.cuda.is_available():
            available, reason = "0", f"torch {torch.__version__} cannot use the GPU ({reason})"
        built.append(Backend(name, available == "1", reason))
    names = {backend.name for backend in built}
    missing = [Backend(n, False, why) for n, why in _NOT_IN_THIS_VERSION.items() if n not in names]
    return tuple(sorted((*built, *missing), key=lambda backend: not backend.available))


def get_available_backends() -> list[str]:
    """Names of the backends that run here, the preferred one first; the slow "reference" is the last."""
    return [backend.name for backend in backends() if backend.available]


def is_available(name: str) -> bool:
    return name in get_available_backends()


def unavailable_reason(name: str) -> str:
    """Why the backend `name` does not run here, and what does; "" when it runs."""
    for backend in backends():
        if backend.name == name:
            if backend.available:
                return ""
            return f"{backend.reason}; available: {', '.join(get_available_backends())}"
    known = ", ".join(backend.name for backend in backends())
    raise ValueError(f"backend: got {name!r}, expected one of {known}")
