"""Doge's attention layer with one score for each key instead of a mask element for each (query, key) pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention, DogeRMSNorm

from ..._core.checks import may_read
from ...generation.ragged import RaggedBatch
from ...keys.intervals import KeyIntervals
from ...keys.recognise import Memo, cached_result, intervals_of_mask, split_additive, visible_counts
from ...keys.rule import SelectionRule
from ...keys.select import select_key_intervals
from ...scores import doge_scores_of, with_zero_sum_gradient
from .._shared.attention_interface.dtypes import cast_states, target_dtype
from .._shared.attention_interface.keywords import check_mask_keywords
from .._shared.attention_interface.layer_masks import as_key_intervals, is_causal_mask
from .._shared.attention_interface.layout import swap_heads_and_tokens
from .._shared.attention_interface.named_attention import attention_bshd
from .._shared.attention_interface.packed_sequences import hide_other_sequences
from .cache import DynamicMaskCache
from .cache_layer import DynamicMaskLayer
from .compat import CACHE, adopt_layer, pop_cache
from .names import BATCHED_DOGE, CONTEXT, DOGE_NAMES
from .scored_cache import update_with_scores
from .slot_attention import attend_in_batch, attend_with_slots


class Context(NamedTuple):
    """The state of one forward of a DogeModel, which all of its layers share.

    mask_kind: what the mask is.
        "causal": causality and nothing else.
        "padded": causality among the keys that are not padding.
        "packed": causality within documents, so that every query sees its own key.
        None: another mask, or a mask over keys of a cache.
    memo: results that the layers share.
    pieces: context_parallel.PieceForward, if this rank has a piece of each sequence; None: it has whole sequences.
    batch: the sequences of a step of continuous batching. Its cache has slots for each sequence.
    """

    mask_kind: str | None = None
    memo: Memo | None = None
    pieces: Any = None
    batch: RaggedBatch | None = None


class FlashDogeRMSNorm(DogeRMSNorm):
    """`DogeRMSNorm` with torch's function, which rounds at the same places and is one kernel on a GPU.

    The attention layer requests torch's function in each call, so that the layer's config decides. For other callers
    this class acts as its base class. The base class also handles compiled code (inductor fuses its kernels), float64
    (it rounds to float32, which torch's function does not), and norms whose forward was replaced. transformers
    initialises modules whose class has "RMSNorm" in its name.
    """

    @classmethod
    def from_norm(cls, norm: DogeRMSNorm) -> FlashDogeRMSNorm:
        return adopt_layer(norm, cls)

    def forward(self, hidden_states: torch.Tensor, is_fused: bool = False) -> torch.Tensor:
        if (
            not is_fused
            or torch.compiler.is_compiling()
            or hidden_states.dtype == torch.float64
            or not _has_stock_forward()
        ):
            return super().forward(hidden_states)
        shape = hidden_states.shape[-1:]
        normalized = F.rms_norm(hidden_states, shape, None, self.variance_epsilon)
        return self.weight * normalized.to(hidden_states.dtype)  # float32 under autocast


def _has_stock_forward() -> bool:
    """Whether `DogeRMSNorm.forward` is transformers' own function, and was not replaced before or after this import.

    A wrapper around it may carry its module's name, but then has the attribute `__wrapped__`.
    """
    forward = DogeRMSNorm.forward
    is_of_module = getattr(forward, "__module__", None) == DogeRMSNorm.__module__
    return is_of_module and not hasattr(forward, "__wrapped__")


class FlashDogeAttention(DogeAttention):
    """`DogeAttention` that chooses its keys by intervals, and builds no tensor with one element per (query, key) pair.

    Under an implementation that is not in `DOGE_NAMES` (after `model.set_attn_implementation("eager")`), the layer acts
    as its base class.
    """

    round_scores_like_eager = False
    batched_name = BATCHED_DOGE

    @classmethod
    def from_layer(cls, layer: DogeAttention) -> FlashDogeAttention:
        """Makes a layer that takes over parameters, modules, buffers and hooks of `layer`. Do not use `layer` again."""
        adopted = adopt_layer(layer, cls)
        for name, norm in list(adopted.named_children()):
            if type(norm) is DogeRMSNorm and "forward" not in vars(norm):  # nobody's own
                setattr(adopted, name, FlashDogeRMSNorm.from_norm(norm))
        return adopted

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        if self.config._attn_implementation not in DOGE_NAMES:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        context = kwargs.pop(CONTEXT, None) or Context()
        cache = pop_cache(kwargs)
        cache_position = kwargs.pop("cache_position", None)
        if context.mask_kind == "causal" or is_causal_mask(attention_mask):
            attention_mask = None
        if context.batch is None:
            check_mask_keywords(kwargs, has_mask=attention_mask is not None)
        if cache is None and context.mask_kind != "packed":
            batch, length = hidden_states.shape[:2]
            mask = hide_other_sequences(attention_mask, kwargs, batch, length, length)
            if mask is not attention_mask:
                attention_mask, context = mask, context._replace(mask_kind=None)
        per_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = _normalize(self.q_norm, self.q_proj(hidden_states).view(per_head))
        key = _normalize(self.k_norm, self.k_proj(hidden_states).view(per_head))
        value = self.v_proj(hidden_states)
        scores = doge_scores(self, self.dt_proj(value))
        value = value.view(per_head)
        # Query and key keep the dimension order of attention: if they were transposed to that of caches here, compiled code would
        # write both twice, once for each order.
        #
        # The function is looked up in its module at each call, because other libraries replace it there.
        query, key = modeling_doge.apply_rotary_pos_emb(
            query, key, *position_embeddings, unsqueeze_dim=2
        )
        if context.pieces is not None:
            states = cast_states((query, key, value), target_dtype(self, query))
            rule = SelectionRule(self.keep_window_size)
            slots = None if cache is None else cache.layer_at(self.layer_idx)
            is_zero_sum = not self.round_scores_like_eager
            out = context.pieces.attend(
                *states, scores, rule, slots, scale=self.scaling, zero_sum=is_zero_sum
            )
            return self.o_proj(out.flatten(2)), None
        if context.batch is not None:
            states = (query, key, value)
            out = attend_in_batch(
                cache, self.layer_idx, context.batch, states, scores, scale=self.scaling
            )
            return self.o_proj(out.to(hidden_states.dtype).flatten(2)), None
        if isinstance(cache, DynamicMaskCache):
            states = _States(query, key, value, scores, attention_mask, context)
            out = _attend_with_cache(self, cache.layer_at(self.layer_idx), states)
            return self.o_proj(out.flatten(2)), None
        if cache is not None:
            check_cache(cache)
            where = () if cache_position is None else ({"cache_position": cache_position},)
            key, value, scores = update_with_scores(
                cache, *swap_heads_and_tokens(key, value), scores, self.layer_idx, where
            )
            key, value = swap_heads_and_tokens(key, value)
            # Eager attention rounds the scores of all keys together.
            if scores is None or self.round_scores_like_eager:
                scores = doge_scores(self, self.dt_proj(value.flatten(2)))
        states = _States(query, key, value, scores, attention_mask, context)
        out = _attend(self, states, kwargs)
        return self.o_proj(out.flatten(2)), None


def check_cache(cache: object) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"{CACHE}: got {type(cache).__name__}, expected a transformers Cache")


def _normalize(norm: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Returns norm(states). It uses torch's function unless this package's norm, or its forward, was replaced."""
    if isinstance(norm, FlashDogeRMSNorm) and "forward" not in vars(norm):
        return norm(states, is_fused=True)
    return norm(states)


class _States(NamedTuple):
    """The states of a layer's tokens, and what its queries may see."""

    query: torch.Tensor  # [B, S, Hq, D]
    key: torch.Tensor  # [B, S, Hkv, D]
    value: torch.Tensor
    scores: torch.Tensor  # [B, Hkv, S]
    mask: torch.Tensor | None
    context: Context


def _attend_with_cache(
    self: DogeAttention, slots: DynamicMaskLayer, states: _States
) -> torch.Tensor:
    """Computes attention of new tokens to the cached tokens and to each other. Returns [B, S, Hq, D]."""
    query, key, value = cast_states(states[:3], target_dtype(self, states.query))
    cast = states._replace(query=query, key=key, value=value)
    return attend_with_slots(
        slots,
        SelectionRule(self.keep_window_size),
        self.layer_idx,
        cast[:3],
        cast.scores,
        cast.mask,
        lambda _: _attend(self, cast, {}),
        scale=self.scaling,
    )


def _attend(self: DogeAttention, states: _States, options: dict) -> torch.Tensor:
    """Computes attention of queries over all keys of the text so far. Returns [B, Sq, Hq, D]."""
    query, key, value, scores, attention_mask, context = states
    query_length, key_length = query.shape[1], key.shape[1]
    allowed = _doge_mask(attention_mask, query_length, key_length, context.memo)
    mask, window = allowed, self.keep_window_size
    is_padded = context.mask_kind == "padded" and isinstance(allowed, KeyIntervals)
    if key_length > window and (allowed is None or is_padded):
        shown = allowed.shown_keys() if is_padded else None
        mask = select_key_intervals(scores, window, key_mask=shown, query_length=query_length)
        window = key_length  # chosen already
    if not self.round_scores_like_eager:
        scores = with_zero_sum_gradient(scores)
    out = attention_bshd(
        self,
        query,
        key,
        value,
        mask,
        scores,
        scaling=self.scaling,
        window_size=window,
        dropout=self.attention_dropout if self.training else 0.0,
        output_attentions=options.get("output_attentions"),
        is_causal=True,
        memo=context.memo,
    )
    if attention_mask is not None and context.mask_kind != "packed":
        out = _fill_blind_rows(out, allowed, states, self.scaling)
    return out


def doge_scores(attention: DogeAttention, step: torch.Tensor) -> torch.Tensor:
    """Returns `exp(A · softplus(step))`, the score by which a key is chosen and which is added to its attention scores.

    Args:
        attention: a Doge attention layer.
        step: result of its `dt_proj`, [B, Sk, Hkv].

    Returns:
        [B, Hkv, Sk]: float32 (float64 in a float64 model), under autocast too; with
        `enable_flash_dmattn(..., round_scores_like_eager=True)` in the dtypes of eager attention.
    """
    if getattr(attention, "round_scores_like_eager", False):
        return torch.exp(attention.A * F.softplus(step)).transpose(-1, -2)
    return doge_scores_of(attention.A, step)


def _doge_mask(
    mask: torch.Tensor | None, query_length: int, key_length: int, memo: Memo | None
) -> torch.Tensor | KeyIntervals | None:
    """Converts a mask by Doge's rule: in a mask that is not bool, every value but 0 masks."""
    if mask is None:
        return None

    def find(mask: torch.Tensor) -> torch.Tensor | KeyIntervals:
        return _find_doge_mask(mask, query_length, key_length)

    return cached_result(memo, "mask", mask, find)


def _find_doge_mask(
    mask: torch.Tensor, query_length: int, key_length: int
) -> torch.Tensor | KeyIntervals:
    intervals = as_key_intervals(mask, query_length)
    if intervals is not None:
        return intervals
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask == 0

    def fit(dense: torch.Tensor) -> torch.Tensor:
        if dense.shape[2:] == (query_length, key_length):
            return dense
        return dense[..., :key_length].expand(-1, -1, query_length, -1)

    if query_length > 1:
        intervals = intervals_of_mask(fit(mask))
        if intervals is not None:
            return intervals
        if mask.is_floating_point():
            allowed, adds = split_additive(mask)
            if not adds:
                return fit(allowed)
    mask = fit(mask)
    return mask if mask.dtype == torch.bool else mask == 0


def _fill_blind_rows(
    out: torch.Tensor, mask: torch.Tensor | KeyIntervals, states: _States, scaling: float
) -> torch.Tensor:
    """Gives queries that may see no key the result of eager attention: the mean of all values.

    With padding on the left there are such queries, and they have an effect: the last one predicts
    the first token, and Doge's mixture of experts routes by all rows. Eager's softmax runs
    over equal fill values there, whose derivative by the scores is still that of a softmax,
    `d out = scaling / Sk * sum_j (v_j - mean) d(q . k_j)`: one D x D matrix per head.
    """
    blind = _blind_rows(mask, states.context.memo)
    if blind is None:
        return out
    query, key, value = swap_heads_and_tokens(*states[:3])
    groups = query.shape[1] // key.shape[1]
    mean = value.mean(2, keepdim=True)
    slope = (value - mean).detach().mT @ key * (scaling / key.shape[2])
    slope, mean = (t.repeat_interleave(groups, dim=1) for t in (slope, mean))
    change = query @ slope.mT
    filled = (mean + (change - change.detach())).transpose(1, 2).to(out.dtype)
    return torch.where(blind.transpose(1, 2)[..., None], filled, out)


def _blind_rows(mask: torch.Tensor | KeyIntervals, memo: Memo | None) -> torch.Tensor | None:
    """Returns which queries may see no key, bool [B, H, Sq], or None if it is known that every query may see one."""

    def find(_: torch.Tensor) -> torch.Tensor | None:
        blind = visible_counts(mask) == 0 if isinstance(mask, KeyIntervals) else ~mask.any(-1)
        return None if may_read() and not blind.any() else blind

    shared = mask.intervals if isinstance(mask, KeyIntervals) else mask
    return cached_result(memo, "blind rows", shared, find)
