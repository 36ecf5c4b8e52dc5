"""The 1.x module of this name."""

from torch import Tensor, dtype

from ._shared.attention_interface.layer_attention import (
    compute_layer_attention as _flash_dynamic_mask_attention_forward,
)
from ._shared.attention_interface.states import cast_states

__all__ = ["_flash_dynamic_mask_attention_forward", "fdma_peft_integration_check"]


def fdma_peft_integration_check(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    target_dtype: dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Casts float32 tensors back to the dtype of the model: `cast_states` with a bias."""
    return cast_states((q, k, v, bias), target_dtype)
