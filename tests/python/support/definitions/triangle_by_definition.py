"""Triangle attention over all elements, and inputs for it."""

import torch

NAMES = ("out", "dq", "dk", "dv", "dbias")


def definition(q, k, v, bias, mask=None, scale=None, empty_rows="zero"):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1)  # of a row without keys: those of the mean
    if empty_rows == "zero":
        weights = weights.masked_fill(empty, 0)
    return weights.to(v.dtype) @ v


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
    """Returns out and the gradients of those inputs that require one; zeros in the place of the others."""
    out = function(*inputs, mask, **options)
    wanted = [t for t in inputs if t.requires_grad]
    computed = iter(torch.autograd.grad(out, wanted, direction))
    return [out.detach(), *(next(computed) if t.requires_grad else torch.zeros_like(t) for t in inputs)]  # fmt: skip
