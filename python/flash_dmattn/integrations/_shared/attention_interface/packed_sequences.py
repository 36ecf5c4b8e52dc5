"""Sequences packed into the rows of a batch, as transformers describes them: by offsets, or by positions that begin
again."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...._core.checks import check_count, check_positions, may_read
from ....functional import flash_dmattn_varlen_func
from ....keys.intervals import KeyIntervals, intersect
from ....keys.positions import check_offsets
from ....keys.recognise import refuse_negative, split_additive
from .keywords import PACKED_KEYWORDS, refuse_packed_by_layer
from .layer_masks import (
    as_key_intervals,
    has_queries,
    is_causal_mask,
    is_key_mask,
    window_mask,
)


class PackedSequences(NamedTuple):
    """Sequences packed over all rows: offsets int [sequences + 1], and maximum lengths if known."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_length_q: int | None
    max_length_k: int | None


def sequences_or_mask(
    packed: Mapping[str, object],
    positions: torch.Tensor | None,
    mask: torch.Tensor | KeyIntervals | None,
    query: torch.Tensor,
    key_length: int,
    *,
    sliding_window: int | None,
    is_causal: bool,
    selects: bool,
) -> PackedSequences | torch.Tensor | KeyIntervals | None:
    """Returns the packed sequences of a call, or its mask combined with the window and the sequences of each row.

    A mask with a query dimension contains both already and is returned unchanged.

    packed: the keywords `PACKED_KEYWORDS`. selects: whether a selection follows, which takes the offsets of sequences.
    """
    refuse_packed_by_layer(**packed)
    if positions is not None:
        check_positions(positions, "position_ids")
    if sliding_window is not None:
        check_count(sliding_window, "sliding_window")
    batch, length = query.shape[:2]
    window = None
    if mask is None:
        window = window_mask(sliding_window, is_causal, length, key_length, query.device)
    elif not isinstance(mask, (torch.Tensor, KeyIntervals)):
        raise TypeError(
            f"attention_mask: got {type(mask).__name__}, expected a torch.Tensor, KeyIntervals or None"
        )
    elif is_key_mask(mask, length, key_length):
        refuse_negative(mask, None)
    else:
        return mask
    sequences = _sequences_of_offsets(packed, mask, batch * length, batch * key_length)
    if sequences is None and positions is not None and length == key_length:
        sequences = _sequences_of_positions(
            positions, mask, batch, length, is_causal, by_offsets=may_read() or selects
        )
    if isinstance(sequences, PackedSequences) and window is not None:
        raise ValueError(
            f"sliding_window: got {sliding_window} for packed sequences without a mask, expected a mask"
        )
    if window is None:
        return mask if sequences is None else sequences
    return window if sequences is None else intersect(window, sequences)


