"""Tests the measurements and output of benchmarks/bench.py, but never how fast anything is."""

import itertools
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from harness import cases, machine, record, sides
from harness.case import (
    CASES,
    DENSE,
    DENSE_MASKS,
    FORGETTING,
    NAMES,
    PER_QUERY,
    Case,
    cases_of,
)
from harness.cases import attention, decode
from harness.clock import Rounds
from harness.sides import build, draw

RUN = ["run", "--device", "cpu", "--commit", "0123456"]
ONCE = ["--repeats", "1"]
SMALL = ["--length", "64", "96", "--window", "16", "--dtype", "float32", *ONCE]


@pytest.mark.parametrize("name", cases._MODULES)
def test_case_module_measures_the_sides_it_is_listed_with(name):
    if name in ("models", "presses", "scored_llama", "serving"):
        pytest.importorskip("kvpress" if name == "presses" else "transformers.models.doge")
    names, listed = cases._MODULES[name]
    modules = {cases.module_of(case) for case in names}
    measured = {
        side
        for module in modules
        for case in names
        for device in ("cpu", "cuda")
        for side in module.side_names(case, device)
    }
    assert len(modules) == 1 and measured == set(listed)


def test_every_case_and_side_is_in_the_document():
    page = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    first_column = "".join(re.findall(r"^\| [^|]+", page, re.MULTILINE))
    described = {"ours", *re.findall(r"`(\w+)`", first_column)}  # ours: with our backends
    assert {*cases.NAMES, *cases.SIDES} - described == set()


def run(capsys, *arguments):
    """Runs the benchmark and returns what it prints, among it every row."""
    assert bench.main([*RUN, *arguments]) == 0
    return capsys.readouterr().out


def test_rows_are_printed_written_and_drawn(capsys, tmp_path):
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    wanted = ["--case", "dense", "scaling", "dense_masks", *SMALL, "--json", str(file)]
    printed = run(capsys, *wanted)
    assert "per_query B1 H8 N96 D64 w16" in printed and "TFLOP/s" in printed
    content = record.read(file)
    assert content["machine"]["name"] and content["versions"]["torch"] == torch.__version__
    titles = {(Case.parse(row["case"]), row["side"]) for row in content["rows"]}
    assert {(case.kind, case.seqlen, side) for case, side in titles} == {
        (kind, n, side)
        for kind in (DENSE, PER_QUERY, DENSE_MASKS)
        for n in (64, 96)
        for side in ("cpu", "sdpa")
    }
    assert all(
        row[name] > 0 for row in content["rows"] for name in ("forward", "backward", "peak_mb")
    )
    assert bench.main(["show", str(file), "--plot", str(picture)]) == 0
    assert "per_query B1 H8 N96 D64 w16" in capsys.readouterr().out
    assert "sequence length N" in picture.read_text()
    assert bench.main(["compare", str(file), str(file)]) == 0
    ratios = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line[0] == " "]
    assert ratios == ["1.000"] * 3 * 2 * len(content["rows"])  # forward, backward, peak_mb


def test_pictures_have_a_panel_per_varying_size(capsys, tmp_path):
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    sizes = ["--length", "64", "96", "--window", "8", "16", "--dtype", "float32"]
    run(capsys, "--case", "windows", "--side", "cpu", *sizes, "--json", str(file))
    assert bench.main(["show", str(file), "--plot", str(picture)]) == 0
    assert "sequence length N" in picture.read_text() and "window w" in picture.read_text()
    once = ["--dtype", "float32", *ONCE]
    run(capsys, "--case", "dense", "--length", "32", *once, "--json", str(file))
    with pytest.raises(SystemExit):
        bench.main(["show", str(file), "--plot", str(picture)])
    assert "--plot: got no attention at several lengths" in capsys.readouterr().err


def test_decoding_has_cold_and_warm_times(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 16)
    file = tmp_path / "bench.json"
    printed = run(capsys, "--case", "decode", *SMALL, "--json", str(file))
    assert "a copy moves" in printed and "decode slots w16, any context B8" in printed
    rows = record.read(file)["rows"]
    assert {(row["case"].split(" B")[0], row["side"]) for row in rows} == {
        ("decode slots w16, any context", "ours"), ("decode slots w16, any context", "rows"), ("decode all of N64", "ours"), ("decode all of N64", "sdpa"),
        ("decode all of N96", "ours"), ("decode all of N96", "sdpa"),
    }  # fmt: skip
    for row in rows:
        assert row["forward"] > 0 and row["parts"]["warm"] > 0 and row["of_copy_bandwidth"] > 0
        assert row["visited_mib"] >= 1 / 16


