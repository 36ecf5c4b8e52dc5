"""The C++ library's backends."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .._core.autograd import forward_direct, select_and_attend_direct
from .._core.numerics import Numerics
from ..keys.visible import Visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
    backend: str = "",
    bias_delay: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes attention for arguments in normal form. Returns out and statistics [2, B, Hq, Sq].

    The statistics are lse and the part of it that rounding removed. Only this function orders the operator's arguments.
    """
    value_dim = v.shape[3]
    if q.is_cuda and (q.shape[3] % 8 or value_dim % 8):
        q, k, v = (_pad_head_dim(t) for t in (q, k, v))
    options = (visible.is_causal, bias_delay, *numerics, backend)
    if visible.window is not None:
        out, statistics, _ = select_and_attend_direct(q, k, v, bias, visible.window, *options)
    else:
        operands = _key_operands(visible)
        out, statistics = forward_direct(q, k, v, visible.mask, bias, *operands, *options)
    return out if out.shape[3] == value_dim else out[..., :value_dim], statistics


def _key_operands(visible: Visible) -> tuple[Tensor | None, tuple[int, ...]]:
    """Returns the operators' arguments key_intervals and key_bound."""
    keys = visible.intervals
    if keys is None:
        return None, ()
    base, per_query = (-1, 0) if keys.bound is None else keys.bound  # -1: unknown
    return keys.intervals, (base, per_query, int(keys.consecutive))


def _pad_head_dim(tensor: Tensor) -> Tensor:
    """Pads the head dimension to a multiple of 8, as the GPU's kernels load 16 bytes at a time."""
    padding = -tensor.shape[3] % 8
    return F.pad(tensor, (0, padding)) if padding else tensor
