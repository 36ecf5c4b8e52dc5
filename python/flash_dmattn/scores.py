"""Learned scores: one number per key, by which a query keeps keys and which is added to their attention scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._core.checks import check_count, check_floating, check_tensor


def make_scores(
    features: int,
    heads: int,
    score: str | Callable[[Tensor], Tensor] = "gate",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A module that gives every key a score: hidden [B, S, features] -> scores [B, heads, S].

        scores = make_scores(512, heads=4)
        bias = scores(hidden)
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=1024)

    With z = proj(hidden), a linear projection to one number per head, and s(z) = log(1 + exp(z)):

    - "gate": log sigmoid(z) = -s(-z), from -inf to 0. The bias of proj begins at 3, so that all gates begin open, near
      -0.05. A gate that closes takes a key out of the choice and out of the softmax alike.
    - "linear": A * s(z), A of each head from 0.5.
    - "doge": exp(A * s(z)), A from 0: the form of transformers' Doge, for its checkpoints. It grows without bound and
      seldom learns what to keep (docs/quality.md). It ends at the largest float32, and its gradient at 2^64
      (docs/numerics.md).
    - a function or module: hidden [B, S, features], widened, -> [B, S, heads].

    Scores are float32 (float64 of float64), under autocast and in a module of 16 bits too, from the projection on: in 16
    bits hundreds of keys share a value, and rounding decides which are kept. A module that is given for `score` runs with
    autocast off on float32, so its parameters are best float32.

    Args:
        features: of every token.
        heads: the key heads, or the query heads where each of them scores.
        score: "gate", "linear", "doge", or a function.
        device, dtype: of the parameters.
    """
    for name, value in (("features", features), ("heads", heads)):
        check_count(value, name)
        if not value:
            raise ValueError(f"{name}: got 0, expected 1 or more")
    check_floating(dtype, "dtype")
    if callable(score):
        return _FunctionScores(features, heads, score)
    if not isinstance(score, str) or score not in _FORMS:
        names = ", ".join(map(repr, _FORMS))
        raise ValueError(f"score: got {score!r}, expected one of {names}, or a function")
    return _FORMS[score](features, heads, device, dtype)


