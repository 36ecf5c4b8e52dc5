"""The Triton backend's function."""

from __future__ import annotations

from torch import Tensor

from .attention import attention, with_statistics
from .choice import Choice
from .key_intervals import KeyIntervals
from .numerics import Numerics
from .visibility import Visibility


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = False,
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
    """flash_dmattn_func by Triton kernels, for GPUs of any vendor. The arguments mean what they mean there.

    query, key, value: float32, bfloat16 or float16, head dimension 1 to 256, on a GPU; on the CPU with
        TRITON_INTERPRET=1, which is for tests, and multiplies bfloat16 wrongly.
    deterministic: without effect; gradients are always bit-identical from run to run.

    Raises RuntimeError with the reason where it cannot run.
    """
    out, statistics = attention(
        query,
        key,
        value,
        attn_bias,
        Visibility(attn_mask, is_causal, key_intervals),
        Choice(keep_window_size, selection, selection_scores),
        Numerics.of(scale, softmax_scale, softcap, nonfinite, deterministic),
        "triton",
    )
    return with_statistics(out, statistics, return_attn_probs)
