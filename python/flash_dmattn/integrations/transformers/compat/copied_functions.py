"""Copies of transformers' functions that refer to a class of this package."""

import types


def with_globals(function: types.FunctionType, **values: object) -> types.FunctionType:
    """Returns a copy of a function that finds these values under global names of its module.

    The module stays unchanged, because other threads use it. Raises AttributeError if the module has no such name.
    """
    missing = values.keys() - function.__globals__.keys()
    if missing:
        raise AttributeError(f"{function.__module__} has no {', '.join(sorted(missing))}")
    copied = types.FunctionType(
        function.__code__,
        function.__globals__ | values,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
