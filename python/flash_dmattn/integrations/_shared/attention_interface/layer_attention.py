"""The attention functions of 1.x, with the masks and keywords that transformers passes."""

import torch

from ...._core.checks import (
    MASK_VALUE,
    check_bias,
    check_count,
    check_tensor,
    resolve_flag,
    squeeze_query_dimension,
)
from ...._core.numerics import Numerics, resolve_scale
from ...._dispatch import attention, with_lse
from ....keys.intervals import KeyIntervals
from ....keys.rule import SelectionRule
from ....keys.select import select_elements
from ....keys.visible import Visible
from ....merge import check_sink_logits
from . import keywords, packed_sequences
from .layer_masks import has_queries, is_causal_mask, normalize_mask
from .packed_sequences import PackedArguments, PackedSequences
from .states import cast_states, swap_heads_and_tokens, target_dtype


def check_states(layout: str, **states: torch.Tensor) -> None:
    for name, tensor in states.items():
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {layout}")


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
    keep = resolve_window(kwargs.pop("keep_window_size", None), window_size, attention_bias, module)
    keywords.check_probabilities(dropout, kwargs)
    if query.numel() == 0:
        raise ValueError(f"query: got shape {tuple(query.shape)}, expected no dimension of size 0")
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
        keep_window_size=keep,
        target_dtype=target_dtype(module, query),
        **kwargs,
    )
    return out, None


def compute_layer_attention(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor | KeyIntervals | None,
    attention_bias: torch.Tensor | None,
    query_length: int,
    key_length: int,
    is_causal: bool,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    keep_window_size: int | None = None,
    deterministic: bool | None = None,
    target_dtype: torch.dtype | None = None,
    implementation: str | None = None,
    *,
    window_size: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Computes attention in which every query sees the `keep_window_size` keys with the highest bias.

    Keys are selected among the allowed keys, if there are more than `keep_window_size` keys. No gradient flows through
    the selection. Its form depends on which input has a query dimension:

    | mask                        | bias       | selection                                        |
    |-----------------------------|------------|-----------------------------------------------|
    | None, [B, Sk], [B, H, Sk]   | [B, H, Sk] | one for all queries; causality is applied after |
    | [B, H, Sq, Sk] or intervals | [B, H, Sk] | per query; the bias stays 3-d                 |
    | any                         | 4-d        | per query                                     |

    A 3-d bias costs O(N) memory with every mask that shows each key to consecutive queries: causal,
    padded, packed. Such a 4-d mask is recognised by reading it, in every call (keys/recognise.py). Under any other mask
    a GPU needs one more byte for each (query, key) and head of the selection.

    Args:
        query_states: [B, Sq, Hq, D]; float32, bfloat16 or float16.
        key_states, value_states: [B, Sk, Hkv, D].
        attention_mask: bool or integer, nonzero = allowed, every dimension but the last may be 1; or, if 4-d,
            additive floating point; or `KeyIntervals`, or their tensor, int32 [B, H, Sk, 2].
        attention_bias: added to the scaled scores; heads Hq, Hkv or 1.
        query_length, key_length: Sq and Sk.
        is_causal: whether to hide keys after the query, in addition to the mask. The last query is at the last key.
        keep_window_size: how many keys a query keeps; alias: `window_size`.
        target_dtype: see `cast_states`.
        implementation: accepted for compatibility; there is one.
        position_ids: int [1 or B, Sq]; if Sq = Sk and they begin again, the row packs several sequences. A mask with a
            query dimension includes this; together with other padding it raises.
        cu_seq_lens_q, cu_seq_lens_k: int32 [sequences + 1], offsets of packed sequences over all rows one after the
            other.
        max_length_q, max_length_k: the lengths of the longest packed sequences, or None.
        sliding_window: how many keys a query sees without a mask, itself included. A mask already includes it.
        s_aux: [Hq], one logit per head. It enters every softmax like the score of a key whose value is 0 (sinks).
        kwargs: see `keywords`.

    Returns:
        [B, Sq, Hq, D]; a query that sees no key gets 0.

    Raises:
        ValueError: both names of the window given and different, or one without a bias; shapes that do not
            fit; packed sequences with padding, a 4-d bias or a sliding window; one of cu_seq_lens_q and
            cu_seq_lens_k; keywords of unsupported features; a mask of negative integers, if values can be read.
        TypeError: an unknown keyword, or an argument of another type; a floating point mask that is not 4-d.
    """
    states = (query_states, key_states, value_states)
    _check_arguments(states, (query_length, key_length), attention_mask, sliding_window, kwargs)
    packing = PackedArguments(
        position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    )
    packing.check()
    if attention_bias is not None:
        attention_bias = check_bias(attention_bias, "attention_bias", query_states, key_states)
    if s_aux is not None:
        check_sink_logits(s_aux, query_states, "s_aux")
    keep = resolve_window(keep_window_size, window_size, attention_bias)
    selects = keep is not None and key_length > keep
    is_causal = resolve_flag(is_causal, "is_causal") and query_length > 1

    visible = packed_sequences.sequences_or_mask(
        packing,
        attention_mask,
        query_states,
        key_length,
        sliding_window=sliding_window,
        is_causal=is_causal,
        selects=selects,
    )
    cast = cast_states(states, target_dtype)
    if isinstance(visible, PackedSequences):
        return packed_sequences.attend(
            *cast,
            attention_bias,
            visible,
            keep,
            is_causal=is_causal,
            softmax_scale=softmax_scale,
            softcap=softcap,
            deterministic=deterministic,
            sink_logits=s_aux,
        )
    numerics = Numerics.from_arguments(None, softmax_scale, softcap, "saturate", deterministic)
    return attend_by_bias(
        *cast, visible, attention_bias, keep, is_causal=is_causal, numerics=numerics, sink_logits=s_aux
    )  # fmt: skip


def attend_by_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | KeyIntervals | None,
    bias: torch.Tensor | None,
    keep_window_size: int | None,
    *,
    is_causal: bool,
    numerics: Numerics,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention to the keys with the highest bias among those that a mask shows. Returns [B, Sq, Hq, Dv].

    query: [B, Sq, Hq, D]; key: [B, Sk, Hkv, D]; value: [B, Sk, Hkv, Dv]; mask, bias: see `compute_layer_attention`.
    keep_window_size: None shows all of them.
    """
    selects = keep_window_size is not None and key.shape[1] > keep_window_size
    mask, intervals, added = normalize_mask(mask, bias, query, key, selects, None)
    rule = scores = None
    if selects:
        mask, intervals, rule, scores = _make_rule(
            bias, mask, intervals, keep_window_size, is_causal, query, key
        )
    visible = Visible(mask, is_causal, intervals)
    out, statistics = attention(
        query, key, value, added, visible, numerics, rule=rule, scores=scores
    )
    return with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)


