"""The kind of mask that a function of transformers makes."""

from collections.abc import Callable

import torch
from transformers import masking_utils

# The function of masks in which every query sees every key. 4.57 has none; no model of it asks for such masks. Remove the None when
# 4.57 is no longer supported.
BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)


def documents_of(mask_function: Callable) -> torch.Tensor | None:
    """Returns the number of each token's document, int [B, S], if a mask function is causality within packed documents.

    4.57 to 5.24: the functions are closures, in the order of #40753. No issue asks for more. Remove when mask functions carry
    their kind. Compiled code cannot look into a closure, and gets None.
    """
    if torch.compiler.is_compiling() or not _is_local_of(mask_function, "and_masks"):
        return None
    documents = None
    for part in _closure(mask_function)["mask_functions"]:
        if _is_local_of(part, "packed_sequence_mask_function"):
            documents = _closure(part)["packed_sequence_mask"]
        elif _is_local_of(part, "remap_positions_for_packed_sequence"):
            part = _closure(part)["mask_function"]
            if part is not masking_utils.causal_mask_function:
                return None
        elif part is not masking_utils.causal_mask_function:
            return None
    return documents


def _is_local_of(function: Callable, maker: str) -> bool:
    """Whether the function `maker` of transformers' masking module made `function`."""
    is_of_module = getattr(function, "__module__", None) == masking_utils.__name__
    return is_of_module and function.__qualname__.startswith(f"{maker}.<locals>")


def _closure(function: Callable) -> dict[str, object]:
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))
