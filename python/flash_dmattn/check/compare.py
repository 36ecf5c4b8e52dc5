"""The criterion by which checks and tests accept a result (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Problem, Result, attention

# Where gradients saturate; bf16 at half of its maximum.
GRADIENT_LIMIT = {torch.bfloat16: torch.finfo(torch.bfloat16).max / 2, torch.float16: 65504.0}

TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Verdict:
    """The comparison of one tensor: `message` describes the failure, and is "" without one.

    error, bound: maximum error and its bound, or mean ones if only those are exceeded; None if values are not
        comparable (no elements, non-finite ones that differ, a yardstick that overflows).
    """

    tensor: str
    error: float | None = None
    bound: float | None = None
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message


def compare_tensor(
    name: str,
    actual: Tensor,
    expected: Tensor,
    yardstick: Tensor,
    largest_score: float = 1.0,
    terms: Tensor | None = None,
) -> Verdict:
    """Checks that maximum and mean error are at most twice the yardstick's plus an allowance.

    The allowance is one unit in the last place of the result plus the effect of two units in the last place of an fp32
    score, because the yardstick may be exact by chance. Non-finite values must be the same and in the same places. A
    yardstick that overflows measures nothing.

    expected: the result in double.
    yardstick: the result of the same mathematics in the precision of `actual`.
    terms: for a result that is a sum, the root of the sum of the squares of its terms. If the terms cancel, their errors
        do not.
    """
    if actual.shape != expected.shape:
        message = f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        return Verdict(name, message=message)
    if actual.numel() == 0:
        return Verdict(name)
    got = actual.detach().double()
    same_nonfinite = torch.where(
        expected.isfinite(), got.isfinite(), (got == expected) | (got.isnan() & expected.isnan())
    )
    if not same_nonfinite.all():
        worst = tuple(int(i) for i in (~same_nonfinite).nonzero()[0])
        return Verdict(
            name,
            message=f"{name}{list(worst)}: got {got[worst].item()}, expected {expected[worst].item()} "
            f"({int((~same_nonfinite).sum())} of {got.numel()} values differ in being finite)",
        )
    finite = expected.isfinite()
    if not (yardstick.isfinite() | ~finite).all() or not finite.any():
        return Verdict(name)
    unit = torch.finfo(actual.dtype).eps + 2 * torch.finfo(torch.float32).eps * largest_score
    magnitude = expected.abs() if terms is None else expected.abs().maximum(terms)
    magnitude = torch.where(finite, magnitude, 0)
    error = torch.where(finite, (got - expected).abs(), 0)
    yardstick_error = torch.where(finite, (yardstick.double() - expected).abs(), 0)
    verdicts = []
    for kind, measure in (("maximum", torch.amax), ("mean", torch.mean)):
        bound = (2 * measure(yardstick_error) + unit * measure(magnitude)).item()
        measured = measure(error).item()
        message = ""
        if measured > bound:
            worst = tuple(int(i) for i in (error == error.amax()).nonzero()[0])
            message = (
                f"{name}: {kind} error {measured:.3e} > {bound:.3e}; worst at {list(worst)}: got "
                f"{got[worst].item():.6e}, expected {expected[worst].item():.6e}, plain torch "
                f"{yardstick[worst].item():.6e}"
            )
        verdicts.append(Verdict(name, measured, bound, message))
    return next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])


def compare_result(actual: Result, problem: Problem, saturate: bool = True) -> list[Verdict]:
    """Yields a verdict on every result that `actual` has, by the oracle of the problem."""
    dtype = problem.q.dtype
    expected, yardstick = attention(problem), attention(problem, dtype)
    verdicts = []
    for name in TENSORS:
        got = getattr(actual, name)
        if got is None:
            continue
        wanted = getattr(expected, name)
        if name != "lse":
            wanted = _rounded_range(wanted, got.dtype, saturate, gradient=name != "out")
        terms = expected.dbias_terms if name == "dbias" else None
        verdicts.append(
            compare_tensor(
                name, got, wanted, getattr(yardstick, name), expected.largest_score, terms
            )
        )
    return verdicts


def _rounded_range(expected: Tensor, dtype: torch.dtype, saturate: bool, gradient: bool) -> Tensor:
    """Replaces values beyond the range of `dtype` by the limit or infinity."""
    limit = torch.finfo(dtype).max
    if saturate:
        limit = GRADIENT_LIMIT.get(dtype, limit) if gradient else limit
        return expected.clamp(-limit, limit)
    return torch.where(expected.abs() > limit, expected.sign() * torch.inf, expected)
