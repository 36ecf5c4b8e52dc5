"""Projections that leave free rows in front of their results, for keys of other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import (
    autocast_tensors,
    check_count,
    check_tensor,
    refuse_all_transforms,
)


def linear_with_headroom(
    hidden: Tensor, weight: Tensor, places: int, bias: Tensor | None = None
) -> Tensor:
    """Computes F.linear(hidden, weight, bias) with `places` rows of zeros in front. The result has a gradient.

    This makes keys or values for `begin_exchange(headroom=True)` without a copy. Later operations on rows (norms, a
    rotary embedding) may run over all rows.

    hidden: [B, n, C]; weight: [F, C]; bias: [F] or None. Returns [B, places + n, F].
    """
    check_count(places, "places")
    check_tensor(hidden, "hidden")
    check_tensor(weight, "weight")
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"hidden, weight: got shapes {tuple(hidden.shape)}, {tuple(weight.shape)}, expected [B, n, C] and [F, C]"
        )
    if bias is not None:
        check_tensor(bias, "bias")
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias: got shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}"
            )
    refuse_all_transforms(hidden=hidden, weight=weight, bias=bias)
    hidden, weight = autocast_tensors(hidden, weight)
    return _Projection.apply(
        hidden, weight, None if bias is None else bias.to(hidden.dtype), places
    )


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, places: int) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.places = places
        batch, n, _ = hidden.shape
        features = weight.shape[0]
        projected = hidden.new_empty((batch, places + n, features))
        projected[:, :places] = 0
        factors = hidden, weight.t().expand(batch, -1, -1)
        if bias is None:
            torch.bmm(*factors, out=projected[:, places:])
        else:
            bias = bias.expand(batch, n, features)
            torch.baddbmm(bias, *factors, out=projected[:, places:])
        return projected

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden, weight = ctx.saved_tensors
        gradient = gradient[:, ctx.places :]
        dhidden = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dhidden = gradient @ weight
        if ctx.needs_input_grad[1]:
            dweight = gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)
        if ctx.needs_input_grad[2]:
            dbias = gradient.sum((0, 1))
        return dhidden, dweight, dbias, None
