"""Doge's attention layer with one score for each key instead of a mask element for each (query, key) pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention, DogeRMSNorm

from ..._core.checks import may_read
from ..._core.numerics import Numerics
from ...keys.recognise import Memo, cached_result, visible_counts
from ...keys.rule import SelectionRule
from ...keys.visible import Visible
from ...scores import (
    doge_scores_of,
    project_scores,
    score_projection,
    weights_of_product,
    with_zero_sum_gradient,
)
from .._shared.layer_call import (
    as_key_intervals,
    cast_states,
    check_mask_keywords,
    check_probabilities,
    hide_other_sequences,
    is_causal_mask,
    present_tokens,
    swap_heads_and_tokens,
    target_dtype,
)
from .cache import DynamicMaskCache
from .cache_layer import DynamicMaskLayer
from .compat import change_class, find_cache, implementation_of, pop_cache
from .model_state import CONTEXT, DOGE_NAME
from .scored_attention import (
    KeyScores,
    LayerOptions,
    attend,
    visible_elements,
    visible_tokens,
)
from .scored_cache import CacheState, forget_scores, store_scores


class Context(NamedTuple):
    """The state of one forward of a DogeModel, which all of its layers share.

    mask_kind: what the mask is, besides plain causality (`is_causal_mask`).
        "padded": causality among the keys that are not padding.
        "packed": causality within documents, so that every query sees its own key.
        None: another mask, or a mask over keys of a cache.
    memo: results that the layers share.
    pieces: context_parallel.PieceForward, if this rank has a piece of each sequence; None: it has whole sequences.
    """

    mask_kind: str | None = None
    memo: Memo | None = None
    pieces: Any = None


class FlashDogeRMSNorm(DogeRMSNorm):
    """`DogeRMSNorm` with torch's function, which rounds at the same places and is one kernel on a GPU.

    The attention layer requests torch's function in each call, so that the layer's config decides. For other callers
    this class acts as its base class. The base class also handles compiled code (inductor fuses its kernels), float64
    (it rounds to float32, which torch's function does not), and norms whose forward was replaced. transformers
    initialises modules whose class has "RMSNorm" in its name.
    """

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

    Under another implementation than `DOGE_NAME` (after `model.set_attn_implementation("eager")`), the layer acts
    as its base class.
    """

    round_scores_like_eager = False

    @classmethod
    def from_layer(cls, layer: DogeAttention) -> FlashDogeAttention:
        """Changes the class of a layer, which keeps its parameters, modules, buffers and hooks, and returns it."""
        change_class(layer, cls)
        for norm in layer.children():
            if type(norm) is DogeRMSNorm and "forward" not in vars(norm):  # nobody's own
                change_class(norm, FlashDogeRMSNorm)
        return layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        if implementation_of(self.config) != DOGE_NAME:
            forget_scores(find_cache(kwargs), self.layer_idx)
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        context = kwargs.pop(CONTEXT, None) or Context()
        cache = pop_cache(kwargs)
        cache_position = kwargs.pop("cache_position", None)
        if is_causal_mask(attention_mask):
            attention_mask = None
        check_mask_keywords(kwargs, has_mask=attention_mask is not None and cache is None)
        if cache is None and context.mask_kind != "packed":
            batch, length = hidden_states.shape[:2]
            mask = attention_mask
            if kwargs.get("cu_seq_lens_q") is not None:
                mask = _as_shown_elements(mask, length, length)
            mask = hide_other_sequences(mask, kwargs, batch, length, length)
            if mask is not attention_mask:
                attention_mask, context = mask, context._replace(mask_kind=None)
        per_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = _normalize(self.q_norm, self.q_proj(hidden_states).view(per_head))
        key = _normalize(self.k_norm, self.k_proj(hidden_states).view(per_head))
        value = self.v_proj(hidden_states)
        slots = cache.slots_of(self.layer_idx) if isinstance(cache, DynamicMaskCache) else None
        scores = self._scores(value, hidden_states, slots)
        value = value.view(per_head)
        # Query and key keep the dimension order of attention: if they were transposed to that of caches here, compiled code would
        # write both twice, once for each order.
        #
        # The function is looked up in its module at each call, because other libraries replace it there.
        query, key = modeling_doge.apply_rotary_pos_emb(
            query, key, *position_embeddings, unsqueeze_dim=2
        )
        check_probabilities(self.attention_dropout if self.training else 0.0, kwargs)
        if cache is not None and slots is None and context.pieces is None:
            key, value, scores = self._update(cache, key, value, scores, cache_position)
        states = cast_states((query, key, value), target_dtype(self, query))
        if context.pieces is not None:
            out = context.pieces.attend(
                *states, scores, SelectionRule(self.keep_window_size), slots,
                scale=self.scaling, zero_sum=not self.round_scores_like_eager,
            )  # fmt: skip
        else:
            out = self._attend(*states, scores, attention_mask, context, slots)
        return self.o_proj(out.flatten(2)), None

    def _scores(
        self,
        value: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        slots: DynamicMaskLayer | None = None,
    ) -> torch.Tensor:
        """Returns the scores [B, Hkv, S] of values [B, S, Hkv * D], which `v_proj` made of hidden_states, if given."""
        if self.round_scores_like_eager:
            return doge_scores(self, self.dt_proj(value))

        def make_weights() -> tuple | None:
            return weights_of_product(self.v_proj, self.dt_proj, hidden_states.dtype)

        weights = None
        if hidden_states is not None:
            keeps = slots is not None and not torch.is_grad_enabled()
            weights = slots.score_weights(make_weights) if keeps else make_weights()
        if weights is None:
            return project_scores(self.dt_proj, value, "doge", self.A)
        return score_projection(hidden_states, *weights, form="doge", A=self.A)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        context: Context,
        slots: DynamicMaskLayer | None,
    ) -> torch.Tensor:
        """Computes attention to all tokens, or with slots also to the keys in them. Returns [B, S, Hq, D].

        query: [B, S, Hq, D]; key, value: [B, Sk, Hkv, D]; scores: [B, Hkv, Sk].
        """
        states, memo, rule = (query, key, value), context.memo, SelectionRule(self.keep_window_size)
        numerics = Numerics.from_arguments(self.scaling, None, None, "saturate", None)
        options = LayerOptions(numerics, memo=memo)

        def attend_to_tokens() -> torch.Tensor:
            visible = shown = _visible_elements(mask, query, key, memo)
            if context.mask_kind == "padded" and visible.intervals is not None:
                visible = visible_tokens(visible.intervals, is_checked=True)
            bias = scores if self.round_scores_like_eager else with_zero_sum_gradient(scores)
            chooses = key.shape[1] > self.keep_window_size
            out = attend(*states, visible, KeyScores(rule, scores, bias), options, chooses=chooses)
            if mask is not None and context.mask_kind != "packed":
                out = _fill_blind_rows(out, shown, states, self.scaling, memo)
            return out

        if slots is None:
            return attend_to_tokens()
        present = present_tokens(mask, key.shape[1], memo)
        return slots.attend_call(
            rule, self.layer_idx, states, scores.float(), present, numerics, attend_to_tokens
        )

    def _update(
        self,
        cache: Cache,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor,
        position: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds tokens to a cache of all keys. Returns all keys and values [B, Sk, Hkv, D], and scores [B, Hkv, Sk]."""
        state = CacheState.of_layer(cache, self.layer_idx, position)
        key, value = swap_heads_and_tokens(key, value)
        key, value = cache.update(key, value, self.layer_idx, *state.arguments)
        scores = store_scores(cache, self.layer_idx, self.config, scores, state, key)
        key, value = swap_heads_and_tokens(key, value)
        # Eager attention rounds the scores of all keys together.
        if scores is None or self.round_scores_like_eager:
            scores = self._scores(value.flatten(2))
        return key, value, scores


def _normalize(norm: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Returns norm(states). It uses torch's function unless this package's norm, or its forward, was replaced."""
    if isinstance(norm, FlashDogeRMSNorm) and "forward" not in vars(norm):
        return norm(states, is_fused=True)
    return norm(states)


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


def _as_shown_elements(
    mask: torch.Tensor | None, query_length: int, key_length: int
) -> torch.Tensor | None:
    """Returns a mask of integers as bool by Doge's rule, that every value but 0 masks. Other masks stay as they are."""
    if mask is None or mask.is_floating_point() or mask.dtype == torch.bool:
        return mask
    return mask == 0 if as_key_intervals(mask, query_length, key_length) is None else mask


def _visible_elements(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, memo: Memo | None
) -> Visible:
    """Returns what a mask shows by Doge's rule: in a mask that is not bool, every value but 0 masks."""
    if mask is None:
        return Visible(is_causal=True)

    def find(mask: torch.Tensor) -> Visible:
        queries, keys = query.shape[1], key.shape[1]
        mask = _as_shown_elements(mask, queries, keys)
        if as_key_intervals(mask, queries, keys) is None:
            mask = mask[..., :keys].expand(-1, -1, queries, -1)
        return visible_elements(mask, query, key, added_values_hide=True)

    return cached_result(memo, "visible", mask, find)


def _fill_blind_rows(
    out: torch.Tensor,
    visible: Visible,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling: float,
    memo: Memo | None,
) -> torch.Tensor:
    """Gives queries that may see no key the result of eager attention: the mean of all values.

    With padding on the left there are such queries, and they have an effect: the last one predicts
    the first token, and Doge's mixture of experts routes by all rows. Eager's softmax runs
    over equal fill values there, whose derivative by the scores is still that of a softmax,
    `d out = scaling / Sk * sum_j (v_j - mean) d(q . k_j)`: one D x D matrix per head.
    """
    blind = _blind_rows(visible, memo)
    if blind is None:
        return out
    query, key, value = swap_heads_and_tokens(*states)
    groups = query.shape[1] // key.shape[1]
    mean = value.mean(2, keepdim=True)
    slope = (value - mean).detach().mT @ key * (scaling / key.shape[2])
    slope, mean = (t.repeat_interleave(groups, dim=1) for t in (slope, mean))
    change = query @ slope.mT
    filled = (mean + (change - change.detach())).transpose(1, 2).to(out.dtype)
    return torch.where(blind.transpose(1, 2)[..., None], filled, out)


def _blind_rows(visible: Visible, memo: Memo | None) -> torch.Tensor | None:
    """Returns which queries may see no key, bool [B, H, Sq], or None if it is known that every query may see one."""
    mask, _, shown, _ = visible

    def find(_: torch.Tensor) -> torch.Tensor | None:
        blind = visible_counts(shown) == 0 if mask is None else ~mask.any(-1)
        return None if may_read() and not blind.any() else blind

    return cached_result(memo, "blind rows", shown.intervals if mask is None else mask, find)
