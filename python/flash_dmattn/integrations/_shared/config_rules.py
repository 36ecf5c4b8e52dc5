"""What a config says about a model's layers: their rules, the settings of learned scores, and the head dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers.configuration_utils import PretrainedConfig

from ...keys.rule import RuleParts, SelectionRule
from .scorers import FIRST_LOGIT

CONFIG_NAME = "learned_scores"  # the attribute of a config


class LearnedScores(NamedTuple):
    """The part of a config that describes learned scores. The parameters of the scorers belong to the model."""

    # One for each layer that has scores; they differ in keep_window_size alone.
    rules: tuple[SelectionRule, ...]
    scorer: str  # "custom" for a function or module
    layers: tuple[int, ...]  # the layers that have scores
    dense_prefill: bool = False
    late: bool = False  # whether a key has the score of the token after it
    first_logit: float = FIRST_LOGIT  # of the gates before training

    def rule_arguments(self) -> dict:
        """Returns the rules as the arguments of `add_learned_scores`."""
        arguments = self.rules[0]._asdict()
        del arguments["selection"]
        if any(rule != self.rules[0] for rule in self.rules):
            arguments["keep_window_size"] = [rule.keep_window_size for rule in self.rules]
        return arguments

    def as_dict(self) -> dict:
        """Returns numbers, strings and lists, for JSON. Raises ValueError for late scores of keys that compete early."""
        rule = self.rules[0]
        if self.late and rule.delay() < 2:
            raise ValueError(
                f"late: got True with recent_window={rule.recent_window} and recent_competes={rule.recent_competes}, expected "
                "recent_window of 2 or more, and False: a key has no score before the token after it"
            )
        stored = self.rule_arguments() | self._asdict()
        del stored["rules"]
        return {name: _as_lists(value) for name, value in stored.items()}

    @classmethod
    def from_dict(cls, stored: dict) -> LearnedScores:
        parts = {name: value for name, value in stored.items() if name in SelectionRule._fields}
        layers = tuple(stored["layers"])
        rules = make_rules(len(layers), parts.pop("keep_window_size"), parts)
        newer = {name: stored[name] for name in ("late", "first_logit") if name in stored}
        return cls(rules, stored["scorer"], layers, stored["dense_prefill"], **newer)

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LearnedScores | None:
        stored = getattr(config, CONFIG_NAME, None)
        return None if stored is None else cls.from_dict(stored)


def _as_lists(value: object) -> object:
    return list(map(_as_lists, value)) if isinstance(value, (list, tuple)) else value


def make_rules(
    layers: int,
    keep_window_size: int | Sequence[int] | Sequence[Sequence[int]] | None,
    rule: RuleParts,
) -> tuple[SelectionRule, ...]:
    """Makes the rule of each layer.

    keep_window_size: of all layers, or a list with one entry, a list of numbers for its key heads, for each layer.
    rule: the other parts.
    """
    windows = keep_window_size
    nested = isinstance(windows, Sequence) and not isinstance(windows, (str, bytes))
    nested = nested and any(isinstance(w, Sequence) for w in windows)
    if not nested:
        return (_make_rule(windows, rule),) * layers
    if len(windows) != layers:
        raise ValueError(
            f"keep_window_size: got lists for {len(windows)} layers, expected {layers}: one for each layer with scores"
        )
    return tuple(_make_rule(w, rule) for w in windows)


def _make_rule(keep_window_size: int | Sequence[int] | None, parts: RuleParts) -> SelectionRule:
    rule = SelectionRule.of_keywords(keep_window_size, parts).checked_per_query()
    if not rule.hides_keys():
        raise ValueError(
            "keep_window_size: got None without score_threshold, so that every key is visible; expected one of them"
        )
    if rule.keep_window_size is not None and rule.place_count() < 1:
        raise ValueError(
            f"keep_window_size: got {keep_window_size} without recent_window and sink_tokens, so that no key is visible; "
            "expected 1 or more, or one of them"
        )
    return rule


def rules_of(config: PretrainedConfig) -> list[SelectionRule]:
    """Returns the rules of a model whose layers score their keys (Doge). Raises if no cache can follow them."""
    if getattr(config, "sliding_window", None) is not None:
        raise ValueError(
            f"config.sliding_window: got {config.sliding_window}, expected None: a key that leaves the window makes place for "
            "others, which would have been evicted; such a model takes a cache of all keys (transformers' DynamicCache)"
        )
    layers = [config]
    if hasattr(config, "num_hidden_layers"):
        layers = getattr(config, "per_layer_config", None) or layers * config.num_hidden_layers
    return [_rule_of(layer, type(config).__name__) for layer in layers]


def _rule_of(layer: PretrainedConfig, name: str) -> SelectionRule:
    parts = {
        part: getattr(layer, part, None) for part in SelectionRule._fields if part != "selection"
    }
    if parts["keep_window_size"] is None:
        raise ValueError(
            f"config: got {name} without keep_window_size, expected that of a model with dynamic masks (Doge) or learned scores"
        )
    rule = SelectionRule(**{part: value for part, value in parts.items() if value is not None})
    try:
        return rule.checked_cache_rule()
    except (TypeError, ValueError) as error:
        raise type(error)(f"config.{error}") from None


def head_dims_of(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the head dimensions of keys and values. With latent attention `head_dim` is that of rotated columns."""
    head_dim = getattr(config, "head_dim", None)
    if getattr(config, "kv_lora_rank", None):
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return head_dim, getattr(config, "v_head_dim", None) or head_dim
