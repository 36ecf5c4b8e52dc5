"""A call of transformers' attention functions: its keywords, its mask, packed sequences, and query, key and value."""

import difflib
import functools
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.checks import (
    add_query_dimension,
    broadcast_argument,
    check_bias,
    may_read,
    widen_bias,
)
from ..._core.numerics import resolve_scale
from ...keys.intervals import KeyIntervals, intersect
from ...keys.positions import check_offsets
from ...keys.recognise import (
    Memo,
    cached_result,
    intervals_of_mask,
    refuse_negative,
    split_additive,
)
from ...merge import check_sink_logits

# ---- Keywords -----------------------------------------------------------------------------------

# Bookkeeping of models, trainers and generation that reaches every attention function and changes nothing in it.
# grid_thw belongs to an encoder of images, whose mask or offsets follow from it; ignore_index and shift_labels to the loss;
# seq_idx to state-space layers, whose sequences attention knows by cu_seq_lens; tokenizer to `generate`, for strings that
# end a text.
BOOKKEEPING = frozenset({
    "cache_position", "grid_thw", "ignore_index", "implementation", "input_ids", "layer_idx", "logits_to_keep",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "seq_idx",
    "shift_labels", "token_type_ids", "tokenizer", "use_cache",
})  # fmt: skip
_PAGED = "continuous batching (a paged cache), which flash_dmattn does not support"
_SINKS = "per-token attention sinks, which flash_dmattn does not support"
_SPARSE = "keys chosen by an indexer, which flash_dmattn does not support"
_REASONS = {
    "head_mask": "weights of whole heads, which flash_dmattn does not support",
    "sinks": _SINKS,
    **dict.fromkeys(("block_indices", "indices"), _SPARSE),
    **dict.fromkeys(
        ("block_table", "cache", "cache_seqlens", "logits_indices", "page_table", "read_index", "write_index"), _PAGED
    ),
}  # fmt: skip
# Words of settings that change attention. A scalar with such a word in its name, or with one like it, is not ignored.
_CHANGES = (
    "bias", "cap", "capping", "causal", "chunk", "dilation", "dropout", "keep", "mask", "scale", "scaling", "sink", "sinks",
    "softcap", "softcapping", "temperature", "window", "windowsize",
)  # fmt: skip
PACKED_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def check_probabilities(dropout: float, keywords: dict) -> None:
    """Raises ValueError for dropout. Warns of output_attentions, and removes it from the keywords."""
    if dropout:
        raise ValueError(f"dropout: got {dropout}, expected 0: attention dropout is not supported")
    if keywords.pop("output_attentions", None):
        warnings.warn(
            "flash_dmattn has no output_attentions; use attn_implementation='eager'", stacklevel=3
        )


def check_keywords(keywords: Mapping[str, object]) -> None:
    """Raises ValueError or TypeError for a keyword that is neither None nor bookkeeping, as `check_known_keywords`."""
    for name, value in keywords.items():
        if value is not None and name in _REASONS:
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected None; it belongs to {_REASONS[name]}. "
                "Use another attn_implementation"
            )
        check_known_keywords({name: value}, BOOKKEEPING)


