"""Trains a small Llama for associative recall from scratch, with keys chosen by scores, by other rules of equal size, or with all keys.

python -m learned_scores.recall [--lengths 128] [--seeds 0 1 2] [--output recall.json]    (in examples/)
python -m learned_scores.recall --lengths 64 256 1024 --steps 400 300 300 --pairs 32 --words 4096 --width 128    (a GPU)

A text is filler, with (key, value) pairs scattered over its first half. Its last quarter asks for the keys again. Except for
`soft_first`, every kind trains with its budget of keys from the first step. Learned scores are trained with every budget, the other kinds
only with the largest. In texts shorter than the last ones a query sees at most half of the keys, so that scores must choose from the
first step. If a query sees all keys, scores learn less, and 64 keys then recall less than 32. Models are also tested at other lengths,
and those with learned scores with all keys. With `--pairs 1` the task is a pass key.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaModel

from command_line import add_device, between, check_texts, new_file, rate, run_program
from flash_dmattn import make_scores
from flash_dmattn.integrations.transformers import add_learned_scores, set_score_phase
from one_cycle import one_cycle
from recall_texts import Texts

# soft_first: the first half of the steps sees all keys. doge: the score is exp(A softplus(z)) instead of the gate.
KINDS = ("dense", "scores", "soft_first", "window", "doge", "key_norm", "random")
SCORED = ("scores", "soft_first")  # kinds that are trained with every budget


class Run(NamedTuple):
    kind: str
    budget: int
    same_words: bool = False  # whether the filler has the words of the pairs

    def __str__(self) -> str:
        return f"{self.kind} {self.budget}{' same words' if self.same_words else ''}"


class Reader(nn.Module):
    """A Llama of few layers. The embedding of a word includes a share of the previous word, so that two layers are enough."""

    def __init__(self, kind: str, budget: int, options: argparse.Namespace):
        super().__init__()
        width = options.width
        config = LlamaConfig(
            vocab_size=2 * options.words, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, initializer_range=width**-0.5,
            max_position_embeddings=64 * options.lengths[-1], use_cache=False, attn_implementation="flash_dmattn",
        )  # fmt: skip
        self.llama = LlamaModel(config)
        nn.init.normal_(self.llama.embed_tokens.weight, std=0.5)
        self.previous = nn.Linear(width, width, bias=False)
        if kind != "dense":
            scorers = {"window": "random", "doge": DogeForm(width, options.heads)}
            scorers |= dict.fromkeys(SCORED, "hidden")
            rule = rule_of(kind, budget)
            add_learned_scores(self.llama, scorer=scorers.get(kind, kind), **rule)

    def forward(self, text: Tensor, places: Tensor) -> Tensor:
        """Returns the logits of the answers, [B, pairs, words]."""
        words, on_gpu = self.llama.embed_tokens, text.is_cuda
        with torch.autocast(text.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            embedded = words(text)
            embedded = embedded + self.previous(F.pad(embedded, (0, 0, 1, -1)))
            hidden = self.llama(inputs_embeds=embedded).last_hidden_state
            asking = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
            return asking @ words.weight.t() / hidden.shape[2] ** 0.5


def rule_of(kind: str, keys: int) -> dict[str, int]:
    """Returns the rule by which a query sees `keys` keys."""
    recent = keys if kind == "window" else keys // 4
    return {"keep_window_size": keys - recent, "recent_window": recent}


class DogeForm(nn.Module):
    """A scorer that computes exp(A softplus(z)), where A begins at 0.5."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.scores = make_scores(width, heads, "doge")
        nn.init.constant_(self.scores.A, 0.5)

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.scores(hidden).transpose(1, 2)


class Loss(nn.Module):
    """The forward of a step as one module, which a CUDA graph can capture."""

    def __init__(self, model: Reader):
        super().__init__()
        self.model = model

    def forward(self, text: Tensor, places: Tensor, answers: Tensor) -> Tensor:
        return F.cross_entropy(self.model(text, places).float().transpose(1, 2), answers)


class Stage(NamedTuple):
    """Training steps in one phase of the scores, on texts of one shape. A query sees `keys` keys."""

    steps: int
    length: int
    batch: int
    keys: int
    phase: str | None = None  # None: the model's current phase