def _check_arguments(states, lengths, attention_mask, sliding_window, others) -> None:
    query, key, value = states
    check_states("[B, S, H, D]", query_states=query, key_states=key, value_states=value)
    expected = (query.shape[1], key.shape[1])
    if lengths != expected:
        raise ValueError(f"query_length, key_length: got {lengths}, expected {expected}")
    keywords.check_keywords(others)
    if not isinstance(attention_mask, (torch.Tensor, KeyIntervals, type(None))):
        raise TypeError(
            f"attention_mask: got {type(attention_mask).__name__}, expected a torch.Tensor, KeyIntervals or None"
        )
    if sliding_window is not None:
        check_count(sliding_window, "sliding_window")


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


def resolve_window(
    keep_window_size: int | None,
    window_size: int | None,
    bias: torch.Tensor | None,
    module: torch.nn.Module | None = None,
) -> int | None:
    """Returns the number of keys that a query keeps, from either name of the argument, or by default of the module's attribute."""
    for name, size in (("keep_window_size", keep_window_size), ("window_size", window_size)):
        if size is None:
            continue
        check_count(size, name)
        if bias is None:
            raise ValueError(
                f"{name}: got {size} without attention_bias, expected a bias with the scores of keys"
            )
    if None not in (keep_window_size, window_size) and window_size != keep_window_size:
        raise ValueError(
            f"window_size: got {window_size} together with keep_window_size {keep_window_size}, expected one of them "
            "(aliases)"
        )
    size = window_size if keep_window_size is None else keep_window_size
    if size is None and bias is not None:
        size = getattr(module, "keep_window_size", getattr(module, "window_size", None))
    return size