def check_known_keywords(keywords: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises TypeError for a keyword that is neither None nor known, nor a scalar whose name has no word of a setting of attention.
    Of such a scalar it warns once: flags of a later transformers reach every layer."""
    for name, value in keywords.items():
        if value is None or name in known:
            continue
        if not isinstance(value, (bool, int, float, str)) or not _may_ignore(name):
            raise TypeError(
                f"{name}: got an unknown keyword, which could change the result, expected one of {', '.join(sorted(known))}"
            )


def _may_ignore(name: str) -> bool:
    """Whether the name of a scalar has no word of a setting of attention. Warns once if so."""
    return _warn_of_flag(name)


_may_ignore._dynamo_marked_constant = True  # compiled code does not trace it


@functools.cache
def _warn_of_flag(name: str) -> bool:
    if any(difflib.get_close_matches(word, _CHANGES, cutoff=0.8) for word in name.split("_")):
        return False
    warnings.warn(
        f"{name}: got an unknown keyword, which flash_dmattn ignores; a later transformers may have added it",
        stacklevel=2,
    )
    return True


def check_mask_keywords(keywords: Mapping[str, object], has_mask: bool) -> None:
    """Raises as `check_keywords`, for layers whose mask contains packing and causality, and for offsets that no mask follows.

    has_mask: whether a mask contains causality, and no cache has keys from before it: offsets can then separate its sequences.
    """
    for name, offsets in packed_keywords(keywords).items():
        if isinstance(offsets, Tensor) and offsets.dim() == 1 and len(offsets) > 2 and not has_mask:
            raise ValueError(
                f"{name}: got offsets of {len(offsets) - 1} sequences that no mask separates, expected position_ids that begin "
                "again with every sequence, and use_cache=False, of which the model makes a mask"
            )
    known = {*PACKED_KEYWORDS, "position_ids", "output_attentions"}
    if keywords.get("is_causal") is True:
        known.add("is_causal")
    check_keywords({name: value for name, value in keywords.items() if name not in known})


def packed_keywords(keywords: Mapping[str, object]) -> dict[str, object]:
    """Returns those of PACKED_KEYWORDS. Raises ValueError for lengths per kind of layer, which continuous batching passes."""
    packed = {name: keywords.get(name) for name in PACKED_KEYWORDS}
    for name, value in packed.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected one value; it belongs to {_PAGED}"
            )
    return packed


def checked_options(
    query: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    s_aux: Tensor | None = None,
    **others,
) -> dict[str, object]:
    """Returns keywords of transformers by their names in flash_dmattn_func. others: change nothing; the rest raise."""
    check_keywords(others)
    if s_aux is not None:
        check_sink_logits(s_aux, query, "s_aux")
    scale = None if scaling is None else resolve_scale(scaling, "scaling")
    options = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    return options | {"sink_logits": s_aux}


def take_bias(keywords: dict, query: Tensor, key: Tensor) -> Tensor | None:
    """Removes the bias, which has two names, from keywords, and returns it."""
    bias = None
    for name in ("position_bias", "attention_bias"):
        given = keywords.pop(name, None)
        if given is None:
            continue
        if bias is not None:
            raise ValueError(
                f"{name}: got a tensor together with position_bias, expected one of them (aliases)"
            )
        bias = check_bias(given, name, query, key)
    return bias


# ---- Masks --------------------------------------------------------------------------------------


def causal_mask(batch: int, device: torch.device | str | None) -> Tensor:
    """Returns the mask that says plain causality, int32 [B, 1, 0, 2]: intervals of 0 keys.

    It has four dimensions because transformers passes a mask with four dimensions on unchanged.
    """
    return torch.empty((batch, 1, 0, 2), dtype=torch.int32, device=device)


def intervals_of_documents(documents: Tensor, is_causal: bool = True) -> Tensor:
    """Returns which queries of its document see each key, int32 [B, 1, S, 2]. documents: numbers that do not fall, [B, S]."""
    last = torch.searchsorted(documents, documents, right=True, out_int32=True)
    if is_causal:
        first = torch.arange(last.shape[1], dtype=torch.int32, device=last.device).expand_as(last)
    else:
        first = torch.searchsorted(documents, documents, out_int32=True)
    return torch.stack([first, last], dim=-1)[:, None]


def is_causal_mask(mask: object) -> bool:
    """Whether `mask` has the form that `causal_mask` returns."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.int32
        and mask.dim() == 4
        and mask.shape[2] == 0
        and mask.shape[3] == 2
    )


def check_mask_type(
    mask: Tensor | KeyIntervals | None,
) -> Tensor | KeyIntervals | None:
    if mask is None or isinstance(mask, (Tensor, KeyIntervals)):
        return mask
    raise TypeError(
        f"attention_mask: got {type(mask).__name__}, expected a torch.Tensor, KeyIntervals or None"
    )


def has_queries(mask: Tensor | KeyIntervals | None) -> bool:
    """Whether a mask has a query dimension, and with it includes causality."""
    if isinstance(mask, KeyIntervals):
        return True
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] > 1


def as_key_intervals(
    mask: Tensor | KeyIntervals | None, query_length: int, key_length: int
) -> KeyIntervals | None:
    """Returns the intervals that a model passed as its mask, int32 [B, H, Sk, 2], or None for other masks.

    Code that may not read values (compiled code, CUDA graphs) assumes that the intervals are consecutive, as masks of models
    are: then it does not have to read a bound from a GPU. It takes int32 [B, H, 2, 2] of two queries for intervals.
    """
    if not isinstance(mask, Tensor):
        return mask
    compact = mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[3] == 2
    if not compact or key_length != mask.shape[2] or _is_two_by_two_mask(mask, query_length):
        return None
    return KeyIntervals(mask, query_length, consecutive=not may_read())


