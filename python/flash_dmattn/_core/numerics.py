"""Numerical options of a call (scale, softcap, nonfinite, deterministic), passed as one value from functions to
operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOAT32_MAX, NUMBERS, resolve_flag


class Numerics(NamedTuple):
    """The numerical options of a call in the order of the operators' arguments."""

    scale: float | None  # the factor on query . key; None: 1 / sqrt(D)
    softcap: float  # 0: no softcap
    saturate: bool
    deterministic: bool

    @staticmethod
    def from_arguments(
        scale: float | None,
        softmax_scale: float | None,
        softcap: float | None,
        nonfinite: str,
        deterministic: bool | None,
    ) -> Numerics:
        """Makes a Numerics from arguments of the public functions. Errors name these arguments."""
        has_scale = scale is not None or softmax_scale is not None
        return Numerics(
            _resolve_scale(scale, softmax_scale) if has_scale else None,
            0.0 if softcap is None else _resolve_softcap(softcap),
            nonfinite == "saturate" or resolve_nonfinite(nonfinite),
            resolve_deterministic(deterministic),
        )

    def with_scale_for(self, head_dim: int) -> Numerics:
        scale, softcap, saturate, deterministic = self
        if scale is not None:
            return self
        return Numerics(1.0 / math.sqrt(head_dim), softcap, saturate, deterministic)


def _resolve_scale(scale: float | None, softmax_scale: float | None) -> float | None:
    if scale is not None and softmax_scale is not None:
        raise ValueError(
            f"scale, softmax_scale: got {scale} and {softmax_scale}, expected one of them (aliases)"
        )
    if scale is not None:
        return resolve_scale(scale, "scale")
    return None if softmax_scale is None else resolve_scale(softmax_scale, "softmax_scale")


def resolve_scale(scale: object, name: str) -> float:
    check_number(scale, name)  # a True is most often is_causal in softmax_scale's place
    if not abs(scale) <= FLOAT32_MAX:
        raise ValueError(f"{name}: got {scale}, expected a number within the range of float32")
    if scale == 0:
        raise ValueError(
            f"{name}: got 0, expected another number: a scale of 0 gives every key the same weight. If this 0 is the dropout_p "
            "of FlashAttention's argument order, leave it out: there is no dropout"
        )
    return float(scale)


def check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: got {value!r}, expected a number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(
            f"{name}: got an integer of {value.bit_length()} bits, expected a number within the range of a float"
        )
    if not isinstance(value, Tensor):
        return
    if value.numel() != 1:
        raise TypeError(f"{name}: got a tensor of shape {tuple(value.shape)}, expected a number")
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: got a tensor that requires a gradient, expected a number: it has no derivative; multiply query "
            "by a factor that learns"
        )


def _resolve_softcap(softcap: float) -> float:
    check_number(softcap, "softcap")
    softcap = float(softcap)
    if not 0.0 <= softcap <= FLOAT32_MAX:
        raise ValueError(
            f"softcap: got {softcap}, expected 0 (none) or a positive number within the range of float32"
        )
    return softcap


def resolve_nonfinite(nonfinite: str) -> bool:
    """Returns whether non-finite values saturate."""
    if nonfinite not in ("saturate", "propagate"):
        raise ValueError(f"nonfinite: got {nonfinite!r}, expected 'saturate' or 'propagate'")
    return nonfinite == "saturate"


def resolve_deterministic(deterministic: bool | None) -> bool:
    if deterministic is not None:
        return resolve_flag(deterministic, "deterministic")
    default = _blocks[-1][0]
    return torch.are_deterministic_algorithms_enabled() if default is None else default


# The values of the blocks of default_deterministic that are entered, each with an object that makes it unique, after one that
# stays. Threads change the list by single calls, which are atomic. dynamo guards a list, but no thread-local value.
_blocks: list[tuple[bool | None, object]] = [(None, None)]


@contextmanager
def default_deterministic(value: bool | None) -> Iterator[None]:
    """Makes `value` the default of `deterministic` in this process, as torch's own flags are. Of several blocks, nested or of
    other threads, the last one entered decides. None: as torch.use_deterministic_algorithms sets."""
    block = (value, object())
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)
