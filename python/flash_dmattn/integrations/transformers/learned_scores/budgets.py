"""One budget of keys for all heads of a model with learned scores: see `flash_dmattn.budgets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ....budgets import (
    BYTES_OF_SLOT,
    KeyBudgets,
    check_budgets,
    check_division,
    collected_scores,
    divide_scores,
    evaluating,
    listed_texts,
    loss_of_records,
    texts_of_one_length,
)
from ..._shared.config_rules import CONFIG_NAME, LearnedScores, head_dims_of, make_rules
from ..compat import device_of
from ..families import config_of, sizes_of
from .add import scored_layers, set_score_phase
from .layers import late_scores


def budget_loss(
    model: nn.Module,
    target: float,
    *,
    per_head: bool = False,
    sampled: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns max(0, share - target), where share is the mean gate of old keys in the last forward in the phase "soft".

        model.set_score_phase("soft", temperature=0.3)
        loss = divergence(model(ids).logits, teacher) + 4 * budget_loss(model, target=1 / 8)

    The scores are those of that forward: no second one runs. Keys become old when `recent_window` tokens follow them; sinks do
    not count. Of a layer that runs several times the first run counts. Call it once for each forward, before `backward`.

    Args:
        model: prepared by `add_learned_scores`.
        target: the share of old keys that the gates should keep, 0 to 1.
        per_head: whether each head has this target. By default only the mean over all layers and heads has: few heads need many
            keys, and most need few.
        sampled: whether sampled gates count, each as open or closed, over all tokens, and each text has the target (DMS).
        mask: bool [B, S], False for padding. The texts of a packed row count as one.

    Raises:
        ValueError: late scores without `sampled`, `sampled` with `per_head`, or a mask of another shape.
        RuntimeError: there was no forward in the phase "soft" with gradients since the last call.
    """
    layers = scored_layers(model)
    rules = [layer.scoring.rule for layer in layers]
    records = [layer.scoring.record for layer in layers]
    if layers[0].scoring.late and not sampled:
        raise ValueError(f"sampled: got {sampled} with late scores, expected True")
    return loss_of_records(records, rules, target, per_head, sampled, mask)


def divide_budget(
    model: nn.Module,
    texts: Sequence[Tensor],
    mean_keys: float = 512,
    *,
    length: int | None = None,
    least: float = 0.25,
    quantile: float | None = None,
    bound: float = 2.0,
    progress: bool = True,
) -> KeyBudgets:
    """Returns a budget of keys, divided over the layers and heads of a model with trained scores by the scores of sample texts.

        budgets = divide_budget(model, texts, mean_keys=512)
        print(budgets)
        set_key_budgets(model, budgets)
        cache = DynamicMaskCache(model.config)

    Args:
        model: prepared by `add_learned_scores`, on any device. Log gates, as which those of a function or module of your own count,
            are computed in the phase "soft", without sampling; other scores in the phase "hard" with a window as long as the text.
            The phase, the rules and the mode of training come back.
        texts: token ids, each [S] or [1, S] with S >= length; what is longer is cut. A dozen texts of the kind that will be
            served.
        mean_keys: the mean number of keys of a head, sinks and recent keys included.
        length: the number of tokens at which keys are counted; by default that of the shortest text.
        least, quantile, bound: how the numbers of the heads are chosen, see `flash_dmattn.budgets.divide_scores`.
        progress: whether a bar shows the texts.

    Raises:
        ValueError: no texts, a text shorter than length, or a budget that the rule's recent keys and sinks exceed.
        TypeError: texts that are no token ids.
    """
    texts = texts_of_one_length(map(_token_ids, listed_texts(texts)), length)
    layers, scores = scored_layers(model), []
    rule, bytes_of_channel = layers[0].scoring.rule, next(model.parameters()).element_size()
    budget = mean_keys, rule.recent_window, rule.sink_tokens
    options = {"least": least, "quantile": quantile, "bound": bound}
    check_division(texts[0].shape[1], *budget, **options)
    with _all_keys_visible(model, layers, texts[0].shape[1]), evaluating(model):
        for text in tqdm(texts, desc="dividing the budget", disable=not progress):
            with collected_scores([layer.scorer for layer in layers]) as of_text:
                model(input_ids=text.to(device_of(model)), use_cache=False)
            if layers[0].scoring.late:
                of_text = [[late_scores(run) for run in runs] for runs in of_text]
            scores.append(of_text)
    sizes = (sum(head_dims_of(config_of(layer))) * bytes_of_channel for layer in layers)
    return divide_scores(
        scores, *budget, **options, key_bytes=[size + BYTES_OF_SLOT for size in sizes]
    )


def set_key_budgets(model: nn.Module, budgets: KeyBudgets) -> nn.Module:
    """Makes the layers of a model with learned scores follow budgets. They are part of its config and of `save_scores`.

    Returns the same model. Raises ValueError if the budgets are those of another number of layers or heads.
    """
    layers = scored_layers(model)
    check_budgets(budgets, [sizes_of(layer)[1] for layer in layers])
    stored = LearnedScores.from_config(layers[0].config)
    parts = budgets.rule_arguments() | {"recent_competes": layers[0].scoring.rule.recent_competes}
    rules = make_rules(len(layers), parts.pop("keep_window_size"), parts)
    stored = stored._replace(rules=rules).as_dict()
    for layer, rule in zip(layers, rules, strict=True):
        layer.scoring.rule = rule
        setattr(layer.config, CONFIG_NAME, stored)
    return model


def _token_ids(text: object) -> Tensor:
    """Returns ids [1, S] of what torch makes a tensor of integers of."""
    try:
        ids = torch.as_tensor(text)
        torch.iinfo(ids.dtype)  # raises unless it is a dtype of integers
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is None or ids.dim() == 0:
        raise TypeError(f"texts: got a {type(text).__name__}, expected token ids, [S] or [1, S]")
    return ids.long() if ids.dim() > 1 else ids.long()[None]


@contextmanager
def _all_keys_visible(model: nn.Module, layers: list[nn.Module], length: int) -> Iterator[None]:
    """Shows every key: gates in the phase "soft" without sampling, other scores under a rule that hides none."""
    phase, temperature = layers[0].scoring.phase, layers[0].scoring.temperature
    rules = [layer.scoring.rule for layer in layers]
    for layer, rule in zip(layers, rules, strict=True):
        layer.scoring.rule = rule._replace(keep_window_size=length, score_threshold=None)
    are_gates = all(layer.scorer.is_gate for layer in layers)
    set_score_phase(model, "soft" if are_gates else "hard")
    try:
        yield
    finally:
        set_score_phase(model, phase, temperature)
        for layer, rule in zip(layers, rules, strict=True):
            layer.scoring.rule = rule
