"""Attention layers of transformers that give their keys scores.

A layer gets a module `scorer`, `scoring`, which says how the scores are used, and two hooks. Before its forward the first hook
adds a `ScoreCall` to the keywords, which the layer passes on to the attention function.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...._core.numerics import Numerics
from ....budgets import SoftScores
from ....keys.intervals import KeyIntervals
from ....keys.recognise import Memo, cached_result
from ....keys.rule import SelectionRule
from ....keys.visible import Visible
from ....scores import bias_to_learn
from ..._shared.layer_call import layer_arguments, present_tokens, shows_only_tokens
from ..cache import DynamicMaskCache
from ..cache_layer import DynamicMaskLayer
from ..compat import CACHE, bind_arguments, find_cache, implementation_of
from ..model_state import PIECES, SCORED_NAME, SCORES, add_hook, remove_hooks
from ..scored_attention import (
    KeyScores,
    LayerOptions,
    attend,
    shown_keys,
    visible_elements,
    visible_tokens,
)
from ..scored_cache import CacheState, forget_scores, store_scores

# query [B, Sq, Hq, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv]
States = tuple[Tensor, Tensor, Tensor]


@dataclass
class Scoring:
    """How a layer uses its scores. rule, dense_prefill, late, phase, temperature: as in `add_learned_scores`."""

    rule: SelectionRule
    dense_prefill: bool
    late: bool
    base_layer_idx: int  # before `add_scorer`
    base_attention: str  # the implementation in the phase "off"
    phase: str = "hard"
    temperature: float | None = None
    record: SoftScores = field(default_factory=SoftScores)  # of the phase "soft"
    memo: Memo | None = None  # of the decoder's forward


def late_scores(scores: Tensor, present: Tensor | None = None) -> Tensor:
    """Returns the scores of keys, each made by the next token, of the scores of tokens [B, H, S]. The last key, which is recent,
    has 0.

    present: bool [B, 1, S], False for padding, which makes no scores. None: all columns are tokens.
    """
    if present is None:
        return F.pad(scores[..., 1:], (0, 1))
    length = scores.shape[-1]
    own = torch.where(present, torch.arange(length, device=scores.device), length)
    later = F.pad(own[..., 1:], (0, 1), value=length).flip(-1).cummin(-1).values.flip(-1)
    return F.pad(scores, (0, 1)).gather(-1, later.expand_as(scores))


def has_scores(layer: nn.Module) -> bool:
    return "scoring" in vars(layer)


def add_scorer(layer: nn.Module, scorer: nn.Module, number: int, **scoring) -> None:
    """Gives a layer scores. In the phase "off", and under another attention implementation, it acts as without them.

    number: of the layer in a cache. scoring: rule, dense_prefill and late of `Scoring`.
    """
    base = {"base_layer_idx": layer.layer_idx, "base_attention": implementation_of(layer.config)}
    layer.scoring = Scoring(**scoring, **base)
    layer.scorer, layer.layer_idx = scorer, number
    scorer.attach(layer)
    add_hook(layer, _begin_call)
    add_hook(layer, _end_call, after=True)


def uses_scores(layer: nn.Module) -> bool:
    """Whether a layer with scores uses them in this phase and attention implementation."""
    return layer.scoring.phase != "off" and implementation_of(layer.config) == SCORED_NAME


def remove_scorer(layer: nn.Module) -> None:
    layer.scorer.detach()
    layer.layer_idx = layer.scoring.base_layer_idx
    del layer.scorer, layer.scoring
    remove_hooks(layer, _begin_call, _end_call)


def _begin_call(layer: nn.Module, args: tuple, keywords: dict) -> tuple[tuple, dict] | None:
    pieces = keywords.pop(PIECES, None)
    arguments = bind_arguments(_argument_names(type(layer)), args, keywords)
    number, cache = _number_in_cache(layer, arguments), find_cache(arguments)
    cache = getattr(cache, "self_attention_cache", cache)  # in an EncoderDecoderCache
    if not uses_scores(layer):
        forget_scores(cache, number)
        return None
    position = arguments.get("cache_position")
    call = ScoreCall(layer, number, arguments["hidden_states"], cache, position, pieces)
    return (), arguments | {SCORES: call}


def _number_in_cache(layer: nn.Module, keywords: dict) -> int:
    """Returns the number of the cache layer of this call. Zamba passes it, HRM and Dory an offset."""
    if "layer_idx" in keywords and "layer_idx" in _argument_names(type(layer)):
        return keywords["layer_idx"]
    offsets = (keywords.get(name, 0) for name in ("cycle_offset", "cache_offset"))
    return layer.layer_idx + sum(offsets)


def _end_call(layer: nn.Module, args: tuple, keywords: dict, output: object) -> None:
    call = keywords.get(SCORES)
    if call is not None and call.slots is not None:
        call.slots.stop_expecting()  # the forward may have raised before it updated the cache
    if call is not None and output is not None and not call.has_attended:
        raise RuntimeError(
            f"{SCORES}: got no call of transformers' attention function with the keywords of {type(layer).__name__}, "
            "expected one: its layers cannot have learned scores"
        )


@functools.cache
def _argument_names(layer_class: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(layer_class.forward).parameters)[1:]


class ScoreCall:
    """One call of a layer with scores: a keyword of the attention function.

    Keys come from a `DynamicMaskCache`, from the pieces of other ranks, or from the layer's arguments, which transformers'
    own cache may have extended. Each has a method `_attend_...`.
    """

    def __init__(
        self, layer: nn.Module, number: int, hidden: Tensor, cache: object, position, pieces: Any
    ):
        """
        Args:
            number: of the layer in the cache.
            hidden: the layer's input, [B, S, features].
            cache: the cache that the layer gets, or None. position: `cache_position` (transformers 4, and 5 until 5.3).
            pieces: context_parallel.PieceForward, if this rank has a piece of each sequence; None: it has whole sequences.
        """
        self.layer, self.number, self.hidden, self.pieces = layer, number, hidden, pieces
        self.cache = cache
        self.slots: DynamicMaskLayer | None = None  # of a DynamicMaskCache
        self.state: CacheState | None = None  # of transformers' own cache, before it gets the keys
        # The column of the first query in a static cache. None: the last query is the last key.
        self.first_query: Tensor | int | None = None
        self.has_attended = False
        if isinstance(self.cache, DynamicMaskCache):
            self.slots = self.cache.slots_of(number)
            self.slots.expect_keys()
        elif self.cache is not None:
            self.state = CacheState.of_layer(self.cache, number, position)
            self.first_query = self.state.position

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,  # these layers are, whether their masks say it or not
        **keywords,
    ) -> Tensor:
        """Computes attention in the layer's phase. Arguments as in `attention_forward`. Returns [B, Sq, Hq, D]."""
        layer = self.layer
        if sliding_window is not None:
            raise ValueError(
                f"sliding_window: got {sliding_window} in a layer with learned scores, expected None"
            )
        scores = self.scores_of(key, value)
        query = layer.scorer.clear_query(query)
        mask, *states = layer_arguments(layer, query, key, value, mask, keywords, dropout)
        numerics = Numerics.from_arguments(scaling, None, softcap, "saturate", None)
        options = LayerOptions(numerics, s_aux, layer.scoring.memo)
        if self.pieces is not None:
            return self._attend_to_pieces(states, scores, options)
        if self.slots is not None:
            return self._attend_to_slots(states, scores, mask, options)
        return self._attend_to_keys(states, scores, mask, options)

    def scores_of(self, key: Tensor, value: Tensor) -> Tensor:
        """Returns scores [B, Hkv, S] of keys and values [B, Hkv, S, D]. New tokens are the last rows; in a static cache they
        begin at `first_query`, and with slots there are no others."""
        layer, new = self.layer, self.hidden.shape[1]
        if self.has_attended:  # a cache would take the scores a second time
            raise RuntimeError(
                f"scorer: got a second attention call in layer {layer.layer_idx}, expected one: the cache stores one value per key"
            )
        self.has_attended, keys = True, key
        if self.slots is not None and self.slots.stop_expecting():
            raise ValueError(
                f"{CACHE}: got a DynamicMaskCache whose layer {self.number} got no keys, expected them. Use transformers' "
                "DynamicCache"
            )
        if self.first_query is not None:
            columns = torch.arange(new, device=key.device) + self.first_query
            key, value = (t.index_select(2, columns) for t in (key, value))
        elif key.shape[2] > new:
            key, value = key[:, :, -new:], value[:, :, -new:]
        scores = layer.scorer(self.hidden, key.transpose(1, 2), value.transpose(1, 2))
        if scores.shape[1] != key.shape[1]:
            raise ValueError(
                f"scorer: got scores of {scores.shape[1]} heads, expected {key.shape[1]}, as many as keys have"
            )
        if self.state is None:
            return scores
        scores = store_scores(self.cache, self.number, layer.config, scores, self.state, keys)
        if scores is None:
            raise ValueError(
                f"{CACHE}: got keys without scores in layer {self.number}, expected a cache that was filled by this model with "
                "its scores on (phase 'soft' or 'hard')"
            )
        return scores

    def _attend_to_keys(
        self,
        states: States,
        scores: Tensor,
        mask: Tensor | KeyIntervals | None,
        options: LayerOptions,
    ) -> Tensor:
        layer, scoring = self.layer, self.layer.scoring
        is_soft, is_static = scoring.phase == "soft", self.first_query is not None
        if is_soft and is_static:
            raise ValueError(
                f"{CACHE}: got a static one in the phase 'soft', expected a cache that grows, or the phase 'hard'"
            )
        queries, keys = (t.shape[1] for t in states[:2])
        is_prompt = self.state is not None and (
            self.state.is_empty if is_static else queries == keys
        )
        chooses = not is_soft and not (scoring.dense_prefill and is_prompt)
        visible = self._visible(*states[:2], mask, options.memo, chooses)
        if is_soft:
            gates = scoring.record.gates(scores, scoring.temperature)
            bias = scores - layer.scorer.first_score if gates is scores else gates
            bias = self._of_keys(bias, visible)
        else:
            scores = self._of_keys(scores, visible)
            bias = bias_to_learn(scores)
        delay = 0 if bias is None else scoring.rule.recent_window
        key_scores = KeyScores(scoring.rule, scores, bias, delay, self.first_query)
        return attend(*states, visible, key_scores, options, chooses=chooses)

    def _visible(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | KeyIntervals | None,
        memo: Memo | None,
        chooses: bool,
    ) -> Visible:
        """Returns what a mask shows to queries that choose, or do not choose, keys. Layers of one forward share it."""
        is_static = self.first_query is not None

        def find(_: Tensor | None) -> Visible:
            # Masks of a static cache, and nearly all intervals over keys of a cache, are causality and padding. Other masks of a
            # static cache raise.
            of_cache = self.cache is not None and query.shape[1] < key.shape[1]
            of_cache = of_cache and isinstance(mask, KeyIntervals)
            if chooses and (is_static or (of_cache and shows_only_tokens(mask))):
                return visible_tokens(mask, self.first_query, is_checked=not is_static)
            return visible_elements(mask, query, key, memo)

        if mask is None:
            return Visible(is_causal=True)
        of_mask = mask.intervals if isinstance(mask, KeyIntervals) else mask
        return cached_result(memo, f"visible, {chooses}", of_mask, find)

    def _attend_to_slots(
        self,
        states: States,
        scores: Tensor,
        mask: Tensor | KeyIntervals | None,
        options: LayerOptions,
    ) -> Tensor:
        layer, scoring = self.layer, self.layer.scoring
        self._check_phase("a DynamicMaskCache")
        present = present_tokens(mask, states[0].shape[1], options.memo)
        scores, first = scores.float(), None
        if scoring.late:
            first = scores[..., 0]
            if present is not None:  # the first token of each row
                column = present.byte().argmax(1).view(-1, 1, 1)
                first = scores.take_along_dim(column, -1)[..., 0]
        scores = self._of_keys(scores, Visible(None if present is None else present[:, None, None]))
        key_scores = KeyScores(scoring.rule, scores)

        def attend_to_prompt() -> Tensor:
            if scoring.dense_prefill:
                visible = visible_elements(mask, *states[:2], options.memo)
            else:
                visible = visible_tokens(mask, is_checked=True)
            return attend(*states, visible, key_scores, options, chooses=not scoring.dense_prefill)

        return self.slots.attend_call(
            scoring.rule, layer.layer_idx, states, scores, present, options.numerics, attend_to_prompt,
            scores_are_bias=False, late_scores=first, sink_logits=options.sink_logits,
        )  # fmt: skip

    def _attend_to_pieces(self, states: States, scores: Tensor, options: LayerOptions) -> Tensor:
        layer, scoring = self.layer, self.layer.scoring
        rule = scoring.rule
        try:
            self._check_phase("context parallelism")
            if self.slots is not None:
                if scoring.dense_prefill:
                    raise ValueError(
                        "dense_prefill: got True with a cache and context parallelism, expected False: a prompt would see "
                        "all keys of all earlier ranks"
                    )
                self.slots.check_rule(rule, layer.layer_idx)
        except ValueError as error:
            self.pieces.group.collectives.raise_on_all_ranks("begin_exchange", error)
        if scoring.late:
            raise ValueError(
                "late: got True with context parallelism, expected False: the next token is another rank's"
            )
        bias = bias_to_learn(scores)
        return self.pieces.attend(
            *states, scores.detach(), rule, self.slots, bias=bias,
            bias_delay=0 if bias is None else rule.recent_window,
            scale=options.numerics.scale, softcap=options.numerics.softcap, sink_logits=options.sink_logits,
        )  # fmt: skip

    def _check_phase(self, where: str) -> None:
        phase = self.layer.scoring.phase
        if phase != "hard":
            raise ValueError(
                f"phase: got {phase!r} with {where}, expected 'hard': in another phase a query sees all earlier keys"
            )

    def _of_keys(self, scores: Tensor, visible: Visible) -> Tensor:
        """Returns the scores of keys, of the scores of tokens. visible: what the mask shows."""
        if not self.layer.scoring.late:
            return scores
        present = shown_keys(visible)
        return late_scores(scores, None if present is None else present.any(1, keepdim=True))
