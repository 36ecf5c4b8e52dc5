"""The one way tests decide that a result is right (docs/numerics.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import Problem, Result, attention

# Where gradients saturate; bf16 at half of its maximum.
GRADIENT_LIMIT = {torch.bfloat16: torch.finfo(torch.bfloat16).max / 2, torch.float16: 65504.0}


def assert_close(
    name: str, actual: Tensor, expected: Tensor, yardstick: Tensor, largest_score: float = 1.0
) -> None:
    """Maximum and mean error at most twice the yardstick's, plus what may be luck of the yardstick.

    expected: in double. yardstick: the same mathematics in the precision of `actual`. That luck is one unit
    in the last place of the result, and what two units in the last place of an fp32 score do to it.
    Non-finite values must be the same and in the same places; a yardstick that overflows measures nothing.
    """
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    if actual.numel() == 0:
        return
    got = actual.detach().double()
    same_nonfinite = torch.where(
        expected.isfinite(), got.isfinite(), (got == expected) | (got.isnan() & expected.isnan())
    )
    if not same_nonfinite.all():
        worst = tuple(int(i) for i in (~same_nonfinite).nonzero()[0])
        raise AssertionError(
            f"{name}{list(worst)}: got {got[worst].item()}, expected {expected[worst].item()} "
            f"({int((~same_nonfinite).sum())} non-finite values differ)"
        )
    finite = expected.isfinite()
    if not (yardstick.isfinite() | ~finite).all() or not finite.any():
        return
    unit = torch.finfo(actual.dtype).eps + 2 * torch.finfo(torch.float32).eps * largest_score
    magnitude = torch.where(finite, expected.abs(), 0)
    error = torch.where(finite, (got - expected).abs(), 0)
    yardstick_error = torch.where(finite, (yardstick.double() - expected).abs(), 0)
    for kind, measure in (("maximum", torch.amax), ("mean", torch.mean)):
        bound = 2 * measure(yardstick_error) + unit * measure(magnitude)
        if measure(error) > bound:
            worst = tuple(int(i) for i in (error == error.amax()).nonzero()[0])
            raise AssertionError(
                f"{name}: {kind} error {measure(error).item():.3e} > {bound.item():.3e}; worst at "
                f"{list(worst)}: got {got[worst].item():.6e}, expected {expected[worst].item():.6e}, "
                f"plain torch {yardstick[worst].item():.6e}"
            )


def assert_matches_oracle(actual: Result, problem: Problem, saturate: bool = True) -> None:
    """Every result that `actual` has against the oracle of the problem."""
    dtype = problem.q.dtype
    expected, yardstick = attention(problem), attention(problem, dtype)
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        got = getattr(actual, name)
        if got is None:
            continue
        wanted = getattr(expected, name)
        if name != "lse":
            wanted = _rounded_range(wanted, got.dtype, saturate, gradient=name != "out")
        assert_close(name, got, wanted, getattr(yardstick, name), expected.largest_score)


def _rounded_range(expected: Tensor, dtype: torch.dtype, saturate: bool, gradient: bool) -> Tensor:
    """What is left of values beyond the range of `dtype`: the limit, or infinity."""
    limit = torch.finfo(dtype).max
    if saturate:
        limit = GRADIENT_LIMIT.get(dtype, limit) if gradient else limit
        return expected.clamp(-limit, limit)
    return torch.where(expected.abs() > limit, expected.sign() * torch.inf, expected)
