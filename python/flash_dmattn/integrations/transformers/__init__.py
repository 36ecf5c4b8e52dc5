"""Dynamic mask attention for transformers: a named attention implementation, and Doge models.

Importing this module registers the names "flash_dmattn" and "dynamic_mask_attention" with transformers:

    import flash_dmattn.integrations.transformers

    model = AutoModel.from_pretrained(..., attn_implementation="flash_dmattn")

is exact attention for models without scores (docs/transformers.md lists those that equal eager attention, and those that are
refused when the name is set). Most other decoders get scores for their keys by add_learned_scores. A Doge chooses its keys by learned scores:

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    model = enable_flash_dmattn(DogeForCausalLM.from_pretrained(...))
"""

from transformers import AttentionInterface, AttentionMaskInterface

from ..named_attention import mask_driven_attention_forward
from .cache import DynamicMaskCache
from .compat import wrap_implementation_setter
from .doge import NAMES as _DOGE_NAMES
from .doge import doge_scores
from .enable import NAME, NAMES, enable_flash_dmattn, resolve_name
from .learned_scores import NAMES as _SCORES_NAMES
from .learned_scores import (
    add_learned_scores,
    load_scores,
    remove_learned_scores,
    save_scores,
    scored_attention_forward,
    set_score_phase,
)
from .mask_functions import key_interval_mask, registered_attention_mask

__all__ = [
    "NAME",
    "DynamicMaskCache",
    "add_learned_scores",
    "doge_scores",
    "enable_flash_dmattn",
    "key_interval_mask",
    "load_scores",
    "remove_learned_scores",
    "save_scores",
    "set_score_phase",
]

for _name in NAMES:
    AttentionInterface.register(_name, mask_driven_attention_forward)
    AttentionMaskInterface.register(_name, registered_attention_mask)
for _name in _DOGE_NAMES:
    AttentionInterface.register(_name, mask_driven_attention_forward)
    AttentionMaskInterface.register(_name, key_interval_mask)
for _name in _SCORES_NAMES:
    AttentionInterface.register(_name, scored_attention_forward)
    AttentionMaskInterface.register(_name, key_interval_mask)
wrap_implementation_setter(resolve_name, {NAME: NAMES[-1]})
