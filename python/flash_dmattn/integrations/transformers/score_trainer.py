"""Trains learned scores with transformers' Trainer, on one device or with DDP or FSDP2. Needs accelerate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Trainer

from ...budgets import evaluating
from .compat import CHECKPOINTS_REENTRANT
from .learned_scores.add import set_score_phase
from .learned_scores.budgets import budget_loss
from .learned_scores.training import ScoreSchedule, divergence


class ScoreTrainer(Trainer):
    """Trains the scores that `add_learned_scores` added, against the model without them, or the whole model by its own loss.

    schedule: the phases and the budget term, which closes gates until `share` of the old keys is kept. Without it no
        gate closes.
    distils: whether the loss is the divergence from a teacher. False: the model's own loss, for `labels`.
    teacher: a copy of the model before scores were added, if the base is trained too. None: the model with its scores
        off, for a frozen base (see `freeze_all_but_scores`).
    Other arguments are those of transformers' Trainer. Reentrant checkpointing is refused: the budget term would have no
    gradient.
    """

    def __init__(
        self,
        *args,
        schedule: ScoreSchedule,
        distils: bool = True,
        teacher: nn.Module | None = None,
        **kwargs,
    ):
        if not isinstance(schedule, ScoreSchedule):
            raise TypeError(f"schedule: got {type(schedule).__name__}, expected a ScoreSchedule")
        super().__init__(*args, **kwargs)
        self.schedule, self.distils, self.teacher = schedule, distils, teacher
        if teacher is not None:
            if not distils:
                raise ValueError("teacher: got a model with distils=False, expected None")
            teacher.to(self.args.device).eval()
        self.model_accepts_loss_kwargs = False  # losses are means, which accumulated steps divide
        checkpointing = self.args.gradient_checkpointing_kwargs or {}
        is_reentrant = checkpointing.get("use_reentrant", CHECKPOINTS_REENTRANT)
        if self.args.gradient_checkpointing and is_reentrant:
            raise ValueError(
                "gradient_checkpointing_kwargs: got use_reentrant=True, expected False: the budget term would have no gradient"
            )
        self._parts: dict[str, float] = {}  # parts of the last step's loss, for the log

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ) -> Tensor | tuple[Tensor, object]:
        base, mask = self.accelerator.unwrap_model(model), inputs.get("attention_mask")
        progress = self.state.global_step / max(1, self.state.max_steps)
        phase = self.schedule.phase(progress)
        unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
        if self.distils:
            set_score_phase(base, "off")
            with evaluating(teacher := self.teacher or model):
                expected = teacher(**unlabelled).logits
        set_score_phase(base, phase, self.schedule.temperature if phase == "soft" else None)
        outputs = model(**(unlabelled if self.distils else inputs))
        loss = outputs.loss
        if self.distils:
            loss = divergence(outputs.logits, expected, mask)
        elif loss is None:
            raise ValueError(
                "train_dataset: got texts without labels, expected labels with distils=False"
            )
        self._parts = {"own_loss": loss.item(), "hard": float(phase == "hard")}
        if phase == "soft" and torch.is_grad_enabled():
            target, sampled = self.schedule.target(progress), self.schedule.sampled
            excess = budget_loss(base, target, sampled=sampled, mask=mask)
            self._parts["excess_share"] = excess.item()
            loss = loss + self.schedule.weight * excess
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        super().log({**logs, **self._parts}, *args, **kwargs)
