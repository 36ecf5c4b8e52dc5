"""Runs examples/from_scratch.py with texts too short and steps too few to learn anything."""

import json

import pytest

pytest.importorskip("tokenizers")

import from_scratch  # noqa: E402

TINY = "--context 64 --mean-keys 24 --recent 8 --steps 8 --batch 1 --samples 2 --layers 1 --width 16 --head-dim 8 --vocab 300"


def test_each_form_has_a_record_and_its_number_of_keys(tmp_path):
    for name in ("trained", "held"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        text = "".join(f"{i * i} is the square of {i}.\n" for i in range(100))
        (tmp_path / "texts" / name / "squares.txt").write_text(text)
    options = ["--output", str(tmp_path), "--device", "cpu", *TINY.split()]
    from_scratch.main(["--texts", str(tmp_path / "texts"), "--held-out", "held", *options])
    from_scratch.main(["--forms", "learned", "--seeds", "1", *options])  # with the same tokens
    records = json.loads((tmp_path / "record.json").read_text())
    assert [record["form"] for record in records] == ["all", "window", "learned", "learned"]
    for record, keys in zip(records, (64, 24, 24, 24), strict=True):
        assert record["keys"] == pytest.approx(keys, rel=0.25) and 0 < record["loss 16-64"] < 10
