"""Parts of a training of learned scores: a schedule, the loss, and the parameters that learn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ...._core.checks import check_shape
from ...._core.numerics import check_number
from ....budgets import check_phase
from .add import scored_layers


@dataclass(frozen=True)
class ScoreSchedule:
    """The phases of a training and its budget term.

    soft: the share of steps in the soft phase; the rest is hard.
    narrowing: the share of steps over which the budget's target falls from 1.
    share: the target share of old keys that gates keep at the end, over all heads together.
    weight: of the budget term in the loss.
    temperature: of the gates that the soft phase samples; None: gates are not sampled.
    by_ratio: whether the target's reciprocal, the compression ratio, grows evenly, instead of the target falling evenly.
    sampled: whether the budget term counts sampled gates, as in `budget_loss`.
    """

    soft: float = 1.0
    narrowing: float = 0.4
    share: float = 0.125
    weight: float = 4.0
    temperature: float | None = 0.3
    by_ratio: bool = False
    sampled: bool = False

    def __post_init__(self):
        ranges = {
            "soft": (0, 1),
            "narrowing": (0, 1),
            "share": (1e-6 if self.by_ratio else 0, 1),
            "weight": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            check_number(getattr(self, name), name)
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(
                    f"{name}: got {value!r}, expected a number from {least:g} to {most:g}"
                )
        check_phase("soft", ("soft",), self.temperature)

    def phase(self, progress: float) -> str:
        """Returns the phase after a share of the steps."""
        return "soft" if progress < self.soft else "hard"

    def target(self, progress: float) -> float:
        """Returns the budget's target after a share of the steps."""
        part = min(1.0, progress / self.narrowing) if self.narrowing else 1.0
        if self.by_ratio:
            return 1 / (1 + (1 / self.share - 1) * part)
        return 1 - (1 - self.share) * part


def freeze_all_but_scores(model: nn.Module) -> list[nn.Parameter]:
    """Makes the scores' parameters the only ones that require a gradient, and returns them.

    Raises ValueError for a model without scores.
    """
    scored_layers(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".scorer." in name)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the mean KL(teacher, student) of the next token in nats.

    student, teacher: logits [B, S, V]. mask: the tokens of the mean, [B, S]; None: all. Raises ValueError for other shapes.
    """
    check_shape(teacher, "teacher", student.shape)
    if mask is not None:
        check_shape(mask, "mask", student.shape[:-1])
    student, teacher = (logits.float().log_softmax(-1) for logits in (student, teacher))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return each.mean() if mask is None else (each * mask).sum() / mask.sum()
