"""Hooks of this package on modules of a model. Their handles stay with the module, by the names of the hooks."""

from collections.abc import Callable

from torch import nn

_HANDLES = "_flash_dmattn_hooks"  # the attribute of a module


def add_hook(module: nn.Module, hook: Callable, after: bool = False) -> None:
    """Runs a hook, which takes keywords, before each forward of a module, or after it. A module gets each hook once."""
    handles = vars(module).setdefault(_HANDLES, {})
    if _name(hook) not in handles:
        register = module.register_forward_hook if after else module.register_forward_pre_hook
        handles[_name(hook)] = register(hook, with_kwargs=True)


def remove_hooks(module: nn.Module, *hooks: Callable) -> None:
    """Removes hooks: functions, or the classes of callables."""
    handles = vars(module).get(_HANDLES, {})
    for name in handles.keys() & set(map(_name, hooks)):
        handles.pop(name).remove()
    if not handles:
        vars(module).pop(_HANDLES, None)


def _name(hook: Callable) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
