"""Associative recall from scratch: a small Llama with dynamic masks, with a window of the same size, and with all keys.

python -m learned_scores.recall [--length 256] [--seeds 3] [--output recall.json]    (in examples/)

A text is filler, with (key, value) pairs scattered over its first half; its last quarter asks for the keys again. Every kind
trains at every budget of keys, from the first step, and is tested at other lengths, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaModel

from flash_dmattn.integrations.transformers import add_learned_scores

KINDS = ("dense", "scores", "window")
_ASKED_PLACES = 4  # a quarter of the text asks


class Texts:
    """Words 0 to 2 `words` - 1: keys, values, and as many of filler, or the filler of the same words."""

    def __init__(self, options: argparse.Namespace, seed: int, same_words: bool = False):
        self.pairs, self.words, self.batch = options.pairs, options.words, options.batch
        self.device, self.same_words = options.device, same_words
        self.random = torch.Generator(options.device).manual_seed(seed)

    def draw(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Texts [B, length], the places that ask [B, pairs] and their answers [B, pairs]."""
        half, asked = self.words // 2, length // _ASKED_PLACES
        first, last = (0, self.words) if self.same_words else (self.words, 2 * self.words)
        text = torch.randint(first, last, (self.batch, length), **self._on())
        keys = self._distinct(half)
        values = half + torch.randint(half, keys.shape, **self._on())
        stated = 2 * self._distinct(length // 4)
        places = length - asked + self._distinct(asked)
        text.scatter_(1, stated, keys).scatter_(1, stated + 1, values).scatter_(1, places, keys)
        return text, places, values

    def _on(self) -> dict:
        return {"device": self.device, "generator": self.random}

    def _distinct(self, high: int) -> Tensor:
        """[B, pairs] different numbers below `high`."""
        return torch.rand(self.batch, high, **self._on()).argsort(1)[:, : self.pairs]


class Reader(nn.Module):
    """A Llama of few layers. The embedding of a word has a share of the word before, so that two layers are enough."""

    def __init__(self, kind: str, budget: int, options: argparse.Namespace):
        super().__init__()
        width = options.width
        config = LlamaConfig(
            vocab_size=2 * options.words, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, initializer_range=width**-0.5,
            max_position_embeddings=64 * options.length, use_cache=False, attn_implementation="flash_dmattn",
        )  # fmt: skip
        self.llama = LlamaModel(config)
        nn.init.normal_(self.llama.embed_tokens.weight, std=0.5)
        self.previous = nn.Linear(width, width, bias=False)
        recent = budget // 4
        if kind == "scores":
            add_learned_scores(self.llama, keep_window_size=budget - recent, recent_window=recent)
        elif kind == "window":
            rule = {"keep_window_size": 0, "recent_window": budget}
            add_learned_scores(self.llama, scorer="random", **rule)

    def forward(self, text: Tensor, places: Tensor) -> Tensor:
        """Logits of the answers, [B, pairs, words]."""
        words = self.llama.embed_tokens
        embedded = words(text)
        embedded = embedded + self.previous(F.pad(embedded, (0, 0, 1, -1)))
        hidden = self.llama(inputs_embeds=embedded).last_hidden_state
        asking = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        return asking @ words.weight.t() / hidden.shape[2] ** 0.5


def train(model: Reader, texts: Texts, options: argparse.Namespace, title: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.rate, options.steps, pct_start=0.1
    )
    for _ in tqdm(range(options.steps), desc=title, leave=False, dynamic_ncols=True):
        text, places, answers = texts.draw(options.length)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            logits = model(text, places)
        optimizer.zero_grad()
        F.cross_entropy(logits.float().transpose(1, 2), answers).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def recall(model: Reader, texts: Texts, length: int, options: argparse.Namespace) -> float:
    """The share of right answers."""
    right = []
    for _ in range(options.tests):
        text, places, answers = texts.draw(length)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            right.append((model(text, places).argmax(-1) == answers).float().mean())
    return torch.stack(right).mean().item()


def runs(options: argparse.Namespace) -> list[tuple[str, int, bool]]:
    """(kind, budget, whether the filler has the words of the pairs)."""
    budgets = [options.length // part for part in options.parts]
    found = [("dense", options.length, False)]
    found += [(kind, budget, False) for kind in KINDS[1:] for budget in budgets]
    same = budgets[min(1, len(budgets) - 1)]
    return found + [("dense", options.length, True), ("scores", same, True)]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    for seed in range(options.seeds):
        for kind, budget, same_words in runs(options):
            begin = time.perf_counter()
            torch.manual_seed(seed)
            model = Reader(kind, budget, options).to(options.device)
            title = f"seed {seed} {kind} {budget}{' same words' if same_words else ''}"
            train(model, Texts(options, seed, same_words), options, title)
            lengths = [options.length * factor for factor in options.longer]
            found = {
                length: recall(model, Texts(options, 1000 + seed, same_words), length, options)
                for length in lengths
            }
            seconds = time.perf_counter() - begin
            rows.append(
                {
                    "kind": kind,
                    "budget": budget,
                    "same_words": same_words,
                    "seed": seed,
                    "recall": found,
                }
            )
            print(f"{title}: recall {found}, {seconds:.0f} s", flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--length", type=int, default=128, help="tokens of a text")
    add("--pairs", type=int, default=8, help="at most an eighth of the length")
    add("--parts", type=int, nargs="+", default=[4, 8, 16, 32], help="budgets, as length / part")
    add("--longer", type=int, nargs="+", default=[1, 2, 4], help="factors of lengths in tests")
    add("--words", type=int, default=64, help="of pairs, and as many of filler")
    add("--width", type=int, default=64, help="features of a token")
    add("--heads", type=int, default=2, help="of attention")
    add("--layers", type=int, default=2, help="of attention and MLP")
    add("--steps", type=int, default=400, help="of training")
    add("--tests", type=int, default=8, help="batches of a test")
    add("--batch", type=int, default=32, help="texts of a step")
    add("--rate", type=float, default=3e-3, help="the largest learning rate")
    add("--seeds", type=int, default=3, help="of parameters and texts")
    add("--threads", type=int, default=1)
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, default=None, help="a .json of all results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
