"""Dynamic mask attention for transformers: a named attention implementation, and Doge models.

Importing this module registers the names "flash_dmattn" and "dynamic_mask_attention" with transformers:

    import flash_dmattn.integrations.transformers

    model = AutoModel.from_pretrained(..., attn_implementation="flash_dmattn")

is exact attention for models without scores (docs/transformers.md lists those that equal eager attention, and those that are
refused when the name is set). Most other decoders get scores for their keys by add_learned_scores.
A Doge chooses its keys by learned scores:

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    model = enable_flash_dmattn(DogeForCausalLM.from_pretrained(...))
"""

from transformers import AttentionInterface, AttentionMaskInterface

from ...budgets import KeyBudgets
from .attention import attention_forward
from .cache import DynamicMaskCache
from .compat import check_methods, wrap_implementation_setter
from .doge import doge_scores
from .enable import enable_flash_dmattn, resolve_name
from .learned_scores.add import add_learned_scores, remove_learned_scores, set_score_phase
from .learned_scores.budgets import budget_loss, divide_budget, set_key_budgets
from .learned_scores.dms import DMS_SCHEDULE, add_dms_scores, load_dms
from .learned_scores.files import load_scores, save_scores
from .learned_scores.training import ScoreSchedule, divergence, freeze_all_but_scores
from .mask_functions import key_interval_mask, registered_attention_mask
from .model_state import DOGE_NAME, NAME, NAMES, SCORED_NAME

__all__ = [
    "DMS_SCHEDULE",
    "NAME",
    "DynamicMaskCache",
    "KeyBudgets",
    "ScoreSchedule",
    "add_dms_scores",
    "add_learned_scores",
    "budget_loss",
    "divergence",
    "divide_budget",
    "doge_scores",
    "enable_flash_dmattn",
    "freeze_all_but_scores",
    "key_interval_mask",
    "load_dms",
    "load_scores",
    "remove_learned_scores",
    "save_scores",
    "set_key_budgets",
    "set_score_phase",
]

# At import, because from_pretrained(..., attn_implementation=NAME) calls nothing of this package before these methods.
_is_wrapped = wrap_implementation_setter(resolve_name, {NAME: NAMES[-1]})
for _name in (*NAMES, DOGE_NAME, SCORED_NAME):
    _mask = registered_attention_mask if _name in NAMES else key_interval_mask
    AttentionInterface.register(_name, attention_forward if _is_wrapped else check_methods)
    AttentionMaskInterface.register(_name, _mask if _is_wrapped else check_methods)
