"""Boolean masks made from attention scores, for callers that want the mask itself.

The attention functions do not need such a mask: they take `keep_window_size` or key intervals, which cost O(N) memory.
A mask made here has one element for each (query, key) pair.

The scores are detached, and no gradient flows through a mask.
"""

import torch
import torch.nn.functional as F

from .._core.checks import MASK_VALUE, check_count, check_tensor
from ..keys.in_torch import best_elements
from ..keys.select import indices_of_true


def topk_indices(attention_bias: torch.Tensor, window_size: int, **kwargs) -> torch.Tensor:
    """Returns the positions of the `window_size` best keys of every row, in ascending order.

    Args:
        attention_bias: scores, float [..., K]. The more recent key of equal scores is better. NaN is worst.
        window_size: how many keys to keep; more than K keeps all K.

    Returns:
        int64 [..., min(window_size, K)].
    """
    check_tensor(attention_bias, "attention_bias")
    check_count(window_size, "window_size")
    _refuse_keywords(kwargs, "topk_indices")
    scores = attention_bias.detach()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))[..., None, :]
    best = best_elements(scores, torch.ones_like(scores, dtype=torch.bool), window_size)[..., 0, :]
    return indices_of_true(best, min(window_size, best.shape[-1]))[0].long()


def topk_mask(
    attention_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window_size: int,
    min_dtype: float | None,
    block_size: int | None = None,
    **kwargs,
) -> torch.Tensor:
    """Makes a mask that is True where a key is among the `window_size` best allowed keys of its row.

    Args:
        attention_bias: scores, float [B, H, K] or [B, H, Q, K]; sizes of 1 broadcast.
        attention_mask: allowed keys, bool, broadcastable against the scores after 3-d shapes got a
            query dimension of 1; None allows all.
        window_size: how many keys a row keeps. The more recent one of two keys with equal scores wins.
        min_dtype: a score at or below it is never kept; None: no score is too low. NaN is never kept.
        block_size: if given, blocks of this many neighbouring keys are kept or dropped together, by
            majority; a key that is not allowed stays out.

    Returns:
        bool, 3-d when both inputs are 3-d (or the mask is None), else 4-d.
    """
    check_count(window_size, "window_size")
    _refuse_keywords(kwargs, "topk_mask")
    scores, allowed = _align_dimensions(attention_bias, attention_mask, min_dtype)
    kept = best_elements(scores, allowed, window_size)
    return _keep_by_block(kept, allowed, block_size, attention_bias, attention_mask)


def relu_mask(
    attention_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    min_dtype: float,
    block_size: int | None = None,
    **kwargs,
) -> torch.Tensor:
    """Makes a mask that is True where an allowed key has a positive score. See `topk_mask` for the arguments."""
    _refuse_keywords(kwargs, "relu_mask")
    scores, allowed = _align_dimensions(attention_bias, attention_mask, min_dtype)
    kept = allowed & (scores > 0)
    return _keep_by_block(kept, allowed, block_size, attention_bias, attention_mask)


def create_mask(
    attention_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float | None,
    block_size: int | None = None,
    type: str = "topk",
) -> torch.Tensor:
    """Makes the mask of dynamic mask attention, which shows each query the keys that it keeps.

    | bias       | mask               | selection                               | result       |
    |------------|--------------------|-----------------------------------------|--------------|
    | [B, H, K]  | None               | one for all queries                     | [B, H, K]    |
    | [B, H, K]  | [B, H, K] or 2-d   | one for all queries, among allowed keys | [B, H, K]    |
    | [B, H, K]  | [B, H, Q, K]       | per query, among allowed keys           | [B, H, Q, K] |
    | 4-d        | 4-d, 2-d or None   | per query, among allowed keys           | [B, H, Q, K] |

    Args:
        attention_bias: scores, float; B, H and Q may be 1. Keep them in float32 even with 16-bit tensors: in 16
            bits many scores are equal, and rounding then decides which keys are kept.
        attention_mask: allowed keys, bool; also padding [B, key_len], or [B, query_len] when earlier
            keys (a cache) are all allowed.
        batch_size, query_len, key_len: B, Q and K.
        window_size: keys to keep per row (type "topk").
        min_dtype: a score at or below it is never kept; None: the value at which a bias of its dtype masks, -1e4 in
            float16 and -1e30 in others.
        block_size: see `topk_mask`.
        type: "topk", or "relu" for all keys with a positive score.

    Raises:
        ValueError: unknown type, another shape than B, H, Q and K have, or a block size below 1.
        TypeError: a mask of floating point, which may be an additive one.
    """
    _check_shape(attention_bias, "attention_bias", batch_size, query_len, key_len)
    if min_dtype is None:
        min_dtype = MASK_VALUE.get(attention_bias.dtype)
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = _padding_mask(attention_mask, batch_size, query_len, key_len)
        attention_mask = attention_mask[:, None, :]
    elif attention_mask is not None:
        _check_shape(attention_mask, "attention_mask", batch_size, query_len, key_len)
    if type == "topk":
        return topk_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)
    if type == "relu":
        return relu_mask(attention_bias, attention_mask, min_dtype, block_size)
    raise ValueError(f"type: got {type!r}, expected 'topk' or 'relu'")


