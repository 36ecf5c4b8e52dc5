"""Floating point operations of attention for torch.utils.flop_counter.FlopCounterMode.

Importing this module registers them. The first attention call after an import of torch.utils.flop_counter registers
them too, including for a counter that is already active; `import flash_dmattn` alone does not import torch's module,
which imports Triton and takes half a
second. Import this module yourself before you make a counter that becomes active only after the first call.

The formulas count two products forward and five backward for each element: 2 D FLOPs per product (2 Dv for products with
the value). Elements are those of the score matrix, or those within the bound of key intervals. Causality and masks are not
subtracted, because the values of a mask would have to be read; torch counts its own attention the same way.
"""

from __future__ import annotations

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from ._core import ops
from ._core.signatures import Signature


def _register(operator, signature: Signature, with_keys: int, with_values: int) -> None:
    @register_flop_formula(operator)
    def flops(*arguments, out_shape=None, **more) -> int:
        named = signature.arguments_by_name(arguments) | more
        terms = with_keys * named["q"][3] + with_values * named["v"][3]
        return 2 * terms * _elements(named)


def _elements(named: dict[str, object]) -> int:
    """Returns the number of elements of the score matrices of all heads. named: shapes by argument name."""
    batch, seqlen_q, heads_q, _ = named["q"]
    keys = named["k"][1]
    if "window" in named:
        bound = (named["window"], int(named["is_causal"]))
    else:
        bound = named["key_bound"]
    if bound and bound[0] >= 0:
        keys = min(keys, bound[0] + bound[1])
    return batch * heads_q * seqlen_q * keys


_register(ops.operators.forward, ops.FORWARD, with_keys=1, with_values=1)
_register(ops.operators.select_and_attend, ops.SELECT_AND_ATTEND, with_keys=1, with_values=1)
_register(ops.operators.backward, ops.BACKWARD, with_keys=3, with_values=2)

# A counter copies the registry when it is made. Active counters get the formulas too, so that the current call is
# counted.
for _mode in _get_current_dispatch_mode_stack():
    _counter = getattr(_mode, "counter", None)
    if isinstance(_counter, FlopCounterMode):
        _counter.flop_registry.update(flop_registry)
