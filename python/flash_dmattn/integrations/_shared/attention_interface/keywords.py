"""Checks keywords of transformers' attention functions, and refuses those that this package does not support."""

import warnings
from collections.abc import Mapping

from torch import Tensor

# Bookkeeping of models, trainers and generation that reaches every attention function and changes nothing in it.
BOOKKEEPING = frozenset(
    {
        "cache_position",
        "grid_thw",  # of an encoder of images; its mask or offsets follow from it
        "ignore_index",  # of the loss, as shift_labels
        "implementation",
        "input_ids",
        "layer_idx",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "shift_labels",
        "seq_idx",  # of state-space layers; attention has cu_seq_lens for the same sequences
        "token_type_ids",
        "tokenizer",  # of `generate`, for strings that end a text
        "use_cache",
    }
)
_PAGED = "continuous batching (a paged cache), which flash_dmattn does not support"
_SINKS = "per-token attention sinks, which flash_dmattn does not support"
_SPARSE = "keys chosen by an indexer, which flash_dmattn does not support"
_REASONS = {
    "block_indices": _SPARSE,
    "block_table": _PAGED,
    "cache": _PAGED,
    "cache_seqlens": _PAGED,
    "head_mask": "weights of whole heads, which flash_dmattn does not support",
    "indices": _SPARSE,
    "logits_indices": _PAGED,
    "page_table": _PAGED,
    "read_index": _PAGED,
    "sinks": _SINKS,
    "write_index": _PAGED,
}


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
    """Raises ValueError or TypeError for a keyword that is neither None nor bookkeeping."""
    for name, value in keywords.items():
        if value is not None and name in _REASONS:
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected None; it belongs to {_REASONS[name]}. "
                "Use another attn_implementation"
            )
        check_known_keywords({name: value}, BOOKKEEPING)


def check_known_keywords(keywords: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises TypeError for a keyword that is neither None nor known."""
    for name, value in keywords.items():
        if value is not None and name not in known:
            raise TypeError(
                f"{name}: got an unknown keyword, which could change the result, expected one of {', '.join(sorted(known))}"
            )


def check_mask_keywords(keywords: Mapping[str, object], has_mask: bool) -> None:
    """Does what `check_keywords` does, for layers whose mask contains packing and causality."""
    packed = {name: keywords.get(name) for name in PACKED_KEYWORDS}
    refuse_packed_by_layer(**packed)
    for name, offsets in packed.items():
        if isinstance(offsets, Tensor) and offsets.dim() == 1 and len(offsets) > 2 and not has_mask:
            raise ValueError(
                f"{name}: got offsets of {len(offsets) - 1} sequences without a mask; expected position_ids that begin "
                "again with every sequence, and use_cache=False, of which the model makes one"
            )
    known = {*PACKED_KEYWORDS, "position_ids", "output_attentions"}
    if keywords.get("is_causal") is True:
        known.add("is_causal")
    check_keywords({name: value for name, value in keywords.items() if name not in known})


def refuse_packed_by_layer(**lengths: object) -> None:
    """Raises ValueError for lengths per kind of layer, which continuous batching passes."""
    for name, value in lengths.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected one value; it belongs to {_PAGED}"
            )
