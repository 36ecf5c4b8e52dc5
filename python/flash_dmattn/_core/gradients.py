"""Changes of shape and dtype that sum or round the gradient. With `saturate`, finite gradients stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# The limit of a gradient. For bfloat16 it is half of the dtype's maximum, so that a sum of two gradients is still
# finite.
_GRADIENT_LIMIT = {torch.bfloat16: torch.finfo(torch.bfloat16).max / 2}


def gradient_limit(dtype: torch.dtype) -> float:
    return _GRADIENT_LIMIT.get(dtype, torch.finfo(dtype).max)


def narrow_gradient(gradient: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Converts a gradient to `dtype`. With `saturate`, values are clamped to the limit and NaN becomes the limit."""
    if saturate:
        limit = min(gradient_limit(dtype), torch.finfo(gradient.dtype).max)
        gradient = gradient.clamp(-limit, limit).nan_to_num(limit)
    return gradient.to(dtype)


def expand(tensor: Tensor, shape: Sequence[int], saturate: bool = True) -> Tensor:
    """Returns tensor.expand(shape). torch would sum the copies' gradients in their dtype, and 16 bits may overflow."""
    if not _has_gradient(tensor) or tuple(tensor.shape) == tuple(shape):
        return tensor.expand(shape)
    return _Expanded.apply(tensor, tuple(shape), saturate)


def expand_for_uses(tensor: Tensor, uses: int, saturate: bool) -> tuple[Tensor, ...]:
    """Returns one copy of the tensor for each of its uses. The gradients of the copies are added in a wider dtype."""
    return expand(tensor, (uses, *tensor.shape), saturate).unbind()


def repeat_interleave(tensor: Tensor, repeats: int, dim: int, saturate: bool) -> Tensor:
    """Returns tensor.repeat_interleave(repeats, dim)."""
    shape = (*tensor.shape[: dim + 1], repeats, *tensor.shape[dim + 1 :])
    return expand(tensor.unsqueeze(dim + 1), shape, saturate).flatten(dim, dim + 1)


def prefixes(tensor: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """Yields tensor[:, :n] for each length n.

    The gradients of the prefixes are added to one sum in float32. torch would make a tensor of the full length for the
    gradient of each prefix.
    """
    if len(lengths) == 1 or not _has_gradient(tensor):
        yield from (tensor[:, :n] for n in lengths)
        return
    total = _Total.apply(tensor, torch.promote_types(tensor.dtype, torch.float32))
    for n in lengths:
        prefix, total = _Prefix.apply(tensor.detach(), total, n)
        yield prefix


def widen(tensor: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """Returns tensor.to(dtype)."""
    return _Widened.apply(tensor, dtype, saturate) if _has_gradient(tensor) else tensor.to(dtype)


def _has_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class _Expanded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, shape: tuple[int, ...], saturate: bool) -> Tensor:
        return tensor.expand(shape)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensor, _, ctx.saturate = inputs
        ctx.shape = tensor.shape

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        new = gradient.dim() - len(ctx.shape)
        repeated = (d for d, size in enumerate(ctx.shape, new) if size != gradient.shape[d])
        dims = [*range(new), *repeated]
        dtype, scale = gradient.dtype, 1.0
        # torch sums 16 bits in float32 as it reads them, and would first copy them to float64.
        wide = torch.float64 if dtype.itemsize > 2 else torch.float32
        if dtype is torch.float64 and ctx.saturate:  # no dtype is wider than float64
            copies = gradient.numel() // max(ctx.shape.numel(), 1)
            scale = 0.5 ** copies.bit_length()
            gradient = gradient * scale
        total = gradient.sum(dims, dtype=wide).view(ctx.shape)
        if scale != 1:
            limit = gradient_limit(dtype) * scale
            return total.clamp(-limit, limit) / scale, None, None
        return narrow_gradient(total, dtype, ctx.saturate), None, None


class _Total(torch.autograd.Function):
    """Makes a placeholder without memory. The gradient of the placeholder becomes the gradient of `tensor`."""

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.new_zeros((), dtype=dtype).expand(tensor.shape)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return narrow_gradient(gradient, ctx.dtype, saturate=True), None


class _Prefix(torch.autograd.Function):
    """Returns tensor[:, :length], and `total` for the next prefix. Backward adds the prefix's gradient to total's."""

    @staticmethod
    def forward(tensor: Tensor, total: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return tensor[:, :length], total.view_as(total)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, total, ctx.length = inputs
        ctx.shape, ctx.dtype = total.shape, total.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dprefix: Tensor | None, sum_of_later: Tensor | None):
        if dprefix is None:
            return None, sum_of_later, None
        if sum_of_later is None:
            total = dprefix.new_zeros(ctx.shape, dtype=ctx.dtype)
        else:
            total = sum_of_later.contiguous()  # it is, except while torch.compile traces
        total[:, : ctx.length] += dprefix  # in place: no other node reads this sum
        return None, total, None


class _Widened(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
        return tensor.to(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensor, _, ctx.saturate = inputs
        ctx.dtype = tensor.dtype

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return narrow_gradient(gradient, ctx.dtype, ctx.saturate), None, None
