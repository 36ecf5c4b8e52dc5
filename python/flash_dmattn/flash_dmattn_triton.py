"""The Triton backend's function."""

from __future__ import annotations

from torch import Tensor

from .flash_dmattn_interface import _attention
from .key_intervals import KeyIntervals


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
    return _attention(
        query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic,
        return_attn_probs, scale=scale, keep_window_size=keep_window_size, selection=selection,
        selection_scores=selection_scores, key_intervals=key_intervals, nonfinite=nonfinite,
        backend="triton",
    )  # fmt: skip
