"""Attention of layers whose mask and bias decide which keys a query sees."""

from collections.abc import Collection

import torch

from ..._core.checks import (
    MASK_VALUE,
    add_query_dimension,
    broadcast_argument,
    check_bias,
    check_count,
    squeeze_query_dimension,
    widen_bias,
)
from ..._core.numerics import Numerics, resolve_scale
from ..._dispatch import attention, with_lse
from ...keys.intervals import KeyIntervals
from ...keys.recognise import Memo, intervals_of_mask, refuse_negative, split_additive
from ...keys.rule import SelectionRule
from ...keys.select import select_elements
from ...keys.visible import Visible
from ...merge import check_sink_logits
from .layer_call import (
    as_key_intervals,
    check_keywords,
    check_mask_type,
)


def take_bias_and_window(
    keywords: dict,
    query: torch.Tensor,
    key: torch.Tensor,
    layer: torch.nn.Module | None = None,
    names_with_window: Collection[str] = ("attention_bias",),
) -> tuple[torch.Tensor | None, int | None]:
    """Removes the bias and the number of keys that a query keeps, each of which has two names, from keywords, and returns them.

    The number for a bias under `names_with_window` is by default `layer.keep_window_size` or `layer.window_size`.
    """
    bias = keep = None
    for name in ("position_bias", "attention_bias"):
        given = keywords.pop(name, None)
        if given is None:
            continue
        if bias is not None:
            raise ValueError(
                f"{name}: got a tensor together with position_bias, expected one of them (aliases)"
            )
        bias = check_bias(given, name, query, key)
        if name in names_with_window:
            keep = getattr(layer, "keep_window_size", getattr(layer, "window_size", None))
    sizes = {name: keywords.pop(name, None) for name in ("keep_window_size", "window_size")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name, size in sizes.items():
        check_count(size, name)
        if bias is None:
            raise ValueError(
                f"{name}: got {size} without attention_bias, expected a bias with the scores of keys"
            )
        keep = size
    if len(sizes) == 2 and sizes["window_size"] != sizes["keep_window_size"]:
        raise ValueError(
            f"window_size: got {sizes['window_size']} together with keep_window_size {sizes['keep_window_size']}, expected one of "
            "them (aliases)"
        )
    return bias, keep


def attend_by_mask(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | KeyIntervals | None,
    is_causal: bool,
    bias: torch.Tensor | None,
    keep: int | None,
    **keywords,
) -> torch.Tensor:
    """Computes attention in which a query sees the keys that the mask shows; of these, with a window, those with
    the highest bias.

    Args:
        states: query [B, Sq, Hq, D], key [B, Sk, Hkv, D] and value [B, Sk, Hkv, Dv].
        mask, is_causal: as in `_flash_dynamic_mask_attention_forward`.
        bias, keep: of `take_bias_and_window`.
        keywords: of `checked_options`.

    Returns:
        [B, Sq, Hq, Dv].
    """
    query, key, value = states
    options = checked_options(query, **keywords)
    selects = keep is not None and key.shape[1] > keep
    mask, intervals, added = normalize_mask(mask, bias, query, key, selects, None)
    rule = scores = None
    if selects:
        mask, intervals, rule, scores = _make_rule(
            bias, mask, intervals, keep, is_causal, query, key
        )
    sink_logits = options.pop("sink_logits")
    numerics = Numerics.from_arguments(**options, softmax_scale=None, nonfinite="saturate")
    visible = Visible(mask, is_causal, intervals)
    out, statistics = attention(
        query, key, value, added, visible, numerics, rule=rule, scores=scores
    )
    return with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)


def checked_options(
    query: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others,
) -> dict[str, object]:
    """Returns keywords of transformers by their names in flash_dmattn_func. others: change nothing; the rest raise."""
    check_keywords(others)
    if s_aux is not None:
        check_sink_logits(s_aux, query, "s_aux")
    scale = None if scaling is None else resolve_scale(scaling, "scaling")
    options = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    return options | {"sink_logits": s_aux}


def normalize_mask(
    mask: torch.Tensor | KeyIntervals | None,
    bias: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    chooses: bool,
    memo: Memo | None,
) -> tuple[torch.Tensor | None, KeyIntervals | None, torch.Tensor | None]:
    """Returns (mask, intervals, bias). The mask is bool [B, H, Sk] or [B, H, Sq, Sk], unless intervals describe it.

    An additive mask that has values besides allowing and masking ones is split into a mask and a bias.
    chooses: whether a choice of keys follows. The choice recognises intervals in a bool mask by itself.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    intervals = as_key_intervals(check_mask_type(mask), query_length, key_length)
    if mask is None or intervals is not None:
        return None, intervals, bias
    if mask.dim() == 0 or mask.shape[-1] != key_length:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected {key_length} keys last"
        )
    refuse_negative(mask, memo)
    mask = broadcast_argument(mask, "attention_mask", query, key)
    if mask.dim() < 4:
        if mask.is_floating_point():
            raise TypeError(
                f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected bool or integers (nonzero: visible); "
                "an additive mask has 4 dimensions"
            )
        return mask.bool(), None, bias
    if mask.shape[2] > 1 and not (chooses and mask.dtype == torch.bool):
        intervals = intervals_of_mask(mask, memo)
        if intervals is not None:
            return None, intervals, bias
    if mask.is_floating_point():
        additive = mask
        mask, adds = split_additive(additive, memo)
        if adds:
            bias = additive if bias is None else _sum_of_biases(additive, add_query_dimension(bias))
    mask = mask.bool()
    return mask if mask.shape[2] > 1 else mask.squeeze(2), None, bias


def _sum_of_biases(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        x, y = widen_bias(x, x.dtype), widen_bias(y, y.dtype)
    return x + y


def _make_rule(
    attention_bias: torch.Tensor,
    mask: torch.Tensor | None,
    intervals: KeyIntervals | None,
    keep: int,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[torch.Tensor | None, KeyIntervals | None, SelectionRule | None, torch.Tensor | None]:
    """Returns the mask, the intervals, the rule and the scores of a call that selects keys.

    4-d scores select single elements: the mask then contains the selection.
    """
    scores = squeeze_query_dimension(attention_bias.detach())
    if scores.dim() == 4:
        shown = Visible(mask, is_causal, intervals)
        mask = select_elements(scores, shown, keep, query, key, MASK_VALUE[scores.dtype])
        return mask, None, None, None
    has_no_queries = intervals is None and (mask is None or mask.dim() == 3)
    mode = "global" if has_no_queries else "per_query"
    return mask, intervals, SelectionRule(keep, mode).checked_rule(), scores
