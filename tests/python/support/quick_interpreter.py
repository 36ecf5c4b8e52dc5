"""Triton's interpreter without the search that takes nearly half of its time."""

from functools import cache


def patch_once_a_launch() -> None:
    """The interpreter looks through triton.language and replaces its builtins when a kernel is launched, and again whenever
    one interpreted function calls another. While what a function sees is replaced, nothing is left to look for."""
    try:
        import triton.language as tl
        from triton.language.core import is_builtin
        from triton.runtime import interpreter
    except ImportError:
        return

    patch = interpreter._patch_lang

    @cache
    def languages_of(function) -> list:
        """Functions of Triton's own see triton.language.core instead."""
        seen = function.__globals__.values()
        return [language for language in (tl, tl.core) if any(x is language for x in seen)]

    def patch_what_is_not(function):
        if any(is_builtin(language.load) for language in languages_of(function)):
            return patch(function)  # which a launch undoes

    interpreter._patch_lang = patch_what_is_not
