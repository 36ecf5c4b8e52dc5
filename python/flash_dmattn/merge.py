"""Merges attention over sets of keys, and adds sinks, by the log-sum-exp and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ._core.checks import check_on_device, check_tensor
from ._core.gradients import narrow_gradient
from ._core.numerics import resolve_nonfinite


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], nonfinite: str = "saturate"
) -> tuple[Tensor, Tensor]:
    """Merges the attention of the same queries over disjoint sets of keys into attention over their union.

        recent, lse_recent = flash_dmattn_func(q, k, v, key_intervals=a, return_lse=True)
        old, lse_old = flash_dmattn_func(q, k, v, key_intervals=b, return_lse=True)
        out, lse = merge_attention([recent, old], [lse_recent, lse_old])

    outs: [B, Sq, Hq, D] each, one or more, of one dtype.
    lses: [B, Hq, Sq] each, the log-sum-exp of the same calls; -inf for a query that sees no key of the set.
    nonfinite: "saturate": the gradients of lses are always finite; "propagate": inf and NaN stay visible.

    Returns out [B, Sq, Hq, D] in the dtype of outs, summed in float32, and lse [B, Hq, Sq] of the union, with the exact
    gradient of both. A query that sees no key at all has out = 0 and lse = -inf, and gradients of 0.
    """
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, Sequence):
            raise TypeError(f"{name}: got {type(tensors).__name__}, expected a sequence of tensors")
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"outs, lses: got {len(outs)} and {len(lses)} tensors, expected the same number of each, one or more"
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
    return merge_sets(outs, lses, resolve_nonfinite(nonfinite))


def merge_sets(
    outs: Sequence[Tensor], lses: Sequence[Tensor], saturate: bool
) -> tuple[Tensor, Tensor]:
    """Does what merge_attention does, without checks."""
    return _Merged.apply(torch.stack(list(lses)), None, saturate, *outs)


def add_sink(
    out: Tensor, lse: Tensor, sink_logits: Tensor, saturate: bool = True
) -> tuple[Tensor, Tensor]:
    """Adds one logit per head to every softmax, like the score of a key whose value is 0.

    out: [.., Sq, Hq, D]; lse: [.., Hq, Sq]; sink_logits: [Hq]. Returns both with the sink, with their gradients.
    """
    return _Merged.apply(lse[None], sink_logits, saturate, out)


class _Merged(torch.autograd.Function):
    """Computes out and lse over the union of sets of keys and an optional sink. lses: [sets, .., Hq, Sq].

    Has derivatives in reverse mode, as attention does.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        lses: Tensor, sink_logits: Tensor | None, saturate: bool, *outs: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = _append_sink(lses, sink_logits, saturate)
        shares = _shares(logits).transpose(-2, -1)[..., None]
        parts = (share * out for share, out in zip(shares, outs, strict=False))
        out = reduce(torch.add, parts)
        if saturate:  # A mean of numbers at the limit may round beyond it.
            limit = torch.finfo(outs[0].dtype).max
            out = out.clamp(-limit, limit)
        return out.to(outs[0].dtype), logits.logsumexp(0)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        lses, sink_logits, ctx.saturate, *outs = inputs
        ctx.save_for_backward(lses, sink_logits, *outs)

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        lses, sink_logits, *outs = ctx.saved_tensors
        if ctx.saturate:  # as in attention, elements that are not finite count as 0
            dout, dlse = (t.nan_to_num(0.0, 0.0, 0.0) for t in (dout, dlse))
        # Double keeps the sum over all sets but one exact if that one has nearly all of the softmax.
        shares = _shares(_append_sink(lses, sink_logits, ctx.saturate).double())
        weights = shares.to(lses.dtype).transpose(-2, -1)[..., None]
        douts = [(share * dout).to(dout.dtype) for share, _ in zip(weights, outs, strict=False)]
        dlses = dsink = None
        if any(ctx.needs_input_grad[:2]):
            products, scales = _scaled_products(dout, outs, lses.dtype)
            mean = (shares[: len(outs)] * products).sum(0)
            dlogits = [
                _logit_gradient(products[i] - mean, scales, dlse, shares[i])
                for i in range(len(outs))
            ]
            dlses = narrow_gradient(torch.stack(dlogits), lses.dtype, ctx.saturate)
        if ctx.needs_input_grad[1]:
            rows = _logit_gradient(-mean, scales, dlse, shares[-1]).transpose(-2, -1).flatten(0, -2)
            dsink = narrow_gradient(rows.sum(0), sink_logits.dtype, ctx.saturate)
        return dlses, dsink, None, *douts


def _append_sink(lses: Tensor, sink_logits: Tensor | None, saturate: bool) -> Tensor:
    """Returns the logits of a softmax over the sets and the sink. With saturation they are finite, or -inf for a set
    without visible keys or a sink of -inf."""
    logits = lses
    if sink_logits is not None:
        sink = sink_logits.to(lses.dtype)
        logits = torch.cat([lses, sink[:, None].expand_as(lses[0])[None]])
    if saturate:  # as attention does with scores
        limit = torch.finfo(lses.dtype).max
        logits = logits.nan_to_num(-limit, limit, -torch.inf)
    return logits


def _shares(logits: Tensor) -> Tensor:
    """Returns the share of each set in the softmax, 0 for a query that sees no key (there -inf - -inf would be NaN)."""
    sees_nothing = logits.amax(0) == -torch.inf
    known = logits.masked_fill(sees_nothing, 0).clamp(max=torch.finfo(logits.dtype).max)
    return known.softmax(0).masked_fill(sees_nothing, 0)


def _scaled_products(
    dout: Tensor, outs: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns dout . out of each set, [sets, .., Hq, Sq], scaled down, and the two factors [.., Hq, Sq] that undo the
    scaling; all in double.

    A row of dout is first scaled to a sum of at most 1/2, so that no product with finite numbers leaves float32. A row whose
    reciprocal would be subnormal, which some modes flush to 0, is scaled by 2^-32 before, and so has a second factor.
    """
    lowest, highest = dout.detach().aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(lowest.abs(), highest.abs()).double()
    is_large = largest > torch.finfo(dtype).max * 2.0**-32
    first = torch.ones_like(largest).masked_fill(is_large, 2.0**-32)
    # 2^126: the reciprocal of a row of zeros or of subnormal numbers.
    second = (1 / (2 * dout.shape[-1] * (first * largest))).clamp(max=2.0**126).to(dtype)
    scaled = (first.to(dtype) * dout).mul_(second)
    products = torch.stack([(scaled * out).sum(-1).transpose(-2, -1) for out in outs])
    scales = tuple(1 / f[..., 0].transpose(-2, -1).double() for f in (first, second))
    return products.double(), scales


def _logit_gradient(
    difference: Tensor, scales: tuple[Tensor, Tensor], dlse: Tensor, share: Tensor
) -> Tensor:
    """Returns the gradient of a logit, in double. It is 0 if the logit has no share in the softmax, whatever dlse is."""
    first, second = scales
    return torch.where(share == 0, 0, share * (second * difference * first + dlse))


def check_sink_logits(sink_logits: Tensor, out: Tensor, name: str = "sink_logits") -> None:
    check_tensor(sink_logits, name)
    heads = out.shape[-2]
    if sink_logits.shape != (heads,) or not sink_logits.is_floating_point():
        raise ValueError(
            f"{name}: got {sink_logits.dtype} of shape {tuple(sink_logits.shape)}, expected a floating dtype of "
            f"shape [Hq], ({heads},)"
        )
    check_on_device(sink_logits, name, out.device)
