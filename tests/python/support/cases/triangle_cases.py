"""Inputs of triangle attention, and its results by the oracle."""

import torch

from flash_dmattn.check.oracle import Problem, attention

NAMES = ("out", "dq", "dk", "dv", "dbias")


def draw(batch, rows, queries, keys, heads, head_dim, value_dim, dtype=torch.float32, device="cpu"):
    """Returns [q, k, v, bias] that require gradients, and a random mask."""
    shapes = [
        (batch, rows, heads, queries, head_dim),
        (batch, rows, heads, keys, head_dim),
        (batch, rows, heads, keys, value_dim),
        (batch, 1, heads, queries, keys),
    ]
    inputs = [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]
    return inputs, (torch.rand(batch, rows, 1, 1, keys) < 0.7).to(device)


def gradients(function, inputs, direction, mask=None, **options):
    """Returns out and the gradients of the inputs, None for those that require none."""
    out = function(*inputs, mask, **options)
    wanted = [t for t in inputs if t.requires_grad]
    computed = iter(torch.autograd.grad(out, wanted, direction))
    return [out.detach(), *(next(computed) if t.requires_grad else None for t in inputs)]


def oracle(inputs, direction, mask=None, scale=None, empty_rows="zero", dtype=torch.float64):
    """Returns what `gradients` returns, by one problem of the oracle for each of the B elements: its batch is the N rows."""
    elements = []
    for i, bias in enumerate(inputs[3]):
        q, k, v, dout = (t[i].detach().transpose(1, 2) for t in (*inputs[:3], direction))
        shown = None if mask is None else mask[i]
        r = attention(Problem(q, k, v, dout, shown, bias, scale=scale), dtype)
        if empty_rows == "mean":
            empty = r.lse.isneginf().mT[..., None]
            r.out += empty * v.to(dtype).mean(1, keepdim=True)
            r.dv += (empty * dout.to(dtype)).sum(1, keepdim=True) / v.shape[1]
        elements.append([*(t.transpose(1, 2) for t in (r.out, r.dq, r.dk, r.dv)), r.dbias])
    return [torch.stack(parts) for parts in zip(*elements, strict=True)]
