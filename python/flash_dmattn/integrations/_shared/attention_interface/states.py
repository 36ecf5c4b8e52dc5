"""The dtype and the order of dimensions of queries, keys and values."""

from collections.abc import Sequence

import torch

from ...._core.checks import check_tensor


def check_states(layout: str, **states: torch.Tensor) -> None:
    """Raises unless query, key and value have four dimensions, by name."""
    for name, tensor in states.items():
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {layout}")


def target_dtype(module: torch.nn.Module, query: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype to which a float32 query is cast: autocast's dtype, or else the dtype of the layer's weights.

    Returns None for queries of other dtypes.
    """
    if query.dtype != torch.float32:
        return None
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    config = getattr(module, "config", None)
    if hasattr(config, "_pre_quantization_dtype"):  # of a quantized model, until transformers 4.57
        return config._pre_quantization_dtype
    weights = (m.weight for m in module.modules() if isinstance(m, torch.nn.Linear))
    return next((w.dtype for w in weights if w.is_floating_point()), None)


def cast_states(
    states: Sequence[torch.Tensor | None], target_dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, ...]:
    """Casts float32 query, key and value back to the dtype of the model.

    PEFT keeps layer norms in float32 for stability, which silently turns later tensors into float32. A float32 bias is
    not cast, because rounding would change the scores.

    Args:
        states: tensors of any shape. None and tensors of another dtype stay as they are.
        target_dtype: the dtype that replaces float32. None leaves all tensors as they are.
    """
    if target_dtype is None:
        return tuple(states)
    if not isinstance(target_dtype, torch.dtype) or not target_dtype.is_floating_point:
        raise TypeError(f"target_dtype: got {target_dtype!r}, expected a floating dtype or None")
    return tuple(
        t.to(target_dtype) if t is not None and t.dtype == torch.float32 else t for t in states
    )


def swap_heads_and_tokens(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns views that swap [B, S, H, D], the order of this package, and [B, H, S, D], the order of transformers."""
    return tuple(t.transpose(1, 2) for t in states)
