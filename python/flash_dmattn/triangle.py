"""Triangle attention: the rows of a pair representation attend with one bias, which all rows share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._core.checks import check_on_device, check_tensor
from ._core.gradients import expand, prefixes
from .functional import flash_dmattn_func


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    empty_rows: str = "zero",
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """Computes softmax(scale * q . k + bias) . v for the N rows of a pair representation, which share the bias.

    The layout is that of cuEquivariance, [B, N, H, S, D]. Neither the bias nor the mask is expanded, and no element of
    the scores is stored.

        out = triangle_attention(q, k, v, bias, mask)  # AlphaFold's triangle attention, OpenFold's and Boltz's pair bias

    q: [B, N, H, Q, D]; k: [B, N, H, K, D]; v: [B, N, H, K, Dv]: dtypes and devices as in flash_dmattn_func; any strides.
    bias: [B, 1, H, Q, K], dtype of q or float32. A value at or below the mask value of its dtype hides its element, as in
        flash_dmattn_func. The gradient is the sum over the N rows.
    mask: bool [B, N, 1, 1, K], True where visible.
    scale: the factor on q . k, 1 / sqrt(D) by default.
    empty_rows: the result of a query that sees no key: "zero", or "mean", the mean of v over all K keys, as in
        cuEquivariance. The mean has a gradient for v alone.
    deterministic: whether gradients are bit-identical from run to run; None: as torch.use_deterministic_algorithms sets.
        On a GPU this costs time if the bias is float32 beside 16-bit q. On the CPU and by Triton gradients always are.
    backend: as in flash_dmattn_func.

    Each of the B elements is a call of its own.

    Returns out [B, N, H, Q, Dv] with the strides of [B, N, Q, H, Dv].
    """
    _check_arguments(q, k, v, bias, mask)
    if empty_rows not in ("zero", "mean"):
        raise ValueError(f"empty_rows: got {empty_rows!r}, expected 'zero' or 'mean'")
    masks = [None] * q.shape[0] if mask is None else _elements(mask)
    options = {"scale": scale, "deterministic": deterministic, "backend": backend}
    # Results and gradients of attention have the heads last: torch joins parts in this layout at the speed of a copy.
    heads_last = (t.transpose(2, 3) for t in (q, k, v))
    outs = [
        _attend(*tensors, empty_rows == "mean", options)
        for tensors in zip(*map(_elements, (*heads_last, bias)), masks, strict=True)
    ]
    return (outs[0].unsqueeze(0) if len(outs) == 1 else torch.stack(outs)).transpose(2, 3)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, has_means: bool, options
) -> Tensor:
    """Computes one of the B elements, [N, S, H, D]. The rows are the core's batch, whose elements may share a bias."""
    count = _rows_with_own_gradient(q, bias, options["backend"])
    if count and count < q.shape[0]:
        parts = [t.split(count) for t in (q, k, v)]
        heads = [bias.shape[1]] * len(parts[0])
        biases = prefixes(bias, heads)  # whose gradients are added one after the other
        masks = [None] * len(heads) if mask is None else mask.split(count)
        outs = [
            _attend(*part, has_means, options) for part in zip(*parts, biases, masks, strict=True)
        ]
        return torch.cat(outs)
    if count:
        bias = expand(bias, (q.shape[0], *bias.shape[1:]))
    key_mask = None if mask is None else mask.squeeze(2)  # [N, 1, K]
    if not has_means or not k.shape[1]:
        return flash_dmattn_func(q, k, v, key_mask, bias, **options)
    out, lse = flash_dmattn_func(q, k, v, key_mask, bias, return_lse=True, **options)
    if lse is None:
        raise NotImplementedError(
            "empty_rows: got 'mean' with backend='flex' on the CPU, where FlexAttention returns no log-sum-exp; expected another backend"
        )
    mean = v.mean(1, keepdim=True).to(out.dtype)
    return torch.where(lse.isneginf().mT.unsqueeze(-1), mean, out)


def _rows_with_own_gradient(q: Tensor, bias: Tensor, backend: str | None) -> int:
    """Returns the number of rows that get a gradient of the bias each, which torch adds. 0: kernels add them.

    On an H200 that takes 0.69 ms at N 256, H 4, D 32, where kernels that add to one sum take 0.96 ms, or in a fixed order
    13 ms. The gradients of these rows take up to 256 MiB.
    """
    has_gradient = torch.is_grad_enabled() and bias.requires_grad
    if not has_gradient or not q.is_cuda or bias.dtype != q.dtype or backend not in (None, "cuda"):
        return 0
    return max(2**28 // max(bias.numel() * bias.element_size(), 1), 1)


def _elements(tensor: Tensor) -> Sequence[Tensor]:
    """Returns the B elements. The gradient of unbind is a copy, which a single element does not need."""
    return [tensor.squeeze(0)] if tensor.shape[0] == 1 else tensor.unbind()


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    tensors = {"q": q, "k": k, "v": v, "bias": bias} | ({} if mask is None else {"mask": mask})
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
        check_on_device(tensor, name, q.device)
        if tensor.dim() != 5:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected five dimensions")
    batch, rows, heads, queries, head_dim = q.shape
    keys = k.shape[3]
    if not batch:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected [B, N, H, Q, D] with B > 0")
    expected = {
        "k": (batch, rows, heads, keys, head_dim),
        "v": (batch, rows, heads, keys, v.shape[4]),
        "bias": (batch, 1, heads, queries, keys),
        "mask": (batch, rows, 1, 1, keys),
    }
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            raise ValueError(f"{name}: got shape {tuple(tensors[name].shape)}, expected {shape}")
    if not bias.is_floating_point():
        raise TypeError(f"bias: got {bias.dtype}, expected a floating dtype")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask: got {mask.dtype}, expected torch.bool (True: visible)")
