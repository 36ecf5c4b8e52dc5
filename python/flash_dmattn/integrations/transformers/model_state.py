"""What a model carries of this package: names of attention implementations, keywords, attributes, and hooks on modules."""

from collections.abc import Callable

from torch import nn

NAME = "flash_dmattn"
# Names accepted for exact attention. A config stores the second: transformers 5 branches on "flash" in a name.
NAMES = (NAME, "dynamic_mask_attention")
# Implementations that a config stores; transformers has "doge_flex_attention".
DOGE_NAME = "doge_dynamic_mask_attention"
SCORED_NAME = "learned_scores_attention"
STORED_NAMES = (NAMES[-1], DOGE_NAME, SCORED_NAME)

CONTEXT = "flash_dmattn_context"  # a DogeModel passes its layers a `doge.Context`
SCORES = "flash_dmattn_scores"  # a layer passes the attention function a `ScoreCall`
# The attribute of a decoder whose sequences are on several ranks; it passes its layers `context_parallel.PieceForward`.
PIECES = "flash_dmattn_pieces"

_HANDLES = "_flash_dmattn_hooks"  # the attribute of a module that keeps the handles of its hooks, by their names


def add_hook(module: nn.Module, hook: Callable, after: bool = False) -> None:
    """Runs a hook, which takes keywords, before each forward of a module, or after it, with the output None if it raised. A
    second hook of the same name is not added."""
    handles = vars(module).setdefault(_HANDLES, {})
    if hook.__name__ not in handles:
        register, options = module.register_forward_pre_hook, {}
        if after:
            register, options = module.register_forward_hook, {"always_call": True}
        handles[hook.__name__] = register(hook, with_kwargs=True, **options)


def remove_hooks(module: nn.Module, *hooks: Callable) -> None:
    """Removes hooks, which are told by their names."""
    handles = vars(module).get(_HANDLES, {})
    for name in handles.keys() & {hook.__name__ for hook in hooks}:
        handles.pop(name).remove()
    if not handles:
        vars(module).pop(_HANDLES, None)
