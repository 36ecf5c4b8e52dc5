"""The rule of a model's learned scores, and its form in a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers.configuration_utils import PretrainedConfig

from ...keys.rule import KeySelection

CONFIG_NAME = "learned_scores"  # the attribute of a config


class LearnedScores(NamedTuple):
    """The part of a config about learned scores. The parameters of the scorers are the model's."""

    rule: KeySelection
    scorer: str  # "custom" for a function or module
    layers: tuple[int, ...]  # the layers that have scores
    dense_prefill: bool = False

    def as_dict(self) -> dict:
        """Numbers, strings and lists, for JSON."""
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
    def of_dict(cls, stored: dict) -> LearnedScores:
        rule = {name: value for name, value in stored.items() if name in KeySelection._fields}
        rule = KeySelection(**rule).checked()
        return cls(rule, stored["scorer"], tuple(stored["layers"]), stored["dense_prefill"])

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> LearnedScores | None:
        stored = getattr(config, CONFIG_NAME, None)
        return None if stored is None else cls.of_dict(stored)


def make_rule(
    keep_window_size: int | Sequence[int] | None,
    recent_window: int,
    recent_competes: bool,
    sink_tokens: int,
    score_threshold: float | None,
) -> KeySelection:
    rule = KeySelection(
        keep_window_size, "per_query", recent_window, recent_competes, sink_tokens, score_threshold
    ).checked()
    if not rule.limits():
        raise ValueError(
            "keep_window_size: got None without score_threshold, so that every key is visible; expected one of them"
        )
    return rule
