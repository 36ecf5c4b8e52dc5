"""One budget of keys for all layers and heads: the loss that trains it, and its division into a number for each head.

Heads differ: most need a few old keys, some need a thousand. With the same number for each head the first waste memory and the
second lose what they need (docs/quality.md). One threshold for the scores of all heads shows how many keys each head needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._core.checks import check_count, check_shape, check_tensor, resolve_flag
from ._core.numerics import check_number
from .keys.rule import SelectionRule

BYTES_OF_SLOT = 8  # of a key's score and position
SHARE_OF_TEXT = 0.75  # the relative growth of a head's keys with the text from which on they count as a share of it


@dataclass(frozen=True)
class KeyBudgets:
    """The keys that each head of each layer keeps.

    threshold: of all scores; an old key below it is hidden. None: no score hides a key.
    caps: the most old keys of each head, [layers, heads]. The best stay.
    recent_window, sink_tokens: every head also sees these keys, as in KeyRule.
    length: the number of tokens at which the caps were measured.
    means: the mean number of old keys of each head that are among the best of all heads, [layers, heads], for several numbers of
        tokens.
    key_bytes: the memory of one key and its value in one head of each layer, in bytes, in all caches of a layer that runs several
        times.
    """

    threshold: float | None
    caps: tuple[tuple[int, ...], ...]
    recent_window: int = 0
    sink_tokens: int = 0
    length: int = 0
    means: dict[int, list[list[float]]] = field(default_factory=dict, repr=False)
    key_bytes: tuple[int, ...] = ()

    def __post_init__(self):
        if not isinstance(self.caps, Sequence) or not all(
            isinstance(heads, Sequence) for heads in self.caps
        ):
            raise TypeError(
                f"caps: got {type(self.caps).__name__} {self.caps}, expected a list of numbers for each layer"
            )

    def rule_arguments(self) -> dict:
        """Returns the arguments of `add_learned_scores` for these budgets, which say nothing of `recent_competes`."""
        return {
            "keep_window_size": [list(heads) for heads in self.caps],
            "recent_window": self.recent_window,
            "sink_tokens": self.sink_tokens,
            "score_threshold": self.threshold,
        }

    def slots(self) -> list[list[int]]:
        """Returns the most keys that each head holds, [layers, heads]."""
        always = self.recent_window + self.sink_tokens
        return [[cap + always for cap in heads] for heads in self.caps]

    def heads_that_grow(self) -> list[tuple[int, int]]:
        """Returns (layer, head) of those whose keys are a share of the text. The caps bind in texts longer than `length`."""
        if len(self.means) < 2:
            return []
        (short, few), (long, many) = sorted(self.means.items())[-2:]
        always = self.recent_window + self.sink_tokens
        growth = 1 + SHARE_OF_TEXT * ((long - always) / max(1, short - always) - 1)
        pairs = [(i, h) for i, heads in enumerate(many) for h in range(len(heads))]
        return [(i, h) for i, h in pairs if many[i][h] > max(1.0, growth * few[i][h])]

    def __str__(self) -> str:
        always = self.recent_window + self.sink_tokens
        slots = self.slots()
        flat = [count for heads in slots for count in heads]
        lines = [
            f"{sum(flat) / len(flat):.0f} slots a head, from {min(flat)} to {max(flat)}; "
            f"{self.recent_window} recent keys, {self.sink_tokens} sinks"
        ]
        if self.threshold is not None:
            lines[0] += f", threshold {self.threshold:.4g}"
            if self.length in self.means:
                kept = [count for heads in self.means[self.length] for count in heads]
                lines[0] += f", mean {sum(kept) / len(kept) + always:.0f} keys of {self.length}"
        if self.key_bytes:
            sizes = list(zip(slots, self.key_bytes, strict=True))
            total = sum(sum(heads) * size for heads, size in sizes)
            whole = sum(len(heads) * self.length * size for heads, size in sizes)
            lines.append(
                f"{total / 2**20:.1f} MiB a sequence of keys and values instead of {whole / 2**20:.1f} at {self.length} tokens"
            )
        growing = self.heads_that_grow()
        if growing:
            others = ", the others a number of keys" if len(growing) < len(flat) else ""
            lines.append(f"{len(growing)} of {len(flat)} heads keep a share of the text{others}")
        return "\n".join(lines)

    def draw(self, path: str | PathLike) -> None:
        """Draws the caps, layers by heads, into a file. Needs matplotlib."""
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        widest = max(map(len, self.caps))
        rows = [
            [cap + 1 for cap in heads] + [math.nan] * (widest - len(heads)) for heads in self.caps
        ]
        figure = Figure(figsize=(6 + widest / 8, 1.5 + len(rows) / 6), layout="constrained")
        axes = figure.add_subplot(
            xlabel="key head", ylabel="layer", title="Most old keys of a head"
        )
        axes.set_xticks(range(widest))
        image = axes.imshow(rows, norm=LogNorm(1), aspect="auto", interpolation="none")
        figure.colorbar(image, ax=axes, label="keys")
        figure.savefig(path)


def check_budgets(budgets: object, heads: Sequence[int]) -> None:
    """Raises unless `budgets` has caps for as many layers as `heads`, and for as many heads in each."""
    if not isinstance(budgets, KeyBudgets):
        raise TypeError(f"budgets: got {type(budgets).__name__}, expected KeyBudgets")
    own = list(map(len, budgets.caps))
    if own != list(heads):
        raise ValueError(f"budgets: got caps for {own} heads of the layers, expected {list(heads)}")


def check_phase(phase: str, phases: Sequence[str], temperature: float | None) -> None:
    """Raises unless the phase is one of `phases`, and there is a temperature above 0 or none; only "soft" has one."""
    if phase not in phases:
        raise ValueError(f"phase: got {phase!r}, expected one of {phases}")
    if temperature is None:
        return
    check_number(temperature, "temperature")
    if phase != "soft" or not temperature > 0:
        raise ValueError(
            f"temperature: got {temperature} with the phase {phase!r}, expected a number above 0 with 'soft', or None"
        )


def loss_of_records(
    records: Sequence[SoftScores | None],
    rules: Sequence[SelectionRule],
    target: float,
    per_head: bool,
    sampled: bool,
    mask: Tensor | None,
) -> Tensor:
    """Returns how far the mean share of open gates in the last forward lies above the target, 0 if it lies below.

    records, rules: of each layer. per_head, sampled, mask: as in `ScoreBudget.loss`.
    """
    check_number(target, "target")
    if not 0 <= target <= 1:
        raise ValueError(f"target: got {target}, expected a share, 0 to 1")
    sampled, per_head = resolve_flag(sampled, "sampled"), resolve_flag(per_head, "per_head")
    if sampled and per_head:
        raise ValueError("sampled: got True with per_head=True, expected False")
    shares = []
    for record, rule in zip(records, rules, strict=True):
        scores = None if record is None else record.take(sampled)
        if scores is None or not scores.requires_grad:
            raise RuntimeError(
                "target: got a model without scores of a forward with gradients, expected one in the phase 'soft' since the last "
                "call (under checkpointing with use_reentrant=False), with a temperature for sampled gates"
            )
        if sampled:
            shares.append(share_of_samples(scores, mask))
        else:
            shares.append(share_of_old_keys(scores, rule.recent_window, rule.sink_tokens, mask))
    if sampled:
        return (torch.stack(shares).mean(0) - target).clamp(min=0).mean()
    share = torch.cat(shares)
    share = share if per_head else share.mean()
    return (share - target).clamp(min=0).mean()


def share_of_samples(samples: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the share of open gates in each text, [B], of sampled log gates [B, H, S].

    A gate counts as open (1) or closed (0), and has the gradient of its sample. All tokens count, recent ones too.
    """
    gates = samples.exp()
    opened = (gates >= 0.5).to(gates.dtype) + (gates - gates.detach())
    present = _present(gates, mask)
    return torch.where(present[:, None], opened, 0).mean(1).sum(1) / present.sum(1).clamp(min=1)


