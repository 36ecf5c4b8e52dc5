"""Dynamic mask attention behind the calling convention of transformers' attention functions."""

import torch

from .._arguments import (
    MASK_VALUE,
    broadcast_argument,
    check_bias,
    check_count,
    check_positions,
    check_tensor,
    may_read,
    resolve_flag,
    widen_bias,
)
from ..allowed_keys import (
    intervals_of_mask,
    mask_of_intervals,
    refuse_negative,
    select_among,
    split_additive,
)
from ..flash_dmattn_interface import flash_dmattn_func
from ..key_intervals import KeyIntervals, intersect, prefix_lm
from ..key_intervals import sliding_window as sliding_window_of
from ..utils.mask import topk_mask
from . import keywords, packed_sequences


def check_states(layout: str, **states: torch.Tensor) -> None:
    for name, tensor in states.items():
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {layout}")


def fdma_peft_integration_check(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    bias: torch.Tensor | None,
    target_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Casts float32 tensors back to the dtype of the model.

    PEFT keeps layer norms in float32 for stability, which silently turns later tensors into float32.

    Args:
        q, k, v, bias: tensors of any shape; None stays None, and so do tensors of another dtype.
        target_dtype: the dtype that replaces float32; None leaves all tensors as they are.
    """
    if target_dtype is None:
        return q, k, v, bias
    if not isinstance(target_dtype, torch.dtype) or not target_dtype.is_floating_point:
        raise TypeError(f"target_dtype: got {target_dtype!r}, expected a floating dtype or None")
    return tuple(
        t.to(target_dtype) if t is not None and t.dtype == torch.float32 else t
        for t in (q, k, v, bias)
    )


def _flash_dynamic_mask_attention_forward(
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
    **kwargs,
) -> torch.Tensor:
    """Attention in which every query sees the `keep_window_size` keys with the highest bias.

    The choice is made when there are more keys than that, among allowed keys only, and no gradient
    flows through it. Its form depends on which input has a query dimension:

    | mask                        | bias       | choice                                        |
    |-----------------------------|------------|-----------------------------------------------|
    | None, [B, Sk], [B, H, Sk]   | [B, H, Sk] | one for all queries; causality is applied after |
    | [B, H, Sq, Sk] or intervals | [B, H, Sk] | per query; the bias stays 3-d                 |
    | any                         | 4-d        | per query                                     |

    A 3-d bias costs O(N) memory with every mask that shows each key to consecutive queries: causal,
    padded, packed. Such a 4-d mask is recognised by reading it (see `allowed_keys`). Under any other mask
    a GPU needs a bit for each (query, key) and head of the choice beside it.

    Args:
        query_states: [B, Sq, Hq, D]; float32, bfloat16 or float16.
        key_states, value_states: [B, Sk, Hkv, D].
        attention_mask: bool or integer, nonzero = allowed, every dimension but the last may be 1; or, when
            4-d, additive floating point; or `KeyIntervals`, or their tensor, int32 [B, H, Sk, 2].
        attention_bias: added to the scaled scores; heads Hq, Hkv or 1.
        query_length, key_length: Sq and Sk.
        is_causal: hide keys that come after the query (last query = last key), beside the mask.
        keep_window_size: how many keys a query keeps; `window_size` is another name of it.
        target_dtype: see `fdma_peft_integration_check`.
        implementation: accepted for compatibility; there is one.
        position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: several sequences packed in a
            row; int [1 or B, Sq] that begin again where Sq = Sk, or int32 [sequences + 1] over all rows one
            after the other, and lengths where known. A mask with a query dimension includes them; beside
            any other padding is refused.
        sliding_window: how many keys a query sees, itself included, where there is no mask; a mask
            already includes it.
        kwargs: see `keywords`.

    Returns:
        [B, Sq, Hq, D]; a query that sees no key gets 0.

    Raises:
        ValueError: both names of the window given and different, or one without a bias; shapes that do not
            fit; packed sequences with padding, a 4-d bias or a sliding window; one of cu_seq_lens_q and
            cu_seq_lens_k; keywords of unsupported features; a mask of negative integers, where values are read.
        TypeError: an unknown keyword, or an argument of another type; a floating point mask that is not 4-d.
    """
    check_states(
        "[B, S, H, D]",
        query_states=query_states,
        key_states=key_states,
        value_states=value_states,
    )
    lengths = (query_length, key_length)
    if lengths != (query_states.shape[1], key_states.shape[1]):
        raise ValueError(
            f"query_length and key_length are {lengths}; expected those of query_states and key_states, "
            f"{(query_states.shape[1], key_states.shape[1])}"
        )
    keywords.refuse(kwargs)
    keywords.refuse_packed_by_layer(
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_length_q,
        max_length_k=max_length_k,
    )
    for name, count in (
        ("keep_window_size", keep_window_size),
        ("window_size", window_size),
        ("sliding_window", sliding_window),
    ):
        if count is not None:
            check_count(count, name)
    if position_ids is not None:
        check_positions(position_ids, "position_ids")
    if not isinstance(attention_mask, (torch.Tensor, KeyIntervals, type(None))):
        raise TypeError(
            f"attention_mask: got {type(attention_mask).__name__}, expected a torch.Tensor, KeyIntervals or None"
        )
    if attention_bias is not None:
        attention_bias = check_bias(attention_bias, "attention_bias", query_states, key_states)
    if keep_window_size is not None and window_size not in (None, keep_window_size):
        raise ValueError(
            f"window_size is {window_size} and keep_window_size is {keep_window_size}; give one"
        )
    keep = keep_window_size if keep_window_size is not None else window_size
    if keep is not None and attention_bias is None:
        name = "window_size" if keep_window_size is None else "keep_window_size"
        raise ValueError(
            f"{name} is {keep} without an attention_bias, which has the scores to choose by"
        )
    chooses = keep is not None and key_length > keep
    is_causal = resolve_flag(is_causal, "is_causal")
    attend = {
        "is_causal": is_causal and query_length > 1,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "deterministic": deterministic,
    }
    states = (query_states, key_states, value_states)
    has_mask = attention_mask is not None
    if not has_mask:
        attention_mask = _window_mask(
            sliding_window, is_causal, query_length, key_length, query_states.device
        )
    if not has_mask or _is_key_mask(attention_mask, query_length, key_length):
        key_mask = attention_mask if has_mask else None
        if has_mask:
            refuse_negative(key_mask)
        batch = query_states.shape[0]
        packed = packed_sequences.of_offsets(
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            key_mask,
            total_q=batch * query_length,
            total_k=batch * key_length,
        )
        by_positions = packed is None and query_length == key_length
        if by_positions and (may_read() or chooses):
            packed = packed_sequences.of_positions(position_ids, key_mask, batch, query_length)
        elif by_positions and not _is_additive(key_mask):
            documents = packed_sequences.intervals_of_positions(
                position_ids, key_mask, batch, query_length, attend["is_causal"]
            )
            if documents is not None:
                window = attention_mask if key_mask is None else None
                attention_mask = documents if window is None else intersect(window, documents)
        if packed is not None:
            if not has_mask and attention_mask is not None:
                raise ValueError(
                    f"sliding_window is {sliding_window} for packed sequences without a mask; expected a mask that "
                    "says which keys are visible"
                )
            states = _cast(states, target_dtype)
            return packed_sequences.attend(*states, attention_bias, packed, keep, attend)

    visible, bias = _normalize_mask(attention_mask, attention_bias, query_states, key_states)
    if chooses:
        scores = attention_bias.detach()
        if scores.dim() == 4 and scores.shape[2] == 1:
            scores = scores.squeeze(2)
        per_key_mask = visible is None or (isinstance(visible, torch.Tensor) and visible.dim() == 3)
        is_bool = isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
        visible = _choose(
            visible,
            scores,
            query_length,
            key_length,
            keep,
            attend["is_causal"],
            attention_mask if is_bool else None,
        )
        if scores.dim() == 3 and not isinstance(visible, KeyIntervals):
            query, key, value = _cast(states, target_dtype)
            return flash_dmattn_func(
                query,
                key,
                value,
                attn_mask=visible,
                attn_bias=bias,
                keep_window_size=keep,
                selection="global" if per_key_mask else "per_query",
                selection_scores=scores,
                **attend,
            )
    query, key, value = _cast(states, target_dtype)
    if not isinstance(visible, KeyIntervals):
        return flash_dmattn_func(query, key, value, attn_mask=visible, attn_bias=bias, **attend)
    heads = visible.intervals.shape[1]
    if heads > key.shape[2]:
        # Lists of keys per query head need keys per query head.
        key, value = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (key, value))
        if bias is not None and bias.shape[1] > 1:
            bias = bias.repeat_interleave(heads // bias.shape[1], dim=1)
    return flash_dmattn_func(query, key, value, attn_bias=bias, key_intervals=visible, **attend)


def _is_key_mask(mask: torch.Tensor | KeyIntervals, query_length: int, key_length: int) -> bool:
    """Whether a mask has no query dimension, and so cannot include packed sequences."""
    if isinstance(mask, KeyIntervals) or mask.dim() == 0 or mask.shape[-1] != key_length:
        return False
    if mask.dim() < 4:
        return not mask.is_floating_point()  # others are refused
    return mask.shape[2] == 1 and query_length > 1


def _is_additive(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.is_floating_point()


def _window_mask(
    window: int | None, is_causal: bool, query_length: int, key_length: int, device: torch.device
) -> KeyIntervals | None:
    """The window where there is no mask: causal, it ends at the query, else the query is in its middle."""
    if window is None or key_length <= window:
        return None
    lookahead = 0 if is_causal else window - 1
    return sliding_window_of(
        key_length, window, lookahead=lookahead, query_length=query_length, device=device
    )


def _cast(
    states: tuple[torch.Tensor, ...], target_dtype: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    """Query, key and value in the model's dtype. A float32 bias stays: rounded, it would move the scores."""
    return fdma_peft_integration_check(*states, None, target_dtype)[:3]


def as_key_intervals(
    mask: torch.Tensor | KeyIntervals | None, query_length: int, key_length: int | None = None
) -> KeyIntervals | None:
    """The intervals that a model passed along as its mask, int32 [B, H, Sk, 2]; None for other masks.

    Code that may not read values takes them for consecutive, which masks of models are: then no bound has to be read from a GPU.
    """
    if not isinstance(mask, torch.Tensor):
        return mask
    compact = mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[3] == 2
    if (
        not compact
        or key_length not in (None, mask.shape[2])
        or _is_two_by_two_mask(mask, query_length)
    ):
        return None
    return KeyIntervals(mask, query_length, consecutive=not may_read())


def _is_two_by_two_mask(mask: torch.Tensor, query_length: int) -> bool:
    """Of int32 [B, H, 2, 2] for two queries: whether it has a value for every (query, key) pair. The intervals of a
    key that the last query sees end at 2."""
    if mask.shape[2] != 2 or query_length != 2 or not may_read() or mask.amax() > 1:
        return False
    if mask[..., 0].any():
        return True
    if mask.any():
        raise ValueError(
            "attention_mask is int32 of shape [B, H, 2, 2] and could be a mask as well as intervals; expected a bool "
            "mask or KeyIntervals"
        )
    return False


def _normalize_mask(
    mask: torch.Tensor | KeyIntervals | None,
    bias: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[torch.Tensor | KeyIntervals | None, torch.Tensor | None]:
    """The mask as intervals, as bool [B, H, Sk], or else as bool [B, H, Sq, Sk].

    An additive mask with other values than allowing and masking ones is split into a mask and a bias.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    intervals = as_key_intervals(mask, query_length, key_length)
    if mask is None or intervals is not None:
        return intervals, bias
    if mask.dim() == 0 or mask.shape[-1] != key_length:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected {key_length} keys last"
        )
    refuse_negative(mask)
    mask = broadcast_argument(mask, "attention_mask", query, key)
    if mask.dim() < 4:
        if mask.is_floating_point():
            raise TypeError(
                f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; expected bool or integers (nonzero: "
                "visible). An additive mask has 4 dimensions"
            )
        return mask.bool(), bias
    if mask.shape[2] > 1:
        intervals = intervals_of_mask(mask)
        if intervals is not None:
            return intervals, bias
    if mask.is_floating_point():
        additive = mask
        mask, adds = split_additive(additive)
        if adds:
            bias = additive if bias is None else _sum_of_biases(additive, _per_pair(bias))
    return mask.bool() if mask.shape[2] > 1 else mask.bool().squeeze(2), bias


def _sum_of_biases(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        x, y = widen_bias(x, x.dtype), widen_bias(y, y.dtype)
    return x + y


def _choose(
    mask: torch.Tensor | KeyIntervals | None,
    scores: torch.Tensor,
    query_length: int,
    key_length: int,
    keep: int,
    is_causal: bool,
    bool_mask: torch.Tensor | None,
) -> torch.Tensor | KeyIntervals | None:
    """The best allowed keys of every query, as intervals or, for dense scores, as a mask.

    Scores per key [B, H, Sk] under a mask, or under intervals that the choice does not leave as intervals:
    the mask to choose under, `bool_mask` where it is given.
    """
    if scores.dim() == 3 and not isinstance(mask, KeyIntervals):
        return mask
    past = prefix_lm(key_length, 0, query_length=query_length, device=scores.device)
    if isinstance(mask, KeyIntervals):
        matched, of_heads = _match_heads(mask, scores)
        allowed = intersect(matched, past) if is_causal else matched
        if scores.dim() == 3:
            chosen = select_among(of_heads, allowed, keep)
            if chosen is not None:
                return chosen
        mask = mask_of_intervals(mask) if bool_mask is None else bool_mask
        if scores.dim() == 3:
            return mask
    mask, scores = _match_heads(mask, scores)
    if is_causal:
        mask = past.to_mask() if mask is None else past.to_mask() & _per_pair(mask)
    return topk_mask(scores, mask, keep, MASK_VALUE[scores.dtype])


def _match_heads(
    mask: torch.Tensor | KeyIntervals | None, scores: torch.Tensor
) -> tuple[torch.Tensor | KeyIntervals | None, torch.Tensor]:
    """Repeats the one given per key head, when the other is given per query head."""
    shown = mask.intervals if isinstance(mask, KeyIntervals) else mask
    if shown is None or 1 in (shown.shape[1], scores.shape[1]):
        return mask, scores
    heads = max(shown.shape[1], scores.shape[1])
    shown, scores = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (shown, scores))
    if isinstance(mask, KeyIntervals):
        shown = mask.with_intervals(shown)
    return shown, scores


def _per_pair(t: torch.Tensor) -> torch.Tensor:
    """[B, H, Sk] as [B, H, 1, Sk]; 4-d as it is."""
    return t[:, :, None] if t.dim() == 3 else t
