"""Rules for the operators in modules of torch that are slow to import: FLOP counting and sharding."""

from __future__ import annotations

import importlib
import sys
import warnings

from .load import PACKAGE

# The module of torch, and ours that registers on import. torch's are slow to import, and most processes need neither.
_missing = {
    "torch.utils.flop_counter": ".flops",
    "torch.distributed.tensor": ".distributed.sharding",
}


def register() -> None:
    """Registers the rules of torch's modules that have been imported.

    Called when this package is imported and before a call of attention, until none is missing: torch has no place for a
    rule before it has the module.
    """
    for name in tuple(_missing):
        if name not in sys.modules:
            continue
        rules = _missing.pop(name, None)
        if rules is None:  # another thread registers them
            continue
        try:
            importlib.import_module(rules, PACKAGE)
        except Exception as error:  # no reason for attention not to run
            warnings.warn(
                f"{name} is without the rules of {PACKAGE}{rules}: {type(error).__name__}: {error}",
                stacklevel=2,
            )
