"""Runs examples/demo.py at a size too small to learn anything."""

import pytest
import torch

for needed in ("matplotlib", "tqdm", "transformers.models.doge"):
    pytest.importorskip(needed)

import demo  # noqa: E402
from corpus import standard_library  # noqa: E402

TINY = ["--context", "48", "--window", "8", "--seed", "3"]


def test_demo_runs_to_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "LENGTHS", (16, 32))
    demo.main([*TINY, "--steps", "2", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    for line in ("held-out bits per byte", "import os", "all gradients finite", "eager: N 16"):
        assert line in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("import os")


def test_context_beyond_the_held_out_text_is_an_error(capsys, monkeypatch, tmp_path):
    few = torch.zeros(100, dtype=torch.uint8)
    monkeypatch.setattr(demo, "standard_library", lambda: demo.Corpus(few, few, 2))
    with pytest.raises(SystemExit):
        demo.main(["--context", "101", "--output", str(tmp_path)])
    assert "--context: got 101, expected at most 100" in capsys.readouterr().err


def test_nonfinite_gradient_stops_training(tmp_path, monkeypatch):
    make_model = demo.make_model

    def make_broken_model(*sizes):
        model = make_model(*sizes)
        model.lm_head.weight.register_hook(lambda gradient: gradient + torch.inf)
        return model

    monkeypatch.setattr(demo, "make_model", make_broken_model)
    with pytest.raises(FloatingPointError, match="step 0: the gradient of .* is not finite"):
        demo.main([*TINY, "--steps", "1", "--output", str(tmp_path)])


def test_held_out_text_comes_from_other_files():
    text = standard_library()
    assert len(text.training) > 10 * len(text.held_out) > 10_000
    files = [set(bytes(part.tolist()).split(b"\0")) for part in (text.training, text.held_out)]
    assert len(files[0] & files[1] - {b""}) == 0
