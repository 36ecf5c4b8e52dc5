"""Dynamic mask attention as a layer: projections, learned scores, and a cache of the keys that its rule shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ._core.checks import (
    check_count,
    check_floating,
    check_head_dim,
    check_positions,
    check_shape,
    check_tensor,
    resolve_flag,
)
from ._core.kv_checks import check_mask
from .budgets import (
    BYTES_OF_SLOT,
    KeyBudgets,
    SoftScores,
    check_budgets,
    check_division,
    check_phase,
    collected_scores,
    divide_scores,
    evaluating,
    is_sink,
    loss_of_records,
    texts_of_one_length,
)
from .functional import flash_dmattn_func
from .generation.cache import KVSlots
from .keys.rule import RuleParts, SelectionRule, takes_rule
from .scores import bias_to_learn, make_scores, with_zero_sum_gradient

SCORE_INPUTS = ("hidden", "value")
_EXTRA_STATE = "_extra_state"  # torch's name for what is neither a parameter nor a buffer


class DynamicMaskAttention(nn.Module):
    """Causal self-attention in which every query keeps the `keep_window_size` keys with the highest learned scores.

        attention = DynamicMaskAttention(512, heads_q=8, heads_kv=4, keep_window_size=1024, rope=rope)
        out = attention(hidden)                         # training: [B, S, 512] -> [B, S, 512]

        cache = attention.make_cache(batch=1)           # generation, under torch.no_grad()
        out = attention(prompt, cache=cache)
        out = attention(token, cache=cache)             # [B, 1, 512], at any length with the same work and memory

    A key's score, float32 in every precision, is added to its attention scores, through which it learns. By default the
    score is a log gate, log sigmoid(z), where z is a projection of the layer's input. z is initially near 3 (an open gate);
    training closes the gates of keys that no query needs. Which form to choose: docs/quality.md.

    Args:
        hidden_size: features of input and output.
        heads_q: query heads.
        heads_kv: key and value heads, by default heads_q.
        keep_window_size, rule: a `KeyRule`.
        head_dim: up to 256; by default hidden_size / heads_q.
        bias: whether the projections of queries, keys, values and output have one.
        score: "gate", "linear", "doge" or a function, as in `make_scores`.
        score_input: what scores are made from: "hidden", the layer's input [B, S, hidden_size], or "value", the values
            [B, S, heads_kv * head_dim]; by default hidden, of "doge" the values.
        rope: (query [B, S, heads_q, D], key [B, S, heads_kv, D], positions int64 [B or 1, S]) -> (query, key): a rotary
            embedding, or whatever else happens to queries and keys.
        device, dtype: device and dtype of the parameters.

    `state_dict()` contains the rule of a `ScoreBudget` too, as `_extra_state`, float32 [5 + heads_kv, 64]: the bits of its
    numbers, because zeros and ones survive casts to any dtype, averages over steps (EMA) and every format of tensors. A
    layer that loads it follows this rule, and its scores only choose keys. Zeros, the state of a layer without a budget, and a
    state without it leave the rule as it is.
    """

    @takes_rule
    def __init__(
        self,
        hidden_size: int,
        heads_q: int,
        heads_kv: int | None = None,
        keep_window_size: int | Sequence[int] = 2048,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        score: str | Callable[[Tensor], Tensor] = "gate",
        score_input: str | None = None,
        rope: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **rule: Unpack[RuleParts],
    ):
        super().__init__()
        heads_kv = heads_q if heads_kv is None else heads_kv
        sizes = {"hidden_size": hidden_size, "heads_q": heads_q, "heads_kv": heads_kv}
        for name, value in sizes.items():
            check_count(value, name)
            if not value:
                raise ValueError(f"{name}: got 0, expected 1 or more")
        if heads_q % heads_kv:
            raise ValueError(f"heads_q: got {heads_q}, expected a multiple of heads_kv, {heads_kv}")
        self.rule = SelectionRule.of_keywords(keep_window_size, rule).checked_cache_rule()
        self.rule.check_heads(heads_kv)
        if head_dim is None:
            if hidden_size % heads_q:
                raise ValueError(
                    f"hidden_size: got {hidden_size}, expected a multiple of heads_q, {heads_q}, where head_dim is not given"
                )
            head_dim = hidden_size // heads_q
        check_count(head_dim, "head_dim")
        check_head_dim(head_dim, "head_dim: got")
        if rope is not None and not callable(rope):
            raise TypeError(f"rope: got {type(rope).__name__}, expected a function or None")
        check_floating(dtype, "dtype")
        if score_input is None:
            score_input = "value" if score == "doge" else "hidden"
        if score_input not in SCORE_INPUTS:
            raise ValueError(f"score_input: got {score_input!r}, expected one of {SCORE_INPUTS}")
        self.heads_q, self.heads_kv, self.head_dim = heads_q, heads_kv, head_dim
        self.score_input = score_input
        self.hidden_size, self.rope = hidden_size, rope
        options = {"bias": resolve_flag(bias, "bias"), "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, heads_q * head_dim, **options)
        self.k_proj = nn.Linear(hidden_size, heads_kv * head_dim, **options)
        self.v_proj = nn.Linear(hidden_size, heads_kv * head_dim, **options)
        features = hidden_size if score_input == "hidden" else heads_kv * head_dim
        self.scores = make_scores(features, heads_kv, score, device=device, dtype=dtype)
        self.o_proj = nn.Linear(heads_q * head_dim, hidden_size, **options)
        # ScoreBudget sets these: whether scores are also added to the attention scores, the phase "soft", and its gates.
        self.scores_are_bias, self.soft_scores, self.temperature = True, None, None

    @property
    def keep_window_size(self) -> int | tuple[int, ...]:
        """Returns the window of all key heads, or of each."""
        return self.rule.keep_window_size

    def get_extra_state(self) -> Tensor:
        """Returns the rule of a `ScoreBudget`, float32 [5 + heads_kv, 64]; zeros if the layer has none."""
        if self.scores_are_bias:
            return torch.zeros(5 + self.heads_kv, 64, device="cpu")
        return _bits_of_rule(self.rule, self.heads_kv)

    def set_extra_state(self, state: Tensor) -> None:
        """Follows the rule of a state; zeros leave the layer's own."""
        rule = _rule_of_bits(state, _EXTRA_STATE, self.heads_kv)
        if rule is not None:
            self.rule, self.scores_are_bias = rule, False

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others) -> None:
        *_, missing, _, errors = others
        name = prefix + _EXTRA_STATE
        try:
            if (state := state_dict.pop(name, None)) is not None:
                self.set_extra_state(state)
        except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
            errors.append(f"{prefix}{error}")  # torch raises one error with those of all layers
        super()._load_from_state_dict(state_dict, prefix, *others)
        if name in missing:
            missing.remove(name)  # states of earlier versions do not have it

    def extra_repr(self) -> str:
        sizes = {"heads_q": self.heads_q, "heads_kv": self.heads_kv, "head_dim": self.head_dim}
        return ", ".join(
            f"{name}={value}" for name, value in (sizes | self.rule.non_default_parts()).items()
        )

    def make_cache(
        self, batch: int, *, chunk: int = 128, dtype: torch.dtype | None = None
    ) -> KVSlots:
        """Returns an empty cache for generation.

        batch: the number of rows. chunk: the maximum number of tokens in one call after the prompt.
        dtype: the dtype of keys and values, by default that of the weights. Under torch.autocast give its dtype.
        """
        weight = self.k_proj.weight
        return KVSlots(
            batch, self.heads_kv, head_dim=self.head_dim, **self.rule._asdict(),
            chunk=chunk, dtype=weight.dtype if dtype is None else dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        *,
        cache: KVSlots | None = None,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attends causally to the keys that the rule shows. With a cache, appends the tokens to it and attends to what it holds.

        Args:
            hidden: [B, S, hidden_size].
            cache: see `make_cache`. A prompt comes first, then tokens one by one or several at a time; there is no
                gradient through it.
            key_mask: bool [B, S], False for padding; None: there is none.
            positions: integers [B or 1, S], for `rope`; by default tokens are counted, padding included.

        Returns:
            [B, S, hidden_size].
        """
        self._check_arguments(hidden, cache, key_mask)
        _check_positions(positions, hidden)
        batch, length, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, length, self.heads_q, self.head_dim)
        key, value = (
            project(hidden).view(batch, length, self.heads_kv, self.head_dim)
            for project in (self.k_proj, self.v_proj)
        )
        if self.score_input == "hidden":
            scores = self.scores(hidden)
        else:
            scores = self.scores(value.flatten(2), projected=(self.v_proj, hidden))
        if self.rope is not None:
            rotated = self.rope(query, key, self._positions(length, cache, positions, hidden))
            query, key = _checked_rotation(rotated, query, key)
        dtype = value.dtype
        if cache is not None:
            query, key, value = (t.to(cache.k.dtype) for t in (query, key, value))
            if not cache.is_empty:
                out = cache.extend(
                    query,
                    key,
                    value,
                    scores,
                    key_mask=key_mask,
                    scores_are_bias=self.scores_are_bias,
                )
                return self.o_proj(out.flatten(2).to(dtype))
        options = self._scores_as_arguments(scores, key_mask)
        out = flash_dmattn_func(query, key, value, attn_mask=key_mask, is_causal=True, **options)
        if cache is not None:
            with torch.no_grad():
                cache.fill(key, value, scores, key_mask=key_mask)
        return self.o_proj(out.flatten(2).to(dtype))

    def _scores_as_arguments(self, scores: Tensor, key_mask: Tensor | None) -> dict:
        """Returns the arguments of attention for scores of a text."""
        rule = self.rule._asdict()
        if self.soft_scores is None and self.scores_are_bias:
            return {"attn_bias": with_zero_sum_gradient(scores), **rule}
        if self.soft_scores is not None:
            chosen, bias = {}, self.soft_scores.gates(scores, self.temperature)
        else:
            chosen, bias = {"selection_scores": scores.detach(), **rule}, bias_to_learn(scores)
            if bias is None:
                return chosen
        if self.rule.sink_tokens:
            bias = torch.where(is_sink(scores, self.rule.sink_tokens, key_mask)[:, None], 0, bias)
        return {"attn_bias": bias, "bias_delay": self.rule.recent_window, **chosen}

    def _check_arguments(
        self, hidden: Tensor, cache: KVSlots | None, key_mask: Tensor | None
    ) -> None:
        check_tensor(hidden, "hidden")
        if hidden.dim() != 3 or hidden.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden: got shape {tuple(hidden.shape)}, expected [B, S, {self.hidden_size}]"
            )
        if key_mask is not None:
            check_mask(key_mask, tuple(hidden.shape[:2]), hidden.device)
        if cache is None:
            return
        if self.soft_scores is not None:
            raise ValueError(
                "phase: got 'soft' with a cache, expected 'hard': in the phase 'soft' a query sees all earlier keys"
            )
        if not isinstance(cache, KVSlots):
            raise TypeError(f"cache: got {type(cache).__name__}, expected KVSlots (make_cache)")
        got = (cache.batch, cache.heads_kv, cache.keep_window_size, cache.head_dim)
        expected = (hidden.shape[0], self.heads_kv, self.keep_window_size, self.head_dim)
        if got != expected:
            raise ValueError(
                f"cache: got a cache with (batch, heads_kv, keep_window_size, head_dim) {got}, expected {expected}"
            )
        if cache.rule != self.rule:
            raise ValueError(
                f"cache: got a cache with the rule {cache.rule.non_default_parts()}, expected {self.rule.non_default_parts()}"
            )

    def _positions(
        self, length: int, cache: KVSlots | None, positions: Tensor | None, hidden: Tensor
    ) -> Tensor:
        if positions is not None:
            return positions
        counted = torch.arange(length, device=hidden.device)[None]
        if cache is None:
            return counted
        seen = (
            cache.seen
            if cache.rows is None
            else cache.seen[cache.rows.clamp(0, len(cache.seen) - 1)]
        )
        return counted + seen[:, None] + cache.pending


class ScoreBudget:
    """One budget of keys for all `DynamicMaskAttention` layers of a model: phases, the loss that closes gates, its division.

        budget = ScoreBudget(model)
        budget.set_phase("soft", temperature=0.3)
        loss = own_loss(model(ids)) + 4 * budget.loss(target=1 / 8)   # in each step
        budgets = budget.divide(texts, mean_keys=512)
        budget.follow(budgets)                                         # and set_phase("hard")

    In the phase "soft" queries see all keys, and the log gates of old keys (those that `recent_window` tokens follow) are added
    to their attention scores; with a temperature the gates are sampled while gradients are on. In the phase "hard", which
    layers begin with, the rule decides. Scores then choose keys and change nothing else, in a cache too, and learn by the
    gradient of a bias of old keys. `remove` ends the budget; layers stay in the phase "hard" with their rules.

    The functions of `integrations.transformers` do the same to models with learned scores. They have these arguments, with the
    same defaults, after the model:

    - `set_phase`, `set_score_phase`: phase, temperature. Only the second has the phase "off".
    - `loss`, `budget_loss`: target, per_head, sampled, mask.
    - `divide`, `divide_budget`: texts, mean_keys, length, least, quantile, bound. Only the second shows its progress, and
      chooses the phase itself.
    - `follow`, `set_key_budgets`: budgets.

    model: its layers have `score="gate"`, or a function that returns log gates, 0 or less.
    """

    def __init__(self, model: nn.Module):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self.model = model
        self.layers = [m for m in model.modules() if isinstance(m, DynamicMaskAttention)]
        if not self.layers:
            raise ValueError(
                f"model: got a {type(model).__name__} without DynamicMaskAttention layers, expected some"
            )
        first = self.layers[0].rule
        for layer in self.layers:
            parts = (layer.rule.recent_window, layer.rule.sink_tokens)
            if parts != (first.recent_window, first.sink_tokens):
                raise ValueError(
                    f"model: got layers with (recent_window, sink_tokens) {parts} and "
                    f"{(first.recent_window, first.sink_tokens)}, expected the same in all"
                )
            if (form := getattr(layer.scores, "form", "gate")) != "gate":
                raise ValueError(
                    f"model: got a layer with score={form!r}, expected 'gate', or a function that returns log gates"
                )
        for layer in self.layers:
            layer.scores_are_bias = False
        self._hook = model.register_forward_pre_hook(self._begin_forward)

    def remove(self) -> None:
        """Removes the budget's hook from the model. Its layers stay in the phase "hard", with the rules that they have."""
        self.set_phase("hard")
        self._hook.remove()

    def set_phase(self, phase: str, temperature: float | None = None) -> None:
        """Chooses the phase of all layers, "soft" or "hard". temperature: of sampled gates, see `budgets.stochastic_gates`."""
        check_phase(phase, ("soft", "hard"), temperature)
        for layer in self.layers:
            layer.soft_scores = SoftScores() if phase == "soft" else None
            layer.temperature = temperature

    def loss(
        self,
        target: float,
        *,
        per_head: bool = False,
        sampled: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns max(0, share - target), where share is the mean gate of old keys in the last forward in the phase "soft". Of a
        layer that runs several times the first run counts.

        Args:
            target: 0 to 1.
            per_head: whether each head has this target, or the mean over all.
            sampled: whether sampled gates count, each as open or closed, over all tokens, and each text has the target (DMS).
            mask: bool [B, S], False for padding.

        Raises:
            ValueError: `sampled` with `per_head`.
            RuntimeError: there was no forward in the phase "soft" with gradients since the last call, for `sampled` with a
                temperature.
        """
        rules = [layer.rule for layer in self.layers]
        records = [layer.soft_scores for layer in self.layers]
        return loss_of_records(records, rules, target, per_head, sampled, mask)

    def divide(
        self,
        texts: Sequence[Tensor],
        mean_keys: float = 512,
        *,
        length: int | None = None,
        least: float = 0.25,
        quantile: float | None = None,
        bound: float = 2.0,
    ) -> KeyBudgets:
        """Returns the division of a budget by the scores of sample texts, in the phase that is set.

        Args:
            texts: inputs of the model, each of one sequence, [1, S, ...] with S >= length; what is longer is cut.
            length: the number of tokens at which keys are counted; by default that of the shortest text.
            mean_keys, least, quantile, bound: as in `budgets.divide_scores`.
        """
        rule, scores, texts = self.layers[0].rule, [], texts_of_one_length(texts, length)
        budget = mean_keys, rule.recent_window, rule.sink_tokens
        options = {"least": least, "quantile": quantile, "bound": bound}
        check_division(texts[0].shape[1], *budget, **options)
        with evaluating(self.model):
            for text in texts:
                with collected_scores([layer.scores for layer in self.layers]) as of_text:
                    self.model(text)
                scores.append(of_text)
        sizes = (2 * layer.head_dim * layer.k_proj.weight.element_size() for layer in self.layers)
        return divide_scores(
            scores, *budget, **options, key_bytes=[size + BYTES_OF_SLOT for size in sizes]
        )

    def follow(self, budgets: KeyBudgets) -> None:
        """Makes the rules of the layers those of the budgets."""
        check_budgets(budgets, [layer.heads_kv for layer in self.layers])
        rules = []
        for layer, caps in zip(self.layers, budgets.caps, strict=True):
            parts = {**budgets.rule_arguments(), "keep_window_size": caps}
            rules.append(layer.rule._replace(**parts).checked_cache_rule())
        for layer, rule in zip(self.layers, rules, strict=True):
            layer.rule = rule

    def _begin_forward(self, model: nn.Module, args: tuple) -> None:
        for layer in self.layers:
            if layer.soft_scores is not None:
                layer.soft_scores.open()


def _bits_of_rule(rule: SelectionRule, heads: int) -> Tensor:
    """Returns the rule of a cache as the bits of float64 numbers, float32 [5 + heads, 64]."""
    windows = (rule.windows() * heads)[:heads]
    threshold = math.nan if rule.score_threshold is None else rule.score_threshold
    numbers = [isinstance(rule.keep_window_size, tuple), *rule[2:5], threshold, *windows]
    words = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64)
    return (words[:, None] >> torch.arange(64, device="cpu") & 1).float()


def _rule_of_bits(bits: Tensor, name: str, heads: int) -> SelectionRule | None:
    check_shape(bits, name, (5 + heads, 64))
    values = bits.to("cpu", torch.float64)
    if not values.any():  # of a layer without a budget
        return None
    ones = (values > 0.5).long()
    if not ((values - ones).abs() <= 0.25).all():
        raise ValueError(
            f"{name}: got numbers between 0 and 1, as in an average of states with different rules, expected the bits of one rule"
        )
    numbers = (ones << torch.arange(64, device="cpu")).sum(1).view(torch.float64).tolist()
    are_own, recent_window, competes, sink_tokens, threshold, *windows = numbers
    windows = tuple(map(int, windows))
    return SelectionRule(
        windows if are_own else windows[0], "per_query", int(recent_window), bool(competes), int(sink_tokens),
        None if math.isnan(threshold) else threshold,
    ).checked_cache_rule()  # fmt: skip


def _checked_rotation(rotated: object, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Checks the results of `rope`, and returns them."""
    if not isinstance(rotated, (tuple, list)) or len(rotated) != 2:
        raise TypeError(f"rope: got {type(rotated).__name__}, expected (query, key)")
    for name, state, rotated_state in zip(("query", "key"), (query, key), rotated, strict=True):
        check_tensor(rotated_state, f"rope's {name}")
        if rotated_state.shape != state.shape:
            raise ValueError(
                f"rope: got a {name} of shape {tuple(rotated_state.shape)}, expected {tuple(state.shape)}"
            )
    return rotated


def _check_positions(positions: Tensor | None, hidden: Tensor) -> None:
    if positions is None:
        return
    check_positions(positions, "positions")
    batch, length, _ = hidden.shape
    if positions.shape not in ((1, length), (batch, length)):
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)}, expected [B or 1, S] of hidden, ({batch}, {length})"
        )