@pytest.mark.parametrize(
    "case", ["host", "scored_text", "scored_token", "selection", "token", "training_step"]
)
def test_bench_cases_of_other_modules_have_rows(case, capsys, tmp_path, monkeypatch):
    if case not in ("host", "selection"):
        pytest.importorskip("transformers.models.doge")
        from harness.cases import models

        monkeypatch.setattr(models, "_STEPS", Rounds(1))
        monkeypatch.setattr(models, "_TOKEN_ROUNDS", {"cpu": Rounds(1, "least", warm_up=0)})
    from harness.cases import host

    monkeypatch.setattr(host, "_ROUNDS", Rounds(1, "least", warm_up=0))
    file = tmp_path / "bench.json"
    chosen = {
        "host": ["--side", "ours", "sdpa"], "token": ["--side", "ours", "eager"], "training_step": ["--side", "ours", "eager"],
        "selection": ONCE,
    }.get(case, [])  # fmt: skip
    printed = run(capsys, "--case", case, "--length", "16", *chosen, "--json", str(file))
    assert "failed:" not in printed
    rows = record.read(file)["rows"]
    flash = "all keys, FlashAttention-2"
    assert {row["side"] for row in rows} == {
        "host": {"ours", "sdpa"}, "scored_text": {flash, "soft", "hard"}, "scored_token": {flash, "hard, slots"},
        "selection": {"cpu"}, "token": {"ours", "eager"}, "training_step": {"ours", "eager"},
    }[case]  # fmt: skip
    assert all((row["forward"] or row["both"]) > 0 for row in rows)


@pytest.fixture
def serving(monkeypatch):
    """Imports the case and makes it small."""
    pytest.importorskip("transformers.models.doge")
    from flash_dmattn.integrations.transformers.compat import HAS_SLOTS_IN_BATCHES

    if not HAS_SLOTS_IN_BATCHES:
        pytest.skip("slots in batches need transformers 5.24")
    from harness.cases import serving

    monkeypatch.setattr(serving, "_NEW", {"cpu": 3})
    monkeypatch.setattr(serving, "_CONCURRENCY", {"cpu": (1, 2)})
    monkeypatch.setattr(serving, "_COUNTED", (1, 2))
    monkeypatch.setattr(serving, "_LOADS", (0.8,))
    return serving


def test_serving_has_rows_of_slots_and_of_all_keys(serving, capsys, tmp_path):
    file = tmp_path / "bench.json"
    printed = run(capsys, "--case", "serving", "--length", "20", "--json", str(file))
    assert "failed:" not in printed and "declined" not in printed
    rows = record.read(file)["rows"]
    assert [row["side"] for row in rows] == [side for side in serving.SIDES for _ in range(3)]
    assert all(value > 0 for row in rows for value in row["parts"].values())
    # No request may end in the short time between two arrivals.
    assert all(row["values"]["throughput"][0] > 0 for row in rows if "offered" not in row["values"])
    # Every side gets the same requests per second, a share of what the slots do with 2 at a time.
    saturation, _ = rows[1]["values"]["completed"]
    offered = [row["values"]["offered"][0] for row in rows if "offered" in row["values"]]
    assert offered == pytest.approx([0.8 * saturation] * len(serving.SIDES), rel=1e-5)


class OneAtATime:
    """Imitates an engine that runs one request at a time, each for some seconds, and the clock. Its time is simulated."""

    def __init__(self, seconds):
        self.seconds, self.running, self.end, self.now = seconds, [], 0.0, 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def add_request(self, prompt, **options):
        self.end = max(self.end, self.now) + self.seconds
        moments = [self.end - 1e-4, self.end]
        self.running.append(SimpleNamespace(created_time=self.now, timestamps=moments, error=None))

    def get_result(self, timeout):
        ends = self.running[0].timestamps[-1] if self.running else self.now + timeout + 1
        self.now = max(self.now, min(ends, self.now + timeout))
        return self.running.pop(0) if ends <= self.now else None


