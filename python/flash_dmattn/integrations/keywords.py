"""Keywords of transformers' attention functions that this package does not take."""

from collections.abc import Mapping

# Bookkeeping of models, trainers and generation that reaches every attention function and changes nothing in it.
BOOKKEEPING = frozenset(
    {
        "cache_position",
        "implementation",
        "layer_idx",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "seq_idx",  # of state-space layers; attention has cu_seq_lens for the same sequences
        "token_type_ids",
        "use_cache",
    }
)
_PAGED = "continuous batching (a paged cache), which flash_dmattn does not support"
_SINKS = "attention sinks, which flash_dmattn does not have"
_SPARSE = "keys chosen by an indexer, which flash_dmattn does not take"
_REASONS = {
    "block_indices": _SPARSE,
    "block_table": _PAGED,
    "cache": _PAGED,
    "cache_seqlens": _PAGED,
    "head_mask": "weights of whole heads, which flash_dmattn does not have",
    "indices": _SPARSE,
    "logits_indices": _PAGED,
    "page_table": _PAGED,
    "read_index": _PAGED,
    "s_aux": _SINKS,
    "sinks": _SINKS,
    "write_index": _PAGED,
}


def refuse(keywords: Mapping[str, object]) -> None:
    """Raises for keywords that could change the result: all but bookkeeping and those that are None."""
    for name, value in keywords.items():
        if value is None or name in BOOKKEEPING:
            continue
        if name in _REASONS:
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected None; it belongs to {_REASONS[name]}. "
                "Use another attn_implementation"
            )
        raise TypeError(f"{name}: got an unknown keyword, which could change the result")


def refuse_packed_by_layer(**lengths: object) -> None:
    """Continuous batching has lengths per kind of layer."""
    for name, value in lengths.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"{name}: got a {type(value).__name__}, expected one value; it belongs to {_PAGED}"
            )
