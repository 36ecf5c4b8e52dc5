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


class PackedArguments(NamedTuple):
    """The arguments of transformers' attention functions that describe packed sequences."""

    position_ids: torch.Tensor | None
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    max_length_q: int | torch.Tensor | None
    max_length_k: int | torch.Tensor | None

    def check(self) -> None:
        position_ids, *lengths = self
        refuse_packed_by_layer(**dict(zip(self._fields[1:], lengths, strict=True)))
        if position_ids is not None:
            check_positions(position_ids, "position_ids")


class PackedSequences(NamedTuple):
    """Sequences packed over all rows: offsets int [sequences + 1], and maximum lengths if known."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_length_q: int | None
    max_length_k: int | None


def sequences_or_mask(
    arguments: PackedArguments,
    attention_mask: torch.Tensor | KeyIntervals | None,
    query: torch.Tensor,
    key_length: int,
    *,
    sliding_window: int | None,
    is_causal: bool,
    selects: bool,
) -> PackedSequences | torch.Tensor | KeyIntervals | None:
    """Returns the packed sequences of a call, or its mask combined with the window and the sequences of each row.

    A mask with a query dimension contains both already and is returned unchanged.
    """
    batch, query_length = query.shape[:2]
    window = None
    if attention_mask is None:
        window = window_mask(sliding_window, is_causal, query_length, key_length, query.device)
    elif is_key_mask(attention_mask, query_length, key_length):
        refuse_negative(attention_mask, None)
    else:
        return attention_mask
    sequences = _packed_from_offsets(
        arguments, attention_mask, total_q=batch * query_length, total_k=batch * key_length
    )
    positions = arguments.position_ids
    if sequences is None and positions is not None and query_length == key_length:
        # A selection takes the offsets of sequences. Without one, code that may not read positions gets intervals.
        if may_read() or selects:
            sequences = _packed_from_positions(positions, attention_mask, batch, query_length)
        elif attention_mask is None or not attention_mask.is_floating_point():
            sequences = _intervals_from_positions(
                positions, attention_mask, batch, query_length, is_causal
            )
    if isinstance(sequences, PackedSequences) and window is not None:
        raise ValueError(
            f"sliding_window: got {sliding_window} for packed sequences without a mask, expected a mask"
        )
    if window is None:
        return attention_mask if sequences is None else sequences
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
    # The lengths of sequences are not needed, and may be on a GPU.
    lengths = [keywords.get(name) for name in PACKED_KEYWORDS]
    PackedArguments(None, *lengths).check()
    offsets = PackedArguments(None, *lengths[:2], None, None)
    key_mask = None if has_queries(mask) or is_causal_mask(mask) else mask
    packed = _packed_from_offsets(
        offsets, key_mask, total_q=batch * query_length, total_k=batch * key_length
    )
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


def _packed_from_offsets(
    arguments: PackedArguments, key_mask: torch.Tensor | None, *, total_q: int, total_k: int
) -> PackedSequences | None:
    """Finds packed sequences by offsets. key_mask: a mask without a query dimension, here and below."""
    _, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k = arguments
    if all(value is None for value in arguments[1:]):
        return None
    for name, offsets in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if offsets is None:
            raise ValueError(
                f"{name}: got None with another argument of packed sequences, expected both cu_seq_lens_q and "
                "cu_seq_lens_k"
            )
    max_length_q = _as_host_length(max_length_q, "max_length_q")
    max_length_k = _as_host_length(max_length_k, "max_length_k")
    check_offsets(cu_seq_lens_q, "cu_seq_lens_q", total_q)
    check_offsets(
        cu_seq_lens_k,
        "cu_seq_lens_k",
        total_k,
        longest=max_length_k,
        name_of_longest="max_length_k",
    )
    if key_mask is not None and not (may_read() and _allows_all(key_mask)):
        raise ValueError(
            f"attention_mask: got shape {tuple(key_mask.shape)} with cu_seq_lens_q, expected None or, if values "
            "can be read, a mask that allows every key: packed sequences have no padding"
        )
    return PackedSequences(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)


def _as_host_length(value: int | torch.Tensor | None, name: str) -> int | None:
    """Returns the length as int; transformers passes a tensor if it computes it from positions."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    check_count(value, name)
    return value


def _packed_from_positions(
    position_ids: torch.Tensor,
    key_mask: torch.Tensor | None,
    batch: int,
    length: int,
) -> PackedSequences | None:
    """Finds packed sequences, which begin where positions begin again inside a row.

    Returns None if positions begin again nowhere, or are not [1 or B, length]. Positions also begin again where padding
    ends, so a sequence begins only between two visible tokens.
    """

    packed, begins = None, _sequence_begins(position_ids, None, batch, length)
    if begins is not None and begins.any():
        starts = F.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
        offsets = F.pad(starts, (0, 1), value=batch * length).int()
        longest = int(offsets.diff().max())
        packed = PackedSequences(offsets, offsets, longest, longest)
    if packed is None or key_mask is None:
        return packed
    if not _sequence_begins(position_ids, key_mask, batch, length).any():
        return None
    if not _allows_all(key_mask):
        raise ValueError(
            f"position_ids: got positions that begin again with an attention_mask of shape {tuple(key_mask.shape)} "
            "that hides keys, expected one without padding, or a mask with a query dimension"
        )
    return packed


def _intervals_from_positions(
    position_ids: torch.Tensor,
    key_mask: torch.Tensor | None,
    batch: int,
    length: int,
    is_causal: bool,
) -> KeyIntervals | None:
    """Does the same as `_packed_from_positions` without reading values: shows each allowed key to the queries of its sequence."""
    begins = _sequence_begins(position_ids, key_mask, batch, length)
    if begins is None:
        return None
    intervals = intervals_of_documents(F.pad(begins, (1, 0)).cumsum(1), is_causal)
    if key_mask is not None:
        intervals = intervals * _per_key(key_mask)[..., None]
    return KeyIntervals(intervals, length, consecutive=True)


def attend(
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


def _sequence_begins(
    position_ids: torch.Tensor, key_mask: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor | None:
    """Returns whether each token begins a sequence, bool [B, length - 1]; the first token of a row is left out."""
    if length == 1:
        return None
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.shape not in ((1, length), (batch, length)):
        return None
    begins = position_ids.diff() != 1
    if key_mask is not None:
        visible = _per_key(key_mask).any(1)
        begins = begins & visible[:, 1:] & visible[:, :-1]
    return begins.expand(batch, -1)


def _per_key(key_mask: torch.Tensor) -> torch.Tensor:
    """Converts a mask without a query dimension to bool [B, H, Sk]."""
    if key_mask.is_floating_point():
        key_mask, _ = split_additive(key_mask)
    allowed = key_mask.bool()
    return (
        allowed[:, None]
        if allowed.dim() == 2
        else allowed.flatten(2)
        if allowed.dim() == 4
        else allowed
    )


def _allows_all(key_mask: torch.Tensor) -> bool:
    changes = key_mask != 0 if key_mask.is_floating_point() else key_mask == 0
    return not changes.any()
