"""Teaches a published model which keys its heads still need, divides a budget of keys by it, and compares other choices.

make retrofit                                           # SmolLM2-135M on two cores of a CPU
PYTHONPATH=examples python -m retrofit --device cuda    # longer texts, more samples, three trainings
PYTHONPATH=examples python -m retrofit --base gemma3    # or a folder, or a name of the Hugging Face Hub
"""

import argparse
import copy
import json
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase
from transformers.utils import logging

import flash_dmattn.integrations.transformers as dmattn
from command_line import between, device, new_folder, rate
from flash_dmattn import is_available

from .tasks import NAMES, Sample, Tasks, recall
from .texts import BASES, load_base, read_texts

SINKS = 4
SETTINGS = {  # on a CPU, on a GPU; the type; a list takes several
    "length": ([1024], [4096], between(256), "tokens of a text; scores train for the first"), "trained_length": (512, 4096, between(256), "tokens of a text in training"),
    "keep": ([8], [4, 8, 16], between(2), "8: an eighth of the keys"), "seeds": ([0], [0, 1, 2], between(0), "of trainings"),
    "steps": (80, 900, between(1), "of a training for one budget"), "seconds": (330, 600, between(1), "a training ends after this time"),
    "rate": (2e-2, 1e-2, rate, "of the scores' training"), "base_rate": (0, 3e-4, rate, "of the base model's training; 0: it is frozen"),
    "batch": (1, 4, between(1), "texts of a step"), "samples": (5, 100, between(1), "texts of each task, and texts whose loss is measured"),
    "tasks": ([*NAMES[:2]], [*NAMES], str, "what is asked about the texts"),
}  # fmt: skip
BASELINES = {"sinks and recent": {"scorer": "random", "window": 0}, "random": {"scorer": "random"}, "key norm": {"scorer": "key_norm"}}  # fmt: skip
PRESSES = ("KeyDiffPress", "ExpectedAttentionPress", "SnapKVPress", "TOVAPress")
TOGETHER = 25  # samples that are read in one batch


