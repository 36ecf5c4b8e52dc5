"""Work-arounds for missing features of transformers, each with the versions that need it, the issue or pull request (#) of
huggingface/transformers that it waits for or follows, and the condition for its removal.

Everything else goes through transformers' registries, `AttentionInterface` and `AttentionMaskInterface`, and through subclasses of its
classes, such as `SlotManager`. At import `implementation_names` wraps two methods of `PreTrainedModel`; nothing else of transformers is
replaced, then or later.
"""

from .caches import (
    CACHE,
    CACHE_NAMES,
    CROPS_TO_A_LENGTH,
    MODEL_ARGUMENTS,
    StateLayer,
    find_cache,
    pop_cache,
    set_cache_of_generate,
)
from .continuous_batching import (
    HAS_SLOTS_IN_BATCHES,
    KEPT_MANAGER,
    create_processor,
    drop_slot_manager,
    restore_continuous_batching,
    set_continuous_batching,
)
from .implementation_names import (
    can_set_implementation,
    own_config,
    store_name,
    wrap_implementation_setter,
)
from .layers import adopt_layer
from .mask_closures import BIDIRECTIONAL, documents_of
from .model_sources import adds_a_bias, calls_attention_interface, positions_of_texts

__all__ = [
    "BIDIRECTIONAL",
    "CACHE",
    "CACHE_NAMES",
    "CROPS_TO_A_LENGTH",
    "HAS_SLOTS_IN_BATCHES",
    "KEPT_MANAGER",
    "MODEL_ARGUMENTS",
    "StateLayer",
    "adds_a_bias",
    "adopt_layer",
    "calls_attention_interface",
    "can_set_implementation",
    "create_processor",
    "documents_of",
    "drop_slot_manager",
    "find_cache",
    "own_config",
    "pop_cache",
    "positions_of_texts",
    "restore_continuous_batching",
    "set_cache_of_generate",
    "set_continuous_batching",
    "store_name",
    "wrap_implementation_setter",
]
