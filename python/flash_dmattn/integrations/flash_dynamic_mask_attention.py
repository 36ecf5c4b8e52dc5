"""The attention function that models call: tensors as [B, H, S, D], settings from the module."""

import warnings

import torch

from .._arguments import check_bias, resolve_flag
from ..key_intervals import KeyIntervals
from ..numerics import resolve_scale
from .modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
    check_states,
)


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
    """Dynamic mask attention in the form of transformers' attention functions.

    Args:
        module: the attention layer. `module.is_causal` (default True) and `module.keep_window_size` or
            `module.window_size` are the defaults of the arguments.
        query: [B, Hq, Sq, D].
        key, value: [B, Hkv, Sk, D]; of value, D may be smaller.
        attention_mask: see `_flash_dynamic_mask_attention_forward`. One with a query dimension includes
            causality; beside any other `is_causal` is applied.
        attention_bias: [B, H, Sk] or [B, H, Sq, Sk]; `position_bias` is another name of it.
        scaling: factor of the scores; default 1/sqrt(D).
        window_size: how many keys a query keeps, by their bias; `keep_window_size` is another name of it. That of the
            module counts only beside a bias.
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
        raise ValueError("attention_bias and position_bias are two names of one thing; give one")
    check_states("[B, H, S, D]", query=query, key=key, value=value)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if position_bias is not None:
        attention_bias = check_bias(position_bias, "position_bias", query, key)
    if attention_bias is None:
        if window_size is not None:
            raise ValueError(
                f"window_size is {window_size} without an attention_bias, which has the scores to choose by"
            )
    elif window_size is None and kwargs.get("keep_window_size") is None:
        window_size = getattr(module, "keep_window_size", getattr(module, "window_size", None))
    out = attend_by_token(
        module,
        query,
        key,
        value,
        attention_mask,
        attention_bias,
        scaling=scaling,
        window_size=window_size,
        softcap=softcap,
        is_causal=is_causal,
        dropout=dropout,
        **kwargs,
    )
    return out, None


def attend_by_token(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | KeyIntervals | None,
    attention_bias: torch.Tensor | None,
    *,
    scaling: float | None,
    window_size: int | None,
    dropout: float,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> torch.Tensor:
    """`flash_dynamic_mask_attention_forward` of query, key and value [B, S, H, D], the order in which models make them
    and attention reads them: transposed, they are three views more, and three in the backward. window_size None
    keeps all keys, whatever the module has."""
    if kwargs.pop("output_attentions", None):
        warnings.warn(
            "flash_dmattn has no output_attentions; use attn_implementation='eager'", stacklevel=3
        )
    if query.numel() == 0:
        raise ValueError(
            f"query has shape {tuple(query.shape)} as [B, Sq, Hq, D]; expected no dimension of 0"
        )
    if dropout:
        raise ValueError(f"dropout is {dropout}; flash_dmattn has no attention dropout, expected 0")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = resolve_flag(is_causal, "is_causal")
    mask_is_complete = isinstance(attention_mask, KeyIntervals) or (
        isinstance(attention_mask, torch.Tensor)
        and attention_mask.dim() == 4
        and attention_mask.shape[2] > 1
    )
    return _flash_dynamic_mask_attention_forward(
        query,
        key,
        value,
        attention_mask,
        attention_bias,
        query_length=query.shape[1],
        key_length=key.shape[1],
        is_causal=is_causal and not mask_is_complete,
        softmax_scale=None if scaling is None else resolve_scale(scaling, "scaling"),
        softcap=softcap,
        window_size=window_size,
        target_dtype=target_dtype(module, query),
        **kwargs,
    )


def target_dtype(module: torch.nn.Module, query: torch.Tensor) -> torch.dtype | None:
    """The intended dtype of a float32 query: that of autocast, or of the layer's weights."""
    if query.dtype != torch.float32:
        return None
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    config = getattr(module, "config", None)
    if hasattr(config, "_pre_quantization_dtype"):
        return config._pre_quantization_dtype
    weights = (m.weight for m in module.modules() if isinstance(m, torch.nn.Linear))
    return next((w.dtype for w in weights if w.is_floating_point()), None)
