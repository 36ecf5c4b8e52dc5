"""Dynamic mask attention for transformers: a named attention implementation, and Doge models.

Importing this module registers the name "flash_dmattn" with transformers' attention and mask
interfaces, and makes `DogeAttention` use it under that name:

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    model = enable_flash_dmattn(DogeForCausalLM.from_pretrained(...))

`from_pretrained(..., attn_implementation="flash_dmattn")` and `model.set_attn_implementation` work
too, for any model whose attention layers go through transformers' `AttentionInterface`.
"""

import functools
import types
import warnings

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, modeling_utils
from transformers.models.doge.modeling_doge import DogeAttention

from .doge import ROUNDED, doge_attention_forward, doge_scores
from .flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from .masks import keep_documents, key_interval_mask

__all__ = ["NAME", "doge_scores", "enable_flash_dmattn", "key_interval_mask"]

NAME = "flash_dmattn"


def enable_flash_dmattn(
    model: torch.nn.Module, *, round_scores_like_eager: bool = False
) -> torch.nn.Module:
    """Makes every Doge attention layer of a model choose its keys by intervals.

    No layer then builds a tensor with one element per (query, key) pair. Loss, gradients and generated
    tokens are those of `attn_implementation="eager"` to rounding, except where eager leaves the choice
    open: of equal scores (all of them in a fresh model, and those of equal tokens in the first layer)
    the more recent keys are kept. `model.set_attn_implementation("eager")` undoes it.

    In a 16-bit model the scores of keys are float32 all the same, so that the choice is the float32
    model's; eager attention rounds them, and its choice is partly noise.

    Args:
        model: a Doge model, or anything that contains its attention layers (a PEFT model, for one).
        round_scores_like_eager: scores in the model's dtype, to reproduce a run of eager attention.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Doge attention layer.
    """
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without any DogeAttention layer")
    dropout = max(layer.attention_dropout for layer in layers)
    if dropout:
        warnings.warn(
            f"attention_dropout is {dropout}: this model can infer, but its training will be refused, because "
            "flash_dmattn has no attention dropout; expected config.attention_dropout = 0",
            stacklevel=2,
        )
    for layer in layers:
        layer.config._attn_implementation = NAME
        setattr(layer, ROUNDED, round_scores_like_eager)
        if "_old_forward" in vars(layer):  # accelerate kept the method from before this import
            layer._old_forward = types.MethodType(DogeAttention.forward, layer)
    return model


def _teach_doge() -> None:
    """Under the name "flash_dmattn", DogeAttention.forward is `doge_attention_forward`."""
    forward = DogeAttention.forward

    @functools.wraps(forward)
    def dispatch(self, *args, **kwargs):
        ours = self.config._attn_implementation == NAME
        return (doge_attention_forward if ours else forward)(self, *args, **kwargs)

    DogeAttention.forward = dispatch


def _skip_flash_attention_preload() -> None:
    """transformers 5 loads the FlashAttention package for every name with "flash" in it; not for ours."""
    preload = modeling_utils.lazy_import_flash_attention

    @functools.wraps(preload)
    def preload_others(implementation, *args, **kwargs):
        return None if implementation == NAME else preload(implementation, *args, **kwargs)

    modeling_utils.lazy_import_flash_attention = preload_others


def _refuse_continuous_batching() -> None:
    """At its start: an error of a layer would only be logged by its thread, and the answers truncated."""
    start = getattr(GenerationMixin, "init_continuous_batching", None)
    if start is None:
        return

    @functools.wraps(start)
    def start_others(self, *args, **kwargs):
        if str(self.config._attn_implementation).removeprefix("paged|") == NAME:
            raise ValueError(
                f"attn_implementation is {self.config._attn_implementation!r}; continuous batching (generate_batch) "
                "has a paged cache, which flash_dmattn does not support. Use generate, or another implementation"
            )
        return start(self, *args, **kwargs)

    GenerationMixin.init_continuous_batching = start_others


AttentionInterface.register(NAME, flash_dynamic_mask_attention_forward)
AttentionMaskInterface.register(NAME, key_interval_mask)
_teach_doge()
keep_documents()
_skip_flash_attention_preload()
_refuse_continuous_batching()
