"""Rules for the operators that some modules of torch keep, registered once a process imports these modules, in whatever
order it imports them and this package.

torch has no place for such rules before: its registries are made by the modules themselves, which are slow to import.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RULES = {  # the module of torch, and ours that registers on import
    "torch.utils.flop_counter": ".flops",
    "torch.distributed.tensor": ".sharding",
}


def register_rules() -> None:
    """Those whose module of torch is there, now; the others after its import."""
    # Before the finders of files. It stays there: a thread that goes through the list while an entry is taken out
    # misses the next one.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in RULES:
        if name in sys.modules:
            _register(name)


def _register(name: str) -> None:
    """A rule that torch refuses is no reason for its module, or for this package, not to be imported."""
    try:
        importlib.import_module(RULES[name], __package__)
    except Exception as error:
        warnings.warn(
            f"{name} is without the rules of {__package__}{RULES[name]}: {type(error).__name__}: {error}",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Finds what the finders after it find, with a loader that registers."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname not in RULES:
            return None
        # Only those after it: another version of this package in the process has a finder of its own.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    """The loader of a module, which becomes its only one again when it loads it."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def __getattr__(self, name: str):  # its source and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module.__name__)
