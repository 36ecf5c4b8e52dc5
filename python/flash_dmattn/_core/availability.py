"""The backends of this machine in order of preference, and the reasons why others do not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

from . import ops


@dataclass(frozen=True)
class Backend:
    """One backend. reason: the hardware on which it runs, or why it is not available."""

    name: str
    available: bool
    reason: str


# Triton 3.6 and 3.9 are known to compile the kernels. Triton 3.6 does not compile fp64 products for AMD's GPUs.
_OLDEST_TRITON, _OLDEST_TRITON_OF_AMD = (3, 6), (3, 9)
_ON_GPU = ("cuda", "triton", "flex", "cpu", "reference")
_ON_CPU = ("cpu", "flex", "triton", "cuda", "reference")


def gpu() -> str | None:
    """Returns the kind of GPU that torch can use, "cuda" or "xpu", or None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator and accelerator.type in ("cuda", "xpu") else None


def _triton_backend() -> Backend:
    try:
        import triton

        return _backend_of_triton(triton)
    except Exception as error:  # a broken installation may raise any error
        reason = f"triton cannot be imported: {type(error).__name__}: {error}"
        return Backend("triton", False, reason)


def _backend_of_triton(triton) -> Backend:
    version = f"triton {triton.__version__}"
    oldest, where = _OLDEST_TRITON, ""
    if torch.version.hip is not None:
        oldest, where = _OLDEST_TRITON_OF_AMD, " on AMD's GPUs"
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < oldest:
        expected = ".".join(map(str, oldest))
        return Backend(
            "triton", False, f"{version} is too old, expected {expected} or newer{where}"
        )
    if triton.knobs.runtime.interpret:
        return Backend(
            "triton", False, f"{version} is interpreted (TRITON_INTERPRET), for tests only"
        )
    if gpu() is None:
        missing = "needs a GPU that torch can use (for tests, TRITON_INTERPRET=1)"
        return Backend("triton", False, f"{version} {missing}")
    return Backend("triton", True, f"{version} on {gpu()}")


def _flex_backend() -> Backend:
    try:
        from torch.nn.attention import flex_attention  # noqa: F401
    except Exception as error:
        reason = f"torch {torch.__version__} has no FlexAttention: {type(error).__name__}: {error}"
        return Backend("flex", False, reason)
    if gpu() is None:
        return Backend("flex", False, "FlexAttention has no backward without a GPU")
    return Backend("flex", True, f"torch {torch.__version__} on {gpu()}")


@cache
def backends() -> tuple[Backend, ...]:
    """Returns all backends: the available ones first, each group in order of preference."""
    listed = [_triton_backend(), _flex_backend()]
    for line in ops.backends().splitlines():
        name, available, reason = line.split("\t")
        if name == "cuda" and available == "1" and not torch.cuda.is_available():
            available, reason = "0", f"torch {torch.__version__} cannot use the GPU ({reason})"
        listed.append(Backend(name, available == "1", reason))
    order = _ON_CPU if gpu() is None else _ON_GPU
    return tuple(sorted(listed, key=lambda b: (not b.available, order.index(b.name))))


def get_available_backends() -> list[str]:
    """Returns the names of the backends that run here, in order of preference. The slow "reference" comes last."""
    return [backend.name for backend in backends() if backend.available]


def is_available(name: str) -> bool:
    """Returns whether the backend `name` runs here; False for an unknown name."""
    return name in get_available_backends()


def check_backend_name(name: str) -> None:
    if name not in _ON_GPU:
        known = ", ".join(map(repr, _ON_GPU))
        raise ValueError(
            f"backend: got {name!r}, expected one of {known}, or None for the first that supports the problem"
        )


def unavailable_reason(name: str) -> str:
    """Returns why the backend `name` does not run here, and which backends do; "" if it runs."""
    check_backend_name(name)
    return _unavailable_reason(name)


@cache
def _unavailable_reason(name: str) -> str:
    backend = next(backend for backend in backends() if backend.name == name)
    if backend.available:
        return ""
    return f"{backend.reason}; available: {', '.join(get_available_backends())}"


def check_backend_runs(name: str) -> None:
    """Raises RuntimeError with the reason if the backend `name` does not run here."""
    reason = unavailable_reason(name)
    if reason:
        raise RuntimeError(f"backend: got {name!r}, which cannot run: {reason}")


# With this mark, torch.compile takes the results as constants. Otherwise it would trace into the functions' imports.
get_available_backends._dynamo_marked_constant = True
unavailable_reason._dynamo_marked_constant = True