def present_tokens(
    mask: Tensor | KeyIntervals | None, length: int, memo: Memo | None = None
) -> Tensor | None:
    """Returns whether each new token of a cache of slots is not padding, bool [B, S]; None: all are tokens."""
    if mask is None:
        return None
    intervals = as_key_intervals(mask, length, length)
    fits = intervals is not None and (intervals.heads, intervals.key_length) == (1, length)
    fits = fits and cached_result(
        memo, "only tokens", intervals.intervals, lambda _: shows_only_tokens(intervals)
    )
    if not fits:
        mask = mask if intervals is None else intervals.intervals
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected padding [B, tokens]; slots of a "
            "DynamicMaskCache hold other positions for every head, which no mask over queries and keys describes"
        )
    return intervals.shown_keys()[:, 0]


def shows_only_tokens(intervals: KeyIntervals, first_query: Tensor | int | None = None) -> bool:
    """Whether intervals are causality and padding, so that `shown_keys` says all of them.

    It reads them, except those of one query, as each step of a text has them. Where values may not be read, it is True.
    first_query: the column of the first query, Sk - Sq by default.
    """
    if not may_read() or intervals.query_length == 1:
        return True
    if first_query is None:
        first_query = intervals.key_length - intervals.query_length
    first, last = intervals.intervals.unbind(-1)
    own = torch.arange(intervals.key_length, device=first.device) - first_query
    is_causal = (first.clamp(min=0) == own.clamp(min=0)) & (last >= intervals.query_length)
    return bool((is_causal | (first >= last)).all())


def _is_two_by_two_mask(mask: Tensor, query_length: int) -> bool:
    """Whether an int32 [B, H, 2, 2] argument for two queries is a dense mask.

    Numbers of intervals are 0 to 2, and a key that the last query sees ends at 2.
    """
    if mask.shape[2] != 2 or query_length != 2 or not may_read():
        return False
    if mask.amin() < 0 or mask.amax() > 2:
        return True
    if mask.amax() == 2:
        return False
    if mask[..., 0].any():
        return True
    if mask.any():
        raise ValueError(
            f"attention_mask: got int32 of shape {tuple(mask.shape)}, which is a mask or intervals, expected a bool mask or "
            "KeyIntervals"
        )
    return False


def normalize_mask(
    mask: Tensor | KeyIntervals | None,
    bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    memo: Memo | None = None,
) -> tuple[Tensor | None, KeyIntervals | None, Tensor | None]:
    """Returns (mask, intervals, bias). The mask is bool [B, H, Sk] or [B, H, Sq, Sk], unless intervals describe it.

    An additive mask that has values besides allowing and masking ones is split into a mask and a bias.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    intervals = as_key_intervals(check_mask_type(mask), query_length, key_length)
    if mask is None or intervals is not None:
        return None, intervals, bias
    if mask.dim() == 0 or mask.shape[-1] != key_length:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected {key_length} keys last"
        )
    refuse_negative(mask, memo)
    mask = broadcast_argument(mask, "attention_mask", query, key)
    if mask.dim() < 4:
        if mask.is_floating_point():
            raise TypeError(
                f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected bool or integers (nonzero: visible); "
                "an additive mask has 4 dimensions"
            )
        return mask.bool(), None, bias
    if mask.shape[2] > 1:
        intervals = intervals_of_mask(mask, memo)
        if intervals is not None:
            return None, intervals, bias
    if mask.is_floating_point():
        additive = mask
        mask, adds = split_additive(additive, memo)
        if adds:
            bias = additive if bias is None else _sum_of_biases(additive, add_query_dimension(bias))
    mask = mask.bool()
    return mask if mask.shape[2] > 1 else mask.squeeze(2), None, bias


def _sum_of_biases(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        x, y = widen_bias(x, x.dtype), widen_bias(y, y.dtype)
    return x + y


# ---- Packed sequences ---------------------------------------------------------------------------


def hide_other_sequences(
    mask: Tensor | None,
    keywords: Mapping[str, object],
    batch: int,
    query_length: int,
    key_length: int,
) -> Tensor | None:
    """Hides keys of other sequences in a model's mask, if the keywords have offsets.

    transformers makes the masks of sliding windows without offsets, and the masks of some families (GPT-OSS) without
    positions. A mask without queries has to show every key.
    """
    packed = packed_keywords(keywords)
    # The lengths of sequences are not needed, and may be on a GPU.
    packed = {name: packed[name] for name in PACKED_KEYWORDS[:2]}
    key_mask = None if has_queries(mask) or is_causal_mask(mask) else mask
    offsets = checked_offsets(packed, key_mask, batch * query_length, batch * key_length)
    if offsets is None or len(offsets[0]) == 2:
        return mask

    def sequence_numbers(offsets: Tensor, length: int) -> Tensor:
        tokens = torch.arange(batch * length, dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets, tokens, right=True).view(batch, length)

    queries, keys = map(sequence_numbers, offsets, (query_length, key_length))
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


def checked_offsets(
    packed: Mapping[str, object],
    key_mask: Tensor | None,
    total_q: int,
    total_k: int,
    longest: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns the offsets of packed sequences, int [sequences + 1], of queries and of keys; None: all values are None.

    key_mask: a mask without a query dimension. longest: the number of keys of the longest sequence, if known.
    """
    if all(value is None for value in packed.values()):
        return None
    cu_seqlens_q, cu_seqlens_k = map(packed.get, PACKED_KEYWORDS[:2])
    for name, offsets in zip(PACKED_KEYWORDS, (cu_seqlens_q, cu_seqlens_k), strict=False):
        if offsets is None:
            raise ValueError(
                f"{name}: got None with another argument of packed sequences, expected both cu_seq_lens_q and "
                "cu_seq_lens_k"
            )
    check_offsets(cu_seqlens_q, "cu_seq_lens_q", total_q)
    check_offsets(
        cu_seqlens_k, "cu_seq_lens_k", total_k, longest=longest, name_of_longest="max_length_k"
    )
    if key_mask is not None and not (may_read() and allows_all(key_mask)):
        raise ValueError(
            f"attention_mask: got shape {tuple(key_mask.shape)} with cu_seq_lens_q, expected None or, if values "
            "can be read, a mask that allows every key: packed sequences have no padding"
        )
    return cu_seqlens_q, cu_seqlens_k


