"""Conversions between padded batches [B, S, ...] and packed tokens [total, ...], as in flash_attn.bert_padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.checks import check_count, check_tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a mask keeps.

    hidden_states: [B, S, ...].
    attention_mask: [B, S], nonzero (True) for tokens.
    unused_mask: [B, S], nonzero for tokens that are packed as well but are not counted as used.

    Returns
        packed: [total, ...];
        indices: int64 [total], where each packed token is in the flattened [B * S];
        cu_seqlens: int32 [B + 1], where each sequence begins among the packed tokens;
        max_seqlen: the longest packed sequence;
        used_seqlens: int32 [B], how many tokens attention_mask keeps in each sequence.
    """
    check_tensor(hidden_states, "hidden_states")
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    for name, mask in masks.items():
        check_tensor(mask, name)
        if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name}: got shape {tuple(mask.shape)}, expected [B, S] of hidden_states, "
                f"{tuple(hidden_states.shape[:2])}"
            )
    used = attention_mask != 0
    packed_mask = used if unused_mask is None else used | (unused_mask != 0)
    seqlens = packed_mask.sum(dim=-1, dtype=torch.int32)
    indices = packed_mask.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    return packed, indices, cu_seqlens, max_seqlen, used.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes unpad_input: [total, ...] -> [batch, seqlen, ...], zero where there is no token."""
    check_tensor(hidden_states, "hidden_states")
    check_tensor(indices, "indices")
    for name, length in (("batch", batch), ("seqlen", seqlen)):
        check_count(length, name)
    if tuple(indices.shape) != tuple(hidden_states.shape[:1]):
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}, expected one for each of {hidden_states.shape[0]} tokens"
        )
    _check_values(indices, batch * seqlen)
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _check_values(indices: Tensor, rows: int) -> None:
    """Checks the dtype, and on the CPU the values: on a GPU this check would wait for the device."""
    if indices.dtype != torch.int64:
        raise TypeError(f"indices: got {indices.dtype}, expected torch.int64")
    if type(indices) is not Tensor or not indices.is_cpu or torch.compiler.is_compiling():
        return
    outside = ((indices < 0) | (indices >= rows)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(
            f"indices[{place}]: got {int(indices[place])}, expected 0 or more and less than {rows}"
        )
