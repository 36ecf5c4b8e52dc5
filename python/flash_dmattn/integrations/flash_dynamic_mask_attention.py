"""The 1.x module of this name."""

import torch

from .._core.checks import resolve_flag
from ..keys.intervals import KeyIntervals
from ._shared.layer_call import (
    cast_states,
    check_probabilities,
    has_queries,
    is_causal_mask,
    swap_heads_and_tokens,
    target_dtype,
)
from .packed_sequences import attend_by_mask_or_sequences, check_states, take_bias_and_window

__all__ = ["flash_dynamic_mask_attention_forward"]


def flash_dynamic_mask_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | KeyIntervals | None,
    attention_bias: torch.Tensor | None = None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    *,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes dynamic mask attention in the form of transformers' attention functions.

    Args:
        module: the attention layer. `module.is_causal` (default True) and `module.keep_window_size` or
            `module.window_size` are the defaults of the arguments.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]; value: [B, Hkv, Sk, Dv].
        attention_mask: see `_flash_dynamic_mask_attention_forward`. One with a query dimension includes
            causality; with any other, `is_causal` is applied.
        attention_bias: [B, H, Sk] or [B, H, Sq, Sk]; alias: `position_bias`.
        scaling: factor of the scores; default 1/sqrt(D).
        window_size: how many keys a query keeps, by their bias; alias: `keep_window_size`. The module's window is
            used only with a bias.
        softcap: c > 0 turns scores x into c tanh(x/c).
        dropout: only 0 is possible.
        kwargs: `sliding_window`; `position_ids`, `cu_seq_lens_q` and so on for packed sequences; bookkeeping
            of transformers. Others raise, and unknown scalars warn.

    Returns output [B, Sq, Hq, D], and None in the place of the attention probabilities. Raises ValueError or TypeError that names
    the argument, as `_flash_dynamic_mask_attention_forward` does.
    """
    check_states("[B, H, S, D]", query=query, key=key, value=value)
    states = swap_heads_and_tokens(query, key, value)
    kwargs |= {"attention_bias": attention_bias, "position_bias": position_bias, "window_size": window_size}  # fmt: skip
    bias, keep = take_bias_and_window(kwargs, *states[:2], module)
    check_probabilities(dropout, kwargs)
    if query.numel() == 0:
        raise ValueError(f"query: got shape {tuple(query.shape)}, expected no dimension of size 0")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = resolve_flag(is_causal, "is_causal")
    if is_causal_mask(attention_mask):
        attention_mask, is_causal = None, True
    is_causal = is_causal and not has_queries(attention_mask)
    states = cast_states(states, target_dtype(module, query))
    out = attend_by_mask_or_sequences(
        states, attention_mask, is_causal, bias, keep, scaling=scaling, softcap=softcap, **kwargs
    )
    return out, None
