"""A program in examples/ answers a bad option with one line that names it, before any training. Very short trainings work."""

import importlib

import pytest
import torch

import recall
from command_line import run_program
from one_cycle import one_cycle

# Options that every call of a program gets.
ALWAYS = {
    "learned_scores.distil": ["--length", "96", "--device", "cpu", "--output", "{folder}"],
    "learned_scores.recall": ["--device", "cpu"],
}
BAD = {
    "demo": [
        (["--steps", "0"], "argument --steps: got 0, expected 1 to"),
        (["--context", "1"], "argument --context: got 1, expected 2 to 32768"),
        (["--steps", "many"], "argument --steps: got many, expected 1 to"),
        (["--seed", "-1"], "argument --seed: got -1, expected 0 to"),
        (["--device", "bogus"], "argument --device: got bogus: Expected one of"),
    ],
    "learned_scores.distil": [
        (["--steps", "0"], "argument --steps: got 0, expected 1 to"),
        (["--rate", "fast"], "argument --rate: got fast, expected a number above 0"),
        (["--share", "2"], "argument --share: got 2, expected a number above 0, at most 1"),
        (["--length", "16"], "argument --length: got 16, expected 32 to"),
        (["--parts", "64"], "--parts: got 64, expected at most 24, by which a query sees 4 keys"),
        (["--width", "12", "--parts", "4"], "--width: got 12, expected a multiple of 8"),
        (["--resume", "--parts", "4"], "--resume: got no checkpoint in {folder}, expected one"),
        (["--model", "{folder}/none", "--text", "{folder}/none"], "argument --text: [Errno 2]"),
        (["--parts", "4", "--model", "{folder}/none", "--text", "{file}"], "--model: got {folder}/none: "),
        (["--model", "somewhere"], "--model and --text: got one without the other"),
        (["--train", "all", "--recipes", "learned", "without_budget"], "--recipes: got several with --train all"),
        (["--output", "{file}"], "argument --output: [Errno 17] File exists: '{file}'"),
    ],
    "learned_scores.recall": [
        (["--lengths", "4"], "argument --lengths: got 4, expected 8 to"),
        (["--parts", "256"], "--parts: got 256, expected at most the last of --lengths, 128"),
        (["--words", "8"], "--words: got 8, expected 16 or more, 2 for each pair"),
        (["--graphs"], "--graphs: got it with --device cpu, expected --device cuda"),
        (["--output", "{file}/x.json"], "argument --output: [Errno 17] File exists"),
    ],
    "learned_scores.pictures": [(["{folder}"], "expected one with recall*.json or seed*/results.json")],
    "long_context": [
        (["--save-every", "0"], "argument --save-every: got 0, expected 1 to"),
        (["--hidden", "96"], "--hidden, --head-dim: got 96, 128, expected"),
        (["--output", "{file}"], "argument --output: [Errno 17] File exists"),
        ([], "got no rank of this process, expected that of torchrun: torchrun --nproc_per_node 2"),
    ],
    "recall": [
        (["--length", "4"], "argument --length: got 4, expected 8 to"),
        (["--window", "0"], "argument --window: got 0, expected 1 to"),
        (["--heads", "3"], "--width: got 64, expected a multiple of 6, 2 for each of --heads"),
        (["--words", "8"], "--words: got 8, expected 16 or more, 2 for each pair"),
        (["--output", "x.xyz"], "argument --output: got x.xyz, expected a name that ends in .svg or .png"),
        (["--output", "{file}/x.svg"], "argument --output: [Errno 17] File exists"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [(program, *row) for program, rows in BAD.items() for row in rows],
)
def test_bad_option_is_refused_before_it_trains(
    program, options, message, tmp_path, capsys, monkeypatch
):
    for needed in ("accelerate", "matplotlib", "tqdm", "transformers.models.doge"):
        pytest.importorskip(needed)
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr(torch.Tensor, "backward", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("RANK", raising=False)
    names = {"folder": tmp_path, "file": tmp_path / "file"}
    names["file"].touch()
    words = [word.format(**names) for word in ALWAYS.get(program, []) + options]
    with pytest.raises(SystemExit) as end:
        importlib.import_module(program).main(words)
    assert end.value.code == 2 and message.format(**names) in capsys.readouterr().err


def test_interrupted_program_prints_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run_program(interrupted)
    assert end.value.code == 130 and capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize("steps", ["1", "2"])
def test_few_steps_have_a_recall_each(steps):
    sizes = ["--length", "16", "--pairs", "2", "--words", "8", "--width", "16", "--batch", "2"]
    options = recall.parse([*sizes, "--steps", steps, "--window", "4", "--device", "cpu"])
    assert len(recall.train("gate", options)) == int(steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 40])
def test_learning_rate_of_few_steps_rises_and_falls(steps):
    """OneCycleLR divides by the number of rising or falling steps minus one."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    schedule, rates = one_cycle(optimizer, 1.0, steps, rise=0.05), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert 0 < rates[0] < 1 and (steps == 1 or max(rates) == pytest.approx(1.0))
