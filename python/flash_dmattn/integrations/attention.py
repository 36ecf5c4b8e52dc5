"""The attention functions that transformers' layers call, and the normal form of their masks."""

import warnings

import torch

from .._core.checks import (
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
from .._core.numerics import Numerics, resolve_scale
from ..attention import attention
from ..keys.dense import topk_mask
from ..keys.intervals import KeyIntervals, intersect, prefix_lm
from ..keys.intervals import sliding_window as sliding_window_of
from ..keys.recognise import Memo, intervals_of_mask, refuse_negative, split_additive
from ..keys.rule import KeySelection
from ..keys.selection import Choice, match_heads
from ..keys.visibility import Visibility
from . import keywords, packed_sequences


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
            causality; with any other, `is_causal` is applied.
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


# Keywords that describe what the mask describes already.
_IN_THE_MASK = ("position_ids", "sliding_window")


def eager_like_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """`flash_dynamic_mask_attention_forward` for models that know this attention by its name.

    The mask decides what a query sees, as in the eager attention of every model: without a mask it sees all keys, and
    under a mask [B, 1, 1, Sk] all keys that the mask shows. The `is_causal` of a layer is not looked at: many layers
    have none, or a wrong one, because eager attention never reads it. transformers' mask functions call
    `key_interval_mask`, whose masks include causality.

    Raises:
        ValueError: is_causal is given and contradicts the mask.
    """
    if is_causal is not None:
        _check_causality(module, query, attention_mask, resolve_flag(is_causal, "is_causal"))
    options = {name: value for name, value in kwargs.items() if name not in _IN_THE_MASK}
    if options.get("position_bias") is not None:
        options["window_size"] = key.shape[
            2
        ]  # it is no score: a `window_size` of the layer means something else
    return flash_dynamic_mask_attention_forward(
        module, query, key, value, attention_mask, *args, is_causal=False, **options
    )


def _check_causality(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """A layer may repeat its own flag; a caller who means another attention than the mask describes is told so."""
    if is_causal and mask is None and query.shape[2] > 1:
        raise ValueError(
            "is_causal: got True without a mask, expected a causal mask: under this attn_implementation the mask alone "
            "decides what a query sees"
        )
    if not is_causal and is_causal_mask(mask) and getattr(module, "is_causal", False):
        raise ValueError(
            "is_causal: got False with a causal mask, expected None; set is_causal=False in the model's config, by which "
            "its mask functions decide"
        )


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
    dropout: float = 0.0,
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
    if is_causal_mask(attention_mask):
        attention_mask, is_causal = None, True
    else:
        is_causal = is_causal and not _has_queries(attention_mask)
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


def causal_mask(batch: int, device: torch.device | str | None) -> torch.Tensor:
    """The mask of plain causality, int32 [B, 1, 0, 2]: intervals of no key, because causality is all there is.

    It has four dimensions because transformers passes such masks on as they are.
    """
    return torch.empty((batch, 1, 0, 2), dtype=torch.int32, device=device)


def is_causal_mask(mask: object) -> bool:
    """Whether a mask is that of `causal_mask`."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.int32
        and mask.dim() == 4
        and mask.shape[2] == 0
        and mask.shape[3] == 2
    )


def _has_queries(mask: torch.Tensor | KeyIntervals | None) -> bool:
    """Whether a mask has a query dimension, and with it includes causality."""
    if isinstance(mask, KeyIntervals):
        return True
    return isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] > 1


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
    memo: Memo | None = None,
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
    padded, packed. Such a 4-d mask is recognised by reading it, in every call (keys/recognise.py). Under any other mask
    a GPU needs one more bit for each (query, key) and head of the choice.

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
        memo: what the layers of a model share during one forward.
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
    is_causal = resolve_flag(is_causal, "is_causal") and query_length > 1
    states = (query_states, key_states, value_states)
    has_mask = attention_mask is not None
    if not has_mask:
        attention_mask = _window_mask(
            sliding_window, is_causal, query_length, key_length, query_states.device
        )
    if not has_mask or _is_key_mask(attention_mask, query_length, key_length):
        key_mask = attention_mask if has_mask else None
        if has_mask:
            refuse_negative(key_mask, memo)
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
            packed = packed_sequences.of_positions(
                position_ids, key_mask, batch, query_length, memo
            )
        elif by_positions and not _is_additive(key_mask):
            documents = packed_sequences.intervals_of_positions(
                position_ids, key_mask, batch, query_length, is_causal
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
            return packed_sequences.attend(
                *_cast(states, target_dtype),
                attention_bias,
                packed,
                keep,
                is_causal=is_causal,
                softmax_scale=softmax_scale,
                softcap=softcap,
                deterministic=deterministic,
            )

    mask, intervals, bias = _normalize_mask(
        attention_mask, attention_bias, query_states, key_states, chooses, memo
    )
    choice = Choice()
    if chooses:
        scores = attention_bias.detach()
        if scores.dim() == 4 and scores.shape[2] == 1:
            scores = scores.squeeze(2)
        if scores.dim() == 4:
            mask = _choose_pairs(scores, mask, intervals, keep, is_causal, query_states, key_states)
            intervals = None
        else:
            has_no_queries = intervals is None and (mask is None or mask.dim() == 3)
            selection = "global" if has_no_queries else "per_query"
            choice = Choice(KeySelection(keep, selection), scores)
    out, _ = attention(
        *_cast(states, target_dtype),
        bias,
        Visibility(mask, is_causal, intervals),
        choice,
        Numerics.of(None, softmax_scale, softcap, "saturate", deterministic),
        memo=memo,
    )
    return out


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
    chooses: bool,
    memo: Memo | None,
) -> tuple[torch.Tensor | None, KeyIntervals | None, torch.Tensor | None]:
    """The mask as bool [B, H, Sk] or [B, H, Sq, Sk], or as intervals, and the bias.

    An additive mask with other values than allowing and masking ones is split into a mask and a bias.
    chooses: a choice of keys follows, which recognises intervals in a bool mask by itself.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    intervals = as_key_intervals(mask, query_length, key_length)
    if mask is None or intervals is not None:
        return None, intervals, bias
    if mask.dim() == 0 or mask.shape[-1] != key_length:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected {key_length} keys last"
        )
    refuse_negative(mask, memo)
    mask = broadcast_argument(mask, "attention_mask", query, key)
    if mask.dim() < 4:
        if mask.is_floating_point():
            raise TypeError(
                f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; expected bool or integers (nonzero: "
                "visible). An additive mask has 4 dimensions"
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
            bias = additive if bias is None else _sum_of_biases(additive, _per_pair(bias))
    mask = mask.bool()
    return mask if mask.shape[2] > 1 else mask.squeeze(2), None, bias


def _sum_of_biases(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        x, y = widen_bias(x, x.dtype), widen_bias(y, y.dtype)
    return x + y


def _choose_pairs(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    intervals: KeyIntervals | None,
    keep: int,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """The best allowed keys of every query by scores per pair [B, H, Sq, Sk], as a mask."""
    if intervals is not None:
        mask = intervals.to_mask()
    if mask is not None:
        scores, mask = match_heads(query, key, scores, _per_pair(mask))
    if is_causal:
        past = prefix_lm(key.shape[1], 0, query_length=query.shape[1], device=scores.device)
        mask = past.to_mask() if mask is None else past.to_mask() & mask
    return topk_mask(scores, mask, keep, MASK_VALUE[scores.dtype])


def _per_pair(t: torch.Tensor) -> torch.Tensor:
    """[B, H, Sk] as [B, H, 1, Sk]; 4-d as it is."""
    return t[:, :, None] if t.dim() == 3 else t