def train(
    model: Reader, texts: Texts, run: Run, stages: list[Stage], options: argparse.Namespace
) -> None:
    on_gpu = options.device == "cuda"
    steps = sum(stage.steps for stage in stages)
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.01, fused=on_gpu)
    schedule = one_cycle(optimizer, options.rate, steps, rise=0.1)
    bar = tqdm(total=steps, desc=str(run), leave=False, dynamic_ncols=True)
    for stage in stages:
        for layer in model.modules():
            if hasattr(layer, "score_rule"):
                layer.score_rule = layer.score_rule._replace(**rule_of(run.kind, stage.keys))
        if stage.phase is not None:
            set_score_phase(model, stage.phase)
        loss_of = Loss(model)
        if options.graphs:  # a small model's step is many kernels of a few microseconds
            gc.collect()  # an earlier graph that is freed during the capture would make it fail
            sample = texts.draw(stage.length, stage.batch)
            loss_of = torch.cuda.make_graphed_callables(loss_of, sample)
        for _ in range(stage.steps):
            optimizer.zero_grad()
            loss_of(*texts.draw(stage.length, stage.batch)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update()
    bar.close()


@torch.no_grad()
def recall(model: Reader, texts: Texts, length: int, options: argparse.Namespace) -> float:
    """Returns the share of right answers."""
    right = []
    for _ in range(options.tests):
        text, places, answers = texts.draw(length, options.batch[-1])
        right.append((model(text, places).argmax(-1) == answers).float().mean())
    return torch.stack(right).mean().item()


def stages_of(run: Run, options: argparse.Namespace) -> list[Stage]:
    """Returns the stages of a training, from short texts to long ones."""
    stages = []
    for steps, length, batch in zip(options.steps, options.lengths, options.batch, strict=True):
        is_last = length == options.lengths[-1]
        stages.append(
            Stage(steps, length, batch, run.budget if is_last else min(run.budget, length // 2))
        )
    if run.kind != "soft_first":
        return stages
    *before, last = stages
    soft = last.steps // 2
    return [
        *(stage._replace(phase="soft") for stage in before),
        last._replace(steps=soft, phase="soft"),
        last._replace(steps=last.steps - soft, phase="hard"),
    ]


def runs(options: argparse.Namespace) -> list[Run]:
    length = options.lengths[-1]
    budgets = [length // part for part in options.parts]
    all_runs = []
    for kind in options.kinds:
        kind_budgets = budgets if kind in SCORED else budgets[:1]
        all_runs += [
            Run(kind, budget) for budget in ([length] if kind == "dense" else kind_budgets)
        ]
    if options.same_words:
        same = budgets[min(1, len(budgets) - 1)]
        all_runs += [Run("dense", length, True), Run("scores", same, True)]
    return all_runs


def texts_of(run: Run, seed: int, options: argparse.Namespace) -> Texts:
    return Texts(options.pairs, options.words, options.device, seed, run.same_words)


def measure(run: Run, seed: int, options: argparse.Namespace) -> dict:
    """Trains and tests a model, and returns a row of the results."""
    begin = time.perf_counter()
    torch.manual_seed(seed)
    model = Reader(run.kind, run.budget, options).to(options.device)
    texts = texts_of(run, seed, options)
    train(model, texts, run, stages_of(run, options), options)
    lengths = [options.lengths[-1] * factor for factor in options.longer]
    test_texts = texts_of(run, 1000 + seed, options)
    recalls = {length: recall(model, test_texts, length, options) for length in lengths}
    row = {**run._asdict(), "seed": seed, "recall": recalls}
    # Recall with all keys shows whether a missing answer was not kept or not learned.
    if run.kind in SCORED:
        set_score_phase(model, "off")
        row["recall_with_all_keys"] = recall(model, test_texts, lengths[0], options)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    rows = []
    for seed in options.seeds:
        for run in runs(options):
            rows.append(measure(run, seed, options))
            print(rows[-1], flush=True)
            # The file is written after every run, so that an end before the last loses none.
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                results = {"settings": settings, "rows": rows}
                options.output.write_text(json.dumps(results, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is trained")
    add(
        "--lengths",
        type=between(8),
        nargs="+",
        default=[128],
        help="tokens of a text, one after the other",
    )
    add("--steps", type=between(1), nargs="+", default=[400], help="of training at each length")
    add("--pairs", type=between(1), default=8, help="of a text, fewer if it is short")
    add(
        "--parts",
        type=between(1),
        nargs="+",
        default=[4, 8, 16, 32],
        help="budgets: the last length / part",
    )
    add(
        "--longer",
        type=between(1),
        nargs="+",
        default=[1, 2, 4],
        help="factors of lengths in tests",
    )
    add(
        "--same-words", action=argparse.BooleanOptionalAction, default=True, help="such filler, too"
    )
    add("--words", type=between(2), default=64, help="of pairs, and as many of filler")
    add("--width", type=between(2), default=64, help="features of a token")
    add("--heads", type=between(1), default=2, help="of attention")
    add("--layers", type=between(1), default=2, help="of attention and MLP")
    add("--tests", type=between(1), default=8, help="batches of a test")
    add(
        "--batch",
        type=between(1),
        nargs="+",
        default=[32],
        help="texts of a step at each length; one number: at the last, and as many tokens at others",
    )
    add("--rate", type=rate, default=3e-3, help="the largest learning rate")
    add("--seeds", type=between(0), nargs="+", default=[0, 1, 2], help="of parameters and texts")
    add("--threads", type=between(1), default=1)
    add("--graphs", action="store_true", help="CUDA graphs of the steps")
    add_device(parser)
    add("--output", type=new_file, default=None, help="a .json of all results")
    options = parser.parse_args(arguments)
    if len(options.batch) == 1:
        tokens = options.batch[0] * options.lengths[-1]
        options.batch = [max(1, tokens // length) for length in options.lengths]
    for name in ("steps", "batch"):
        count = len(getattr(options, name))
        if count != len(options.lengths):
            parser.error(
                f"--{name}: got {count} numbers, expected {len(options.lengths)}, one for each of --lengths"
            )
    if max(options.parts) > options.lengths[-1]:
        parser.error(
            f"--parts: got {max(options.parts)}, expected at most the last of --lengths, {options.lengths[-1]}"
        )
    if options.graphs and options.device != "cuda":
        parser.error(f"--graphs: got it with --device {options.device}, expected --device cuda")
    check_texts(parser, options, max(options.lengths[-1] * max(options.longer), *options.lengths))
    return options


if __name__ == "__main__":
    run_program(main)
