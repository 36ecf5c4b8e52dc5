"""The learning rate of the small trainings."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR


def one_cycle(optimizer: Optimizer, rate: float, steps: int, rise: float) -> OneCycleLR:
    """Returns a schedule that rises to `rate` over the share `rise` of the steps, at least two steps, and falls over the others."""
    total = max(steps, 3)  # the fewest steps with a rise and a fall
    return OneCycleLR(optimizer, rate, total, pct_start=max(rise, 2 / total))
