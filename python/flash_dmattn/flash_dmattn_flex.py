"""The FlexAttention backend's function."""

from __future__ import annotations

from torch import Tensor

from .attention import attention, with_statistics
from .choice import Choice
from .key_intervals import KeyIntervals
from .numerics import Numerics
from .visibility import Visibility


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    keep_window_size: int | None = None,
    selection: str = "per_query",
    selection_scores: Tensor | None = None,
    key_intervals: KeyIntervals | None = None,
    deterministic: bool | None = None,
    nonfinite: str = "saturate",
    return_attn_probs: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_dmattn_func by torch's FlexAttention, compiled for each new shape. The arguments mean what they
    mean there; is_causal=None is False.

    It skips empty blocks of 128 x 128, so with scattered keys it does the work of dense attention. Numbers
    beyond fp32 inside a score are not handled: finite inputs as large as the dtype allows can give NaN.
    Inf and NaN saturate, invisible ones show nowhere; v counts as its dtype's largest number, and the end of scores
    is 1e38 (docs/numerics.md). nonfinite="propagate" raises NotImplementedError, as torch's kernels spread 0 * NaN.
    Sequences may not be empty. On the CPU torch has neither a backward of it nor the log-sum-exp, which is
    None there.
    """
    out, statistics = attention(
        query,
        key,
        value,
        attn_bias,
        Visibility(attn_mask, is_causal, key_intervals),
        Choice(keep_window_size, selection, selection_scores),
        Numerics.of(scale, softmax_scale, softcap, nonfinite, deterministic),
        "flex",
    )
    return with_statistics(out, statistics, return_attn_probs)