def intervals_of_documents(documents: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
    """Returns which queries of its document see each key, int32 [B, 1, S, 2]. documents: numbers that do not fall, [B, S]."""
    last = torch.searchsorted(documents, documents, right=True, out_int32=True)
    if is_causal:
        first = torch.arange(last.shape[1], dtype=torch.int32, device=last.device).expand_as(last)
    else:
        first = torch.searchsorted(documents, documents, out_int32=True)
    return torch.stack([first, last], dim=-1)[:, None]


def hide_other_sequences(
    mask: torch.Tensor | None,
    keywords: Mapping[str, object],
    batch: int,
    query_length: int,
    key_length: int,
) -> torch.Tensor | None:
    """Hides keys of other sequences in a model's mask, if the keywords have offsets.

    transformers makes the masks of sliding windows without offsets, and the masks of some families (GPT-OSS) without
    positions. A mask without queries has to show every key.
    """
    packed = {name: keywords.get(name) for name in PACKED_KEYWORDS}
    refuse_packed_by_layer(**packed)
    # The lengths of sequences are not needed, and may be on a GPU.
    offsets = {name: packed[name] for name in PACKED_KEYWORDS[:2]}
    key_mask = None if has_queries(mask) or is_causal_mask(mask) else mask
    packed = _sequences_of_offsets(offsets, key_mask, batch * query_length, batch * key_length)
    if packed is None or len(packed.cu_seqlens_q) == 2:
        return mask

    def sequence_numbers(offsets: torch.Tensor, length: int) -> torch.Tensor:
        tokens = torch.arange(batch * length, dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets, tokens, right=True).view(batch, length)

    queries = sequence_numbers(packed.cu_seqlens_q, query_length)
    keys = sequence_numbers(packed.cu_seqlens_k, key_length)
    first = torch.searchsorted(queries, keys, out_int32=True)
    last = torch.searchsorted(queries, keys, right=True, out_int32=True)
    same_sequence = KeyIntervals(
        torch.stack([first, last], dim=-1)[:, None], query_length, consecutive=True
    )
    if mask is None or not has_queries(mask):
        return same_sequence.intervals
    intervals = as_key_intervals(mask, query_length, key_length)
    if intervals is not None:
        return intersect(intervals, same_sequence).intervals
    if mask.is_floating_point():
        return mask.masked_fill(~same_sequence.to_mask(), -torch.inf)
    return mask * same_sequence.to_mask()


def _sequences_of_offsets(
    packed: Mapping[str, object], key_mask: torch.Tensor | None, total_q: int, total_k: int
) -> PackedSequences | None:
    """Finds packed sequences by offsets. key_mask: a mask without a query dimension, here and below."""
    if all(value is None for value in packed.values()):
        return None
    cu_seqlens_q, cu_seqlens_k, *lengths = map(packed.get, PACKED_KEYWORDS)
    for name, offsets in (("cu_seq_lens_q", cu_seqlens_q), ("cu_seq_lens_k", cu_seqlens_k)):
        if offsets is None:
            raise ValueError(
                f"{name}: got None with another argument of packed sequences, expected both cu_seq_lens_q and "
                "cu_seq_lens_k"
            )
    for i, length in enumerate(lengths):
        if isinstance(length, torch.Tensor) and length.numel() == 1:
            lengths[i] = length = length.item()  # transformers computes it from positions
        if length is not None:
            check_count(length, PACKED_KEYWORDS[2 + i])
    check_offsets(cu_seqlens_q, "cu_seq_lens_q", total_q)
    check_offsets(
        cu_seqlens_k, "cu_seq_lens_k", total_k, longest=lengths[1], name_of_longest="max_length_k"
    )
    if key_mask is not None and not (may_read() and _allows_all(key_mask)):
        raise ValueError(
            f"attention_mask: got shape {tuple(key_mask.shape)} with cu_seq_lens_q, expected None or, if values "
            "can be read, a mask that allows every key: packed sequences have no padding"
        )
    return PackedSequences(cu_seqlens_q, cu_seqlens_k, *lengths)


def _sequences_of_positions(
    positions: torch.Tensor,
    key_mask: torch.Tensor | None,
    batch: int,
    length: int,
    is_causal: bool,
    by_offsets: bool,
) -> PackedSequences | KeyIntervals | None:
    """Finds packed sequences, which begin where positions begin again inside a row.

    Returns None if positions begin again nowhere, or are not [1 or B, length]. Positions also begin again where padding
    ends, so a sequence begins only between two visible tokens.

    by_offsets: False gives intervals, which need no values: each allowed key is shown to the queries of its sequence.
    """
    positions = positions[None] if positions.dim() == 1 else positions
    if length == 1 or positions.shape not in ((1, length), (batch, length)):
        return None
    is_additive = key_mask is not None and key_mask.is_floating_point()
    if is_additive and not by_offsets:
        return None
    begins, allowed = (positions.diff() != 1).expand(batch, -1), None
    if key_mask is not None:
        allowed = (split_additive(key_mask)[0] if is_additive else key_mask).bool()
        # [B, H, Sk]
        allowed = allowed[:, None] if allowed.dim() == 2 else allowed.flatten(2)
        visible = allowed.any(1)
        begins = begins & visible[:, 1:] & visible[:, :-1]
    begins = F.pad(begins, (1, 0))
    if not by_offsets:
        intervals = intervals_of_documents(begins.cumsum(1), is_causal)
        if allowed is not None:
            intervals = intervals * allowed[..., None]
        return KeyIntervals(intervals, length, consecutive=True)
    if not begins.any():
        return None
    if key_mask is not None and not _allows_all(key_mask):
        raise ValueError(
            f"position_ids: got positions that begin again with an attention_mask of shape {tuple(key_mask.shape)} "
            "that hides keys, expected one without padding, or a mask with a query dimension"
        )
    begins[:, 0] = True
    offsets = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    longest = int(offsets.diff().max())
    return PackedSequences(offsets, offsets, longest, longest)


def _allows_all(key_mask: torch.Tensor) -> bool:
    changes = key_mask != 0 if key_mask.is_floating_point() else key_mask == 0
    return not changes.any()


def attend_in_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    packed: PackedSequences,
    keep_window_size: int | None,
    **options,
) -> torch.Tensor:
    """Computes attention inside each packed sequence, with a global selection in each sequence."""
    if bias is not None:
        if bias.dim() != 3:
            raise ValueError(
                f"attention_bias: got shape {tuple(bias.shape)}, expected [B, H, Sk] for packed sequences"
            )
        bias = bias.expand(key.shape[0], -1, -1).transpose(1, 2).flatten(0, 1)
    out = flash_dmattn_varlen_func(
        *(t.flatten(0, 1) for t in (query, key, value)),
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        packed.max_length_q,
        packed.max_length_k,
        attn_bias=bias,
        keep_window_size=None if bias is None else keep_window_size,
        selection="global",
        **options,
    )
    return out.unflatten(0, query.shape[:2])
