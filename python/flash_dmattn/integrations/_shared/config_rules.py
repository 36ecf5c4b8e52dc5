"""The rules of a model's layers in its config, and the settings of its learned scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers.configuration_utils import PretrainedConfig

from ...keys.rule import SelectionRule

CONFIG_NAME = "learned_scores"  # the attribute of a config


class LearnedScores(NamedTuple):
    """The part of a config that describes learned scores. The parameters of the scorers belong to the model."""

    rule: SelectionRule
    scorer: str  # "custom" for a function or module
    layers: tuple[int, ...]  # the layers that have scores
    dense_prefill: bool = False

    def as_dict(self) -> dict:
        """Returns numbers, strings and lists, for JSON."""
        rule = self.rule._asdict()
        del rule["selection"]
        if isinstance(rule["keep_window_size"], tuple):
            rule["keep_window_size"] = list(rule["keep_window_size"])
        others = {
            "scorer": self.scorer,
            "layers": list(self.layers),
            "dense_prefill": self.dense_prefill,
        }
        return rule | others

    @classmethod
    def from_dict(cls, stored: dict) -> LearnedScores:
        rule = {name: value for name, value in stored.items() if name in SelectionRule._fields}
        rule = SelectionRule(**rule).checked_rule()
        return cls(rule, stored["scorer"], tuple(stored["layers"]), stored["dense_prefill"])

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LearnedScores | None:
        stored = getattr(config, CONFIG_NAME, None)
        return None if stored is None else cls.from_dict(stored)


def make_rule(
    keep_window_size: int | Sequence[int] | None,
    recent_window: int,
    recent_competes: bool,
    sink_tokens: int,
    score_threshold: float | None,
) -> SelectionRule:
    rule = SelectionRule(
        keep_window_size, "per_query", recent_window, recent_competes, sink_tokens, score_threshold
    ).checked_rule()
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
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
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
