"""Attention and selection straight from their definitions, with every (query, key) element held in memory.

In double precision it is the reference of checks and tests; in low precision the yardstick: the result of plain torch
with every matrix product rounded to the dtype and the softmax in fp32.
It shares no code with the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Problem:
    """Tensors as the library gets them; mask and bias 4-d, `shown` bool [B, Hkv or Hq or 1, Sq, Sk]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    shown: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    dlse: Tensor | None = None  # [B, Hq, Sq]
    bias_delay: int = 0


@dataclass
class Result:
    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    # Magnitude, of keys with a probability; the error of rounding a score grows with it.
    largest_score: float = 0.0
    dbias_terms: Tensor | None = None  # in double alone: root of the sum of its terms' squares


def per_head(tensor: Tensor, problem: Problem) -> Tensor:
    """Expands [B or 1, H, Sq or 1, Sk or 1] to [B, Hq, Sq, Sk]; every query head gets the data of its group."""
    batch, seqlen_q, heads_q, _ = problem.q.shape
    if tensor.shape[1] not in (1, heads_q):
        tensor = tensor.repeat_interleave(heads_q // tensor.shape[1], 1)
    return tensor.expand(batch, heads_q, seqlen_q, problem.k.shape[1])


def visible_elements(problem: Problem) -> Tensor:
    batch, seqlen_q, heads_q, _ = problem.q.shape
    seqlen_k = problem.k.shape[1]
    visible = problem.q.new_ones((batch, heads_q, seqlen_q, seqlen_k), dtype=torch.bool)
    if problem.causal:
        visible = visible.tril(seqlen_k - seqlen_q)
    for part in (problem.mask, problem.shown):
        if part is not None:
            visible = visible & per_head(part, problem)
    if problem.bias is not None:
        limit = -1e4 if problem.bias.dtype == torch.float16 else -1e30
        shown = per_head(problem.bias.detach().double(), problem) > limit
        visible = visible & (shown | ~biased_elements(problem))
    return visible


def biased_elements(problem: Problem) -> Tensor:
    """Returns which elements have a bias on their score, bool [Sq, Sk]."""
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    position = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=problem.q.device)
    age = position[:, None] - torch.arange(seqlen_k, device=problem.q.device)
    return (
        age >= problem.bias_delay if problem.bias_delay else torch.ones_like(age, dtype=torch.bool)
    )


def sum_to_shape(tensor: Tensor, shape: torch.Size, heads_kv: int) -> Tensor:
    """Undoes per_head: sums over the heads of a group and over broadcast dimensions."""
    if shape[1] not in (1, tensor.shape[1]):
        tensor = tensor.unflatten(1, (heads_kv, -1)).sum(2)
    return tensor.sum_to_size(shape)


def attention(problem: Problem, dtype: torch.dtype = torch.float64) -> Result:
    """Computes forward and, if the problem has dout, backward. Products are rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    visible = visible_elements(problem)
    group = problem.q.shape[2] // problem.k.shape[2]
    heads_kv = problem.k.shape[2]
    scale = problem.q.shape[3] ** -0.5 if problem.scale is None else problem.scale

    q = problem.q.detach().to(dtype).transpose(1, 2)
    k, v = (
        t.detach().to(dtype).transpose(1, 2).repeat_interleave(group, 1)
        for t in (problem.k, problem.v)
    )
    scores = scale * (q @ k.mT).to(wide)
    slope = 1.0
    if problem.softcap:
        squashed = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * squashed, 1 - squashed * squashed
    if problem.bias is not None:
        bias = per_head(problem.bias.detach().to(wide), problem)
        scores = torch.where(biased_elements(problem), scores + bias, scores)
    largest = torch.finfo(torch.promote_types(problem.q.dtype, torch.float32)).max
    scores = scores.clamp(-largest, largest)
    scores = scores.masked_fill(~visible, -torch.inf)

    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    highest = highest.masked_fill(~visible.any(-1, keepdim=True), 0)
    # The other scores have a probability of 0, in double as well.
    counting = scores[scores > highest - 745]
    largest_score = counting.abs().max().item() if counting.numel() else 0.0
    p = scores.sub_(highest).exp_()
    total = p.sum(-1, keepdim=True)
    lse = (highest + total.log())[..., 0]
    p /= total.masked_fill(total == 0, 1)
    out = (p.to(dtype) @ v).to(wide)
    result = Result(out.transpose(1, 2).to(dtype), lse, largest_score=largest_score)
    if problem.dout is None:
        return result

    dout = problem.dout.detach().to(dtype).transpose(1, 2)
    dp = (dout @ v.mT).to(wide)
    delta = (dout.to(wide) * out).sum(-1, keepdim=True)
    if problem.dlse is not None:
        delta = delta - problem.dlse.to(wide)[..., None]
    ds = dp.sub_(delta).mul_(p).masked_fill_(p == 0, 0)
    dt = (ds * slope).to(dtype)
    dk = scale * (dt.mT @ q).to(wide)
    dv = (p.to(dtype).mT @ dout).to(wide)
    result.dq = (scale * (dt @ k).to(wide)).transpose(1, 2).to(dtype)
    result.dk, result.dv = (
        t.unflatten(1, (heads_kv, group)).sum(2).transpose(1, 2).to(dtype) for t in (dk, dv)
    )
    if problem.bias is not None:
        ds = ds.masked_fill(~biased_elements(problem), 0)
        rounded = problem.bias.dtype if dtype != torch.float64 else dtype
        result.dbias = sum_to_shape(ds, problem.bias.shape, heads_kv).to(rounded)
        if dtype == torch.float64:
            result.dbias_terms = sum_to_shape(ds.square(), problem.bias.shape, heads_kv).sqrt()
    return result
