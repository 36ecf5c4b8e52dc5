"""Registers rules for the operators with torch's FLOP counting and sharding, once their modules have been imported."""

from __future__ import annotations

import importlib
import sys
import warnings

from .load import PACKAGE

# Each module of torch, and the module of this package that registers rules with it on import. torch's modules are slow
# to import, and most processes need neither.
_missing = {
    "torch.utils.flop_counter": ".flops",
    "torch.distributed.tensor": ".distributed.sharding",
}


def register() -> None:
    """Registers the rules for those modules of torch that have been imported.

    It is called when this package is imported, and before each call of attention until all rules are registered. torch
    takes a rule only after it has imported the module.
    """
    for name in tuple(_missing):
        if name not in sys.modules:
            continue
        rules = _missing.pop(name, None)
        if rules is None:  # another thread registers them
            continue
        try:
            importlib.import_module(rules, PACKAGE)
        except Exception as error:  # attention runs without the rules
            warnings.warn(
                f"{name} is without the rules of {PACKAGE}{rules}: {type(error).__name__}: {error}",
                stacklevel=2,
            )
