"""Triangle attention: the N rows of a pair representation attend with one bias, which gets a gradient."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from flash_dmattn import triangle_attention

from ..clock import Step
from ..record import Failure, Row
from ..sides import imported
from .attention import measure_steps

_SIZES = {"cuda": (256, 384, 768), "cpu": (64,)}
_HEADS, _HEAD_DIM = 4, 32


def measure_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row | Failure]:
    for n in options.length or _SIZES[options.device]:
        for dtype in options.dtype:
            builders = {
                side: partial(_build, function, n, getattr(torch, dtype), options.device)
                for side, function in _SIDES.items()
                if not options.side or side in options.side
            }
            case = f"triangle B1 N{n} H{_HEADS} D{_HEAD_DIM}"
            yield from measure_steps(case, dtype, options.device, builders, options.repeats)


def _build(
    attention: Callable[[], Callable[..., Tensor]], n: int, dtype: torch.dtype, device: str
) -> Step:
    """Returns a step with the same numbers for each side: q, k, v [1, N, H, N, D], bias [1, 1, H, N, N]."""
    torch.manual_seed(n)
    q, k, v, dout = torch.randn(4, 1, n, _HEADS, n, _HEAD_DIM, device=device).to(dtype)
    bias = torch.randn(1, 1, _HEADS, n, n, device=device).to(dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    function = attention()
    return Step(lambda: function(*leaves), leaves, dout)


def _formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Computes what DeepSpeed's Evoformer attention compares itself with, by torch's operators."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1) @ v


def _flex() -> Callable[..., Tensor]:
    attend = torch.compile(flex_attention, dynamic=False)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        added = bias[0, 0]
        tensors = (t.squeeze(0) for t in (q, k, v))
        out = attend(*tensors, score_mod=lambda score, b, h, i, j: score + added[h, i, j])
        return out.unsqueeze(0)

    return function


# What makes each side's function of (q, k, v, bias).
_SIDES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "ours": lambda: triangle_attention,
    "cuequivariance": lambda: imported("cuequivariance_torch").triangle_attention,
    "flex": _flex,
    "formula": lambda: _formula,
}
