"""The C++ library's backends."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .._core.autograd import forward_direct, select_and_attend_direct
from .._core.numerics import Numerics
from ..keys.visibility import TopKeysByBias, Visibility


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Visibility,
    numerics: Numerics,
    backend: str = "",
    bias_delay: int = 0,
) -> tuple[Tensor, Tensor]:
    """out and statistics [2, B, Hq, Sq] of arguments in normal form: lse, and what rounding removed from it.

    Here the operator's arguments are put in a row, and nowhere else.
    """
    head_dim = q.shape[3]
    # The GPU's kernels load 16 bytes at a time.
    padding = -head_dim % 8 if q.is_cuda else 0
    if padding:
        q, k, v = (F.pad(t, (0, padding)) for t in (q, k, v))
    options = (visible.is_causal, bias_delay, *numerics, backend)
    if isinstance(visible.keys, TopKeysByBias):
        window = visible.keys.keep_window_size
        out, statistics, _ = select_and_attend_direct(q, k, v, bias, window, *options)
    else:
        operands = visible.operands()
        out, statistics = forward_direct(q, k, v, visible.mask, bias, *operands, *options)
    return out[..., :head_dim] if padding else out, statistics
