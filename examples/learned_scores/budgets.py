"""Measures the cost of a budget of keys: loss and pass keys of a model that keeps ever fewer keys, by learned and by other scores."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from flash_dmattn.integrations.transformers import (
    add_learned_scores,
    load_scores,
    remove_learned_scores,
)

from .text import DIGITS

SINKS = 2  # sinks of every method
UNTRAINED = ("streaming", "key_norm", "random")
_TOKENS = 4096  # tokens per batch, whose logits must fit into memory


class Quality(TypedDict):
    loss: float  # nats per byte or token of text, without the answers
    pass_keys: float  # share of right digits


def rule_of(method: str, budget: int, learned_by: str = "hidden") -> dict:
    """Returns the arguments of add_learned_scores with which a query sees `budget` keys. learned_by: the scorer of the method "learned"."""
    if method == "streaming":  # sinks and recent keys (arXiv 2309.17453)
        return {"keep_window_size": 0, "recent_window": budget - SINKS, "sink_tokens": SINKS, "scorer": "random"}  # fmt: skip
    recent = budget // 2
    scorer = learned_by if method == "learned" else method
    return {
        "keep_window_size": budget - recent - SINKS, "recent_window": recent, "sink_tokens": SINKS, "scorer": scorer,
    }  # fmt: skip


def autocast(model: PreTrainedModel) -> torch.autocast:
    """Returns the precision of training, which is bf16 on a GPU, because its attention has no float32."""
    device = model.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def quality_without_training(
    model: PreTrainedModel, texts: Tensor, budgets: list[int], digits: int = DIGITS
) -> dict[str, dict[int, Quality]]:
    """Returns a model's quality by budget, with all keys and with the methods that need no training.

    digits: how many tokens at the end of a text are the answer.
    """
    qualities = {"dense": {texts.shape[1]: quality_of(model, texts, digits)}}
    for method in UNTRAINED:
        qualities[method] = {
            b: quality_of_rule(model, texts, rule_of(method, b), digits) for b in budgets
        }
    return qualities


def quality_of_scores(
    model: PreTrainedModel,
    texts: Tensor,
    budgets: list[int],
    scores: Path,
    digits: int = DIGITS,
    scorer: str = "hidden",
) -> dict[int, Quality]:
    """Returns the same result as quality_without_training for the scores that save_scores wrote into a folder."""
    return {
        b: quality_of_rule(model, texts, rule_of("learned", b, scorer), digits, scores)
        for b in budgets
    }


def quality_of_rule(
    model: PreTrainedModel, texts: Tensor, rule: dict, digits: int, scores: Path | None = None
) -> Quality:
    add_learned_scores(model, **rule)
    if scores is not None:
        load_scores(model, scores)
    torch.manual_seed(0)
    quality = quality_of(model, texts, digits)
    remove_learned_scores(model)
    return quality


@torch.no_grad()
def quality_of(model: PreTrainedModel, texts: Tensor, digits: int) -> Quality:
    model.eval()
    losses, right = [], []
    for ids in texts.split(max(1, _TOKENS // texts.shape[1])):
        ids = ids.to(model.device)
        with autocast(model):
            logits = model(ids, use_cache=False).logits[:, :-1].float()
        each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        losses.append(each[:, :-digits].flatten())
        right.append((logits.argmax(-1) == ids[:, 1:])[:, -digits:].float().flatten())
    return Quality(loss=torch.cat(losses).mean().item(), pass_keys=torch.cat(right).mean().item())
