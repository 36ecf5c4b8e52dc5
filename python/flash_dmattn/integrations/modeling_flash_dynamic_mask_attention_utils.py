"""The 1.x module of this name."""

from .attention import _flash_dynamic_mask_attention_forward
from .dtypes import fdma_peft_integration_check

__all__ = ["_flash_dynamic_mask_attention_forward", "fdma_peft_integration_check"]
