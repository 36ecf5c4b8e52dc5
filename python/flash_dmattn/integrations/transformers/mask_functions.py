"""A function of transformers' mask interface, which makes the masks of models as key intervals."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import masking_utils
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import may_read
from ...keys.recognise import intervals_of_mask, intervals_of_rows
from .._shared.layer_call import (
    causal_mask,
    check_known_keywords,
    intervals_of_documents,
)
from .compat import BIDIRECTIONAL

# Keywords for implementations that do not evaluate `mask_function` or that make additive masks, and one that says whether
# None may replace causality, which the result of this function always includes.
_IGNORED_KEYWORDS = frozenset(
    {"allow_is_causal_skip", "allow_torch_fix", "config", "dtype", "local_size"}
)


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
    """Makes the attention mask of a model as key intervals. It is a function of transformers' mask interface.

    Args:
        batch_size, q_length, kv_length: B, Sq and Sk.
        q_offset, kv_offset: positions of the first query and key, on the device in a static cache; or all query
            positions in `cache_position`, int [Sq] (transformers 4, and 5 until 5.3).
        mask_function: (batch, head, query position, key position) -> bool, on tensors that broadcast.
        attention_mask: padding, bool [B, positions], True for real tokens; missing ones are padding.
        allow_is_bidirectional_skip: a mask that allows everything may be None.
        use_vmap: `mask_function` is custom and takes scalars; its mask is built and then read.
        kwargs: known arguments of transformers' other mask functions, ignored. Other scalars warn once; other tensors and
            functions raise.

    Returns:
        One of:
            None, if every query is known to see every key;
            int32 [B, 1, 0, 2], if the mask is known to be causality and nothing else (see `causal_mask`);
            intervals, int32 [B, 1, Sk, 2];
            bool [B, 1, Sq, Sk], if no intervals describe the mask, or if a single query sees the future.

    Raises:
        TypeError: an unknown keyword that is no scalar, or is like a setting of attention; padding of floating point.
    """
    check_known_keywords(kwargs, _IGNORED_KEYWORDS)
    if attention_mask is not None and attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask: got {attention_mask.dtype} of shape {tuple(attention_mask.shape)}, expected bool or "
            "integers, nonzero for real tokens; as a bool an additive one would be its opposite"
        )
    if attention_mask is not None and may_read() and isinstance(kv_offset, int):
        positions = attention_mask.shape[-1]
        # If only new tokens are missing, they are padding, as in transformers.
        if positions < kv_offset:
            raise ValueError(
                f"attention_mask: got {positions} positions, expected {kv_offset + kv_length}, one for each token: missing ones "
                "would be padding"
            )
    if use_vmap:
        own = {} if cache_position is None else {"cache_position": cache_position}
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
            **own,
        )
        if mask is None:
            return None
        intervals = intervals_of_mask(mask)
        return mask if intervals is None else intervals.intervals

    if cache_position is not None:
        # len() would make it a constant of torch.compile.
        q_length, device = cache_position.shape[0], cache_position.device
    positions = _Positions(q_length, kv_length, q_offset, kv_offset, cache_position, device)
    present = positions.present_keys(attention_mask)

    if mask_function is masking_utils.causal_mask_function:
        last_query_is_last_key = positions.last_query_is_last_key()
        if last_query_is_last_key and positions.all_keys_are_tokens(present):
            return None if q_length == 1 else causal_mask(batch_size, device)
        if last_query_is_last_key and q_length == 1:  # it sees every token
            every = torch.arange(2, dtype=torch.int32, device=device)
            return _hide_padding(every, present, batch_size)
        first = positions.first_queries()
    elif mask_function is BIDIRECTIONAL:
        if allow_is_bidirectional_skip and positions.all_keys_are_tokens(present):
            return None
        if q_length == 1:
            # Models also use the mask of one query for several queries. Intervals that end at 1 would show these
            # nothing.
            if present is None:
                present = torch.ones(1, kv_length, dtype=torch.bool, device=device)
            return present[:, None, None].expand(batch_size, -1, -1, -1)
        first = torch.zeros(kv_length, dtype=torch.int32, device=device)
    else:
        return _mask_of_function(mask_function, batch_size, positions, present)

    intervals = torch.stack([first, torch.full_like(first, q_length)], dim=-1)
    return _hide_padding(intervals, present, batch_size)


def registered_attention_mask(
    *args, config: PretrainedConfig | None = None, **kwargs
) -> torch.Tensor | None:
    """Calls `key_interval_mask`, except for a Doge with transformers' own layers.

    These layers add their scores to a mask with one element for each (query, key) pair, bool [B, 1, Sq, Sk].
    """
    if getattr(config, "model_type", None) != "doge":
        return key_interval_mask(*args, **kwargs)
    warnings.warn(
        "attn_implementation: got a Doge model with transformers' own attention layers, which build masks of the size "
        "N x N; call flash_dmattn.integrations.transformers.enable_flash_dmattn(model)",
        stacklevel=2,
    )
    return masking_utils.sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


def documents_of_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns each token's document number, int64 [B, S]. A document begins where positions [B, S] begin again."""
    return F.pad(position_ids.diff() != 1, (1, 0)).cumsum(1)


