"""Runs examples/demo.py at a size too small to learn anything."""

import argparse

import pytest
import torch

import demo
import flash_dmattn

for needed in ("matplotlib", "tqdm", "transformers"):
    pytest.importorskip(needed)

from doge_demo import corpus, cost, pictures, run, token_cost, training  # noqa: E402

TINY = ["--context", "48", "--window", "8", "--seed", "3"]


def test_demo_runs_to_the_end(tmp_path, capsys, monkeypatch):
    """Without time for measurements, each side has three points, and the output names the rest."""
    for lengths in ("LENGTHS", "LENGTHS_ON_GPU"):
        monkeypatch.setattr(
            cost, lengths, {"eager": (16, 32, 64), "flash_dmattn": (16, 32, 64, 128)}
        )
    for module in (token_cost, run):
        monkeypatch.setattr(module, "CONTEXTS", (16, 32, 64, 96))
    monkeypatch.setattr(run, "_COST_SECONDS", 0)
    assert demo.main([*TINY, "--steps", "2", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ("on cuda" if flash_dmattn.is_available("cuda") else "on cpu") in printed
    for line in (
        "held-out bits per byte",
        "  | import os",
        "all finite",
        "one layer, N = 64",
        "generating after 64 bytes",
        "cache 0.0 MiB",
        "flash_dmattn ends at 64 of 128: more",
        "eager ends at 64 of 96, flash_dmattn ends at 64 of 96: more",
    ):
        assert line in printed
    assert "steps in" not in printed
    for name in ("loss.png", "keys.png", "cost.png", "token.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("import os")


def test_note_of_missing_steps_names_the_needed_time():
    history = training.History([8.0] * 23, seconds=156.0, bytes_seen=1, gradients_checked=1)
    options = argparse.Namespace(steps=400, seconds=150)
    expected = "23 of 400 steps in 150 s; all need --seconds 2713 on this machine"
    assert run._missing_steps(history, options) == expected
    options.steps = 23
    assert run._missing_steps(history, options) == ""


def test_missing_common_point_omits_rows():
    ours = [cost.Cost(16, 0.1, 1.0)]
    assert run._token_rows({"eager": [], "flash_dmattn": ours}) == []


def test_axes_of_a_narrow_range_have_plain_numbers():
    points = [cost.Cost(n, 0.6, 1.015 + n / 1e5) for n in (256, 512, 1024)]
    costs, labels = {"eager": points, "flash_dmattn": []}, {"eager": "", "flash_dmattn": ""}
    figure, panels = pictures._draw_by_length(costs, labels, 1e3, "bytes")
    figure.canvas.draw()
    for axes, expected in zip(panels, (["100", "1000"], ["1", "10"]), strict=True):
        low, high = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        assert [text.get_text() for y, text in ticks if low <= y <= high] == expected
        assert not any(text.get_text() for text in axes.get_yticklabels(minor=True))


def test_interrupt_prints_one_line_and_returns_130(tmp_path, capsys, monkeypatch):
    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "check_gradients", interrupted)
    assert demo.main([*TINY, "--output", str(tmp_path)]) == 130
    last_words = capsys.readouterr().err
    assert last_words.rstrip().endswith(f"Interrupted. What is finished is in {tmp_path}/.")


def test_unwritable_folder_prints_one_line(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert demo.main([*TINY, "--output", str(file)]) == 1
    assert capsys.readouterr().err == f"--output: [Errno 17] File exists: '{file}'\n"


def test_context_beyond_the_held_out_text_is_an_error(capsys, monkeypatch, tmp_path):
    few = torch.zeros(100, dtype=torch.uint8)
    monkeypatch.setattr(run, "standard_library", lambda: corpus.Corpus(few, few, 2))
    assert demo.main(["--context", "101", "--output", str(tmp_path / "output")]) == 2
    assert "--context: got 101, expected at most the 100 bytes" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_prints_one_line(error, monkeypatch, capsys, tmp_path):
    def exhausted(*rest):
        raise error

    monkeypatch.setattr(run, "make_model", exhausted)
    assert demo.main([*TINY, "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "out of memory" in said and said.count("\n") == 1


def test_nonfinite_gradient_stops_training():
    model = torch.nn.Linear(2, 2)
    model(torch.randn(1, 2)).sum().backward()
    assert training.check_gradients(model, 0) == 2
    model.bias.grad[1] = float("inf")
    with pytest.raises(FloatingPointError, match="step 7: the gradient of bias is not finite"):
        training.check_gradients(model, 7)


def test_held_out_text_comes_from_other_files():
    text = corpus.standard_library()
    assert len(text.training) > 10 * len(text.held_out) > 10_000
    files = [set(bytes(part.tolist()).split(b"\0")) for part in (text.training, text.held_out)]
    assert len(files[0] & files[1] - {b""}) == 0
    batch = corpus.random_batch(text.training, 3, 50, torch.Generator().manual_seed(0))
    assert batch.shape == (3, 50) and batch.dtype == torch.int64
    assert corpus.even_batch(text.held_out, 4, 50).shape == (4, 50)
