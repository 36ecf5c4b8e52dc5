"""Adds learned scores to a pretrained model, trains them against the model itself, and shows the cost of budgets of keys.

python -m learned_scores.distil                                            (in examples/; a small Llama, pretrained here)
python -m learned_scores.distil --model Qwen/Qwen3-0.6B --text book.txt --length 4096 --keep 252 --recent 256 --batch 1
accelerate launch -m learned_scores.distil --model ...                     (DDP, or FSDP2 by accelerate's config)

The base is frozen; --train all trains it, too. The loss is the divergence from the model with its scores off, plus a term for gates that
keep more old keys than the target. The target falls from 1 to --share. In the soft phase, gates are drawn open or closed
(training.stochastic_gates). The last quarter of the steps is hard.
--recipes compares this with trainings that leave out a part of it. --resume continues from the last checkpoint of --output.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from command_line import add_device, between, new_folder, rate, run_program, share
from doge_demo.corpus import standard_library
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    remove_learned_scores,
    save_scores,
    set_score_phase,
)
from flash_dmattn.integrations.transformers.compat import CACHE
from one_cycle import one_cycle

from .budgets import SINKS, autocast, quality_of_scores, quality_without_training
from .text import DIGITS, PassKeyTexts, held_out_texts, held_out_tokens
from .training import RECIPES, ScoreTrainer, freeze_all_but_scores


def small_llama(options: argparse.Namespace, texts: PassKeyTexts) -> LlamaForCausalLM:
    """Trains a small model of bytes with all keys, which takes minutes on a core."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=2 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.68 * options.width**-0.5,
        max_position_embeddings=options.length, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(options.device)
    largest_rate, steps = options.pretraining_rate, options.pretraining_steps
    optimizer = torch.optim.AdamW(
        model.parameters(), largest_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = one_cycle(optimizer, largest_rate, steps, rise=0.05)
    bar = tqdm(range(steps), desc="pretraining", dynamic_ncols=True)
    for step in bar:
        rows = range(step * options.batch, (step + 1) * options.batch)
        ids, asked = (
            torch.stack(columns).to(options.device)
            for columns in zip(*(texts.with_answers(row) for row in rows), strict=True)
        )
        with autocast(model):
            logits = model(ids, use_cache=False).logits[:, :-1]
        each = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        answer = each[asked[:, 1:]].mean()
        optimizer.zero_grad()
        (each.mean() + 2.0 * answer).backward()  # an answer is a few digits among hundreds of bytes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            bar.set_postfix_str(f"loss {each.mean().item():.2f}, answers {answer.item():.2f}")
    return model


class TokenTexts(Dataset):
    """Rows of one long text, [length] each."""

    def __init__(self, ids: Tensor, length: int):
        self.rows = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def training_arguments(options: argparse.Namespace, recipe: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(options.output / "checkpoints" / recipe),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, options.steps // 50),
        max_grad_norm=1.0,
        gradient_checkpointing=options.gradient_checkpointing,
        logging_steps=max(1, options.steps // 50),
        save_steps=max(1, options.steps // 4),
        save_total_limit=1,
        use_cpu=options.device == "cpu",
        bf16=options.device == "cuda",
        seed=options.seed,
        report_to=[],
        remove_unused_columns=False,
    )


def train_scores(
    model: PreTrainedModel, texts: Dataset, options: argparse.Namespace, recipe: str
) -> list[dict[str, float | str]]:
    """Adds scores to a model, trains and saves them, and returns the log."""
    add_learned_scores(
        model, options.keep, recent_window=options.recent, sink_tokens=SINKS, scorer=options.scorer
    )
    if options.train == "scores":
        freeze_all_but_scores(model)
    trainer = ScoreTrainer(
        model=model,
        args=training_arguments(options, recipe),
        train_dataset=texts,
        schedule=replace(RECIPES[recipe], share=options.share),
        distils=options.train == "scores",
    )
    # A recipe that had not begun when the run ended has no checkpoint.
    checkpoint = last_checkpoint(options, recipe) if options.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    save_scores(model, scores_folder(options, recipe))
    return [{"recipe": recipe, **row} for row in trainer.state.log_history]


def last_checkpoint(options: argparse.Namespace, recipe: str) -> str | None:
    folder = options.output / "checkpoints" / recipe
    return get_last_checkpoint(folder) if folder.is_dir() else None


def scores_folder(options: argparse.Namespace, recipe: str) -> Path:
    return options.output / ("scores" if recipe == "learned" else f"scores_{recipe}")


def main(arguments: list[str] | None = None) -> dict:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    is_first = PartialState(cpu=options.device == "cpu").is_main_process
    # From here on, each process has its own GPU.
    set_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    digits = DIGITS
    if options.model is None:
        corpus = standard_library()
        rows = options.batch * (options.pretraining_steps + options.steps)
        texts = PassKeyTexts(corpus.training, options.length, rows, options.seed)
        model = small_llama(options, texts)
        held_out = held_out_texts(corpus, options.length, options.tests)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            model = AutoModelForCausalLM.from_pretrained(options.model).to(options.device)
        except OSError as error:  # neither a folder nor a name of the hub
            options.fail(f"--model: got {options.model}: {str(error).splitlines()[0]}")
        ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]
        kept_back = max(2 * options.length, len(ids) // 10)
        if len(ids) < kept_back + options.length:
            options.fail(
                f"--text: got {len(ids)} tokens, expected {3 * options.length} or more, 3 texts of --length"
            )
        texts = TokenTexts(ids[:-kept_back], options.length)
        held_out, digits = held_out_tokens(
            ids[-kept_back:], tokenizer, options.length, options.tests
        )
    results = {"settings": {k: str(v) for k, v in vars(options).items() if k != "fail"}, "log": []}
    budgets = [options.length // part for part in options.parts]
    results["quality"] = quality_without_training(model, held_out, budgets, digits)
    if is_first:
        keep_results(results, options)
    for recipe in options.recipes:
        results["log"] += train_scores(model, texts, options, recipe)
        if recipe == options.recipes[0]:
            write(model, held_out[0], min(options.length, 512))
        remove_learned_scores(model)
        folder = scores_folder(options, recipe)
        results["quality"][recipe] = quality_of_scores(
            model, held_out, budgets, folder, digits, options.scorer
        )
        if is_first:
            keep_results(results, options)
    if is_first:
        for method, qualities in results["quality"].items():
            for budget, quality in qualities.items():
                print(
                    f"{method:10} {budget:5} keys: loss {quality['loss']:.3f}, pass keys {quality['pass_keys']:.2f}"
                )
    return results if is_first else {}


def keep_results(results: dict, options: argparse.Namespace) -> None:
    """Writes the results so far. Called after every recipe, so that an interrupted run loses none."""
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


@torch.no_grad()
def write(model: PreTrainedModel, prompt: Tensor, count: int) -> None:
    """Generates with a cache of the rule's keys, and prints how many keys it holds."""
    set_score_phase(model, "hard")  # some recipes and very short trainings end in the soft phase
    cache = DynamicMaskCache(model.config)
    ids = prompt[None].to(model.device)
    with autocast(model):
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, max_new_tokens=count, do_sample=False
        )  # fmt: skip
    keys = cache.layers[0].keys.shape[2]
    print(f"generated {written.shape[1]} tokens with a cache of {keys} keys a head")


def readable(text: str) -> Path:
    """Parses the path of a text file."""
    try:
        Path(text).open().close()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a folder or name of from_pretrained; by default a small Llama is trained")
    add(
        "--text",
        type=readable,
        help="a file of text, with --model; its last tenth is for the tests",
    )
    add("--train", choices=("scores", "all"), default="scores")
    add(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=["learned"],
        help="trainings, one after the other",
    )
    add("--scorer", choices=("hidden", "mlp", "value"), default="hidden", help="what makes scores")
    add("--length", type=between(32), default=256, help="tokens of a text")
    add("--keep", type=between(1), default=22, help="old keys that a query keeps in the hard phase")
    add("--recent", type=between(1), default=8, help="keys that are always seen")
    add("--share", type=share, default=1 / 8, help="of old keys, at the end")
    add("--steps", type=between(1), default=400, help="of the scores' training")
    add("--batch", type=between(1), default=8, help="texts of a step")
    add("--gradient-checkpointing", action="store_true", help="layers run again for the backward")
    add("--rate", type=rate, default=1e-2, help="the largest learning rate")
    add("--seed", type=between(0), default=0)
    add("--resume", action="store_true", help="from the last checkpoint")
    add("--pretraining-steps", type=between(1), default=1700, help="of the small Llama")
    add("--pretraining-rate", type=rate, default=3e-3, help="the largest learning rate of it")
    add("--width", type=between(8), default=128, help="features of the small Llama")
    add("--layers", type=between(1), default=3, help="of the small Llama")
    add(
        "--parts",
        type=between(1),
        nargs="+",
        default=[2, 4, 8, 16, 32],
        help="budgets, as length / part",
    )
    add("--tests", type=between(1), default=128, help="texts by which budgets are compared")
    add("--threads", type=between(1), default=1)
    add_device(parser)
    add("--output", type=new_folder, default="build/learned_scores", help="a folder")
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.text is None):
        parser.error("--model and --text: got one without the other, expected both or neither")
    if options.train == "all" and len(options.recipes) > 1:
        parser.error(
            "--recipes: got several with --train all, expected one, which changes the base"
        )
    least = SINKS + 2
    if options.length // max(options.parts) < least:
        parser.error(
            f"--parts: got {max(options.parts)}, expected at most {options.length // least}, by which a query sees {least} keys"
        )
    if options.model is None and options.width % 8:
        parser.error(f"--width: got {options.width}, expected a multiple of 8")
    if options.resume and not any(last_checkpoint(options, recipe) for recipe in options.recipes):
        parser.error(f"--resume: got no checkpoint in {options.output}, expected one")
    options.fail = parser.error
    return options


if __name__ == "__main__":
    run_program(main)
