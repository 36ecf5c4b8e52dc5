"""Triton's interpreter without the search that takes two fifths of its time."""

import inspect
from functools import cache


def remember_builtins() -> None:
    """Whenever one interpreted function calls another, the interpreter looks through all members of triton.language for
    builtins. Which ones they are does not change: they are looked for once in each module and class."""
    try:
        from triton.language.core import is_builtin
        from triton.runtime import interpreter
    except ImportError:
        return

    @cache
    def builtins_of(package) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, *rest) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # not while it is replaced
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin
