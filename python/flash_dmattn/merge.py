"""Attention over sets of keys that are merged, and sinks, by the log-sum-exp and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._core.checks import check_tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention of the same queries over each.

        recent, lse_recent = flash_dmattn_func(q, k, v, key_intervals=a, return_lse=True)
        old, lse_old = flash_dmattn_func(q, k, v, key_intervals=b, return_lse=True)
        out, lse = merge_attention([recent, old], [lse_recent, lse_old])

    outs: [B, Sq, Hq, D] each, one or more, of one dtype.
    lses: [B, Hq, Sq] each, the log-sum-exp of the same calls; -inf for a query that sees no key of the set.

    Returns out [B, Sq, Hq, D] in the dtype of outs, summed in float32, and lse [B, Hq, Sq] of the union, with the exact
    gradient of both. A query that sees no key at all has out = 0 and lse = -inf, and gradients of 0.
    """
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, Sequence):
            raise TypeError(f"{name}: got {type(tensors).__name__}, expected a sequence of tensors")
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"outs, lses: got {len(outs)} and {len(lses)} tensors, expected one or more of both, as many"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(out, f"outs[{i}]")
        check_tensor(lse, f"lses[{i}]")
        alike = out.shape == outs[0].shape and out.dtype == outs[0].dtype
        if out.dim() != 4 or not alike or not out.is_floating_point():
            raise ValueError(
                f"outs[{i}]: got {out.dtype} of shape {tuple(out.shape)}, expected floating [B, Sq, Hq, D], all alike"
            )
        batch, queries, heads, _ = out.shape
        if lse.shape != (batch, heads, queries) or lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"lses[{i}]: got {lse.dtype} of shape {tuple(lse.shape)}, expected float32 of shape {(batch, heads, queries)}"
            )
    each = torch.stack(list(lses))
    highest = each.detach().amax(0)
    # A query that sees no key: -inf - 0 has a weight and a gradient of 0, -inf - -inf has neither.
    highest = highest.masked_fill(highest == -torch.inf, 0)
    weights = (each - highest).exp()
    total = weights.sum(0)
    shares = (weights / total.masked_fill(total == 0, 1)).transpose(2, 3)[..., None]
    out = sum(share * out for share, out in zip(shares, outs, strict=True))
    sees_keys = total > 0
    lse = (total.masked_fill(~sees_keys, 1).log() + highest).masked_fill(~sees_keys, -torch.inf)
    return out.to(outs[0].dtype), lse


def add_sink(out: Tensor, lse: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in which every softmax has one more logit, that of a key without a value.

    out: [.., Sq, Hq, D]; lse: [.., Hq, Sq]; sink_logits: [Hq]. Returns both with the sink, with their gradients.
    """
    sink = sink_logits.to(lse.dtype)[:, None]
    # A query that sees no key has out = 0, and with a sink of -inf no difference.
    sees_keys = lse > -torch.inf
    known = torch.where(sees_keys, lse, 0)
    share = torch.sigmoid(known - sink).transpose(-2, -1)[..., None]
    return (share * out).to(out.dtype), torch.where(sees_keys, torch.logaddexp(known, sink), sink)


def check_sink_logits(sink_logits: Tensor, out: Tensor, name: str = "sink_logits") -> None:
    check_tensor(sink_logits, name)
    heads = out.shape[-2]
    if sink_logits.shape != (heads,) or not sink_logits.is_floating_point():
        raise ValueError(
            f"{name}: got {sink_logits.dtype} of shape {tuple(sink_logits.shape)}, expected a floating dtype of "
            f"shape [Hq], ({heads},)"
        )
    if sink_logits.device != out.device:
        raise TypeError(f"{name}: got a tensor on {sink_logits.device}, expected {out.device}")