def train(model: nn.Module, teacher: nn.Module, batches: Iterator[Tensor], schedule: dmattn.ScoreSchedule, options: argparse.Namespace) -> None:  # fmt: skip
    """Trains the scores, and the base if it has a rate, to predict what the teacher does, with few old keys. batches: [B, S]."""
    scores = dmattn.freeze_all_but_scores(model)
    base = [p for p in model.parameters() if not p.requires_grad] if options.base_rate else []
    weights = [p.requires_grad_().detach().float() for p in base]  # bfloat16 would lose small steps
    groups = [{"params": scores, "highest": options.rate}, {"params": weights, "highest": options.base_rate}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0)
    began = time.perf_counter()
    for step in (bar := tqdm(range(options.steps), desc="training")):
        progress = max(step / options.steps, (time.perf_counter() - began) / options.seconds)
        if progress >= 1:
            break
        ids = next(batches).to(model.device)
        later_half = {"use_cache": False, "logits_to_keep": ids.shape[1] // 2}
        with torch.no_grad():
            expected = teacher(ids, **later_half).logits
        model.set_score_phase("soft", temperature=schedule.temperature)
        loss = dmattn.divergence(model(ids, **later_half).logits, expected)
        excess = dmattn.budget_loss(model, schedule.target(progress))
        (loss + schedule.weight * excess).backward()
        for weight, parameter in zip(weights, base, strict=True):
            weight.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["highest"] * min(1, (step + 1) / 8, 2.5 * (1 - progress))
        optimizer.step()
        with torch.no_grad():
            for weight, parameter in zip(weights, base, strict=True):
                parameter.copy_(weight)
        model.zero_grad()
        bar.set_postfix_str(f"divergence {loss:.3f}, share {excess:.3f} above the target")


def training_batches(streams: list[list[int]], tasks: Tasks, seed: int, batch: int) -> Iterator[Tensor]:  # fmt: skip
    """Yields tokens [batch, length]: plain text of each stream, each time followed by texts that repeat facts."""
    draw = random.Random(seed)
    while True:
        for stream in streams:
            yield torch.tensor([tasks.cut_text(stream, draw) for _ in range(batch)])
            yield torch.tensor([tasks.make_training_text(draw) for _ in range(batch)])


class Evaluation:
    """Held-out texts and tasks of one length, with which every row measures the model as it is then."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, streams: list[list[int]], length: int, options: argparse.Namespace):  # fmt: skip
        streams = [stream for stream in streams if len(stream) > length] or streams
        self.model, self.tasks, self.rows = model, Tasks(tokenizer, streams[0], length), []
        draw, count = random.Random(0), options.samples
        self.texts = [self.tasks.cut_text(s, draw, 1) for s in (streams * count)[:count]]
        self.samples = {t: [self.tasks.make_sample(t, i) for i in range(count)] for t in options.tasks}  # fmt: skip

    @torch.no_grad()
    def add_row(self, method: str, part: int = 1, seed: int = 0, press: type | None = None) -> None:
        """Adds costs, losses and shares of right answers. press: of kvpress, cuts caches after a text was read."""
        costs, answers, losses = [], {}, self._losses() if press is None else {}
        for name, samples in self.samples.items():
            right = []
            for together in (samples[i : i + TOGETHER] for i in range(0, len(samples), TOGETHER)):
                cache = (DynamicCache if press or part == 1 else dmattn.DynamicMaskCache)(config=self.model.config)  # fmt: skip
                dropped = 1 - self.tasks.length / part / len(together[0].text)
                with press(compression_ratio=dropped)(self.model) if press else nullcontext():
                    written = self._answers(together, cache, costs)
                right += map(recall, written, sum((sample.answers for sample in together), []))
            answers[name] = fmean(right)
        keys, size, read, wrote = zip(*costs, strict=True)
        row = {"method": method, "kept": f"1/{part}", "seed": seed, "length": self.tasks.length, "keys a head": fmean(keys), "MiB": fmean(size)}  # fmt: skip
        self.rows.append(row | {"prefill tokens/s": max(read), "decode tokens/s": max(wrote)} | losses | answers)  # fmt: skip
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in self.rows[-1].items()))  # fmt: skip

    def _losses(self) -> dict[str, float]:
        """Returns the mean loss of a token in each of the last three octaves of positions."""
        losses = []
        for ids in torch.tensor(self.texts, device=self.model.device):
            logits = self.model(ids[None, :-1], use_cache=False).logits[0].split(4096)
            parts = zip(logits, ids[1:].split(4096), strict=True)
            losses.append(torch.cat([F.cross_entropy(x.float(), y, reduction="none") for x, y in parts]))  # fmt: skip
        mean, begins = torch.stack(losses).mean(0), [self.tasks.length >> i for i in (3, 2, 1)]
        return {f"loss {i}-{2 * i}": mean[i : 2 * i].mean().item() for i in begins}

    def _answers(self, samples: list[Sample], cache: Cache, costs: list) -> list[str]:
        """Returns what the model writes after each question about samples of one task. Appends the cache's size and speeds."""
        text = torch.tensor([sample.text for sample in samples]).to(self.model.device)
        times = [time.perf_counter()]
        self.model(text, past_key_values=cache, logits_to_keep=1).logits.cpu()  # waits for a GPU
        times.append(time.perf_counter())
        size = size_of_cache(cache, len(samples))
        cache.batch_repeat_interleave(len(samples[0].questions))
        ids = text.new_tensor([question for sample in samples for question in sample.questions])
        written, seen = [], text.shape[1]
        for _ in range(samples[0].new_tokens):
            positions = seen + torch.ones_like(ids).cumsum(1) - 1  # unknown to a cut cache
            seen += ids.shape[1]
            ids = self.model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits.argmax(-1)  # fmt: skip
            written.append(ids.cpu())
            times.append(time.perf_counter())
        one_by_one = len(ids) * (len(written) - 1)
        costs.append((*size, text.numel() / (times[1] - times[0]), one_by_one / (times[-1] - times[2])))  # fmt: skip
        return self.tasks.tokenizer.batch_decode(torch.cat(written, 1))


def size_of_cache(cache: Cache, texts: int) -> tuple[float, float]:
    """Returns the mean number of keys that a head holds, and the MiB for each text."""
    keys, size = [], 0
    for layer in cache.layers:
        slots = getattr(layer, "slots", None)
        keys.append(layer.keys.shape[2] if slots is None else slots.counts[..., 0].double().mean().item())  # fmt: skip
        size += sum(t.nbytes for t in ((layer.keys, layer.values) if slots is None else slots.tensors))  # fmt: skip
    return fmean(keys), size / texts / 2**20


def make_table(rows: list[dict]) -> str:
    """Returns rows as Markdown. The rows of several trainings become one: their mean and half their range."""
    names = [name for name in rows[0] if name not in ("method", "kept", "seed", "length")]
    lines = ["| keys | of all | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for method, kept in dict.fromkeys((row["method"], row["kept"]) for row in rows):
        group = [row for row in rows if (row["method"], row["kept"]) == (method, kept)]
        cells = [method, kept]
        for name in names:
            values = [row[name] for row in group if name in row]
            digits = 0 if name.endswith(("head", "/s")) else 3 if name.startswith("loss") else 2
            half = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.{digits}f}{half}" if values else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_scores(model: nn.Module, part: int, length: int, trained: Path | None = None, window: int | None = None, **options) -> float:  # fmt: skip
    """Gives a model scores, or those it has in a folder, that keep one in `part` of the keys, `window` (default: about half) of them old. Returns the share of old keys."""
    keys = length // part
    recent = keys // 2 if window is None else keys - window - SINKS
    window = keys - recent - SINKS
    model = dmattn.remove_learned_scores(model) if trained else model
    dmattn.add_learned_scores(model, window, recent_window=recent, sink_tokens=SINKS, **options)
    if trained:
        dmattn.load_scores(model, trained)
    return window / (length - recent - SINKS)


def measure_untrained(evaluation: Evaluation, options: argparse.Namespace) -> None:
    """Adds rows of all keys, and of choices of keys that do not learn."""
    evaluation.add_row("all")
    for part in options.keep:
        for name, options_of_scores in BASELINES.items():
            add_scores(evaluation.model, part, evaluation.tasks.length, **options_of_scores)
            evaluation.add_row(name, part)
            dmattn.remove_learned_scores(evaluation.model)
        for name in PRESSES if options.presses else ():
            evaluation.add_row(f"{name}, after the text", part, press=getattr(import_module("kvpress"), name))  # fmt: skip


def measure_trained(evaluations: list[Evaluation], teacher: nn.Module, streams: list[list[int]], options: argparse.Namespace, seed: int) -> None:  # fmt: skip
    """Trains scores for each budget, from those of the next larger one. Adds its rows: the same for all heads, and divided."""
    model, folder, trained = evaluations[0].model, options.output / f"scores-{seed}", None
    tasks = (Tasks(evaluations[0].tasks.tokenizer, streams[0], n) for n in (options.trained_length, *options.length))  # fmt: skip
    batches, *of_lengths = (training_batches(streams, t, seed, options.batch) for t in tasks)
    samples = [[text for _ in range(8) for text in next(texts)] for texts in of_lengths]
    torch.manual_seed(seed)
    for part in sorted(options.keep):
        share = add_scores(model, part, options.length[0], trained)
        # Trained gates are no longer open. The target falls to theirs at once.
        schedule = dmattn.ScoreSchedule(share=share, narrowing=0.1 if trained else 0.4)
        train(model, teacher, batches, schedule, options)
        dmattn.save_scores(model, trained := folder)
        for evaluation, texts in reversed([*zip(evaluations, samples, strict=True)]):
            add_scores(model, part, evaluation.tasks.length, trained)
            model.set_score_phase("hard")
            evaluation.add_row("learned, the same for each head", part, seed)
            budgets = dmattn.divide_budget(model, texts, mean_keys=evaluation.tasks.length / part)
            print(budgets)
            budgets.draw(options.output / f"budgets-{evaluation.tasks.length}-{part}-{seed}.png")
            dmattn.set_key_budgets(model, budgets)
            evaluation.add_row("learned, divided over heads", part, seed)
        dmattn.save_scores(model, folder)  # with the budgets of the first length
    if options.base_rate:
        model.set_score_phase("off")
        for evaluation in evaluations:
            evaluation.add_row("all, with the trained base", seed=seed)
        model.set_score_phase("hard")


def write_text(model: nn.Module, tasks: Tasks) -> str:
    """Returns a question about a fact in a long text, and what the model writes after it with the small cache."""
    sample, cache = tasks.make_sample("one needle", 0), dmattn.DynamicMaskCache(model.config)
    ids = torch.tensor([sample.text + sample.questions[0]], device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "pad_token_id": 0}
    [written] = model.generate(ids, **options, max_new_tokens=40, do_sample=False)
    return " >>>".join(tasks.tokenizer.decode(part) for part in written.split(ids.shape[1]))[-800:]


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # about the name past_key_values
    model, tokenizer = load_base(options.base, options.output, options.device)
    source, training, held_out = read_texts(tokenizer, options.texts)
    print(f"{source}: {sum(map(len, training))} tokens to train with, {sum(map(len, held_out))} held out; on {options.device}")  # fmt: skip
    evaluations = [Evaluation(model, tokenizer, held_out, n, options) for n in options.length]
    for evaluation in evaluations:
        measure_untrained(evaluation, options)
    teacher = copy.deepcopy(model).requires_grad_(False)
    for seed in options.seeds:
        if seed != options.seeds[0]:
            dmattn.remove_learned_scores(model).load_state_dict(teacher.state_dict())
        measure_trained(evaluations, teacher, training, options, seed)
    written = write_text(model, evaluations[0].tasks)
    table = "\n\n".join(f"{e.tasks.length} tokens:\n\n{make_table(e.rows)}" for e in evaluations)
    seconds = time.perf_counter() - began
    print(f"with the small cache:\n{written}\n\n{table}\n\n{seconds:.0f} s; files in {options.output}")  # fmt: skip
    record = {name: str(value) for name, value in vars(options).items()}
    record |= {"source": source, "text": written, "seconds": seconds, "rows": sum((e.rows for e in evaluations), [])}  # fmt: skip
    (options.output / "record.json").write_text(json.dumps(record, indent=1))
    (options.output / "table.md").write_text(table + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="retrofit", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--base", default="smollm2", help=f"{', '.join(BASES)}, or what from_pretrained loads")
    add("--texts", type=Path, help="a folder of texts (default: Python's reference and library)")
    add("--device", type=device, default="cuda" if is_available("cuda") else "cpu", help="of torch")
    add("--presses", action="store_true", help="measure methods of kvpress, which is installed")
    add("--output", type=new_folder, default="build/retrofit", help="folder for results")
    for name, (cpu, gpu, kind, what) in SETTINGS.items():
        several, of = "+" if type(gpu) is list else None, NAMES if kind is str else None
        add(f"--{name.replace('_', '-')}", type=kind, nargs=several, choices=of, help=f"{what} ({gpu}, {cpu} on a CPU)")  # fmt: skip
    options = parser.parse_args(arguments)
    for name, (cpu, gpu, *_) in SETTINGS.items():
        if getattr(options, name) is None:
            setattr(options, name, cpu if options.device == "cpu" else gpu)
    run(options)


if __name__ == "__main__":
    main()