@pytest.mark.parametrize("seconds, wanted", [(0.001, 100), (0.02, 50)])
def test_open_loop_counts_requests_when_they_end(seconds, wanted, serving, monkeypatch):
    """If 100 requests arrive per second, an engine that needs 1 ms for each completes all, and one that needs 20 ms 50."""
    engine = OneAtATime(seconds)
    monkeypatch.setattr(serving, "time", engine)
    monkeypatch.setattr(serving, "_COUNTED", (100, 2))
    model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(vocab_size=9))
    values = serving._open_loop(engine, model, 4, 100.0)["values"]
    (offered, _), (completed, _) = values["offered"], values["completed"]
    assert offered == 100 and completed == pytest.approx(wanted, rel=0.02)
    assert values["throughput"] == [3 * completed, "tokens/s"]


def test_open_loop_of_an_engine_that_hangs_ends(serving, monkeypatch):
    engine = OneAtATime(1e9)
    monkeypatch.setattr(serving, "time", engine)
    model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(vocab_size=9))
    with pytest.raises(RuntimeError, match="no result in 600 seconds"):
        serving._open_loop(engine, model, 4, 1.0)


def test_open_loop_needs_the_rate_of_the_largest_closed_loop(
    serving, capsys, tmp_path, monkeypatch
):
    closed_loop = serving._closed_loop

    def broken(manager, model, length, concurrency):
        if concurrency == 2:
            raise RuntimeError("no room")
        return closed_loop(manager, model, length, concurrency)

    monkeypatch.setattr(serving, "_closed_loop", broken)
    file = tmp_path / "bench.json"
    options = ["--case", "serving", "--length", "20", "--json", str(file)]
    assert bench.main([*RUN, *options]) == 1
    printed = capsys.readouterr().out
    assert printed.count("failed: RuntimeError: no room") == len(serving.SIDES)
    line = "declined: slots has no rate with 2 requests at a time"
    assert printed.count(line) == len(serving.SIDES)
    assert all(", 1 at a time," in row["case"] for row in record.read(file)["rows"])


def test_ragged_steps_have_rows(capsys, tmp_path, monkeypatch):
    from harness.cases import ragged

    monkeypatch.setattr(ragged, "_ROUNDS", Rounds(1))
    monkeypatch.setattr(ragged, "STEPS", {"3 decode": ([1] * 3, 0), "a prompt": ([40, 1], 1)})
    file = tmp_path / "bench.json"
    run(capsys, "--case", "ragged", "--window", "16", "--json", str(file))
    rows = record.read(file)["rows"]
    assert [row["case"].split(",")[1].strip() for row in rows] == ["3 decode", "a prompt"]
    assert all(row["forward"] > 0 for row in rows)


def test_programs_print_rows(capsys, tmp_path):
    program, file = tmp_path / "bench_core", tmp_path / "bench.json"
    case, dtype = "per_query B1 H8 N64 D64 w16", "float32"
    fifteen = {"statistic": "median", "rounds": 15}
    row = record.row(
        case, "library", dtype, 1.5, 2.5, **fifteen, parts={"select": 0.5},
        threads=os.cpu_count(),
    )  # fmt: skip
    times = {"select": 0.5, "forward": 1.5, "backward": 2.5}
    benchmarks = [
        {
            "run_name": f"{case}/{dtype}/{part}/iterations:1/repeats:15/real_time",
            "aggregate_name": aggregate, "real_time": factor * time, "time_unit": "ms",
        }
        for part, time in times.items() for aggregate, factor in (("mean", 2), ("median", 1))
    ]  # fmt: skip
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'benchmarks': benchmarks})}'\nexit 3\n")
    program.chmod(0o755)
    programs = ["--programs", str(tmp_path), "--json", str(file)]
    assert bench.main([*RUN, "--case", "kernels", *programs]) == 1
    printed = capsys.readouterr().out
    assert "failed: RuntimeError: got exit status 3" in printed
    assert record.read(file)["rows"] == [row]


@pytest.mark.parametrize("statistic, time", [("median", 3), ("least", 1), ("mean", 4)])
def test_rounds_summarise_what_follows_the_warm_up(statistic, time):
    measured = iter([100, 1, 3, 8])
    rounds = Rounds(3, statistic, warm_up=1)
    assert rounds.time_one(lambda: next(measured)) == time
    assert rounds.fields() == {"statistic": statistic, "rounds": 3}


