"""The projection of scores where the library has no kernel. Importing this module registers its operator.

It is an operator so that no compiler fuses its products with its sums, which would round them differently.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import projection_gradients, save_projection
from .fake_kernels import empty_scores
from .load import NAMESPACE
from .score_forms import score_of

_SUMS = 64  # the partial sums of a score (include/flash_dmattn/scores.h)
_MOST_SUMS = 2**22  # the partial sums of the tokens that are computed together: 16 MiB


@torch.library.custom_op(f"{NAMESPACE}::score_projection_in_torch", mutates_args=())
def score_projection(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, form: str
) -> Tensor:
    """Computes what the operator score_projection computes, with sums in the same order and so with the same bits."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    (heads, features), (batch, length) = weight.shape, hidden.shape[:2]
    blocks = -(-features // _SUMS)
    padding = (0, blocks * _SUMS - features)
    weight = F.pad(weight.to(dtype), padding).view(heads, blocks, _SUMS)
    scores = torch.empty(batch * length, heads, dtype=dtype, device=hidden.device)
    tokens = max(1, _MOST_SUMS // max(1, heads * _SUMS))
    for part, out in zip(hidden.flatten(0, 1).split(tokens), scores.split(tokens), strict=True):
        part = F.pad(part.to(dtype), padding).view(len(part), 1, blocks, _SUMS)
        sums = part.new_zeros(len(part), heads, _SUMS)
        for block in range(blocks):
            sums += part[:, :, block] * weight[:, block]
        half = _SUMS // 2
        while half:
            sums = sums[..., :half] + sums[..., half:]
            half //= 2
        out.copy_(sums[..., 0])
    if bias is not None:
        scores += bias.to(dtype)
    return score_of(scores.view(batch, length, heads).mT.contiguous(), factor, form)


@score_projection.register_fake
def _score_projection_fake(hidden, weight, bias, factor, form):
    return empty_scores(hidden, weight)


def _save_for_backward(ctx, inputs: tuple, output: Tensor) -> None:
    save_projection(ctx, inputs)


def _backward(ctx, dscores: Tensor) -> tuple[Tensor | None, ...]:
    return projection_gradients(ctx, score_projection, dscores)


score_projection.register_autograd(_backward, setup_context=_save_for_backward)
