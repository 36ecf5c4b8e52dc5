"""Makes Triton's interpreter faster. Two thirds of its time go to a search for builtins, and to types that it
makes for every value."""

from __future__ import annotations

from dataclasses import replace
from functools import cache


def quicken_interpreter() -> None:
    """Patches the interpreter of this process, if triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_once_a_launch(interpreter)
    _make_types_once(interpreter)
    # The interpreter also computes each + of int32 in int64 to compare them. Tensors of these tests are too small to overflow.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch(interpreter) -> None:
    """Skips replacing builtins that are already replaced.

    The interpreter looks through triton.language and replaces its builtins when a kernel is launched, and again whenever
    one interpreted function calls another. While the builtins that a function sees are replaced, there is nothing to do.
    """
    import triton.language as tl
    from triton.language.core import is_builtin

    patch = interpreter._patch_lang

    @cache
    def languages_of(function) -> list:
        """Returns the modules whose builtins a function sees; Triton's own functions see triton.language.core instead."""
        seen = function.__globals__.values()
        return [language for language in (tl, tl.core) if any(x is language for x in seen)]

    def patch_what_is_not(function):
        if any(is_builtin(language.load) for language in languages_of(function)):
            return patch(function)  # which a launch undoes

    interpreter._patch_lang = patch_what_is_not


def _make_types_once(interpreter) -> None:
    """Caches the attributes of a block's type by its element and sizes, and those of a value by its type."""
    from triton.language import core

    init_type, init_value = core.block_type.__init__, core.tensor.__init__
    broadcast = interpreter.interpreter_semantic.broadcast_impl_value
    numpy_type = cache(interpreter._get_np_dtype)
    core.pointer_type.__hash__ = core.dtype.__hash__  # by the name; its class has an __eq__ alone

    def attributes_of_value(kind) -> dict:
        tensor = core.tensor.__new__(core.tensor)
        init_value(tensor, None, kind)
        return vars(tensor)

    attributes_of_scalar = cache(attributes_of_value)

    @cache
    def attributes_of_type(element, *sizes) -> dict:
        block = core.block_type.__new__(core.block_type)
        init_type(block, element, list(sizes))
        return {**vars(block), "sizes": sizes, "attributes_of_value": attributes_of_value(block)}

    def make_type(self, element_ty, shape):
        sizes = (s.value if isinstance(s, core.constexpr) else s for s in shape)
        vars(self).update(attributes_of_type(element_ty, *sizes))

    def make_value(self, handle, type):
        attributes = getattr(type, "attributes_of_value", None) or attributes_of_scalar(type)
        vars(self).update(attributes, handle=handle, type=type)

    def broadcast_others(left, right):
        one, other = (getattr(value.type, "sizes", None) for value in (left, right))
        return (left, right) if one == other else broadcast(left, right)

    core.block_type.__init__, core.tensor.__init__ = make_type, make_value
    interpreter._get_np_dtype = lambda kind: numpy_type(kind.scalar)
    interpreter.interpreter_semantic.broadcast_impl_value = broadcast_others
