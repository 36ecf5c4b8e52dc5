"""Refuses continuous batching, whose paged cache this package does not support."""

from functools import partial

from transformers import PreTrainedModel

from ..names import SCORED_NAME, STORED_NAMES

_METHOD = "init_continuous_batching"


def refuse_continuous_batching(model: PreTrainedModel) -> None:
    """Lets `generate_batch` raise while a model has an implementation of this package.

    4.57: it begins with any implementation, in a thread whose errors are only logged, and answers are cut off. Later versions
    raise for implementations that they do not know, unless they find FlashAttention. Remove with 4.57.
    """
    if hasattr(model, _METHOD):
        setattr(model, _METHOD, partial(_init_continuous_batching, model))


def allow_continuous_batching(model: PreTrainedModel) -> None:
    """Undoes `refuse_continuous_batching`."""
    vars(model).pop(_METHOD, None)


def _init_continuous_batching(model: PreTrainedModel, *args, **kwargs):
    name = str(model.config._attn_implementation)
    if name.removeprefix("paged|") in (*STORED_NAMES, SCORED_NAME):
        raise ValueError(
            f"attn_implementation: got {name!r}, expected another one: continuous batching (generate_batch) has a paged "
            "cache, which flash_dmattn does not support. Use generate, or vLLM"
        )
    return type(model).init_continuous_batching(model, *args, **kwargs)
