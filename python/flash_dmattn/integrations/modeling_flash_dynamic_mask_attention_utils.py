"""The 1.x module of this name."""

from .attention_interface.dtypes import fdma_peft_integration_check
from .attention_interface.layer_attention import _flash_dynamic_mask_attention_forward

__all__ = ["_flash_dynamic_mask_attention_forward", "fdma_peft_integration_check"]
