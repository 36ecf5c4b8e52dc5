"""examples/long_context.py on two processes: the losses of whole sequences, and a run that continues where it was stopped."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from processes import run_in_processes
from python_process import run_python

pytest.importorskip("transformers.models.doge", reason="transformers with Doge is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

# aot_eager alone runs softplus_backward with other strides than it was traced with.
BACKEND = "aot_eager_decomp_partition"
SIZES = [
    "--seq-len", "512", "--window", "32", "--layers", "2", "--hidden", "64", "--head-dim", "16", "--batch", "2",
]  # fmt: skip


def train(rank, folder, steps, options):
    import long_context

    os.environ["WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    long_context.main([*SIZES, "--steps", str(steps), "--output", folder, *options])


def losses(folder, steps, *options, processes=2):
    run_in_processes(processes, train, str(folder), steps, options)
    record = json.loads((folder / "record.json").read_text())
    return [(step["step"], step["loss"], step["gradient_norm"]) for step in record]


def test_losses_are_those_of_whole_sequences_and_of_a_run_that_was_stopped(tmp_path):
    pieces = losses(tmp_path / "pieces", 4, "--checkpoint")
    whole = losses(tmp_path / "whole", 4, processes=1)
    assert [step for step, *_ in pieces] == [0, 1, 2, 3]
    for (_, loss, norm), (_, other_loss, other_norm) in zip(pieces, whole, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-4)
        assert norm == pytest.approx(other_norm, rel=1e-3)
    losses(tmp_path / "stopped", 2)
    assert losses(tmp_path / "stopped", 4) == pieces
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "stopped" / "losses.png").stat().st_size > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--save-every", "0"], "argument --save-every: got 0, expected 1 to"),
        (["--hidden", "96"], "--hidden, --head-dim: got 96, 128, expected"),
        (["--output", "{file}"], "argument --output: [Errno 17] File exists"),
        ([], "got no rank of this process, expected that of torchrun: torchrun --nproc_per_node 2"),
    ],
)
def test_bad_option_is_refused_before_ranks_meet(options, message, tmp_path, monkeypatch, capsys):
    import long_context

    (tmp_path / "file").touch()
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        long_context.main([option.format(file=tmp_path / "file") for option in options])
    assert message in capsys.readouterr().err


def test_torchrun_starts_two_processes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    program = Path(__file__).parents[3] / "examples" / "long_context.py"
    options = (*SIZES, "--steps", "1", "--output", tmp_path)
    run_python(*torchrun, program, *options, OMP_NUM_THREADS="1")
    assert [step["step"] for step in json.loads((tmp_path / "record.json").read_text())] == [0]


def test_compiled_steps_on_pieces_equal_eager_ones_on_whole_sequences(tmp_path):
    # Inductor takes 20 seconds of a core more; test_compiled_pieces.py has it on pieces.
    one_layer = ("--layers", "1")  # each is compiled
    compiled = losses(tmp_path / "compiled", 2, *one_layer, "--checkpoint", "--compile", BACKEND)
    whole = losses(tmp_path / "whole", 2, *one_layer, "--cp", "1")
    assert [loss for _, loss, _ in compiled] == pytest.approx(
        [loss for _, loss, _ in whole], rel=1e-4
    )
