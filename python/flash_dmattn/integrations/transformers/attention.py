"""The attention function of transformers' models under this package's names."""

from __future__ import annotations

from torch import Tensor, nn

from ..._core.checks import resolve_flag
from ..._core.numerics import Numerics
from ..._dispatch import attention, with_lse
from ...keys.visible import Visible
from .._shared.layer_call import (
    PACKED_KEYWORDS,
    cast_states,
    check_probabilities,
    checked_options,
    hide_other_sequences,
    is_causal_mask,
    normalize_mask,
    swap_heads_and_tokens,
    take_bias,
    target_dtype,
)
from .families import FLAG_WITH_EVERY_MASK, type_of
from .learned_scores.layers import ScoreCall


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    flash_dmattn_scores: ScoreCall | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes attention in the form of transformers' attention functions.

    In layers without scores, queries see what the mask shows.

    Args:
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Sk, D]. With a DynamicMaskCache, keys and values of the new tokens.
        attention_mask: as `key_interval_mask` makes it, or a mask of the user's.
        flash_dmattn_scores: of a layer with scores.

    Returns:
        output [B, Sq, Hq, D], and None in the place of the probabilities.
    """
    if flash_dmattn_scores is not None:
        out = flash_dmattn_scores.attend(query, key, value, attention_mask, dropout, **kwargs)
    else:
        check_probabilities(dropout, kwargs)
        out = _attend_by_mask(module, query, key, value, attention_mask, **kwargs)
    return out.contiguous(), None  # some layers call view() on it


def _attend_by_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,  # the mask includes packed texts and windows
    sliding_window: int | None = None,
    **kwargs,
) -> Tensor:
    """Computes attention in which the mask decides what a query sees, as in the eager attention of every model.

    Without a mask a query sees all keys, and under a mask [B, 1, 1, Sk] all keys that the mask shows. Offsets of packed sequences
    hide the keys of other sequences. A layer's `is_causal` is ignored: many layers have none, or a wrong one, because eager
    attention never reads it. Masks of `key_interval_mask` include causality. A model, or its caller, may add a bias.
    """
    if is_causal is not None:
        _check_causality(module, query, mask, resolve_flag(is_causal, "is_causal"))
    if query.numel() == 0:
        raise ValueError(f"query: got shape {tuple(query.shape)}, expected no dimension of size 0")
    has_causality = is_causal_mask(mask)
    mask = hide_other_sequences(mask, kwargs, query.shape[0], query.shape[2], key.shape[2])
    kwargs = {name: value for name, value in kwargs.items() if name not in PACKED_KEYWORDS}
    mask = None if is_causal_mask(mask) else mask
    states = swap_heads_and_tokens(query, key, value)
    bias = take_bias(kwargs, *states[:2])
    if bias is not None and getattr(module, "keep_window_size", None) is not None:
        raise ValueError(
            f"attention_bias: got a bias at a layer with keep_window_size {module.keep_window_size}, expected a layer without one: "
            "here a bias is added and chooses no keys. flash_dynamic_mask_attention_forward chooses keys by it"
        )
    query, key, value = cast_states(states, target_dtype(module, query))
    options = checked_options(query, **kwargs)
    sink_logits = options.pop("sink_logits")
    numerics = Numerics.from_arguments(**options, softmax_scale=None, nonfinite="saturate")
    mask, intervals, bias = normalize_mask(mask, bias, query, key)
    visible = Visible(mask, has_causality, intervals)
    out, statistics = attention(query, key, value, bias, visible, numerics)
    return with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)


def _check_causality(
    module: nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool
) -> None:
    """Raises ValueError if is_causal asks for causality that the mask does not contain; a layer may pass its own flag."""
    if is_causal and mask is None and query.shape[2] > 1:
        raise ValueError(
            "is_causal: got True without a mask, expected a causal mask: under this attn_implementation the mask alone "
            "decides what a query sees"
        )
    contradicts = not is_causal and is_causal_mask(mask) and getattr(module, "is_causal", False)
    if contradicts and type_of(module.config) not in FLAG_WITH_EVERY_MASK:
        raise ValueError(
            "is_causal: got False with a causal mask, expected None; set is_causal=False in the model's config, by which "
            "its mask functions decide"
        )