def is_causal_config(config: PretrainedConfig) -> bool:
    """Whether transformers' mask would be plain causality if there is no padding."""
    has_window = getattr(config, "sliding_window", None) is not None
    return not has_window and getattr(config, "is_causal", True)


def mask_kind(arguments_by_name: dict, use_cache: bool) -> tuple[str | None, torch.Tensor | None]:
    """Returns the kind of mask that transformers makes from arguments (see `doge.Context`), and the mask if known.

    Without the arguments the kind could be found only by reading values, which compiled code cannot do.
    """
    padding, positions = map(arguments_by_name.get, ("attention_mask", "position_ids"))
    tokens = arguments_by_name.get("input_ids")
    tokens = arguments_by_name.get("inputs_embeds") if tokens is None else tokens
    if padding is not None:
        is_padding = isinstance(padding, torch.Tensor) and padding.dim() == 2
        return "padded" if is_padding else None, None
    if not isinstance(tokens, torch.Tensor):
        return None, None  # an error of the model
    batch = tokens.shape[0]
    if positions is None:
        return None, causal_mask(batch, tokens.device)
    if use_cache:  # transformers then does not look where positions begin again
        return None, None
    documents = documents_of_positions(positions.expand(batch, -1))
    if may_read() and not documents.any():
        return None, causal_mask(batch, tokens.device)
    return "packed", intervals_of_documents(documents)


class _Positions(NamedTuple):
    """The positions of queries and keys, from arguments of `key_interval_mask`. Offsets on the device are not read."""

    q_length: int
    kv_length: int
    q_offset: int | torch.Tensor
    kv_offset: int | torch.Tensor
    cache_position: torch.Tensor | None
    device: torch.device | str | None

    def key_positions(self) -> torch.Tensor:
        return torch.arange(self.kv_length, device=self.device) + self.kv_offset

    def query_positions(self) -> torch.Tensor:
        if self.cache_position is not None:
            return self.cache_position
        return torch.arange(self.q_length, device=self.device) + self.q_offset

    def keys_are_queries(self) -> bool:
        """Whether keys and queries are known to be the same tokens. A static DynamicMaskCache has one tensor for both
        offsets."""
        return (
            self.cache_position is None
            and self.q_offset is self.kv_offset
            and self.q_length == self.kv_length
        )

    def last_query_is_last_key(self) -> bool:
        """Whether the last query is known to be at the last key; `cache_position` is read if that is allowed."""
        if self.cache_position is not None:
            return may_read() and bool(self.cache_position[-1] == self.key_positions()[-1])
        if self.keys_are_queries():
            return True
        if isinstance(self.q_offset, torch.Tensor) or isinstance(self.kv_offset, torch.Tensor):
            return False
        return self.q_length + self.q_offset == self.kv_length + self.kv_offset

    def first_queries(self) -> torch.Tensor:
        """Returns the index of the first query at or after each key, int32 [Sk]; the number of queries if none is."""
        if self.cache_position is not None:
            return torch.searchsorted(self.cache_position, self.key_positions(), out_int32=True)
        keys = torch.arange(self.kv_length, dtype=torch.int32, device=self.device)
        if self.keys_are_queries():
            return keys
        # If the offsets are tensors [1], the difference is int64.
        first = keys + (self.kv_offset - self.q_offset)
        return first.clamp(0, self.q_length).int()

    def present_keys(self, padding: torch.Tensor | None) -> torch.Tensor | None:
        """Returns whether each key is a real token, bool [B, Sk], or None without padding."""
        if padding is None:
            return None
        length = padding.shape[-1]
        if isinstance(self.kv_offset, torch.Tensor):
            key = self.key_positions()
            return padding.index_select(1, key.clamp(max=length - 1)).bool() & (key < length)
        end = self.kv_length + self.kv_offset
        if end > length:
            padding = F.pad(padding, (0, end - length))
        return padding[:, self.kv_offset : end].bool()

    def all_keys_are_tokens(self, present: torch.Tensor | None) -> bool:
        """Whether all keys are known to be real tokens; reads `present` if values may be read and the key offset is
        on the host."""
        if present is None:
            return True
        return may_read() and not isinstance(self.kv_offset, torch.Tensor) and bool(present.all())


def _hide_padding(
    intervals: torch.Tensor, present: torch.Tensor | None, batch_size: int
) -> torch.Tensor:
    """Sets the intervals of padding to (0, 0). Returns [B, 1, Sk, 2]; `intervals` broadcast to this shape."""
    if present is None:
        return intervals.expand(batch_size, 1, -1, -1)
    rows = intervals * present.view(present.shape[0], 1, present.shape[1], 1)
    return rows if rows.shape[0] == batch_size else rows.expand(batch_size, -1, -1, -1)


def _mask_of_function(
    mask_function: Callable,
    batch_size: int,
    positions: _Positions,
    present: torch.Tensor | None,
) -> torch.Tensor:
    """Evaluates sliding windows and custom masks exactly, one block of rows at a time.

    Compiled code cannot find out whether intervals describe the mask, so it gets the mask itself.
    """
    query, key = positions.query_positions(), positions.key_positions()
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
