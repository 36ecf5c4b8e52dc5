"""Selection within documents that are packed one after the other, in torch operations.

On a GPU the offsets of the documents are in device memory. No function here reads them back, so none waits,
and all can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import ops


def rank_by_document(scores: Tensor, document: Tensor) -> Tensor:
    """Scores with the same order inside a document, and above those of every earlier document.

    A key is then never beaten by one of a document that ended before it appeared. Of equal scores the
    later key has the higher rank; NaN stays NaN.
    """
    if scores.dtype == torch.float64:  # 64 bits leave no room for the document
        in_document = _rank(scores)
    else:
        # As integers, floats are in their order but for the sign, so that one sort has the documents in the upper halves.
        bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0: -0 and +0 are equal
        in_document = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = _rank((document.long() << 32) + in_document)
    return rank.float().masked_fill(scores.isnan(), float("nan"))


def _rank(values: Tensor) -> Tensor:
    """The number of values that each one beats; of equal ones the later beats the others."""
    order = values.argsort(dim=-1, stable=True)
    rank = torch.empty_like(order)
    return rank.scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    )


def select_packed(
    scores: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    window: int,
    selection: str,
    is_causal: bool,
    query_length: int,
) -> Tensor:
    """select_key_intervals within each document; scores [1, H, total_k] -> int32 [1, H, total_k, 2].

    Keys of later documents beat all keys of earlier ones, so a causal selection over the packed row is one
    within each document for as long as the document lasts: a key still visible at the end of its own is
    among the best of the document, and the others are beaten at the same positions in the packed row.
    """
    keys = torch.arange(scores.shape[2], device=scores.device)
    document = torch.searchsorted(cu_seqlens_k[1:].long(), keys, right=True)
    begin_q, end_q, end_k = (
        torch.cat([offsets, offsets[-1:]]).long()[document]
        for offsets in (cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[1:])
    )
    exists = document < cu_seqlens_k.shape[0] - 1
    ranks = rank_by_document(scores, document).masked_fill(~exists, float("nan"))
    packed = ops.select_key_intervals(ranks, None, window, "per_query", True, scores.shape[2])
    chosen = packed[..., 1] > packed[..., 0]
    beaten_at = packed[..., 1].long()  # a key's position in the packed row
    if selection == "global" or not is_causal:
        chosen &= beaten_at >= end_k
        beaten_at = end_k
    # Counted from their ends, query and key have the same position in a document.
    last = torch.minimum(beaten_at - end_k + end_q, end_q)
    first = torch.maximum(keys - end_k + end_q, begin_q) if is_causal else begin_q
    first, last = torch.broadcast_tensors(first, last)
    visible = chosen & (first < last)
    return (torch.stack([first, last], dim=-1) * visible.unsqueeze(-1)).int()


torch.library.register_kernel(
    f"{ops.NAMESPACE}::select_key_intervals_varlen", "cuda", select_packed
)
