"""The 1.x module of this name."""

from ._shared.attention_interface.layer_attention import flash_dynamic_mask_attention_forward

__all__ = ["flash_dynamic_mask_attention_forward"]
