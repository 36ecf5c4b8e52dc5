"""examples/long_context.py has the losses of whole sequences on two processes, and resumes a run where it stopped."""

import importlib.util
import json
import os
import runpy
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from processes import run_in_processes

pytest.importorskip("transformers.models.doge", reason="transformers with Doge is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

SIZES = [
    "--seq-len", "512", "--window", "32", "--layers", "1", "--hidden", "64", "--head-dim", "16", "--batch", "2",
]  # fmt: skip


# Trainings that run one after the other: (folder, steps, options).
RUNS = [
    ("whole", 4, ("--cp", "1")),
    ("pieces", 4, ("--checkpoint",)),
    # test_compiled_pieces.py has other compilers on pieces.
    ("compiled", 2, ("--checkpoint", "--compile", "eager")),
    ("stopped", 2, ()),
    ("stopped", 4, ()),
]


def train(rank, folder):
    import long_context
    from small_corpus import small_corpus

    long_context.standard_library = small_corpus
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    for name, steps, options in RUNS:
        output = ("--steps", str(steps), "--output", str(folder / name))
        with mock.patch.object(os, "_exit"):  # the program ends by _exit
            long_context.main([*SIZES, *output, *options])


def test_losses_equal_whole_sequences_and_a_resumed_run(tmp_path):
    run_in_processes(2, train, tmp_path)
    whole, pieces, compiled, stopped = (
        json.loads((tmp_path / name / "record.json").read_text())
        for name in ("whole", "pieces", "compiled", "stopped")
    )
    assert [step["step"] for step in pieces] == [0, 1, 2, 3]
    for step, expected in zip(pieces, whole, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert step["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)
    for step, expected in zip(compiled, whole[:2], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    for name in ("step", "loss", "gradient_norm"):
        assert [step[name] for step in stopped] == [step[name] for step in pieces]
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "stopped" / "losses.png").stat().st_size > 0


def run_program(rank, options):
    import corpus
    import long_context
    from small_corpus import small_corpus

    dist.destroy_process_group()  # the program makes its own
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ.update(ranks, MASTER_PORT="0")
    corpus.standard_library = small_corpus
    with mock.patch.object(sys, "argv", ["long_context.py", *options]):
        runpy.run_path(long_context.__file__, run_name="__main__")


def test_program_starts_with_the_variables_of_torchrun(tmp_path):
    run_in_processes(1, run_program, [*SIZES, "--steps", "1", "--output", str(tmp_path)])
    assert [step["step"] for step in json.loads((tmp_path / "record.json").read_text())] == [0]
