"""Training of learned scores on transformers' Trainer, so on one device, DDP or FSDP2 alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from flash_dmattn.integrations.transformers import set_score_phase


@dataclass(frozen=True)
class Schedule:
    """The phases of a training, as shares of its steps."""

    soft: float = 0.75  # the rest is hard
    narrowing: float = 0.5  # until then the target of the budget falls, from 1
    share: float = 0.125  # of old keys that gates are to keep at the end
    weight: float = 4.0  # of the budget's term in the loss
    temperature: float | None = 0.1  # of stochastic gates; None: gates as they are

    def phase(self, progress: float) -> str:
        return "soft" if progress < self.soft else "hard"

    def target(self, progress: float) -> float:
        return self.share ** min(1.0, progress / self.narrowing)


RECIPES = {
    "learned": Schedule(),
    "without_budget": Schedule(weight=0.0),  # no term asks a gate to close
    "without_noise": Schedule(temperature=None),
    "hard_from_the_first": Schedule(soft=0.0),
    "soft_to_the_last": Schedule(soft=1.0),
}


class ScoreTrainer(Trainer):
    """Trains the scores of a model by the model without them, or the whole model by its own loss.

    schedule: of phases and budget. distils: whether the loss is the divergence from the model with its scores off; else it
        is the model's own, for `labels`. The term of the budget is added to either in the soft phase.
    """

    def __init__(self, *args, schedule: Schedule, distils: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.schedule, self.distils = schedule, distils
        self.model_accepts_loss_kwargs = False  # losses are means, which accumulated steps divide
        self.parts: dict[str, float] = {}  # of the last step's loss, for the log

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ) -> Tensor | tuple[Tensor, object]:
        base = self.accelerator.unwrap_model(model)
        progress = self.state.global_step / max(1, self.state.max_steps)
        phase = self.schedule.phase(progress)
        teacher = None
        if self.distils:
            with torch.no_grad():
                set_score_phase(base, "off")
                teacher = model(**without_labels(inputs)).logits
        set_score_phase(base, phase)
        window = rule_of(base).recent_window
        temperature = self.schedule.temperature if phase == "soft" else None
        with scores_of_layers(base, temperature) as scores:
            if self.distils:
                outputs = model(**without_labels(inputs))
                loss = divergence(outputs.logits, teacher, inputs.get("attention_mask"))
            else:
                outputs = model(**inputs)
                loss = outputs.loss
        self.parts = {"own_loss": loss.item(), "hard": float(phase == "hard")}
        if phase == "soft":
            share = share_of_old_keys(scores, window)
            over = (share - self.schedule.target(progress)).clamp(min=0)
            self.parts["kept_share"] = share.mean().item()
            loss = loss + self.schedule.weight * over.square().mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        super().log({**logs, **self.parts}, *args, **kwargs)


def freeze_all_but_scores(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".scorer." in name)


def without_labels(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if name != "labels"}


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """KL(teacher, student) of the next token in nats, logits [B, S, V], a mean over the tokens of mask [B, S]."""
    student, teacher = (logits.float().log_softmax(-1) for logits in (student, teacher))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return each.mean() if mask is None else (each * mask).sum() / mask.sum()


@contextmanager
def scores_of_layers(model: nn.Module, temperature: float | None = None) -> Iterator[list[Tensor]]:
    """Within it, the list fills with the scores [B, Hkv, S] of the layers that run.

    temperature: layers get `stochastic_gates` instead.
    """
    found: list[Tensor] = []

    def remember(scorer: nn.Module, args: tuple, scores: Tensor) -> Tensor | None:
        found.append(scores)
        return None if temperature is None else stochastic_gates(scores, temperature)

    scorers = [m for name, m in model.named_modules() if name.endswith(".scorer")]
    hooks = [scorer.register_forward_hook(remember) for scorer in scorers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def stochastic_gates(scores: Tensor, temperature: float) -> Tensor:
    """Log gates log sigmoid(z) -> log sigmoid((z + noise) / temperature), open with the probability sigmoid(z).

    A gate of 0.1 takes little from a key whose attention score stands out, so that its closing would cost nothing and its
    score would learn nothing. A closed gate of a low temperature takes the key out, as the hard phase does
    (the concrete distribution, arXiv 1611.00712).
    """
    logits = scores - torch.log(-torch.expm1(scores.clamp(max=-1e-6)))
    uniform = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
    return F.logsigmoid((logits + uniform.logit()) / temperature)


def share_of_old_keys(scores: list[Tensor], recent_window: int) -> Tensor:
    """The mean gate of the keys that become old, [layers, Hkv]."""
    ends = [layer.shape[2] - recent_window for layer in scores]
    return torch.stack(
        [layer[..., :end].exp().mean((0, 2)) for layer, end in zip(scores, ends, strict=True)]
    )


def rule_of(model: nn.Module):
    return next(m.score_rule for m in model.modules() if hasattr(m, "score_rule"))
