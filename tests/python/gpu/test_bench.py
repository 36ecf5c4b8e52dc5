"""Tests the rows of benchmarks/bench.py on a GPU, but never how fast anything is."""

import pytest
import torch

import bench
from harness import record, sides
from harness.case import DENSE, GLOBAL, KINDS, PER_QUERY, Case
from harness.cases import decode


@pytest.mark.parametrize("case", ["decode", "host", "dynamic_mask"])
def test_case_has_rows_on_a_gpu(case, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 18)
    monkeypatch.setattr(decode, "_GPU_COPY_BYTES", 1 << 18)
    file = tmp_path / "bench.json"
    sizes = ["--length", "512", "--window", "64", "--repeats", "1", "--json", str(file)]
    assert bench.main(["run", "--case", case, "--device", "cuda", *sizes]) == 0
    rows = record.read(file).rows
    assert {row.side for row in rows} & {"ours", "cuda"}
    assert all(ms > 0 for row in rows for ms in row.ms.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rival", ["flex", "fa2", "cudnn", "fa4", "cudnn_flex"])
def test_rival_gives_same_result(kind, rival, monkeypatch):
    monkeypatch.setattr(sides, "RECENT", 48)
    window = None if kind == DENSE else 64
    heads_first = rival in ("flex", "fa2", "cudnn")
    case = Case(kind, 512, 64, window, heads_q=4, heads_kv=4 if rival in ("fa2", "cudnn") else 2)
    inputs = sides.draw(case, torch.bfloat16, "cuda")
    if rival == "cudnn_flex" and kind in (PER_QUERY, GLOBAL):
        inputs.bias.mul_(1e-6)
    try:
        step = sides.build(rival, inputs)
    except sides.Declined:
        pytest.skip(f"{rival} does not compute {kind}")
    ours, theirs = sides.build("cuda", inputs), step
    out, expected = ours.forward(), theirs.forward()
    seen = torch.ones_like(out[..., 0], dtype=torch.bool)
    if inputs.mask is not None:  # rows without keys
        seen = inputs.mask.any(-1).repeat_interleave(case.heads_q // case.heads_kv, 1).mT
    close = {"rtol": 3e-2, "atol": 3e-2}
    shown = expected.transpose(1, 2) if heads_first else expected
    torch.testing.assert_close(out[seen], shown[seen], **close)
    if inputs.mask is None:
        gradients = zip(ours.backward(out)[:3], theirs.backward(expected)[:3], strict=True)
        for a, b in gradients:
            b = b.transpose(1, 2) if heads_first else b
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
