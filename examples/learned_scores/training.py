"""Trains learned scores with transformers' Trainer, on one device or with DDP or FSDP2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from flash_dmattn.integrations.transformers import set_score_phase


@dataclass(frozen=True)
class Schedule:
    """The phases of a training, as shares of its steps."""

    soft: float = 0.75  # share of steps in the soft phase; the rest is hard
    narrowing: float = 0.5  # share of steps over which the budget's target falls from 1
    share: float = 0.125  # target share of old keys that gates keep at the end
    weight: float = 4.0  # weight of the budget's term in the loss
    temperature: float | None = 0.1  # of stochastic gates; None: plain gates

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
        checkpointing = self.args.gradient_checkpointing_kwargs or {}
        if self.args.gradient_checkpointing and checkpointing.get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_kwargs: got use_reentrant=True, expected False: the term of the budget would have no gradient"
            )
        self.watched: WatchedScores | None = None  # scores of the last step
        self.parts: dict[str, float] = {}  # parts of the last step's loss, for the log

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
        self._watch(base, self.schedule.temperature if phase == "soft" else None)
        if self.distils:
            outputs = model(**without_labels(inputs))
            loss = divergence(outputs.logits, teacher, inputs.get("attention_mask"))
        else:
            outputs = model(**inputs)
            loss = outputs.loss
        scores = self.watched.end_forward()
        self.parts = {"own_loss": loss.item(), "hard": float(phase == "hard")}
        if phase == "soft":
            share = share_of_old_keys(scores, window)
            over = (share - self.schedule.target(progress)).clamp(min=0)
            self.parts["kept_share"] = share.mean().item()
            loss = loss + self.schedule.weight * over.square().mean()
        if not model.training:  # there is no backward pass
            self._watch(None)
        return (loss, outputs) if return_outputs else loss

    def _watch(self, model: nn.Module | None, temperature: float | None = None) -> None:
        """Watches the scores of a model until the next call, because checkpointed layers run again in the backward pass."""
        if self.watched is not None:
            self.watched.remove()
        self.watched = None if model is None else WatchedScores(model, temperature)

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            self._watch(None)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        super().log({**logs, **self.parts}, *args, **kwargs)


def freeze_all_but_scores(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".scorer." in name)


def without_labels(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if name != "labels"}


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Returns KL(teacher, student) of the next token in nats, logits [B, S, V], a mean over the tokens of mask [B, S]."""
    student, teacher = (logits.float().log_softmax(-1) for logits in (student, teacher))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return each.mean() if mask is None else (each * mask).sum() / mask.sum()


class WatchedScores:
    """Records the scores [B, Hkv, S] of a model's layers in a forward pass.

    temperature: if given, layers get `stochastic_gates` instead of their scores, in every run until `remove`.
    """

    def __init__(self, model: nn.Module, temperature: float | None):
        self.temperature, self.is_forward = temperature, True
        self.scores: list[Tensor] = []
        scorers = [m for name, m in model.named_modules() if name.endswith(".scorer")]
        self.hooks = [scorer.register_forward_hook(self._see) for scorer in scorers]

    def _see(self, scorer: nn.Module, args: tuple, scores: Tensor) -> Tensor | None:
        if self.is_forward:
            self.scores.append(scores)
        return None if self.temperature is None else stochastic_gates(scores, self.temperature)

    def end_forward(self) -> list[Tensor]:
        """Returns the scores of all layers in order."""
        self.is_forward = False
        return self.scores

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.scores = []


def stochastic_gates(scores: Tensor, temperature: float) -> Tensor:
    """Samples log gates: log sigmoid(z) -> log sigmoid((z + noise) / temperature), open with the probability sigmoid(z).

    A gate of 0.1 takes little from a key whose attention score stands out, so that its closing would cost nothing and its
    score would learn nothing. A closed gate of a low temperature takes the key out, as the hard phase does
    (the concrete distribution, arXiv 1611.00712).
    """
    logits = scores - torch.log(-torch.expm1(scores.clamp(max=-1e-6)))
    uniform = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
    return F.logsigmoid((logits + uniform.logit()) / temperature)


def share_of_old_keys(scores: list[Tensor], recent_window: int) -> Tensor:
    """Returns the mean gate of the keys that become old, [layers, Hkv]."""
    ends = [layer.shape[2] - recent_window for layer in scores]
    return torch.stack(
        [layer[..., :end].exp().mean((0, 2)) for layer, end in zip(scores, ends, strict=True)]
    )


def rule_of(model: nn.Module):
    return next(m.score_rule for m in model.modules() if hasattr(m, "score_rule"))
