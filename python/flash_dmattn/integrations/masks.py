"""The masks of transformers' models as key intervals: a function of its mask interface."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import masking_utils

from .._arguments import may_read
from ..allowed_keys import intervals_of_mask, intervals_of_rows
from .keywords import refuse_unknown

# For implementations that do not evaluate `mask_function`, or make additive masks; and whether None may stand for causality,
# which the result of this function includes either way.
_OF_OTHERS = frozenset({"allow_is_causal_skip", "allow_torch_fix", "config", "dtype", "local_size"})


def key_interval_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs,
) -> torch.Tensor | None:
    """The attention mask of a model as key intervals; a function of transformers' mask interface.

    Args:
        batch_size, q_length, kv_length: B, Sq and Sk.
        q_offset, kv_offset: positions of the first query and key, on the device in a static cache; or all query
            positions in `cache_position`, int [Sq] (transformers 4).
        mask_function: (batch, head, query position, key position) -> bool, on tensors that broadcast.
        attention_mask: padding, bool [B, positions], True for real tokens; missing ones are padding.
        allow_is_bidirectional_skip: a mask that allows everything may be None.
        use_vmap: `mask_function` is custom and takes scalars; its mask is built and then read.
        kwargs: what transformers gives the masks of its other implementations, and nothing else.

    Returns:
        None where the `is_causal` of the layer is all of it; else int32 [B, 1, Sk, 2]; or, when no
        intervals describe the mask, bool [B, 1, Sq, Sk].

    Raises:
        TypeError: an unknown keyword; padding of floating point.
    """
    refuse_unknown(kwargs, _OF_OTHERS)
    if attention_mask is not None and attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask: got {attention_mask.dtype} of shape {tuple(attention_mask.shape)}, expected bool or "
            "integers, nonzero for real tokens; as a bool an additive one would be its opposite"
        )
    if use_vmap:
        mask = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=True,
            device=device,
        )
        intervals = intervals_of_mask(mask)
        return mask if intervals is None else intervals.intervals

    query = cache_position
    if query is None:
        query = torch.arange(q_length, device=device) + q_offset
    key = torch.arange(kv_length, device=query.device) + kv_offset
    key_end = kv_length + kv_offset
    is_read = cache_position is not None or isinstance(q_offset, torch.Tensor)
    query_end = None if is_read else q_length + q_offset
    present = _present_keys(attention_mask, key, key_end)
    documents = getattr(mask_function, "causal_documents", None)

    if mask_function is masking_utils.causal_mask_function:
        if present is None and (
            _begin_together(q_offset, kv_offset, q_length, kv_length)
            or _end_together(query, key, query_end, key_end)
        ):
            return None
        first = torch.searchsorted(query, key)
    elif documents is not None:
        first = torch.arange(kv_length, device=query.device)
    elif mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        if present is None and allow_is_bidirectional_skip:
            return None
        first = torch.zeros_like(key)
    else:
        return _mask_of_function(mask_function, batch_size, query, key, present)

    if documents is None:
        rows = query.shape[0]  # not len(), which makes it a constant of torch.compile
        last = torch.where(first < rows, rows, 0)[None]
    else:
        last = torch.searchsorted(documents, documents, right=True)
    first, last = torch.broadcast_tensors(first.minimum(last), last)
    intervals = torch.stack([first, last], dim=-1).int()[:, None]
    if present is not None:
        intervals = intervals * present[:, None, :, None]
    return intervals.expand(batch_size, -1, -1, -1)


def _begin_together(
    q_offset: int | torch.Tensor,
    kv_offset: int | torch.Tensor,
    q_length: int | None,
    kv_length: int,
) -> bool:
    """Whether the keys are those of the queries alone, as in a cache whose lengths are on the device."""
    return q_offset is kv_offset and q_length == kv_length


def _end_together(
    query: torch.Tensor, key: torch.Tensor, query_end: int | None, key_end: int
) -> bool:
    """Whether the last query stands at the last key; False where compiled code would have to read it.

    query_end: None where it has to be read.
    """
    if query_end is not None:
        return query_end == key_end
    return may_read() and bool(query[-1] == key[-1])


def _present_keys(
    padding: torch.Tensor | None, key: torch.Tensor, key_end: int | torch.Tensor
) -> torch.Tensor | None:
    """Which keys are real tokens, bool [B, Sk]; None when all are known to be.

    key_end: on the device where it may not be read, and neither is the padding then.
    """
    if padding is None:
        return None
    if isinstance(key_end, torch.Tensor):
        length = padding.shape[-1]
        return padding[:, key.clamp(max=length - 1)].bool() & (key < length)
    missing = key_end - padding.shape[-1]
    if missing > 0:
        padding = F.pad(padding, (0, missing))
    present = padding[:, key].bool()
    return None if may_read() and present.all() else present


def _mask_of_function(
    mask_function: Callable,
    batch_size: int,
    query: torch.Tensor,
    key: torch.Tensor,
    present: torch.Tensor | None,
) -> torch.Tensor:
    """Sliding windows and custom masks: evaluated exactly, a block of rows at a time. Compiled code cannot find
    out whether intervals describe them, and takes the mask."""
    batch = torch.arange(batch_size, device=key.device)[:, None, None, None]
    head = torch.zeros_like(batch[:1])
    shape = torch.Size((batch_size, 1, len(query), len(key)))

    def rows(start: int, stop: int) -> torch.Tensor:
        block = mask_function(batch, head, query[None, None, start:stop, None], key)
        if present is not None:
            block = block & present[:, None, None]
        return block.expand(batch_size, 1, stop - start, len(key))

    intervals = intervals_of_rows(rows, shape, key.device) if may_read() else None
    return rows(0, len(query)).contiguous() if intervals is None else intervals.intervals


def keep_documents() -> None:
    """The causal mask functions of packed sequences carry the document of every token, from which intervals follow
    without evaluating the function. In compiled models transformers takes every sequence for a packed one."""
    combine = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if combine is None:
        return

    @functools.wraps(combine)
    def combine_and_keep(mask_function, position_ids, packed_sequence_mask):
        combined = combine(mask_function, position_ids, packed_sequence_mask)
        if mask_function is masking_utils.causal_mask_function:
            combined.causal_documents = packed_sequence_mask
        return combined

    masking_utils.packed_sequence_compatibility_function = combine_and_keep
