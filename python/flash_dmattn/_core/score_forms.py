"""Scores as functions of projections, and their derivatives, in torch's operators.

z is a projection [B, H, S], float32 or float64. A [H] is the factor of each head, which the forms "linear" and "doge" have.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("projection", "gelu", "gate", "linear", "doge")
SCALED_FORMS = ("linear", "doge")

# The largest factor exp(x) in the gradient of a score. Above a score of 2^24, query . key no longer changes the float32
# sum, so attention sees only the key with the highest score. Adam accumulates the square of the gradient; that of 2^46 is
# 2^92.
_LARGEST_FACTOR = 2.0**46
# The limit of gradients that leave a score. The factors of earlier layers multiply it: unlimited, seven layers overflow
# float32. With this limit even a sum over 2^60 keys stays finite.
_LARGEST_GRADIENT = 2.0**64


def score_of(z: Tensor, A: Tensor | None, form: str) -> Tensor:
    """Returns the score of each projection, by the functions of include/flash_dmattn/scores.h."""
    if form == "projection":
        return z
    if form == "gelu":
        return z * _normal_distribution(z)
    if form == "gate":
        return F.logsigmoid(z)
    exponent = A.to(z.dtype)[:, None] * _softplus(z)
    return exponent if form == "linear" else exponent.clamp(max=_largest_exponent(z.dtype)).exp()


def score_gradients(
    gradient: Tensor, z: Tensor, A: Tensor | None, form: str
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of z [B, H, S] and of A [H], from that of the scores."""
    if form == "projection":
        return gradient, None
    if form == "gelu":
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        return gradient * (_normal_distribution(z) + z * density), None
    if form == "gate":
        return gradient * (-z).sigmoid(), None
    factor, softplus = A.to(z.dtype)[:, None], _softplus(z)
    if form == "linear":
        return gradient * factor * z.sigmoid(), (gradient * softplus).sum((0, 2)).to(A.dtype)
    exponent, largest = factor * softplus, _largest_exponent(z.dtype)
    scores = exponent.clamp(max=largest).exp()
    gradient = gradient * scores.clamp(max=_LARGEST_FACTOR)
    # A clamped exponent has no gradient.
    gradient = limit_gradient(torch.where(exponent <= largest, gradient, 0))
    dfactor = limit_gradient(gradient * softplus).sum((0, 2))
    limit = torch.finfo(z.dtype).max
    dsoftplus = (gradient * factor).clamp(-limit, limit)
    return (
        limit_gradient(dsoftplus * z.sigmoid()),
        limit_gradient(dfactor, A.dtype).to(A.dtype),
    )


def limit_gradient(gradient: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    limit = min(_LARGEST_GRADIENT, torch.finfo(dtype).max)
    return gradient.clamp(-limit, limit)


def _softplus(z: Tensor) -> Tensor:
    """Returns log(1 + exp(z)), finite. Its bits depend on the element alone, unlike those of torch's softplus on CPUs."""
    # A projection may overflow: 0 * inf would be NaN.
    return (-F.logsigmoid(-z)).clamp(max=torch.finfo(z.dtype).max)


def _normal_distribution(z: Tensor) -> Tensor:
    """By torch's erf: the bits of torch's gelu on CPUs depend on the place of an element among the others."""
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))


def _largest_exponent(dtype: torch.dtype) -> float:
    """Returns the exponent of the dtype's largest number minus half a rounding unit, because exp of the exact one may
    round to inf."""
    info = torch.finfo(dtype)
    return math.log(info.max) * (1 - info.eps / 2)
