"""Work-arounds for missing features of transformers, each with the versions that need it, the issue or pull request (#) of
huggingface/transformers that it waits for or follows, and the condition for its removal.

Everything else goes through transformers' registries, `AttentionInterface` and `AttentionMaskInterface`, and through subclasses of its
classes. At import `implementation_names` wraps two methods of `PreTrainedModel`; nothing else of transformers is
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
from .continuous_batching import allow_continuous_batching, refuse_continuous_batching
from .implementation_names import (
    can_set_implementation,
    own_config,
    store_name,
    wrap_implementation_setter,
)

__all__ = [
    "CACHE",
    "CACHE_NAMES",
    "CROPS_TO_A_LENGTH",
    "MODEL_ARGUMENTS",
    "StateLayer",
    "allow_continuous_batching",
    "can_set_implementation",
    "find_cache",
    "own_config",
    "pop_cache",
    "refuse_continuous_batching",
    "set_cache_of_generate",
    "store_name",
    "wrap_implementation_setter",
]