class _Scores(nn.Module):
    """[B, S, features] -> [B, heads, S] by `_make_scores`, which gets float32 or wider."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.features, self.heads = features, heads

    def extra_repr(self) -> str:
        return f"features={self.features}, heads={self.heads}"

    def forward(self, hidden: Tensor) -> Tensor:
        check_tensor(hidden, "hidden")
        if hidden.dim() != 3 or hidden.shape[2] != self.features:
            raise ValueError(
                f"hidden: got shape {tuple(hidden.shape)}, expected [B, S, {self.features}]"
            )
        with _without_autocast(hidden.device.type):
            return self._make_scores(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))


def _without_autocast(device_type: str) -> AbstractContextManager:
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


class _FunctionScores(_Scores):
    def __init__(self, features: int, heads: int, function: Callable[[Tensor], Tensor]):
        super().__init__(features, heads)
        self.function = function

    def _make_scores(self, hidden: Tensor) -> Tensor:
        return scores_of_heads(self.function(hidden), "score", (*hidden.shape[:2], self.heads))


def scores_of_heads(scores: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """The result [B, S, heads] of a function as [B, heads, S], float32 or wider. Raises for another shape or dtype."""
    check_tensor(scores, name)
    if tuple(scores.shape) != shape or not scores.is_floating_point():
        raise ValueError(
            f"{name}: got {scores.dtype} of shape {tuple(scores.shape)}, expected floating numbers [B, S, heads], {shape}"
        )
    return scores.transpose(1, 2).to(torch.promote_types(scores.dtype, torch.float32))


class _Projection(nn.Linear):
    """A Linear whose bias begins at one number, also where it is initialised again after `to_empty`."""

    def __init__(self, features: int, heads: int, first_bias: float, **options):
        self.first_bias = first_bias
        super().__init__(features, heads, **options)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, self.first_bias)


class _ProjectedScores(_Scores):
    """Scores that `_scores_of` makes of a projection [B, S, heads]."""

    first_bias = 0.0

    def __init__(self, features: int, heads: int, device, dtype):
        super().__init__(features, heads)
        self.proj = _Projection(features, heads, self.first_bias, device=device, dtype=dtype)

    def _make_scores(self, hidden: Tensor) -> Tensor:
        weight, bias = (t.to(hidden.dtype) for t in (self.proj.weight, self.proj.bias))
        return self._scores_of(F.linear(hidden, weight, bias))


class _GateScores(_ProjectedScores):
    first_bias = 3.0  # sigmoid(3) = 0.95

    def _scores_of(self, z: Tensor) -> Tensor:
        return F.logsigmoid(z).transpose(1, 2)


class _ScaledScores(_ProjectedScores):
    """Scores of a projection, times a learned factor of each head."""

    first_factor: float

    def __init__(self, features: int, heads: int, device, dtype):
        super().__init__(features, heads, device, dtype)
        self.A = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.A, self.first_factor)


class _LinearScores(_ScaledScores):
    first_factor = 0.5

    def _scores_of(self, z: Tensor) -> Tensor:
        # The order of the gradient: for another, torch's fake kernel of softplus's backward has wrong strides.
        return self.A.to(z.dtype)[:, None] * F.softplus(z.transpose(1, 2).contiguous())


class _DogeScores(_ScaledScores):
    first_factor = 0.0

    def _scores_of(self, z: Tensor) -> Tensor:
        return doge_scores_of(self.A, z)


_FORMS = {"gate": _GateScores, "linear": _LinearScores, "doge": _DogeScores}


def doge_scores_of(A: Tensor, step: Tensor) -> Tensor:
    """``exp(A * softplus(step))`` for A [H] and step [B, S, H]: [B, H, S], float32 or wider, under autocast too.

    Scores and gradients are finite for all finite A, step and gradients of scores.
    """
    if torch.is_grad_enabled() and (A.requires_grad or step.requires_grad):
        return _Doge.apply(A, step)
    return _Doge.forward(A, step)


# The largest factor exp(x) in the gradient of a score. A score above 2^24 leaves query . key no bits of float32, so that
# attention sees the key with the highest score alone; the square of 2^46, of which Adam keeps sums, is 2^92.
_LARGEST_FACTOR = 2.0**46
# The end of the gradients that leave a score, in float32. Below it the factors of the layers multiply: without an end
# those of seven layers leave float32, and with this one the sum over 2^60 keys stays in it.
_LARGEST_GRADIENT = 2.0**64


class _Doge(torch.autograd.Function):
    """An exponent beyond that of the dtype's largest number counts as this one, and has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, step: Tensor) -> Tensor:
        factor, _, softplus = _widen_operands(A, step)
        return (factor * softplus).clamp(max=_largest_exponent(softplus.dtype)).exp()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        A, step, scores = ctx.saved_tensors
        factor, wide, softplus = _widen_operands(A, step)
        is_below = factor * softplus <= _largest_exponent(wide.dtype)
        gradient = gradient * scores.clamp(max=_LARGEST_FACTOR)
        gradient = _limit_gradient(torch.where(is_below, gradient, 0))
        dfactor = _limit_gradient(gradient * softplus).sum((0, 2))
        largest = torch.finfo(wide.dtype).max
        dsoftplus = (gradient * factor).clamp(-largest, largest)
        z = wide.clamp(max=20).exp()  # softplus(x) is x above 20
        dstep = torch.where(wide > 20, dsoftplus, dsoftplus * z / (z + 1))
        return (
            _limit_gradient(dfactor, A.dtype).to(A.dtype),
            _limit_gradient(dstep, step.dtype).to(step.dtype).transpose(1, 2),
        )


def _widen_operands(A: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A [H, 1], step [B, H, S] and its softplus, in float32 or wider."""
    dtype = torch.promote_types(step.dtype, torch.float32)
    # In 16 bits the copy that widens also transposes: elementwise kernels over other strides take twice as long.
    step = step.transpose(-1, -2).to(dtype, memory_format=torch.contiguous_format)
    # A projection may overflow: 0 * inf would be NaN.
    softplus = F.softplus(step).clamp(max=torch.finfo(dtype).max)
    return A.to(dtype)[:, None], step, softplus


def _largest_exponent(dtype: torch.dtype) -> float:
    """Half a unit of rounding below the exponent of the largest number, whose exp may round to inf."""
    info = torch.finfo(dtype)
    return math.log(info.max) * (1 - info.eps / 2)


def _limit_gradient(gradient: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    limit = min(_LARGEST_GRADIENT, torch.finfo(dtype).max)
    return gradient.clamp(-limit, limit)


def with_zero_sum_gradient(scores: Tensor) -> Tensor:
    """The scores of all keys, [B, H, S]. Their gradient sums to 0, as that of a softmax's input does."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return scores
    return _WithZeroSumGradient.apply(scores)


class _WithZeroSumGradient(torch.autograd.Function):
    """Takes from a gradient what all keys of a head share. In 16 bits its error has such a part: attention takes
    delta = dO . O from the rounded O. It adds up in A, one number for all of them (docs/numerics.md). A gradient of 0 is
    that of an invisible key, which stays."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        seen = gradient != 0
        # Divided before they are added: a sum of the largest numbers overflows.
        shared = (gradient / seen.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        limit = torch.finfo(gradient.dtype).max
        return torch.where(seen, gradient - shared, gradient).clamp(-limit, limit)
