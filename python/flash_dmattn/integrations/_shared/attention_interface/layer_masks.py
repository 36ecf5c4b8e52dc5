"""Converts the masks of transformers' layers to the form that attention takes."""

import torch

from ...._core.checks import add_query_dimension, broadcast_argument, may_read, widen_bias
from ....keys.intervals import KeyIntervals
from ....keys.patterns import sliding_window
from ....keys.recognise import Memo, intervals_of_mask, refuse_negative, split_additive


def causal_mask(batch: int, device: torch.device | str | None) -> torch.Tensor:
    """Returns the mask that says plain causality, int32 [B, 1, 0, 2]: intervals of 0 keys.

    It has four dimensions because transformers passes a mask with four dimensions on unchanged.
    """
    return torch.empty((batch, 1, 0, 2), dtype=torch.int32, device=device)


def is_causal_mask(mask: object) -> bool:
    """Whether `mask` has the form that `causal_mask` returns."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.int32
        and mask.dim() == 4
        and mask.shape[2] == 0
        and mask.shape[3] == 2
    )


def has_queries(mask: torch.Tensor | KeyIntervals | None) -> bool:
    """Whether a mask has a query dimension, and with it includes causality."""
    if isinstance(mask, KeyIntervals):
        return True
    return isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] > 1


def is_key_mask(mask: torch.Tensor | KeyIntervals, query_length: int, key_length: int) -> bool:
    """Whether a mask has no query dimension, and so cannot include packed sequences."""
    if isinstance(mask, KeyIntervals) or mask.dim() == 0 or mask.shape[-1] != key_length:
        return False
    if mask.dim() < 4:
        return not mask.is_floating_point()  # floating point masks of this form are refused
    return mask.shape[2] == 1 and query_length > 1


def window_mask(
    window_size: int | None,
    is_causal: bool,
    query_length: int,
    key_length: int,
    device: torch.device,
) -> KeyIntervals | None:
    """Returns the window for a call without a mask: it ends at the query if causal, else the query is in its middle."""
    if window_size is None or key_length <= window_size:
        return None
    lookahead = 0 if is_causal else window_size - 1
    return sliding_window(
        key_length, window_size, lookahead=lookahead, query_length=query_length, device=device
    )


def as_key_intervals(
    mask: torch.Tensor | KeyIntervals | None, query_length: int, key_length: int | None = None
) -> KeyIntervals | None:
    """Returns the intervals that a model passed as its mask, int32 [B, H, Sk, 2], or None for other masks.

    Code that may not read values assumes that the intervals are consecutive, as masks of models are: then it does not
    have to read a bound from a GPU.
    """
    if not isinstance(mask, torch.Tensor):
        return mask
    compact = mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[3] == 2
    if (
        not compact
        or key_length not in (None, mask.shape[2])
        or _is_two_by_two_mask(mask, query_length)
    ):
        return None
    return KeyIntervals(mask, query_length, consecutive=not may_read())


def present_tokens(mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Returns whether each new token of a cache of slots is not padding, bool [B, S]; None: there is no padding."""
    if mask is None:
        return None
    intervals = as_key_intervals(mask, length)
    if intervals is None or mask.shape[1:3] != (1, length):
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected padding [B, tokens]; slots of a "
            "DynamicMaskCache hold other positions for every head, which no mask over queries and keys describes"
        )
    return intervals.shown_keys()[:, 0]


def _is_two_by_two_mask(mask: torch.Tensor, query_length: int) -> bool:
    """Whether an int32 [B, H, 2, 2] argument for two queries is a dense mask.

    In intervals, a key that the last query sees ends at 2.
    """
    if mask.shape[2] != 2 or query_length != 2 or not may_read() or mask.amax() > 1:
        return False
    if mask[..., 0].any():
        return True
    if mask.any():
        raise ValueError(
            f"attention_mask: got int32 of shape {tuple(mask.shape)}, which is a mask or intervals, expected a bool mask or "
            "KeyIntervals"
        )
    return False


def normalize_mask(
    mask: torch.Tensor | KeyIntervals | None,
    bias: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    chooses: bool,
    memo: Memo | None,
) -> tuple[torch.Tensor | None, KeyIntervals | None, torch.Tensor | None]:
    """Returns (mask, intervals, bias). The mask is bool [B, H, Sk] or [B, H, Sq, Sk], unless intervals describe it.

    An additive mask that has values besides allowing and masking ones is split into a mask and a bias.
    chooses: whether a choice of keys follows. The choice recognises intervals in a bool mask by itself.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    intervals = as_key_intervals(mask, query_length, key_length)
    if mask is None or intervals is not None:
        return None, intervals, bias
    if mask.dim() == 0 or mask.shape[-1] != key_length:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected {key_length} keys last"
        )
    refuse_negative(mask, memo)
    mask = broadcast_argument(mask, "attention_mask", query, key)
    if mask.dim() < 4:
        if mask.is_floating_point():
            raise TypeError(
                f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected bool or integers (nonzero: visible); "
                "an additive mask has 4 dimensions"
            )
        return mask.bool(), None, bias
    if mask.shape[2] > 1 and not (chooses and mask.dtype == torch.bool):
        intervals = intervals_of_mask(mask, memo)
        if intervals is not None:
            return None, intervals, bias
    if mask.is_floating_point():
        additive = mask
        mask, adds = split_additive(additive, memo)
        if adds:
            bias = additive if bias is None else _sum_of_biases(additive, add_query_dimension(bias))
    mask = mask.bool()
    return mask if mask.shape[2] > 1 else mask.squeeze(2), None, bias


def _sum_of_biases(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        x, y = widen_bias(x, x.dtype), widen_bias(y, y.dtype)
    return x + y
