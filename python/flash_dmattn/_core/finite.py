"""Check mode for the backends that are written in Python: FLASH_DMATTN_CHECK_FINITE=1, as in the C++ library."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_MINUS_INF_IS_FINE = ("bias", "lse")


def is_enabled() -> bool:
    """False while torch.compile traces: it cannot trace a branch on a value."""
    if torch.compiler.is_compiling():
        return False
    value = os.environ.get("FLASH_DMATTN_CHECK_FINITE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASH_DMATTN_CHECK_FINITE: got {value}, expected 0 or 1")
    return value == "1"


def check_inputs(**tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors. Raises for the first value that is not finite, later also for one of their gradients."""
    stages = ("forward input", "backward output")
    return [t if t is None else _Checked.apply(t, name, *stages) for name, t in tensors.items()]


def check_outputs(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out = _Checked.apply(out, "out", "forward output", "backward input")
    if lse is not None:
        _raise_for_first("forward output", "lse", lse)
    return out, lse


class _Checked(torch.autograd.Function):
    """The identity, forward and backward."""

    @staticmethod
    def forward(ctx, tensor, name, forward_stage, backward_stage):
        ctx.name, ctx.stage = f"d{name}", backward_stage
        _raise_for_first(forward_stage, name, tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        _raise_for_first(ctx.stage, ctx.name, gradient)
        return gradient, None, None, None


def _raise_for_first(stage: str, name: str, tensor: Tensor) -> None:
    wrong = ~tensor.isfinite()
    if name in _MINUS_INF_IS_FINE:
        wrong &= tensor != -torch.inf
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        raise RuntimeError(f"{stage} {name}{first} is {tensor[tuple(first)].item()}")
