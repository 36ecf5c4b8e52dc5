"""Modules that give the keys of one attention layer their scores."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...scores import ScoreProjection, make_scores, project_scores, scores_of_heads

FIRST_LOGIT = 3.0  # of a gate, as in make_scores: its gradient is large enough to train
_HIDDEN_FEATURES = 64  # the width of the MLP's hidden layer

Scorer = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_scorer(scorer: object) -> None:
    if isinstance(scorer, str) and scorer in NAMES:
        return
    if not callable(scorer):
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"scorer: got {scorer!r}, expected one of {names}, a function or a module")
    function = scorer.forward if isinstance(scorer, nn.Module) else scorer
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise TypeError(
            f"scorer: got a function of {signature}, expected one of (hidden, key, value)"
        ) from error


def make_scorer(
    scorer: str | Scorer,
    hidden_size: int,
    heads: int,
    value_size: int,
    device: torch.device,
    first_logit: float = FIRST_LOGIT,
) -> LayerScorer:
    """Makes one layer's scorer: hidden [B, S, hidden_size], key and value [B, S, heads, D] -> scores [B, heads, S].

    value_size: the number of features in the values of all heads. first_logit: of a `GateScorer`.
    """
    check_scorer(scorer)
    if isinstance(scorer, LayerScorer):
        return copy.deepcopy(scorer).to(device)
    if isinstance(scorer, nn.Module):
        return FunctionScorer(copy.deepcopy(scorer).to(device))
    if callable(scorer):
        return FunctionScorer(scorer)
    options = {"device": device, "dtype": torch.float32}
    if scorer == "hidden":
        return GateScorer("hidden", make_scores(hidden_size, heads, **options), first_logit)
    if scorer == "value":
        return GateScorer("value", make_scores(value_size, heads, **options), first_logit)
    if scorer == "mlp":
        return GateScorer("hidden", _MlpGates(hidden_size, heads, options), first_logit)
    return FunctionScorer(_BASELINES[scorer], is_gate=False)


class _MlpGates(nn.Module):
    """Log gates [B, heads, S] of hidden [B, S, hidden_size], by two layers."""

    def __init__(self, hidden_size: int, heads: int, options: dict):
        super().__init__()
        self.function = nn.ModuleDict(
            {
                "0": ScoreProjection(hidden_size, _HIDDEN_FEATURES, **options),
                "2": ScoreProjection(_HIDDEN_FEATURES, heads, **options),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        first, last = self.function.values()
        return project_scores(last, project_scores(first, hidden, "gelu").mT, "gate")


class LayerScorer(nn.Module):
    """The scorer of one layer: its forward takes (hidden, key, value), and returns float32 [B, heads, S].

    is_gate: whether scores are log gates, 0 or less. first_score: what the phase "soft" subtracts from them; the score of every
    key before training, if there is one.
    """

    is_gate = True
    first_score = 0.0

    def attach(self, layer: nn.Module) -> None:
        """Prepares a layer for a scorer that reads more than the arguments of its forward."""

    def detach(self) -> None:
        """Undoes `attach`."""

    def clear_query(self, query: Tensor) -> Tensor:
        """Returns a query [B, Hq, S, D] without the channels that are scores."""
        return query


class GateScorer(LayerScorer):
    """Computes log gates, log sigmoid(z) <= 0, from the layer's input or from its values.

    The weight of the last projection begins at 0 and z at first_logit, so every key begins with the same score. A bias that all
    keys share changes nothing in a softmax, so attention with scores relative to `first_score` begins as attention without
    scores.
    """

    def __init__(self, source: str, scores: nn.Module, first_logit: float):
        super().__init__()
        self.source, self.scores = source, scores
        self.first_score = min(first_logit, 0.0) - math.log1p(math.exp(-abs(first_logit)))
        last = [module for module in scores.modules() if isinstance(module, nn.Linear)][-1]
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, first_logit)

    def extra_repr(self) -> str:
        return f"source={self.source!r}"

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.scores(hidden if self.source == "hidden" else value.flatten(2))


class FunctionScorer(LayerScorer):
    """Converts the scores [B, S, heads] of a function or module to float32 [B, heads, S]."""

    def __init__(self, function: Scorer, is_gate: bool = True):
        super().__init__()
        self.function, self.is_gate = function, is_gate

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scores_of_heads(self.function(hidden, key, value), "scorer", tuple(key.shape[:3]))


def key_norm_scores(hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns minus the length of each key, so that long keys leave first (arXiv 2406.11430)."""
    return -torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)


def random_scores(hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.rand(key.shape[:3], device=key.device)


_BASELINES = {"key_norm": key_norm_scores, "random": random_scores}
TRAINABLE = ("hidden", "mlp", "value")
NAMES = (*TRAINABLE, *_BASELINES)
