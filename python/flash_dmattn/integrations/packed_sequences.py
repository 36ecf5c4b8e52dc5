"""Sequences packed into the rows of a batch, as transformers describes them: by offsets, or by positions that begin
again."""

from typing import NamedTuple

import torch

from .._core.checks import check_count, may_read
from ..functional import flash_dmattn_varlen_func
from ..keys.intervals import KeyIntervals
from ..keys.places import check_offsets
from ..keys.recognise import Memo, derive, split_additive


class Packed(NamedTuple):
    """Of the tokens of all rows, one row after the other: offsets int [sequences + 1], and lengths where known."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest_q: int | None
    longest_k: int | None


def of_offsets(
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    max_length_q: int | torch.Tensor | None,
    max_length_k: int | torch.Tensor | None,
    key_mask: torch.Tensor | None,
    *,
    total_q: int,
    total_k: int,
) -> Packed | None:
    """None where nothing is packed. `key_mask`: a mask without a query dimension."""
    given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if all(value is None for value in given):
        return None
    for name, offsets in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if offsets is None:
            raise ValueError(
                f"{name}: got None beside another argument of packed sequences, expected both cu_seq_lens_q and "
                "cu_seq_lens_k"
            )
    longest_q = _length(max_length_q, "max_length_q")
    longest_k = _length(max_length_k, "max_length_k")
    check_offsets(cu_seq_lens_q, "cu_seq_lens_q", total_q)
    check_offsets(
        cu_seq_lens_k, "cu_seq_lens_k", total_k, longest=longest_k, name_of_longest="max_length_k"
    )
    if key_mask is not None and not (may_read() and _allows_all(key_mask)):
        raise ValueError(
            f"attention_mask: got shape {tuple(key_mask.shape)} beside cu_seq_lens_q, expected None or, where values "
            "can be read, a mask that allows every key: packed sequences have no padding"
        )
    return Packed(cu_seq_lens_q, cu_seq_lens_k, longest_q, longest_k)


def _length(value: int | torch.Tensor | None, name: str) -> int | None:
    """transformers has them on the device where it makes them of positions."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    check_count(value, name)
    return value


def of_positions(
    position_ids: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    batch: int,
    length: int,
    memo: Memo | None = None,
) -> Packed | None:
    """Where positions begin again inside a row. None: nowhere, or these are not positions [1 or B, length].

    With padding, positions begin again where it ends; only between two visible tokens do they begin a sequence.
    """
    if position_ids is None:
        return None

    def find(positions: torch.Tensor) -> Packed | None:
        return _packed_of(_begins(positions, None, batch, length), batch * length)

    packed = derive(memo, "sequences", position_ids, find)
    if packed is None or key_mask is None:
        return packed
    if not _begins(position_ids, key_mask, batch, length).any():
        return None
    if not _allows_all(key_mask):
        raise ValueError(
            f"position_ids: got positions that begin again beside an attention_mask of shape {tuple(key_mask.shape)} "
            "that hides keys, expected one without padding, or a mask with a query dimension"
        )
    return packed


def _packed_of(begins: torch.Tensor | None, total: int) -> Packed | None:
    """`begins`: see `_begins`."""
    if begins is None or not begins.any():
        return None
    starts = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=total).int()
    longest = int(offsets.diff().max())
    return Packed(offsets, offsets, longest, longest)


def intervals_of_positions(
    position_ids: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    batch: int,
    length: int,
    is_causal: bool,
) -> KeyIntervals | None:
    """The same without reading a value: every key, if it is visible, to the queries of its sequence."""
    begins = _begins(position_ids, key_mask, batch, length)
    if begins is None:
        return None
    document = torch.nn.functional.pad(begins, (1, 0)).cumsum(1)
    first = torch.searchsorted(document, document)
    last = torch.searchsorted(document, document, right=True)
    if is_causal:
        first = torch.arange(length, device=first.device).expand_as(first)
    intervals = torch.stack([first, last], dim=-1).int()[:, None]
    if key_mask is not None:
        intervals = intervals * _per_key(key_mask)[..., None]
    return KeyIntervals(intervals, length, consecutive=True)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    packed: Packed,
    keep: int | None,
    **options,
) -> torch.Tensor:
    """Attention inside every packed sequence; one choice of keys for each."""
    if bias is not None:
        if bias.dim() != 3:
            raise ValueError(
                f"attention_bias has shape {tuple(bias.shape)}; packed sequences take [B, H, Sk]"
            )
        bias = bias.expand(key.shape[0], -1, -1).transpose(1, 2).flatten(0, 1)
    out = flash_dmattn_varlen_func(
        *(t.flatten(0, 1) for t in (query, key, value)),
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        packed.longest_q,
        packed.longest_k,
        attn_bias=bias,
        keep_window_size=None if bias is None else keep,
        selection="global",
        **options,
    )
    return out.view(query.shape)


def _begins(
    position_ids: torch.Tensor | None, key_mask: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor | None:
    """Which tokens, but the first of a row, begin a sequence: bool [B, length - 1]."""
    if position_ids is None or length == 1:
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
    """bool [B, H, Sk]."""
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
