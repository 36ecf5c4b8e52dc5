"""Trains learned scores with transformers' Trainer, on one device or with DDP or FSDP2. Needs accelerate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from .learned_scores.add import set_score_phase


@dataclass(frozen=True)
class ScoreSchedule:
    """The phases of a training and its budget term.

    soft: the share of steps in the soft phase; the rest is hard.
    narrowing: the share of steps over which the budget's target falls from 1.
    share: the target share of old keys that gates keep at the end.
    weight: of the budget term in the loss.
    temperature: of `stochastic_gates` in the soft phase; None: gates are not sampled.
    """

    soft: float = 0.75
    narrowing: float = 0.5
    share: float = 0.125
    weight: float = 4.0
    temperature: float | None = 0.1

    def phase(self, progress: float) -> str:
        return "soft" if progress < self.soft else "hard"

    def target(self, progress: float) -> float:
        return self.share ** min(1.0, progress / self.narrowing)


class ScoreTrainer(Trainer):
    """Trains the scores that `add_learned_scores` added, against the model without them, or the whole model by its own loss.

    schedule: the phases and the budget term, which closes gates until `share` of the old keys is kept. Without it no
        gate closes.
    distils: whether the loss is the divergence from the model with its scores off, for a frozen base (see
        `freeze_all_but_scores`). False: the model's own loss, for `labels`.
    Other arguments are those of transformers' Trainer. Reentrant checkpointing is refused: the budget term would have no
    gradient.
    """

    def __init__(self, *args, schedule: ScoreSchedule, distils: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.schedule, self.distils = schedule, distils
        self.model_accepts_loss_kwargs = False  # losses are means, which accumulated steps divide
        checkpointing = self.args.gradient_checkpointing_kwargs or {}
        if self.args.gradient_checkpointing and checkpointing.get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_kwargs: got use_reentrant=True, expected False: the budget term would have no gradient"
            )
        self._watched: _WatchedScores | None = None  # scores of the last step
        self._parts: dict[str, float] = {}  # parts of the last step's loss, for the log

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ) -> Tensor | tuple[Tensor, object]:
        base = self.accelerator.unwrap_model(model)
        progress = self.state.global_step / max(1, self.state.max_steps)
        phase = self.schedule.phase(progress)
        unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
        if self.distils:
            with torch.no_grad():
                set_score_phase(base, "off")
                teacher = model(**unlabelled).logits
        set_score_phase(base, phase)
        self._watch(base, self.schedule.temperature if phase == "soft" else None)
        outputs = model(**(unlabelled if self.distils else inputs))
        loss = outputs.loss
        if self.distils:
            loss = divergence(outputs.logits, teacher, inputs.get("attention_mask"))
        scores = self._watched.end_forward()
        self._parts = {"own_loss": loss.item(), "hard": float(phase == "hard")}
        if phase == "soft":
            rule = next(m.score_rule for m in base.modules() if hasattr(m, "score_rule"))
            share = _share_of_old_keys(scores, rule.recent_window)
            over = (share - self.schedule.target(progress)).clamp(min=0)
            self._parts["kept_share"] = share.mean().item()
            loss = loss + self.schedule.weight * over.square().mean()
        if not model.training:  # there is no backward pass
            self._watch(None)
        return (loss, outputs) if return_outputs else loss

    def _watch(self, model: nn.Module | None, temperature: float | None = None) -> None:
        """Watches the scores of a model until the next call, because checkpointed layers run again in the backward pass."""
        if self._watched is not None:
            self._watched.remove()
        self._watched = None if model is None else _WatchedScores(model, temperature)

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            self._watch(None)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        super().log({**logs, **self._parts}, *args, **kwargs)


def freeze_all_but_scores(model: nn.Module) -> None:
    """Makes the scores' parameters the only ones that require a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".scorer." in name)


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mean KL(teacher, student) of the next token in nats.

    student, teacher: logits [B, S, V]. mask: the tokens of the mean, [B, S]; None: all.
    """
    student, teacher = (logits.float().log_softmax(-1) for logits in (student, teacher))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return each.mean() if mask is None else (each * mask).sum() / mask.sum()


def stochastic_gates(scores: Tensor, temperature: float) -> Tensor:
    """Samples log gates: log sigmoid(z) -> log sigmoid((z + noise) / temperature). A gate is open with probability sigmoid(z).

    If a key's attention score is much larger than the others, a gate of 0.1 hardly changes the result, so that closing it
    would cost nothing and its score would learn nothing. At a low temperature a closed gate removes the key, as the hard
    phase does (the concrete distribution, arXiv 1611.00712).

    scores: log gates, at most 0, of any shape.
    """
    logits = scores - torch.log(-torch.expm1(scores.clamp(max=-1e-6)))
    uniform = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
    return F.logsigmoid((logits + uniform.logit()) / temperature)


class _WatchedScores:
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


def _share_of_old_keys(scores: list[Tensor], recent_window: int) -> Tensor:
    """Returns the mean gate of the keys that become old, [layers, Hkv]."""
    ends = [layer.shape[2] - recent_window for layer in scores]
    return torch.stack(
        [layer[..., :end].exp().mean((0, 2)) for layer, end in zip(scores, ends, strict=True)]
    )
