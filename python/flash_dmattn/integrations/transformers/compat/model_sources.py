"""Facts about models that can be read only from their code.

4.57 to 5.24: transformers does not say which modules are attention layers, what they add to their scores, or by which positions a decoder
makes its masks; `PreTrainedModel` itself reads sources to find out whether attention can be set. No issue is known to us. Remove
each function when models declare what it finds.
"""

import ast
import inspect
import itertools
import textwrap
import types

from torch import nn
from transformers import PreTrainedModel


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether the `forward` of a module looks an attention function up in transformers' registry."""
    code = _forward_code(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def adds_a_bias(layer: nn.Module) -> bool:
    """Whether an attention layer passes the attention function a `position_bias`."""
    constants = _forward_code(layer).co_consts
    # The keywords of calls are among the constants: several keywords form a tuple, and a keyword before `**` is alone.
    groups = (c if isinstance(c, tuple) else (c,) for c in constants)
    return "position_bias" in itertools.chain.from_iterable(groups)


def positions_of_texts(decoder: PreTrainedModel) -> tuple[int, ...] | None:
    """Returns how many dimensions `position_ids` can have for a decoder whose mask separates packed texts by positions.

    Returns None if its mask never does this and is plain causality (OPT). If positions have several axes (Qwen2-VL),
    transformers makes masks from the given positions, except if all axes are made from one.
    """
    source = textwrap.dedent(inspect.getsource(type(decoder).forward))
    position_arguments = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):  # of the arguments for several masks
            pairs = zip(node.keys, node.values, strict=True)
            position_arguments += [
                v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "position_ids"
            ]
        elif isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):
            position_arguments += [
                word.value for word in node.keywords if word.arg == "position_ids"
            ]
    if not position_arguments:
        return None
    if all(ast.unparse(value) == "position_ids" for value in position_arguments):
        return 1, 2
    return (2,) if "position_ids[None, ...].expand(4," in source else ()


def _forward_code(module: nn.Module) -> types.CodeType | None:
    """Returns the code object of a module's `forward`, without decorators. Unlike the text, it has no comments."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)
