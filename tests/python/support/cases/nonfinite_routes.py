"""Calls for every route of non-finite and barely finite numbers through the kernels."""

from __future__ import annotations

import torch

from flash_dmattn import flash_dmattn_func

LENGTH = 200
# {route: (head dim, further arguments)}, for kernels whose blocks own keys and for those whose blocks own queries.
ROUTES = {
    "keys": (64, {}),
    "keys, D 128": (128, {}),
    "list": (64, {"keep_window_size": 30}),
    "global": (128, {"keep_window_size": 30, "selection": "global"}),
    "softcap": (64, {"softcap": 20.0}),
    "D 256": (256, {}),
    "elements": (64, {"elements": True}),
    "elements, softcap": (64, {"elements": True, "softcap": 20.0}),
}
# On these routes Python adds the gradients of query heads, or of two calls.
ADDED = {
    "scores of query heads": (64, {"keep_window_size": 30, "bias_heads": 4}),
    "delay in Triton": (64, {"bias_delay": 30, "backend": "triton"}),
}


class Setting:
    """The tensors q, k, v, bias and dout of a route."""

    def __init__(self, route, dtype, device="cuda"):
        head_dim, options = (ROUTES | ADDED)[route]
        self.options = {**options, "is_causal": True}
        has_elements = self.options.pop("elements", False)
        shapes = [(1, LENGTH, h, head_dim) for h in (4, 2, 2)]
        heads = self.options.pop("bias_heads", 2)
        shapes += [(1, heads, LENGTH, LENGTH) if has_elements else (1, heads, LENGTH)]
        self.leaves = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
        self.mask = torch.rand(1, 1, LENGTH, LENGTH, device=device) < 0.8 if has_elements else None
        if has_elements:
            self.mask |= torch.eye(LENGTH, dtype=torch.bool, device=device)
        self.dout = torch.randn(shapes[0], device=device).to(dtype)

    def attend(self, mask=None, **options):
        q, k, v, bias = self.leaves
        mask = self.mask if mask is None else mask
        return flash_dmattn_func(q, k, v, mask, bias, **self.options, **options)

    def gradients(self, dout=None, mask=None, **options):
        """Returns out, dq, dk, dv and dbias."""
        out = self.attend(mask, **options)
        dout = self.dout if dout is None else dout
        return [out.detach(), *torch.autograd.grad(out, self.leaves, dout)]