def share_of_old_keys(
    scores: Tensor, recent_window: int, sink_tokens: int = 0, mask: Tensor | None = None
) -> Tensor:
    """Returns the mean gate of each head over the keys that become old, [H]. It is 0 without such keys.

    scores: log gates [B, H, S]. mask: bool [B, S], False for padding.
    """
    mask = _present(scores, mask)
    count = mask.cumsum(1)
    is_old = mask & (count > sink_tokens) & (count <= count[:, -1:] - recent_window)
    gates = torch.where(is_old[:, None], scores.exp(), 0)
    return gates.sum((0, 2)) / is_old.sum().clamp(min=1)


def is_sink(scores: Tensor, sink_tokens: int, mask: Tensor | None) -> Tensor:
    """Returns which keys are sinks, bool [B, S]. scores: [B, H, S]. mask: bool [B, S], False for padding."""
    mask = _present(scores, mask)
    return mask & (mask.cumsum(1) <= sink_tokens)


def _present(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(scores[:, 0], dtype=torch.bool)
    check_shape(mask, "mask", scores[:, 0].shape)
    return mask.bool()


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


class SoftScores:
    """A layer's scores [B, Hkv, S] in the last forward with gradients in the phase "soft", for the loss of the budget.

    A forward opens it, and `take` closes it: checkpointed layers run again in the backward pass.
    """

    scores: Tensor | None = None
    samples: Tensor | None = None  # the log gates that were sampled from them
    is_open = False

    def open(self) -> None:
        self.scores, self.samples, self.is_open = None, None, True

    def gates(self, scores: Tensor, temperature: float | None) -> Tensor:
        """Records the scores, and returns log gates sampled from them, or without gradients or temperature the scores."""
        if not torch.is_grad_enabled():
            return scores
        gates = scores if temperature is None else stochastic_gates(scores, temperature)
        if self.is_open and self.scores is None:
            self.scores, self.samples = scores, None if gates is scores else gates
        return gates

    def take(self, sampled: bool = False) -> Tensor | None:
        taken = self.samples if sampled else self.scores
        self.scores, self.samples, self.is_open = None, None, False
        return taken

    def __getstate__(self) -> None:
        """Copies of a model have no graph."""


def listed_texts(texts: object) -> list:
    if isinstance(texts, (str, Mapping)) or not isinstance(texts, Iterable):
        raise TypeError(
            f"texts: got {type(texts).__name__}, expected a list with a text in each entry"
        )
    return list(texts)


def texts_of_one_length(texts: Iterable[Tensor], length: int | None) -> list[Tensor]:
    """Returns the first `length` tokens of texts [1, S, ...], by default as many as the shortest has."""
    texts = listed_texts(texts)
    if not texts:
        raise ValueError("texts: got none, expected a dozen or more")
    for text in texts:
        check_tensor(text, "texts")
        if text.dim() < 2 or text.shape[0] != 1:
            raise ValueError(f"texts: got shape {tuple(text.shape)}, expected [1, S, ...]")
    shortest = min(text.shape[1] for text in texts)
    length = shortest if length is None else length
    check_count(length, "length")
    if shortest < length:
        raise ValueError(f"texts: got one of {shortest} tokens, expected {length} or more")
    return [text[:, :length] for text in texts]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs a model without dropout and gradients. The mode of each of its modules comes back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


@contextmanager
def collected_scores(scorers: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Collects for each scorer the scores [heads, S] that each of its runs makes of a single sequence, on the CPU."""
    runs: dict[nn.Module, list[Tensor]] = {scorer: [] for scorer in scorers}

    def collect(scorer: nn.Module, args: tuple, out: Tensor) -> None:
        runs[scorer].append(out[0].detach().float().cpu())

    hooks = [scorer.register_forward_hook(collect) for scorer in runs]
    try:
        yield list(runs.values())
    finally:
        for hook in hooks:
            hook.remove()


def check_division(
    length: int,
    mean_keys: float,
    recent_window: int,
    sink_tokens: int,
    least: float,
    quantile: float | None,
    bound: float,
) -> None:
    """Raises unless texts of this length can be divided by the arguments of `divide_scores`."""
    always = recent_window + sink_tokens
    if length <= always:
        raise ValueError(
            f"length: got texts of {length} tokens, expected more than {always}: {recent_window} recent keys and {sink_tokens} sinks"
        )
    check_number(mean_keys, "mean_keys")
    if not always < mean_keys <= length or mean_keys < 1:
        raise ValueError(
            f"mean_keys: got {mean_keys} for texts of {length} tokens with {recent_window} recent keys and {sink_tokens} sinks, "
            f"expected {'more than ' if always else ''}{always or 1}, at most {length}"
        )
    for name, share in (("least", least), ("quantile", 1 if quantile is None else quantile)):
        check_number(share, name)
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: got {share}, expected 0 to 1")
    check_number(bound, "bound")
    if not bound > 0:
        raise ValueError(f"bound: got {bound}, expected a number above 0")


def divide_scores(
    texts: Sequence[Sequence[Tensor | Sequence[Tensor]]],
    mean_keys: float,
    recent_window: int,
    sink_tokens: int,
    *,
    least: float = 0.25,
    quantile: float | None = None,
    bound: float = 2.0,
    key_bytes: Sequence[int] = (),
) -> KeyBudgets:
    """Returns the division of one budget by the scores of sample texts of one length.

    The scores of all layers and heads form one pool, and as many of the best pass as the budget has keys. A head's number of
    old keys is in proportion to the mean of those that pass in it.

    Args:
        texts: for each text the scores of each layer, [H, S], or those of each run of a layer that runs several times. Runs
            count like texts, and the layer's caps hold for all of them.
        mean_keys: the mean number of keys of a head at length S, sinks and recent keys included.
        recent_window, sink_tokens: of the rule.
        least: the least number of old keys of a head, as a share of the mean. A head without old keys loses what a text asks for
            more rarely than the sample texts do.
        quantile: None, or keys below the threshold are hidden, and this quantile of a head's count over the texts is its cap. A
            head then keeps fewer keys of a text that has little to keep; `least` does not count.
        bound: with a quantile, the largest sum of the caps, as a multiple of the budget's old keys. Above it the largest caps are
            lowered to one number.
        key_bytes: for KeyBudgets, of a single run.
    """
    layers = []  # [texts and runs, H, S] of each layer
    always = recent_window + sink_tokens
    for number, of_layer in enumerate(zip(*texts, strict=True)):
        runs = [run for of_text in of_layer for run in _runs(of_text)]
        if not runs:
            raise ValueError(
                f"texts: got forwards without scores of layer {number}, expected scores of every layer"
            )
        layers.append(torch.stack(runs).float().cpu())
        if layers[-1].isnan().any():
            raise ValueError(f"texts: got NaN among the scores of layer {number}, expected numbers")
    length = layers[0].shape[2]
    check_division(length, mean_keys, recent_window, sink_tokens, least, quantile, bound)
    old_keys = float(mean_keys) - always
    old = [layer[:, :, sink_tokens : length - recent_window] for layer in layers]
    pool = torch.cat([scores.flatten() for scores in old])
    kept = min(len(pool), max(1, round(old_keys * (len(pool) // (length - always)))))
    threshold = pool.kthvalue(len(pool) - kept + 1).values
    is_kept = [scores >= threshold for scores in old]
    of_layers = [
        torch.full((n.shape[1],), len(n) / len(texts), dtype=torch.float64) for n in layers
    ]
    runs = torch.cat(of_layers)  # how often a model runs each head for a text
    means = {
        part: [keeps[:, :, : part - always].sum(2).double().mean(0).tolist() for keeps in is_kept]
        for part in (length // 4, length // 2, length)
        if part > always
    }
    if quantile is None:
        needs = torch.tensor(sum(means[length], []), dtype=torch.float64)
        caps = _in_proportion(needs, runs, old_keys, least)
    else:
        # No key above the threshold leaves without a cap, so the count at the last token is the largest of a text.
        counts = [keeps.sum(2).double() for keeps in is_kept]
        caps = torch.cat([count.quantile(quantile, 0, interpolation="higher") for count in counts])
        caps = _lower_largest(caps, runs, bound * old_keys * runs.sum().item())
    if not always:
        caps = caps.clamp(min=1)  # a head sees no other keys
    return KeyBudgets(
        threshold=None if quantile is None else threshold.item(),
        caps=tuple(tuple(layer.tolist()) for layer in caps.long().split([n.shape[1] for n in old])),
        recent_window=recent_window,
        sink_tokens=sink_tokens,
        length=length,
        means=means,
        key_bytes=tuple(
            size * len(layer) // len(texts) for size, layer in zip(key_bytes, layers, strict=False)
        ),
    )


def _runs(scores: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [scores] if isinstance(scores, Tensor) else scores


def _in_proportion(needs: Tensor, runs: Tensor, mean: float, least: float) -> Tensor:
    """Returns numbers in proportion to `needs`, with this mean before they are rounded; none is below the share `least` of it.

    runs: how often each number counts in the mean.
    """
    ordered, order = needs.sort()
    counts = runs[order]
    raised = counts.cumsum(0) - counts  # of the smaller needs, which may be raised to the least
    sums = (counts * ordered).flip(0).cumsum(0).flip(0)  # of the others
    factors = (counts.sum() - raised * least) * mean / sums
    factor = factors[factors * ordered >= (1 - 1e-9) * least * mean][0]
    return (factor * needs).clamp(min=least * mean).round()


def _lower_largest(caps: Tensor, runs: Tensor, total: float) -> Tensor:
    """Lowers the largest numbers to one level, so that the sum is at most `total`. runs: how often each counts in it."""
    if (runs * caps).sum() <= total:
        return caps
    ordered, order = caps.sort()
    parts = runs[order] * ordered
    before = parts.cumsum(0) - parts  # the sum of the smaller numbers
    above = runs[order].flip(0).cumsum(0).flip(0)
    level = ((total - before) / above)[(total - before) / above <= ordered][0]
    return caps.clamp(max=level.floor())