def test_rounds_warm_up_for_seconds(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr("harness.clock.time.perf_counter", lambda: next(seconds))
    calls = []
    assert Rounds(2, warm_up=0, warm_up_seconds=3).time_one(lambda: calls.append(0) or 7) == 7
    assert len(calls) == 2 + 2


def test_last_level_cache_is_the_highest_level(tmp_path):
    assert machine.last_level_cache(tmp_path) == 0
    for level, size in [(1, "48K"), (3, "266240K"), (2, "2048K")]:
        folder = tmp_path / f"index{level}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert machine.last_level_cache(tmp_path) == 260 << 20


@pytest.mark.parametrize(
    "name, isa, folder",
    [
        ("NVIDIA H200", "", "h200"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "avx2", "intel-xeon-e5-2690-v4-avx2"),
    ],
)
def test_record_path_names_its_machine(name, isa, folder):
    place = machine.record_path("cpu", {"name": name, "isa": isa})
    assert place.parent == machine.RECORDS / folder
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-cpu\.json", place.name)


def test_side_that_cannot_run_a_case_prints_reason(capsys):
    case = Case(PER_QUERY, 32, 16, 8)
    assert attention.measure(case, "float32", "cpu", ["fa2", "cudnn", "fa3", "fa4"], 1) == []
    printed = capsys.readouterr().out
    assert printed.count("declined: ") == printed.count("has no masks") == 4


def test_forgetting_attention_is_measured_beside_torchs_mask(capsys):
    printed = run(capsys, "--case", "forgetting", *SMALL)
    for title in ("forgetting B1 H8 N64 D64", "forgetting B1 H8 N96 D64 w16"):
        assert printed.count(f"{title} ") == printed.count(title)
    assert "declined" not in printed
    inputs = draw(Case(FORGETTING, 32, 16), torch.float32, "cpu")
    for rival in ("fa2", "flex", "fa4"):
        with pytest.raises(sides.Declined, match="has no"):
            build(rival, inputs)


def test_case_too_large_for_memory_prints_a_line_per_side(capsys):
    wanted = ["--case", "dense_masks", "--window", "8", "--length", "16777216", "32"]
    printed = run(capsys, *wanted, "--dtype", "float32", *ONCE)
    assert printed.count("declined: its inputs, output and gradients take") == 2  # ours and torch's
    assert printed.count("dense_masks B1 H2 Hkv1 N32") == 2


def test_out_of_memory_prints_a_line(monkeypatch, capsys):
    def exhausted(*rest):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nand more")

    monkeypatch.setattr(attention, "costs", exhausted)
    assert attention.measure(Case(DENSE, 32, 16), "float32", "cpu", ["cpu"], 1) == []
    assert capsys.readouterr().out.endswith("you tried\n")


def test_interrupt_keeps_finished_rows(capsys, monkeypatch, tmp_path):
    measure = attention.measure

    def interrupted(case, *rest):
        if case.seqlen == 96:
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(attention, "measure", interrupted)
    file = tmp_path / "bench.json"
    assert bench.main([*RUN, "--case", "scaling", *SMALL, "--json", str(file)]) == 130
    assert "Interrupted after 2 rows" in capsys.readouterr().err
    assert len(record.read(file)["rows"]) == 2


def test_repeated_configurations_are_measured_once(capsys, tmp_path):
    """Two cases may share a configuration, and sizes and dtypes may be given twice."""
    file = tmp_path / "bench.json"
    cases = ["--case", "dynamic_mask", "scaling", "dynamic_mask", "--side", "cpu", *ONCE]
    sizes = ["--length", "64", "64", "--window", "16", "16", "--dtype", "float32", "float32"]
    run(capsys, *cases, *sizes, "--json", str(file))
    titles = [row["case"] for row in record.read(file)["rows"]]
    assert titles[0] == "per_query B1 H8 N64 D64 w16"
    assert len(titles) == len(set(titles)) == 1


def test_failing_case_keeps_the_rows_of_others(capsys, monkeypatch, tmp_path):
    def exhausted(*rest):
        raise RuntimeError("can't allocate memory\nand more")

    monkeypatch.setattr(attention, "_selections", exhausted)
    record_file = tmp_path / "bench.json"
    cases = ["--case", "selection", "dense", "--length", "32", *ONCE]
    printed = run(capsys, *cases, "--json", str(record_file))
    assert "declined: can't allocate memory\n" in printed
    assert {row["side"] for row in record.read(record_file)["rows"]} == {"cpu", "sdpa"}


def test_error_of_ours_ends_the_program(monkeypatch):
    def broken(*rest):
        raise RuntimeError("expected 3 outputs, got 2")

    monkeypatch.setattr(sides, "_our_step", broken)
    case = Case(PER_QUERY, 32, 16, 8)
    with pytest.raises(RuntimeError, match="expected 3 outputs"):
        attention.measure(case, "float32", "cpu", ["cpu"], 1)


@pytest.mark.parametrize("side, is_refused", [("ours", True), ("sdpa", False)])
def test_decode_prints_a_rivals_error_and_raises_ours(side, is_refused, capsys, monkeypatch):
    def broken(*rest):
        raise RuntimeError("expected 3 outputs, got 2")

    monkeypatch.setattr(decode, "_sides", lambda *rest: {side: broken})
    options = bench.parse([*RUN, "--case", "decode", *SMALL])
    with pytest.raises(RuntimeError) if is_refused else nullcontext():
        assert list(decode.measure_rows("decode", options)) == []
    assert ("declined: expected 3 outputs" in capsys.readouterr().out) != is_refused


def test_run_without_rows_leaves_the_record(capsys, monkeypatch, tmp_path):
    record_file = tmp_path / "bench.json"
    record_file.write_text("of another run")
    monkeypatch.setattr(bench, "_measured", lambda options: iter(()))
    assert bench.main([*RUN, "--json", str(record_file)]) == 1
    assert record_file.read_text() == "of another run"
    assert bench.main([*RUN, "--json", str(tmp_path / "new.json")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("side", ["before cuda", "2 GPUs, pieces", "library"])
def test_sides_without_a_colour_are_drawn(side, tmp_path):
    pictures = pytest.importorskip("harness.pictures")
    rows = [
        record.row(Case(PER_QUERY, n, 64, 16), side, "float32", 1.0, both=3.0) for n in (64, 128)
    ]
    assert pictures.seconds(rows[0]) == 3e-3 and pictures.memory(rows[0]) is None
    assert pictures.draw(rows, tmp_path / "picture.svg")
    assert side in (tmp_path / "picture.svg").read_text()


def test_length_option_replaces_case_length():
    cases = cases_of("cpu", "scaling", [128], [32, 64])
    assert [(case.seqlen, case.window) for case in cases] == [(128, 32), (128, 64)]
    assert [case.window for case in cases_of("cpu", "dense", [128], [32, 64])] == [None]


def test_titles_of_cases_are_parsed_back():
    for device, name in itertools.product(CASES, NAMES):
        for case in cases_of(device, name):
            assert Case.parse(str(case)) == case


def test_evidence_becomes_a_record(capsys, tmp_path):
    pytest.importorskip("transformers")
    folder, file = tmp_path / "evidence", tmp_path / "record.json"
    with pytest.raises(SystemExit):
        bench.main(["evidence", str(folder), "--json", str(file)])
    assert "FOLDER: got no results.json" in capsys.readouterr().err
    (folder / "seed1").mkdir(parents=True)
    quality = {"learned": {"32": {"loss": 1.5, "pass_keys": 0.75}}}
    settings = {"seed": "1", "device": "cpu", "model": "None"}
    (folder / "seed1" / "results.json").write_text(
        json.dumps({"settings": settings, "quality": quality})
    )
    settings = {"lengths": [64, 128], "pairs": 8, "words": 64, "device": "cpu"}
    run = {"kind": "scores", "budget": 16, "seed": 2, "same_words": False, "recall": {"128": 1.0}}
    (folder / "recall.json").write_text(json.dumps({"settings": settings, "rows": [run]}))
    arguments = ["evidence", str(folder), "--json", str(file), "--commit", "0123456"]
    assert bench.main(arguments) == 0
    distil, recall = record.read(file)["rows"]
    assert distil["values"] == {"loss": [1.5, "nats/byte"], "right digits": [0.75, "share"]}
    assert recall["side"] == "scores 16" and recall["values"] == {"recall 128": [1.0, "share"]}
    assert recall["case"] == "recall 8 pairs of 128 words in 64, 128 tokens seed 2"
    (folder / "again").mkdir()
    (folder / "again" / "results.json").write_text((folder / "seed1" / "results.json").read_text())
    assert bench.main(arguments) == 0
    assert [row.get("run") for row in record.read(file)["rows"]] == [None, 1, None]
    for text in ("{", "{}"):
        (folder / "recall.json").write_text(text)
        with pytest.raises(SystemExit):
            bench.main(arguments)
        assert f"FOLDER: {folder / 'recall.json'}: " in capsys.readouterr().err
