"""examples/recall.py: its options, and trainings of few steps. test_scores_learn_what_to_keep.py has what it learns."""

import pytest

import recall
from command_line import run_program


@pytest.mark.parametrize(
    "options, message",
    [
        (["--length", "4"], "argument --length: got 4, expected 8 to"),
        (["--window", "0"], "argument --window: got 0, expected 1 to"),
        (["--heads", "3"], "--width: got 64, expected a multiple of 6, 2 for each of --heads"),
        (["--words", "8"], "--words: got 8, expected 16 or more, 2 for each pair"),
        (["--output", "x.xyz"], "argument --output: got x.xyz, expected a name that ends in .svg or .png"),
        (["--output", "{file}/x.svg"], "argument --output: [Errno 17] File exists"),
    ],
)  # fmt: skip
def test_bad_option_is_refused_before_it_trains(options, message, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        recall.parse([option.format(file=file) for option in options])
    assert message in capsys.readouterr().err


def test_interrupted_program_is_one_line(capsys):
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
