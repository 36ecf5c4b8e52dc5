"""The pictures of the demo."""

from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402

from ..integrations.transformers import doge_scores  # noqa: E402
from ..key_intervals import KeyIntervals, select_key_intervals  # noqa: E402
from .cost import Cost  # noqa: E402
from .token_cost import TokenCost  # noqa: E402
from .training import precision_of  # noqa: E402

_OURS, _EAGER, _HELD_OUT = "#1f5fa8", "#c8553d", "#2f7d4f"
_KEPT, _DROPPED = torch.tensor([31, 95, 168]) / 255, torch.tensor([226, 230, 236]) / 255
_IMAGE_PIXELS = 512

plt.rcParams.update(
    {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
)


def draw_loss(path: Path, training: list[float], before: float, after: float) -> None:
    """Bits per byte of every step's batch, and of the held-out files before and after."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(training) + 1), training, color=_OURS, lw=1.2, label="training batch")
    axes.plot(
        [0, len(training)], [before, after], "o", color=_HELD_OUT, ms=7, label="held-out files"
    )
    for x, y, align in ((0, before, "left"), (len(training), after, "right")):
        axes.annotate(f"{y:.2f}", (x, y), (0, 8), textcoords="offset points", ha=align)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_title("A byte-level Doge model on the Python standard library")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_keys(path: Path, model: torch.nn.Module, ids: torch.Tensor) -> None:
    """The keys that each query of a sequence [N] kept: one column per layer, one row per key head."""
    kept = kept_keys(model, ids)
    heads, length = kept[0].intervals.shape[1:3]
    figure, grid = plt.subplots(
        heads, len(kept), figsize=(2.6 * len(kept) + 0.6, 2.8 * heads + 0.6), sharex=True,
        sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for layer, intervals in enumerate(kept):
        for head in range(heads):
            one_head = KeyIntervals(
                intervals.intervals[:, head : head + 1], length, intervals.bound
            )
            axes = grid[head][layer]
            axes.imshow(_shade(one_head.to_mask()[0, 0]).numpy(), extent=(0, length, length, 0))
            axes.grid(False)
            axes.set_title(f"layer {layer + 1}, key head {head + 1}", fontsize=10)
    figure.supxlabel("key")
    figure.supylabel("query")
    figure.suptitle("Kept keys (blue) among those a query may see (grey)", fontsize=12)
    _save(figure, path)


def draw_cost(path: Path, costs: dict[str, list[Cost]], window: int) -> None:
    """Time and peak memory of a training step of one layer, against the length of the sequence."""
    labels = {"eager": "eager, N × N", "flash_dmattn": f"flash_dmattn, w = {window}"}
    figure, (left, right) = _draw_by_length(costs, labels, 1.0, "sequence length N")
    left.set(ylabel="seconds", title="forward + backward, one layer")
    right.set(title="peak memory")
    _save(figure, path)


def draw_token_cost(path: Path, costs: dict[str, list[TokenCost]], window: int) -> None:
    """Time of a generated token and memory of its cache, against the length of the text before it."""
    labels = {"eager": "eager, all keys", "flash_dmattn": f"flash_dmattn, w = {window} keys"}
    figure, (left, right) = _draw_by_length(costs, labels, 1e3, "tokens before")
    left.set(ylabel="milliseconds", title="one token")
    right.set(title="KV cache")
    _save(figure, path)


def _draw_by_length(
    costs: dict[str, list], labels: dict[str, str], per_second: float, length: str
) -> tuple[plt.Figure, tuple[plt.Axes, plt.Axes]]:
    """Time on the left, memory on the right; `length` names the axis that both share."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for implementation, points in costs.items():
        color = {"eager": _EAGER, "flash_dmattn": _OURS}[implementation]
        lengths = [p.length for p in points]
        style = {"marker": "o", "ms": 4, "color": color, "label": labels[implementation]}
        left.plot(lengths, [per_second * p.seconds for p in points], **style)
        right.plot(lengths, [max(p.mebibytes, 1e-3) for p in points], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(length)
    right.set_ylabel("MiB")
    left.legend(frameon=False)
    return figure, (left, right)


@torch.no_grad()
def kept_keys(model: torch.nn.Module, ids: torch.Tensor) -> list[KeyIntervals]:
    """The choice of every layer for a sequence [N]: intervals [1, Hkv, N, 2] each."""
    kept = []

    def choose(attention, step: torch.Tensor) -> None:
        scores = doge_scores(attention, step)
        kept.append(select_key_intervals(scores.cpu(), attention.keep_window_size))

    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [
        attention.dt_proj.register_forward_hook(
            lambda _, __, step, attention=attention: choose(attention, step)
        )
        for attention in layers
    ]
    try:
        with precision_of(ids.device):
            model.eval()(ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def _shade(mask: torch.Tensor) -> torch.Tensor:
    """bool [N, N] -> colours [pixels, pixels, 3]: the share of kept, dropped and future keys."""
    step = max(1, len(mask) // _IMAGE_PIXELS)

    def share(pairs: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(pairs[None].float(), step)[0, :, :, None]

    past = share(torch.ones_like(mask).tril())
    kept = share(mask)
    return 1 - past * (1 - _DROPPED) + kept * (_KEPT - _DROPPED)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
