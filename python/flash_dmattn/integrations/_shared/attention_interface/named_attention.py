"""The attention function of 1.x for layers of transformers."""

import warnings

import torch

from ...._core.checks import check_bias, resolve_flag
from ...._core.numerics import resolve_scale
from ....keys.intervals import KeyIntervals
from .dtypes import target_dtype
from .layer_attention import check_states, compute_layer_attention
from .layer_masks import has_queries, is_causal_mask
from .layout import swap_heads_and_tokens


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
        attention_mask: see `compute_layer_attention`. One with a query dimension includes
            causality; with any other, `is_causal` is applied.
        attention_bias: [B, H, Sk] or [B, H, Sq, Sk]; alias: `position_bias`.
        scaling: factor of the scores; default 1/sqrt(D).
        window_size: how many keys a query keeps, by their bias; alias: `keep_window_size`. The module's window is
            used only with a bias.
        softcap: c > 0 turns scores x into c tanh(x/c).
        dropout: only 0 is possible.
        kwargs: `sliding_window`; `position_ids`, `cu_seq_lens_q` and so on for packed sequences; bookkeeping
            of transformers. Others raise, see `keywords`.

    Returns:
        output [B, Sq, Hq, D], and None in the place of the attention probabilities.

    Raises:
        ValueError: a query without elements, dropout, two different biases, a window_size without a
            bias, or keywords of unsupported features.
        TypeError: an unknown keyword, or an argument of another type.
    """
    if attention_bias is not None and position_bias is not None:
        raise ValueError(
            "attention_bias: got a tensor together with position_bias, expected one of them (aliases)"
        )
    check_states("[B, H, S, D]", query=query, key=key, value=value)
    query, key, value = swap_heads_and_tokens(query, key, value)
    if position_bias is not None:
        attention_bias = check_bias(position_bias, "position_bias", query, key)
    has_window = window_size is not None or kwargs.get("keep_window_size") is not None
    if attention_bias is not None and not has_window:
        window_size = getattr(module, "keep_window_size", getattr(module, "window_size", None))
    if kwargs.pop("output_attentions", None):
        warnings.warn(
            "flash_dmattn has no output_attentions; use attn_implementation='eager'", stacklevel=2
        )
    if query.numel() == 0:
        raise ValueError(f"query: got shape {tuple(query.shape)}, expected no dimension of size 0")
    if dropout:
        raise ValueError(f"dropout: got {dropout}, expected 0: attention dropout is not supported")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = resolve_flag(is_causal, "is_causal")
    if is_causal_mask(attention_mask):
        attention_mask, is_causal = None, True
    else:
        is_causal = is_causal and not has_queries(attention_mask)
    out = compute_layer_attention(
        query,
        key,
        value,
        attention_mask,
        attention_bias,
        query_length=query.shape[1],
        key_length=key.shape[1],
        is_causal=is_causal,
        softmax_scale=None if scaling is None else resolve_scale(scaling, "scaling"),
        softcap=softcap,
        window_size=window_size,
        target_dtype=target_dtype(module, query),
        **kwargs,
    )
    return out, None
