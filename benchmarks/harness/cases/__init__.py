"""The cases of `bench.py run`. A module of this folder measures one or more of them.

Each module has these functions, its own or the defaults of this file:
    measure_rows(case, options): yields the rows of a case.
    expect_case_runs(case, options): raises Declined or ImportError if the case cannot be measured here.
    side_names(case, device): the sides that `--side` can select; none if the case always measures all of its own.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from types import ModuleType

from .. import case, sides

# {module: (its cases, its sides)}. Modules are imported only for their cases, because some need packages that others do not.
_MODULES = {
    "attention": ((*case.NAMES, "selection"), sides.NAMES),
    "decode": (("decode",), ("ours", "rows", "sdpa", "fa2", "cudnn", "efficient")),
    "host": (("host",), ("ours", "sdpa")),
    "library": (("kernels",), ()),
    "memory": (("memory",), ()),
    "models": (
        ("token", "training", "training_step"),
        (
            "ours", "eager", "ours_compiled", "eager_compiled", "sdpa_compiled", "rounded", "rounded_compiled", "generate",
            "eager_other_seed",
        ),
    ),
    "presses": (("presses",), ()),
    "ragged": (("ragged",), ()),
    "scored_llama": (("scored_text", "scored_token"), ()),
    "serving": (("serving",), ("slots", "all_slots", "all_keys")),
}  # fmt: skip
NAMES = tuple(itertools.chain.from_iterable(names for names, _ in _MODULES.values()))
# {case: the options of `run` that it reads, except the device and the sides}. Those of attention that are not named read _SIZES.
# All but _OWN_THREADS also read `threads`.
_SIZES = ("length", "window", "dtype", "repeats")
_OWN_THREADS = ("host", "kernels")
_OPTIONS = {
    "selection": ("length", "repeats"), "decode": _SIZES, "host": ("length",), "kernels": ("programs",), "memory": (),
    "token": ("length",), "training": (), "training_step": ("length",), "presses": ("length",), "ragged": ("window",),
    "scored_text": ("length",), "scored_token": ("length",), "serving": ("length",),
}  # fmt: skip
SIDES = tuple(
    dict.fromkeys(itertools.chain.from_iterable(sides_of for _, sides_of in _MODULES.values()))
)


def module_of(name: str) -> ModuleType:
    """Returns the module that measures a case. Raises ImportError if a package that it needs is missing."""
    (module,) = (module for module, (names, _) in _MODULES.items() if name in names)
    return importlib.import_module(f"{__name__}.{module}")


def options_of(name: str) -> tuple[str, ...]:
    """Returns the options of `run` that change what a case measures, except the device and the sides."""
    has_window = any(one.window for table in case.CASES.values() for one in table.get(name, ()))
    sizes = _SIZES if has_window else tuple(option for option in _SIZES if option != "window")
    options = _OPTIONS.get(name, sizes)
    return options if name in _OWN_THREADS else (*options, "threads")


def runs_everywhere(name: str, options: argparse.Namespace) -> None:
    """Accepts every machine: the `expect_case_runs` of cases without a condition."""


def all_sides(name: str, device: str) -> tuple[str, ...]:
    """Returns no sides: the `side_names` of cases that `--side` does not change."""
    return ()
