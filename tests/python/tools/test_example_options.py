"""A program in examples/ answers a bad option with one line that names it, before any training."""

import importlib

import pytest
import torch

BAD = {
    "demo": [
        (["--steps", "0"], "argument --steps: got 0, expected 1 to"),
        (["--context", "1"], "argument --context: got 1, expected 2 to 32768"),
        (["--steps", "many"], "argument --steps: got many, expected 1 to"),
        (["--seed", "-1"], "argument --seed: got -1, expected 0 to"),
        (["--device", "bogus"], "argument --device: got bogus: Expected one of"),
    ],
    "from_scratch": [
        (["--mean-keys", "9", "--recent", "8", "--output", "{folder}"], "--mean-keys: got 9, expected 13 to"),
        (["--texts", "{file}", "--output", "{folder}"], "--texts: got {file}, expected a folder"),
    ],
    "long_context": [
        (["--save-every", "0"], "argument --save-every: got 0, expected 1 to"),
        (["--hidden", "96"], "--hidden, --head-dim: got 96, 128, expected"),
        (["--output", "{file}"], "argument --output: [Errno 17] File exists"),
        ([], "got no rank of this process, expected that of torchrun: torchrun --nproc_per_node 2"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [(program, *row) for program, rows in BAD.items() for row in rows],
)
def test_bad_option_is_refused_before_it_trains(
    program, options, message, tmp_path, capsys, monkeypatch
):
    for needed in ("tqdm", "transformers.models.doge"):
        pytest.importorskip(needed)
    monkeypatch.setattr(torch.Tensor, "backward", None)
    monkeypatch.delenv("RANK", raising=False)
    names = {"folder": tmp_path, "file": tmp_path / "file"}
    names["file"].touch()
    words = [word.format(**names) for word in options]
    with pytest.raises(SystemExit) as end:
        importlib.import_module(program).main(words)
    assert end.value.code == 2 and message.format(**names) in capsys.readouterr().err
