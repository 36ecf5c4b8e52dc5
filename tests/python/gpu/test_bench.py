"""Tests the rows of benchmarks/bench.py on a GPU, but never how fast anything is."""

import sys

import pytest

import bench
from harness import record
from harness.cases import decode


@pytest.fixture(autouse=True)
def command_of_the_driver(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/bench.py", "run"])


def test_decode_case_prints_valid_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 18)
    monkeypatch.setattr(decode, "_GPU_COPY_BYTES", 1 << 18)
    file = tmp_path / "bench.json"
    sizes = ["--length", "100", "--window", "64", "--repeats", "1", "--json", str(file)]
    assert (
        bench.main(["run", "--case", "decode", "--device", "cuda", "--commit", "0" * 7, *sizes])
        == 0
    )
    rows = record.read(file)["rows"]
    cases = {row["case"] for row in rows if row["side"] == "ours"}
    assert {case.split()[1] for case in cases} == {"all", "slots"}
    assert all(row["forward"] > 0 and row["parts"]["warm"] > 0 for row in rows)


@pytest.mark.parametrize("case", ["selection", "host"])
def test_bench_cases_of_other_modules_have_rows(case, capsys, tmp_path):
    file = tmp_path / "bench.json"
    sizes = ["--length", "512", "--repeats", "1", "--json", str(file)]
    assert bench.main(["run", "--case", case, "--device", "cuda", "--commit", "0" * 7, *sizes]) == 0
    assert all(row["forward"] > 0 for row in record.read(file)["rows"])