def _refuse_keywords(keywords: dict[str, object], function: str) -> None:
    """Raises TypeError for a keyword of version 1.x that is not None."""
    for name, value in keywords.items():
        if value is not None:
            raise TypeError(
                f"{name}: got an unknown keyword, which could change the result, expected arguments of {function}"
            )


def _check_shape(
    tensor: torch.Tensor, name: str, batch_size: int, query_len: int, key_len: int
) -> None:
    check_tensor(tensor, name)
    shape = tuple(tensor.shape)
    fits = len(shape) in (3, 4) and shape[0] in (1, batch_size) and shape[-1] in (1, key_len)
    if not fits or (len(shape) == 4 and shape[2] not in (1, query_len)):
        raise ValueError(
            f"{name}: got shape {shape}, expected [B, H, K] or [B, H, Q, K] with B = {batch_size}, Q = {query_len} and "
            f"K = {key_len}"
        )


def _bool_mask(mask: torch.Tensor) -> torch.Tensor:
    check_tensor(mask, "attention_mask")
    if mask.is_floating_point():  # an additive one allows where it is 0
        raise TypeError(
            f"attention_mask: got {mask.dtype}, expected torch.bool, True where allowed"
        )
    return mask.bool()


def _align_dimensions(
    scores: torch.Tensor, allowed: torch.Tensor | None, min_dtype: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scores, and which allowed keys have a score above min_dtype, both 4-d."""
    check_tensor(scores, "attention_bias")
    if not scores.is_floating_point():
        raise TypeError(f"attention_bias: got {scores.dtype}, expected a floating dtype")
    scores = scores.detach()
    if allowed is None:
        allowed = scores.new_ones((1,) * (scores.dim() - 1) + (scores.shape[-1],), dtype=torch.bool)
    scores, allowed = (
        t.unsqueeze(-2) if t.dim() == 3 else t for t in (scores, _bool_mask(allowed))
    )
    return scores, allowed & (~scores.isnan() if min_dtype is None else scores > min_dtype)


def _keep_by_block(
    kept: torch.Tensor,
    allowed: torch.Tensor,
    block_size: int | None,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Sets every block of `block_size` keys (the last may be shorter) to the value of its majority, where allowed.

    The result is 3-d if bias and mask are.
    """
    if block_size is not None:
        check_count(block_size, "block_size")
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, expected at least 1")
        block_of_key = torch.arange(kept.shape[-1], device=kept.device) // block_size
        blocks = torch.bincount(block_of_key)
        votes = torch.zeros(*kept.shape[:-1], len(blocks), dtype=torch.int32, device=kept.device)
        votes.index_add_(-1, block_of_key, kept.int())
        kept = (2 * votes > blocks).index_select(-1, block_of_key) & allowed
    return kept if 4 in (bias.dim(), 0 if mask is None else mask.dim()) else kept.squeeze(-2)


def _padding_mask(
    mask: torch.Tensor, batch_size: int, query_len: int, key_len: int
) -> torch.Tensor:
    """Returns a padding mask [B, key_len]. If a mask has the queries' length, allowed keys are put in front of it."""
    mask = _bool_mask(mask)
    if mask.shape == (batch_size, key_len):
        return mask
    if mask.shape == (batch_size, query_len) and query_len < key_len:
        return F.pad(mask, (key_len - query_len, 0), value=True)
    raise ValueError(
        f"attention_mask: got shape {tuple(mask.shape)}, expected ({batch_size}, {key_len}) "
        f"or ({batch_size}, {query_len})"
    )
