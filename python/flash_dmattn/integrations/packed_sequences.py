"""Sequences packed into the rows of a batch, as transformers describes them: by offsets, or by positions that begin
again. The functions of 1.x take them; under the names of attention implementations masks contain them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._core.checks import (
    MASK_VALUE,
    check_count,
    check_positions,
    check_tensor,
    may_read,
    squeeze_query_dimension,
)
from .._core.numerics import Numerics
from .._dispatch import attention, with_lse
from ..functional import flash_dmattn_varlen_func
from ..keys.intervals import KeyIntervals, intersect
from ..keys.patterns import sliding_window as window_of_rows
from ..keys.recognise import refuse_negative, split_additive
from ..keys.rule import SelectionRule
from ..keys.select import select_elements
from ..keys.visible import Visible
from ._shared.layer_call import (
    PACKED_KEYWORDS,
    allows_all,
    check_mask_type,
    checked_offsets,
    checked_options,
    intervals_of_documents,
    normalize_mask,
    packed_keywords,
    take_bias,
)


class PackedSequences(NamedTuple):
    """Sequences packed over all rows: offsets int [sequences + 1], and maximum lengths if known."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_length_q: int | None
    max_length_k: int | None


def check_states(layout: str, **states: torch.Tensor) -> None:
    """Raises unless query, key and value have four dimensions, by name."""
    for name, tensor in states.items():
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {layout}")


def take_bias_and_window(
    keywords: dict, query: torch.Tensor, key: torch.Tensor, layer: torch.nn.Module | None = None
) -> tuple[torch.Tensor | None, int | None]:
    """Removes the bias and the number of keys that a query keeps, each of which has two names, from keywords, and returns them.

    The number for a bias is by default `layer.keep_window_size` or `layer.window_size`.
    """
    bias, keep = take_bias(keywords, query, key), None
    if bias is not None:
        keep = getattr(layer, "keep_window_size", getattr(layer, "window_size", None))
    sizes = {name: keywords.pop(name, None) for name in ("keep_window_size", "window_size")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name, size in sizes.items():
        check_count(size, name)
        if bias is None:
            raise ValueError(
                f"{name}: got {size} without attention_bias, expected a bias with the scores of keys"
            )
        keep = size
    if len(sizes) == 2 and sizes["window_size"] != sizes["keep_window_size"]:
        raise ValueError(
            f"window_size: got {sizes['window_size']} together with keep_window_size {sizes['keep_window_size']}, expected one of "
            "them (aliases)"
        )
    return bias, keep


def attend_by_mask_or_sequences(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | KeyIntervals | None,
    is_causal: bool,
    bias: torch.Tensor | None,
    keep: int | None,
    *,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **keywords,
) -> torch.Tensor:
    """Computes attention in which a query sees the keys that the mask shows, in packed sequences too; of these, with a window,
    those with the highest bias.

    Args:
        states: query [B, Sq, Hq, D], key [B, Sk, Hkv, D] and value [B, Sk, Hkv, Dv].
        mask, is_causal: as in `_flash_dynamic_mask_attention_forward`.
        bias, keep: of `take_bias_and_window`.
        keywords: of `checked_options`, and PACKED_KEYWORDS.

    Returns:
        [B, Sq, Hq, Dv].
    """
    query, key, value = states
    packed = packed_keywords(keywords)
    keywords = {name: x for name, x in keywords.items() if name not in PACKED_KEYWORDS}
    selects = keep is not None and key.shape[1] > keep
    visible = sequences_or_mask(
        packed, position_ids, mask, query, key.shape[1],
        sliding_window=sliding_window, is_causal=is_causal, selects=selects,
    )  # fmt: skip
    options = checked_options(query, **keywords)
    if isinstance(visible, PackedSequences):
        return attend_in_sequences(*states, bias, visible, keep, is_causal=is_causal, **options)
    mask, intervals, added = normalize_mask(visible, bias, query, key)
    rule = scores = None
    if selects:
        mask, intervals, rule, scores = _choice_by_bias(
            bias, mask, intervals, keep, is_causal, query, key
        )
    sink_logits = options.pop("sink_logits")
    numerics = Numerics.from_arguments(**options, softmax_scale=None, nonfinite="saturate")
    visible = Visible(mask, is_causal, intervals)
    out, statistics = attention(
        query, key, value, added, visible, numerics, rule=rule, scores=scores
    )
    return with_lse(out, statistics, return_lse=False, sink_logits=sink_logits)


def is_key_mask(mask: torch.Tensor | KeyIntervals, query_length: int, key_length: int) -> bool:
    """Whether a mask has no query dimension, and so cannot include packed sequences."""
    if isinstance(mask, KeyIntervals) or mask.dim() == 0 or mask.shape[-1] != key_length:
        return False
    if mask.dim() < 4:
        return not mask.is_floating_point()  # floating point masks of this form are refused
    return mask.shape[2] == 1 and query_length > 1


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

    packed: of `packed_keywords`. selects: whether a selection follows, which takes the offsets of sequences.
    """
    if positions is not None:
        check_positions(positions, "position_ids")
    if sliding_window is not None:
        check_count(sliding_window, "sliding_window")
    batch, length = query.shape[:2]
    window = None
    if mask is None and sliding_window is not None and key_length > sliding_window:
        # It ends at the query if causal, else the query is in its middle.
        lookahead = 0 if is_causal else sliding_window - 1
        window = window_of_rows(
            key_length,
            sliding_window,
            lookahead=lookahead,
            query_length=length,
            device=query.device,
        )
    elif mask is None:
        pass
    elif is_key_mask(check_mask_type(mask), length, key_length):
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


def _sequences_of_offsets(
    packed: Mapping[str, object], key_mask: torch.Tensor | None, total_q: int, total_k: int
) -> PackedSequences | None:
    lengths = list(map(packed.get, PACKED_KEYWORDS[2:]))
    for i, length in enumerate(lengths):
        if isinstance(length, torch.Tensor) and length.numel() == 1:
            lengths[i] = length = length.item()  # transformers computes it from positions
        if length is not None:
            check_count(length, PACKED_KEYWORDS[2 + i])
    offsets = checked_offsets(packed, key_mask, total_q, total_k, lengths[1])
    return None if offsets is None else PackedSequences(*offsets, *lengths)


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
    if key_mask is not None and not allows_all(key_mask):
        raise ValueError(
            f"position_ids: got positions that begin again with an attention_mask of shape {tuple(key_mask.shape)} "
            "that hides keys, expected one without padding, or a mask with a query dimension"
        )
    begins[:, 0] = True
    offsets = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    longest = int(offsets.diff().max())
    return PackedSequences(offsets, offsets, longest, longest)


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


def _choice_by_bias(
    attention_bias: torch.Tensor,
    mask: torch.Tensor | None,
    intervals: KeyIntervals | None,
    keep: int,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[torch.Tensor | None, KeyIntervals | None, SelectionRule | None, torch.Tensor | None]:
    """Returns the mask, the intervals, the rule and the scores of a call that selects keys.

    4-d scores select single elements: the mask then contains the selection.
    """
    scores = squeeze_query_dimension(attention_bias.detach())
    if scores.dim() == 4:
        shown = Visible(mask, is_causal, intervals)
        mask = select_elements(scores, shown, keep, query, key, MASK_VALUE[scores.dtype])
        return mask, None, None, None
    has_no_queries = intervals is None and (mask is None or mask.dim() == 3)
    mode = "global" if has_no_queries else "per_query"
    return mask, intervals, SelectionRule(keep, mode).checked_rule(), scores
