"""Associative recall: does a layer learn which keys to keep? Trains small models, one for each score of keys.

python examples/recall.py [--length 128] [--window 16] [--output recall.svg]

A text is filler, with (key, value) pairs scattered over its first half. Its last quarter asks for the keys again, and the
answer is the value (`recall_texts.py`). A query keeps `--window` of the `--length` keys before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command_line import add_device, between, check_texts, new_picture, rate, run_program
from flash_dmattn import DynamicMaskAttention
from one_cycle import one_cycle
from recall_texts import Texts

IGNORED = -100  # label of a position that asks for nothing
Score = str | Callable[[Tensor], Tensor]
KINDS = {
    "gate": "log sigmoid(z)",
    "linear": "A softplus(z)",
    "doge": "exp(A softplus(z))",
    "window": "none: the most recent keys",
}


class Model(nn.Module):
    """A model of layers with attention and an MLP. The embedding of a word includes a share of the previous word and is also used for the
    output."""

    def __init__(self, words: int, width: int, heads: int, window: int, score: Score, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(2 * words, width)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.previous = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(Layer(width, heads, window, score) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        embedded = self.embedding(text)
        hidden = embedded + self.previous(F.pad(embedded, (0, 0, 1, -1)))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) @ self.embedding.weight.t() / hidden.shape[-1] ** 0.5


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, window: int, score: Score):
        super().__init__()
        self.attention = DynamicMaskAttention(
            width, heads, keep_window_size=window, score=score, rope=rotate
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden))
        return hidden + self.mlp(self.norms[1](hidden))


def rotate(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Applies a rotary embedding."""
    half = query.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=query.device) / half)
    angles = positions[..., None, None] * frequency
    cos, sin = angles.cos(), angles.sin()

    def rotate_tensor(t: Tensor) -> Tensor:
        a, b = t.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(t.dtype)

    return rotate_tensor(query), rotate_tensor(key)


def equal_scores(heads: int) -> Callable[[Tensor], Tensor]:
    """Returns equal scores, so that a query keeps the most recent keys."""
    return lambda hidden: hidden.new_zeros((*hidden.shape[:2], heads))


def window_of(kind: str, options: argparse.Namespace) -> int:
    """Returns the window of a kind. The most recent keys get a window of twice the size, and still recall nothing."""
    return 2 * options.window if kind == "window" else options.window


def train(kind: str, options: argparse.Namespace) -> list[float]:
    """Trains a model and returns the share of right answers at every step."""
    torch.manual_seed(options.seed)
    texts = Texts(options.pairs, options.words, options.device, options.seed)
    score = equal_scores(options.heads) if kind == "window" else kind
    window = window_of(kind, options)
    model = Model(options.words, options.width, options.heads, window, score, options.layers)
    model.to(options.device)
    if kind == "doge":  # its factors A begin at 0
        for layer in model.layers:
            nn.init.constant_(layer.attention.scores.A, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.01)
    schedule = one_cycle(optimizer, options.rate, options.steps, rise=0.1)
    recall = []
    for _ in range(options.steps):
        text, places, answers = texts.draw(options.length, options.batch)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            logits = model(text)
        labels = torch.full_like(text, IGNORED).scatter_(1, places, answers)
        asked = labels != IGNORED
        logits, answers = logits[asked].float(), labels[asked]
        optimizer.zero_grad()
        F.cross_entropy(logits, answers).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recall.append((logits.argmax(-1) == answers).float().mean())
    return torch.stack(recall).tolist()


def mean_final_recall(recall: list[float]) -> float:
    """Returns the mean recall of the last steps."""
    last = recall[-max(1, min(50, len(recall) // 10)) :]
    return sum(last) / len(last)


def draw(curves: dict[str, list[float]], options: argparse.Namespace, path: Path) -> None:
    """Draws the share of right answers against the step, as means of ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "flash_dmattn"  # the same numbers give the same file
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for kind, recall in curves.items():
        means = [
            sum(recall[i : i + 10]) / len(recall[i : i + 10]) for i in range(0, len(recall), 10)
        ]
        axes.plot(
            range(0, len(recall), 10), means, label=f"{KINDS[kind]}, w = {window_of(kind, options)}"
        )
    axes.set(xlabel="step", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_title(
        f"Associative recall: {options.pairs} pairs in {options.length} tokens", fontsize=11
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="scores that are trained")
    add("--length", type=between(8), default=128, help="tokens of a text")
    add("--pairs", type=between(1), default=8, help="at most an eighth of the length")
    add(
        "--window",
        type=between(1, 2**30),
        default=16,
        help="keys that a query keeps; of the most recent ones twice as many",
    )
    add("--words", type=between(2), default=64, help="of pairs, and as many of filler")
    add("--width", type=between(2), default=64, help="features of a token")
    add("--heads", type=between(1), default=2, help="of attention")
    add("--layers", type=between(1), default=2, help="of attention and MLP")
    add("--steps", type=between(1), default=300, help="of training")
    add("--batch", type=between(1), default=32, help="texts of a step")
    add("--rate", type=rate, default=3e-3, help="the largest learning rate")
    add("--seed", type=between(0), default=0, help="of parameters and texts")
    add_device(parser)
    add(
        "--output",
        type=new_picture,
        default=None,
        help="a picture, .svg or .png, which needs matplotlib",
    )
    options = parser.parse_args(arguments)
    check_texts(parser, options, options.length)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    curves = {}
    for kind in options.kinds:
        begin = time.perf_counter()
        curves[kind] = train(kind, options)
        print(
            f"{KINDS[kind]:28} w {window_of(kind, options):4}  recall {mean_final_recall(curves[kind]):.3f}  "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    if options.output is not None:
        draw(curves, options, options.output)


if __name__ == "__main__":
    run_program(main)