def allows_all(key_mask: Tensor) -> bool:
    changes = key_mask != 0 if key_mask.is_floating_point() else key_mask == 0
    return not changes.any()


# ---- Query, key and value -----------------------------------------------------------------------


def target_dtype(module: torch.nn.Module, query: Tensor) -> torch.dtype | None:
    """Returns the dtype to which a float32 query is cast: autocast's dtype, or else that of a quantized model's config or of
    the layer's weights.

    Returns None for queries of other dtypes, and without a weight of the base model of 16 bits or more.
    """
    if query.dtype != torch.float32:
        return None
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    config = getattr(module, "config", None)
    if hasattr(config, "_pre_quantization_dtype"):  # of a quantized model, until transformers 4.57
        return config._pre_quantization_dtype
    if hasattr(config, "_is_quantized"):  # in later versions
        return config.dtype
    scorer = getattr(module, "scorer", None)
    own = set(scorer.modules()) if isinstance(scorer, torch.nn.Module) else ()
    weights = (
        m.weight for m in module.modules() if isinstance(m, torch.nn.Linear) and m not in own
    )
    # Weights of 8 bits are no dtype of states.
    return next((w.dtype for w in weights if w.is_floating_point() and w.itemsize > 1), None)


def cast_states(
    states: Sequence[Tensor | None], target_dtype: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    """Casts float32 query, key and value back to the dtype of the model.

    PEFT keeps layer norms in float32 for stability, which silently turns later tensors into float32. Scores are not
    for this function, because rounding would change them.

    Args:
        states: tensors of any shape. None and tensors of another dtype stay as they are.
        target_dtype: the dtype that replaces float32. None leaves all tensors as they are.
    """
    if target_dtype is None:
        return tuple(states)
    if not isinstance(target_dtype, torch.dtype) or not target_dtype.is_floating_point:
        raise TypeError(f"target_dtype: got {target_dtype!r}, expected a floating dtype or None")
    return tuple(
        t.to(target_dtype) if t is not None and t.dtype == torch.float32 else t for t in states
    )


def swap_heads_and_tokens(*states: Tensor) -> tuple[Tensor, ...]:
    """Returns views that swap [B, S, H, D], the order of this package, and [B, H, S, D], the order of transformers."""
    return tuple(t.transpose(1, 2) for t in states)


# ---- A layer whose mask contains packing and causality ------------------------------------------


def layer_arguments(
    layer: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keywords: dict,
    dropout: float,
) -> tuple[Tensor | KeyIntervals | None, Tensor, Tensor, Tensor]:
    """Checks the keywords. Returns the mask, None for causality, and query, key and value [B, S, H, D] in the layer's dtype."""
    check_probabilities(dropout, keywords)
    mask = None if is_causal_mask(mask) else mask
    check_mask_keywords(keywords, has_mask=has_queries(mask))
    queries, keys = query.shape[2], key.shape[2]
    mask = hide_other_sequences(mask, keywords, query.shape[0], queries, keys)
    intervals = as_key_intervals(mask, queries, keys)
    mask = mask if intervals is None else intervals
    states = swap_heads_and_tokens(query, key, value)
    return mask, *cast_states(states, target_dtype(layer, query))
