"""Dense attention with torch's own operators in double, with autograd's gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_in_double(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, *, softcap=0.0, delay=0, sinks=None
) -> tuple[Tensor, Tensor]:
    """Returns out [B, Sq, Hq, D] and lse [B, Hq, Sq]. A row without keys has out 0.

    q: [B, Sq, Hq, D]. k, v: [B, Sk, Hkv, D].
    bias: [B, H, Sk] with H = Hq, Hkv or 1. It applies to keys that are at least `delay` queries old.
    seen: broadcasts to [B, Hq, Sq, Sk].
    sinks: [Hq], the logits of keys without values.
    """
    heads, length_q, length_k = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    bias = bias.double().repeat_interleave(heads // bias.shape[1], 1)[:, :, None]
    queries, keys = (torch.arange(n, device=q.device) for n in (length_q, length_k))
    age = queries[:, None] + length_k - length_q - keys
    scores = torch.where((age >= delay) | (delay == 0), scores + bias, scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = sinks.double()[:, None, None].expand(len(q), -1, length_q, 1)
        scores = torch.cat([scores, logits], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :length_k]
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)
