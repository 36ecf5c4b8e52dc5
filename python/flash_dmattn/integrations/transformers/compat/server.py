"""Runs the server of transformers with another class for loading models."""

import builtins
import functools
import types

from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from .copied_functions import with_globals


def serve_with(manager: type[ModelManager]) -> type[Serve]:
    """Returns a `transformers serve` that loads models with the class `manager`.

    5.24: `Serve.__init__` imports the class by name, makes a loader, and runs the server until it ends. A copy of
    that function has an import of its own. No issue is known to us. Remove when the class is an attribute of `Serve`, or when its
    loader takes every registered name for --attn-implementation and calls a hook with each model.
    """

    def import_names(name, globals=None, locals=None, fromlist=(), level=0):
        if fromlist == ("ModelManager",):
            return types.SimpleNamespace(ModelManager=manager)
        return builtins.__import__(name, globals, locals, fromlist, level)

    names = {**vars(builtins), "__import__": import_names}
    initialize = with_globals(Serve.__init__, __builtins__=names)
    functools.update_wrapper(initialize, Serve.__init__)
    return type("Serve", (Serve,), {"__init__": initialize, "__doc__": Serve.__doc__})
