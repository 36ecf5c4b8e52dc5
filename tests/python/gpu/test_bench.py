"""Tests the rows of benchmarks/bench.py on a GPU, but never how fast anything is."""

import pytest

import bench
from harness import record
from harness.cases import decode


@pytest.mark.parametrize("case", ["decode", "host", "serving", "dynamic_mask"])
def test_case_has_rows_on_a_gpu(case, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 18)
    monkeypatch.setattr(decode, "_GPU_COPY_BYTES", 1 << 18)
    file = tmp_path / "bench.json"
    sizes = ["--length", "512", "--window", "64", "--repeats", "1", "--json", str(file)]
    assert bench.main(["run", "--case", case, "--device", "cuda", *sizes]) == 0
    rows = record.read(file)["rows"]
    assert {row["side"] for row in rows} & {"ours", "cuda"}
    assert all(ms > 0 for row in rows for ms in row["ms"].values())
