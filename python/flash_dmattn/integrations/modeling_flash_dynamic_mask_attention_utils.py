"""The 1.x module of this name."""

from torch import Tensor, dtype

from .._core.checks import resolve_flag
from .._core.numerics import resolve_scale
from ..keys.intervals import KeyIntervals
from ._shared.layer_call import cast_states
from .packed_sequences import attend_by_mask_or_sequences, check_states, take_bias_and_window

__all__ = ["_flash_dynamic_mask_attention_forward", "fdma_peft_integration_check"]


def _flash_dynamic_mask_attention_forward(
    query_states: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    attention_mask: Tensor | KeyIntervals | None,
    attention_bias: Tensor | None,
    query_length: int,
    key_length: int,
    is_causal: bool,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    keep_window_size: int | None = None,
    deterministic: bool | None = None,
    target_dtype: dtype | None = None,
    implementation: str | None = None,
    *,
    window_size: int | None = None,
    **kwargs,
) -> Tensor:
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
        implementation: without effect.
        kwargs: others raise, except bookkeeping of transformers; unknown scalars warn.
            position_ids: int [1 or B, Sq]; if Sq = Sk and they begin again, the row packs several sequences. A mask with a
                query dimension includes this; together with other padding it raises.
            cu_seq_lens_q, cu_seq_lens_k: int32 [sequences + 1], offsets of packed sequences over all rows one after the
                other.
            max_length_q, max_length_k: the lengths of the longest packed sequences, or None.
            sliding_window: how many keys a query sees without a mask, itself included. A mask already includes it.
            s_aux: [Hq], one logit per head. It enters every softmax like the score of a key whose value is 0 (sinks).

    Returns:
        [B, Sq, Hq, D]; a query that sees no key gets 0.

    Raises ValueError or TypeError that names the argument: shapes that do not fit, a window without a bias, packed sequences with
    padding, a 4-d bias or a sliding window, keywords that are unknown or belong to unsupported features.
    """
    states = {"query_states": query_states, "key_states": key_states, "value_states": value_states}
    check_states("[B, S, H, D]", **states)
    lengths, expected = (query_length, key_length), (query_states.shape[1], key_states.shape[1])
    if lengths != expected:
        raise ValueError(f"query_length, key_length: got {lengths}, expected {expected}")
    is_causal = resolve_flag(is_causal, "is_causal") and query_length > 1
    scale = None if softmax_scale is None else resolve_scale(softmax_scale, "softmax_scale")
    kwargs |= {"attention_bias": attention_bias, "keep_window_size": keep_window_size, "window_size": window_size}  # fmt: skip
    bias, keep = take_bias_and_window(kwargs, query_states, key_states)
    return attend_by_mask_or_sequences(
        cast_states((query_states, key_states, value_states), target_dtype), attention_mask, is_causal, bias, keep,
        scaling=scale, softcap=softcap, deterministic=deterministic, **kwargs,
    )  # fmt: skip


def fdma_peft_integration_check(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    target_dtype: dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Casts float32 tensors back to the dtype of the model: `cast_states` with a bias."""
    return cast_states((q, k, v, bias), target_dtype)
