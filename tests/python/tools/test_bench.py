"""Tests the measurements, the records and the tables of benchmarks/bench.py, but never how fast anything is."""

import os
import re
from pathlib import Path

import pytest
import torch

import bench
from harness import record, sides, tables
from harness.case import (
    DENSE,
    DENSE_MASKS,
    EVICTED,
    GLOBAL,
    KINDS,
    PER_QUERY,
    Case,
    useful_tflops,
)
from harness.cases import attention, decode, host
from harness.clock import Rounds, peak_mb
from harness.record import Failure, Record, Row
from processes import run_in_processes

RUN = ["run", "--device", "cpu", "--commit", "0123456"]
SMALL = ["--length", "64", "96", "--window", "16", "--dtype", "float32", "--repeats", "1"]
HEAD = ("a", "2026-11-28", "0", {}, "")


def run(tmp_path, *arguments, status=0):
    """Runs the benchmark and returns the rows of its record."""
    file = tmp_path / "bench.json"
    assert bench.main([*RUN, *arguments, "--json", str(file)]) == status
    return record.read(file).rows


def test_attention_has_a_row_for_each_case_and_side(capsys, tmp_path):
    names = ["dense", "scaling", "dynamic_mask", "dense_masks", "documents"]
    rows = run(tmp_path, "--case", *names, *SMALL)
    assert {(row.case.split(" B")[0], row.side) for row in rows} == {
        (kind, side) for kind in (DENSE, PER_QUERY, DENSE_MASKS) for side in ("cpu", "sdpa")
    }
    # dynamic_mask has the sizes of scaling, documents none on the CPU.
    assert len(rows) == 3 * 2 * 2
    assert all(row.ms["backward"] > 0 and row.other["peak MB"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "per_query B1 H8 N96 D64 w16" in printed and "TFLOP/s" in printed


def test_record_keeps_the_rows_of_other_cases_of_its_commit(tmp_path):
    options = ["--side", "cpu", "--window", "16", "--length", "64", "--dtype", "float32", "--repeats", "1"]  # fmt: skip
    for names in (["dense"], ["sliding"], ["sliding"]):
        rows = run(tmp_path, "--case", *names, *options)
    assert [row.case.split(" B")[0] for row in rows] == [DENSE, "sliding"]
    rows = run(tmp_path, "--case", "dense", *options, "--commit", "7654321")
    assert [row.case.split(" B")[0] for row in rows] == [DENSE]


def test_two_records_are_compared_by_their_rows(capsys, tmp_path):
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    for path, ms in zip(paths, (2.0, 1.0), strict=True):
        rows = [Row("a case", "cpu", "float32", {"forward": ms}, {"rounds": 5})]
        record.write(path, Record(*HEAD, rows))
    assert bench.main(["compare", *map(str, paths)]) == 0
    assert "a case cpu float32: forward 2 -> 1 (0.500)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names, sides_of_rows",
    [
        (["host"], {"ours", "sdpa"}),
        (["decode"], {"ours", "rows", "sdpa"}),
        (["token"], {"ours", "eager"}),
        (["training_step", "scored_step"], {"ours", "sdpa", "soft", "hard"}),
    ],
)
def test_other_cases_have_rows_of_their_sides(names, sides_of_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_ROUNDS", Rounds(1, is_least=True))
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 16)
    if names[0] in ("token", "training_step"):
        pytest.importorskip("transformers.models.doge")
        from harness.cases import token, training_step

        monkeypatch.setattr(token, "ROUNDS", {"cpu": Rounds(1, warm_up=0)})
        monkeypatch.setattr(training_step, "STEPS", Rounds(1))
        monkeypatch.setattr(training_step, "LLAMA_STEPS", Rounds(1))
    chosen = sorted(sides_of_rows)
    sizes = ["--length", "16", "--window", "16", "--dtype", "float32", "--repeats", "1"]
    rows = run(tmp_path, "--case", *names, "--side", *chosen, *sizes)
    assert {row.side for row in rows} == sides_of_rows
    assert all(ms > 0 for row in rows for ms in row.ms.values())


def _measure_context_parallel(rank, file):
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does
    options = ["--case", "context_parallel", "--length", "256", "--json", str(file)]
    assert bench.main([*RUN, *options]) == 0


@pytest.mark.slow
def test_context_parallel_has_rows_of_both_exchanges(tmp_path):
    file = tmp_path / "bench.json"
    run_in_processes(2, _measure_context_parallel, file)
    rows = record.read(file).rows
    assert [row.side for row in rows] == ["one GPU", "2 GPUs, direct", "2 GPUs, two_hops"]
    assert all(row.other["exchanged MB"] > 0 for row in rows[1:])


def test_context_parallel_without_ranks_names_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert bench.main([*RUN, "--case", "context_parallel"]) == 1
    assert "torchrun --nproc_per_node 2 benchmarks/bench.py" in capsys.readouterr().out


def test_side_that_cannot_run_a_case_prints_its_reason(capsys):
    assert bench.main([*RUN, "--case", "scaling", "--side", "fa2", "fa4", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert printed.count("not measured: Declined: has no masks") == 4


@pytest.mark.parametrize("side, status", [("_our_step", 1), ("RIVALS", 0)])
def test_error_of_ours_is_the_exit_status_and_a_rivals_is_not(side, status, tmp_path, monkeypatch):
    def broken(*rest):
        raise RuntimeError("expected 3 outputs, got 2")

    value = broken if side == "_our_step" else sides.RIVALS | {"sdpa": broken}
    monkeypatch.setattr(sides, side, value)
    assert len(run(tmp_path, "--case", "dense", *SMALL, status=status)) == 2


def test_case_too_large_for_memory_prints_a_line(capsys):
    case = Case(DENSE_MASKS, 1 << 24, 64, 8)
    (failure,) = attention.measure(case, "float32", "cpu", ["cpu", "sdpa"], 1)
    assert isinstance(failure, Failure) and "its inputs, output and gradients take" in str(failure)


def test_documents_hold_the_tables_of_the_records():
    for document, written in tables.tables_of_documents().items():
        assert tables.with_tables(document, written) == document.read_text(), document


def test_every_case_and_side_is_in_the_document():
    page = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    first_column = "".join(re.findall(r"^\| [^|]+", page, re.MULTILINE))
    described = {"ours", *re.findall(r"`([\w ]+)`", first_column)}
    assert {*bench.CASES, *bench.SIDES} - described == set()


@pytest.mark.parametrize("is_least, time", [(False, 3), (True, 1)])
def test_rounds_summarise_what_follows_the_warm_up(is_least, time):
    measured = iter([100, 1, 3, 8])
    assert Rounds(3, is_least, warm_up=1).time_one(lambda: next(measured)) == time


@pytest.mark.parametrize("kind, window", [*((kind, None if kind == DENSE else 16) for kind in KINDS), (EVICTED, None)])  # fmt: skip
def test_sides_give_same_result(monkeypatch, kind, window):
    """All timed sides compute the same attention, except that torch's side uses the bias only to select keys."""
    monkeypatch.setattr(sides, "RECENT", 24)
    case = Case(kind, 96, 16, window, heads_q=4, heads_kv=2, batch=2)
    inputs = sides.draw(case, torch.float32, "cpu")
    if kind in (PER_QUERY, GLOBAL):
        inputs.bias.mul_(1e-6)
    ours, torchs = sides.build("cpu", inputs), sides.build("sdpa", inputs)
    out, expected = ours.forward(), torchs.forward()
    seen = expected.isfinite().all(-1)  # torch has NaN for a query that sees nothing
    assert seen.float().mean() > 0.9
    torch.testing.assert_close(out.transpose(1, 2)[seen], expected[seen], rtol=1e-4, atol=1e-5)
    if seen.all():
        for a, b in zip(ours.backward(out)[:3], torchs.backward(expected)[:3], strict=True):
            torch.testing.assert_close(a.transpose(1, 2), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (DENSE, DENSE_MASKS)])
def test_runs_for_cudnn_hold_the_visible_keys(kind, monkeypatch):
    monkeypatch.setattr(sides, "RECENT", 24)
    case = Case(kind, 150, 16, 32, heads_q=4, heads_kv=2, batch=2)
    chosen = sides.draw(case, torch.float32, "cpu").chosen()
    ends = sides.ends_of_runs(chosen, case.batch, case.heads_q)
    heads = chosen.heads * (2 if chosen.heads > 1 else 1)
    assert ends.shape[::2] == (heads, 300) and ends.shape[1] % 2 and ends.is_contiguous()
    assert (ends.diff(dim=1) >= 0).all()
    keys = torch.arange(150)[:, None]
    within = (ends.mT[:, :, None] <= keys).sum(-1) % 2 == 0  # [heads, B * N, N]
    expected = chosen.to_mask().expand(2, -1, -1, -1).repeat_interleave(heads // chosen.heads, 1)
    assert torch.equal(within.unflatten(1, (2, 150)).transpose(0, 1), expected)


@pytest.mark.parametrize("kind, window", [(DENSE, None), (EVICTED, None), *((kind, 64) for kind in KINDS if kind != DENSE)])  # fmt: skip
def test_visible_elements_are_as_many_as_useful_work_counts(kind, window):
    case = Case(kind, 2048, 16, window, heads_q=4, heads_kv=4)
    inputs = sides.draw(case, torch.float32, "cpu")
    visible = torch.ones(1, 4, 2048, 2048, dtype=torch.bool).tril()
    if inputs.mask is not None:
        visible = visible & inputs.mask
    elif (chosen := inputs.chosen()) is not None:
        visible = chosen.to_mask().expand_as(visible)
    # Random scores decide how many are visible. The 64 keys of a row lie 4 % nearer to its start or its end.
    tolerance = {GLOBAL: 0.12, DENSE_MASKS: 0.02, EVICTED: 0.02}.get(kind, 0)
    assert int(visible.sum()) == pytest.approx(case.visible_elements, rel=tolerance)
    row = Row(case, "cpu", "float32", {"forward": 1e-9 * case.visible_elements}, {})
    assert useful_tflops(row)["forward"] == pytest.approx(64)  # 4 D FLOPs an element


def test_peak_counts_the_mask_that_a_rival_needs():
    case = Case(PER_QUERY, 256, 16, 16, heads_q=2, heads_kv=2)
    step = sides.build("sdpa", sides.draw(case, torch.float32, "cpu"))
    assert step.mask_bytes == 2 * 256 * 256 and peak_mb(step, "cpu") > step.mask_bytes / 1e6
