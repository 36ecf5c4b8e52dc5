"""The attention functions that transformers' layers call."""

import warnings

import torch

from ..._core.checks import check_bias, resolve_flag
from ..._core.numerics import resolve_scale
from ...keys.intervals import KeyIntervals
from .dtypes import target_dtype
from .layer_attention import _flash_dynamic_mask_attention_forward, check_states
from .layer_masks import has_queries, is_causal_mask
from .layout import swap_heads_and_tokens
from .packed_sequences import hide_other_sequences


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
    out = attention_bshd(
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


# Keywords whose information the mask already contains.
_KEYWORDS_OF_THE_MASK = ("position_ids", "sliding_window")


def mask_driven_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    *,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes `flash_dynamic_mask_attention_forward` for models with attn_implementation="flash_dmattn".

    The mask decides what a query sees, as in the eager attention of every model: without a mask it sees all keys, and
    under a mask [B, 1, 1, Sk] all keys that the mask shows; offsets of packed sequences hide the keys of others. A layer's
    `is_causal` is ignored: many layers have none, or a wrong one, because eager attention never reads it. transformers' mask functions call
    `key_interval_mask`, whose masks include causality.

    Raises:
        ValueError: is_causal is given and contradicts the mask.
    """
    if is_causal is not None:
        _check_causality(module, query, attention_mask, resolve_flag(is_causal, "is_causal"))
    options = {name: value for name, value in kwargs.items() if name not in _KEYWORDS_OF_THE_MASK}
    attention_mask = hide_other_sequences(
        attention_mask, options, query.shape[0], query.shape[2], key.shape[2]
    )
    if options.get("position_bias") is not None:
        # The bias is no score, so every key is kept: a `window_size` of the layer means something else.
        options["window_size"] = key.shape[2]
    return flash_dynamic_mask_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, is_causal=False, **options
    )


def _check_causality(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Raises ValueError if is_causal asks for causality that the mask does not contain; a layer may pass its own flag."""
    if is_causal and mask is None and query.shape[2] > 1:
        raise ValueError(
            "is_causal: got True without a mask, expected a causal mask: under this attn_implementation the mask alone "
            "decides what a query sees"
        )
    contradicts = not is_causal and is_causal_mask(mask) and getattr(module, "is_causal", False)
    if contradicts and not _passes_flag_with_every_mask(module):
        raise ValueError(
            "is_causal: got False with a causal mask, expected None; set is_causal=False in the model's config, by which "
            "its mask functions decide"
        )


def _passes_flag_with_every_mask(module: torch.nn.Module) -> bool:
    """Whether a causal layer of this model passes is_causal=False with every mask, as the mask includes causality."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return model_type in ("moonshine", "moonshine_streaming")


def attention_bshd(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | KeyIntervals | None,
    attention_bias: torch.Tensor | None,
    *,
    scaling: float | None,
    window_size: int | None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> torch.Tensor:
    """Computes `flash_dynamic_mask_attention_forward` for query, key and value [B, S, H, D].

    Models make and attention reads this order; transposing costs three views, and three more in the backward.
    window_size: None keeps all keys, whatever the module has.
    """
    if kwargs.pop("output_attentions", None):
        warnings.warn(
            "flash_dmattn has no output_attentions; use attn_implementation='eager'", stacklevel=3
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
    return _flash_dynamic_mask_attention_forward(
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
