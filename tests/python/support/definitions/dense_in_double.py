"""The oracle of `flash_dmattn.check` as a function that autograd differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn.check.oracle import Problem, attention


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, options):
        ctx.save_for_backward(q, k, v, bias)
        ctx.options = options
        result = attention(Problem(q, k, v, bias=bias, **options))
        return result.out, result.lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, bias = ctx.saved_tensors
        result = attention(Problem(q, k, v, dout, bias=bias, dlse=dlse, **ctx.options))
        gradients = (result.dq, result.dk, result.dv, result.dbias)
        tensors = (q, k, v, bias)
        return *(None if t is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)), None  # fmt: skip


def dense_in_double(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor, *, softcap=0.0, delay=0, sinks=None, scale=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out [B, Sq, Hq, D] and lse [B, Hq, Sq] in double. A row without keys has out 0.

    q: [B, Sq, Hq, D]. k, v: [B, Sk, Hkv, D].
    bias: [B, H, Sk] or [B, H, Sq, Sk] with H = Hq, Hkv or 1. It applies to keys that are at least `delay` queries old.
    seen: broadcasts to [B, Hkv or Hq, Sq, Sk].
    sinks: [Hq], the logits of keys without values.
    """
    seen = seen[(None,) * (4 - seen.dim())]
    bias = bias[:, :, None] if bias is not None and bias.dim() == 3 else bias
    options = {"shown": seen, "softcap": softcap, "bias_delay": delay, "scale": scale}
    out, lse = _Oracle.apply(q, k, v, bias, options)
    if sinks is None:
        return out, lse
    with_sinks = torch.logaddexp(lse, sinks.double()[:, None])
    return out * (lse - with_sinks).exp().transpose(1, 2)[..., None], with_sinks
