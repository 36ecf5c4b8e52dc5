"""The tensor layout of each operator's arguments, by name.

Shape inference, derivatives, sharding and FLOP rules read it. The C++ schemas are the only list of arguments, tensors
first; these rules look an argument up by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch


class Layout(Enum):
    """Which dimensions of a tensor are the batch and the heads."""

    ROWS = (0, 2)  # [B, S, H, D]
    STATISTICS = (1, 2)  # [2, B, H, S]
    SHARED = (0, 1)  # [B or 1, H or 1, ...]: masks, biases and choices; dlse [B, H, S]

    def dim_of(self, axis: int) -> int:
        """Returns the dimension of an axis: the batch (axis 0) or the heads (axis 1)."""
        return self.value[axis]


# The layout of every tensor among the arguments and results of the operators that compute attention or choose keys.
LAYOUTS = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), Layout.ROWS),
    "lse": Layout.STATISTICS,
    **dict.fromkeys(
        (
            "mask", "bias", "dbias", "key_intervals", "scores", "key_mask", "dlse", "",
        ),
        Layout.SHARED,
    ),
}  # fmt: skip
# The name of each argument's gradient, for the arguments that have one.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias"}


class Signature:
    """The names of an operator's arguments and results."""

    def __init__(self, overload: torch._ops.OpOverload):
        schema = overload._schema
        self.arguments = tuple(argument.name for argument in schema.arguments)
        self.results = tuple(result.name for result in schema.returns)
        self.tensors = tuple(a.name for a in schema.arguments if _is_tensor(a.type))
        self.options = self.arguments[len(self.tensors) :]
        assert self.arguments[: len(self.tensors)] == self.tensors, (
            f"{schema.name}: tensors come first"
        )
        # The names of the values that the derivative saves, in this order.
        self.saved = (*self.tensors, *self.results, *self.options)
        # The positions of the arguments that have a gradient, in the order of backward's results.
        self.differentiable = tuple(
            self.arguments.index(name) for name in GRADIENTS if name in self.arguments
        )

    def arguments_by_name(self, arguments: Sequence) -> dict[str, object]:
        """Returns the positional arguments of a call as a dictionary by name."""
        return dict(zip(self.arguments, arguments, strict=False))


def _is_tensor(argument_type: torch._C.JitType) -> bool:
    return str(argument_type) in ("Tensor", "Optional[Tensor]")
