"""The learning rate of the small trainings."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR


def one_cycle(optimizer: Optimizer, rate: float, steps: int, rise: float) -> OneCycleLR:
    """A schedule that rises to `rate` in the share `rise` of the steps, two of them at least, and falls in the others."""
    total = max(steps, 3)  # a rise and a fall
    return OneCycleLR(optimizer, rate, total, pct_start=max(rise, 2 / total))
