"""The records of benchmarks in this repository follow their schema, and a wrong record is refused."""

import argparse
import copy
import re

import pytest

import bench
from harness import machine, ranks, record, report
from harness.commands import split_commands
from harness.compare import ratios
from harness.machine import RECORDS, output_of

COMMIT = "0123456789ab"
MEDIAN = {"statistic": "median", "rounds": 5}
ROW = record.row("dense causal B1 H2 N64 D64", "cpu", "float32", 1.25, 3.5, **MEDIAN, peak_mb=2)
GPU = {"name": "a GPU", "driver": "580", "clocks": "unknown"}
CPU = {"name": "a processor", "family_model": "6/1", "isa": "avx2", "last_level_cache_mib": None, "threads": 2}  # fmt: skip
VALID = {
    "machine": CPU,
    "commit": COMMIT,
    "command": "bench.py run",
    "versions": {"torch": "2.13.0"},
    "rows": [ROW],
}


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*/*.json")), ids=lambda path: path.stem)
def test_record_of_this_repository_is_valid(path):
    content = record.read(path)
    assert content["rows"] and all(record.format_row(row) for row in content["rows"])


def test_commits_of_records_are_in_history():
    history = output_of("git", "rev-list", "HEAD").split()
    if not history or output_of("git", "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the checkout has no history")
    missing = []
    for path in sorted(RECORDS.glob("*/*.json")):
        content = record.read(path)
        parts = [content, *content["rows"]]
        for commit in sorted({part["commit"] for part in parts if part.get("commit")}):
            if not any(one.startswith(commit.removesuffix("-dirty")) for one in history):
                missing.append(f"{path.name}: {commit}")
    assert missing == []


def test_commands_of_records_run_programs_of_their_commit():
    if output_of("git", "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the checkout has no history")
    wrong = []
    for path in sorted(RECORDS.glob("*/*.json")):
        content = record.read(path)
        commit = content["commit"].removesuffix("-dirty")
        files = output_of("git", "ls-tree", "-r", "--name-only", "--full-tree", commit)
        for program, _ in split_commands(content["command"]) if "command" in content else ():
            *launcher, name = program.split()
            source = name.removesuffix(".py")
            source = source.replace(".", "/") if launcher == ["python", "-m"] else source
            if launcher != ["make"] and not re.search(rf"(^|/){source}\W", files, re.MULTILINE):
                wrong.append(f"{path.name}: {program}")
    assert wrong == []


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "error: --commit: got none outside a Git checkout"),
        (["--commit", "HEAD"], "argument --commit: got HEAD, expected a commit's hash"),
        (["--budget", "0"], "argument --budget: got 0, expected more than 0 seconds"),
        (["--commit", "fedcba987654"], f"record.json: got rows of commit {COMMIT}, expected"),
    ],
)
def test_ranks_without_a_commit_fail_before_they_meet(
    words, message, monkeypatch, tmp_path, capsys
):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(ranks.machine, "commit", str)
    parser, path = argparse.ArgumentParser(), tmp_path / "record.json"
    ranks.add_options(parser, budget=100)
    record.write(path, VALID)
    with pytest.raises(SystemExit):
        ranks.Ranks(parser.parse_args(["--json", str(path), *words]), "a method")
    assert message in capsys.readouterr().err
    assert record.read(path) == VALID


def test_ranks_that_measure_again_add_a_run(monkeypatch, tmp_path, capsys):
    again = ranks.Ranks.__new__(ranks.Ranks)
    again.rank, again.began, again.path = 0, 0.0, tmp_path / "record.json"
    again.record = VALID | {"rows": []}
    for _ in range(2):
        again.add_row(ROW)
    assert record.read(again.path)["rows"] == [ROW, ROW | {"run": 1}]


def test_rank_beyond_its_budget_names_its_last_line(monkeypatch, capsys):
    statuses = []
    monkeypatch.setattr(ranks.os, "_exit", statuses.append)
    late = ranks.Ranks.__new__(ranks.Ranks)
    late.rank, late.budget, late.last_line = 1, 100, "N 64: a row"
    late._end_process()
    assert statuses == [3]
    expected = "rank 1 ends: spent 100 s of --budget and 12 s more, after the line: N 64: a row"
    assert expected in capsys.readouterr().err


def test_peak_of_ranks_is_in_millions_of_bytes(monkeypatch):
    monkeypatch.setattr(ranks, "GPU", True)
    monkeypatch.setattr(ranks.torch.cuda, "max_memory_allocated", lambda: 3_000_000)
    assert ranks.Ranks.__new__(ranks.Ranks).peak_mb() == 3


def test_row_without_times_has_no_unit_of_time():
    row = record.row("recall", "gate", "float32", values={"recall": [0.98765432, "share"]})
    assert row["unit"] is None and row["values"] == {"recall": [0.987654, "share"]}
    assert record.format_row(row).endswith("recall 0.98765 share")


def test_documents_hold_the_tables_of_the_newest_records():
    for document, tables in report.documents().items():
        assert report.with_tables(document, tables) == document.read_text(), document


def records_of(tmp_path, monkeypatch, **commits):
    """Returns report.table of the record `ours`, with other records in its folder. commits: name=(commit, {(case, side): ms})."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for name, (commit, times) in commits.items():
        rows = [
            record.row(case, side, "float32", ms, ms, **MEDIAN)
            for (case, side), ms in times.items()
        ]
        versions = VALID["versions"] | {"fa3-fwd": "3", "flash-attn-4": "4"}
        origin = {"machine": GPU, "commit": commit, "versions": versions, "rows": rows}
        record.write(tmp_path / f"{name}.json", VALID | origin)
    return [("ours.json", record.read(tmp_path / "ours.json"))]


DENSE, WINDOW = (
    f"{kind} B1 H2 N64 D64{rest}" for kind, rest in (("dense causal", ""), ("sliding", " w8"))
)


def test_rival_of_another_record_of_the_commit_is_a_column(tmp_path, monkeypatch):
    records = records_of(
        tmp_path, monkeypatch,
        ours=(COMMIT, {(DENSE, "cuda"): 2, (DENSE, "cudnn"): 3, (WINDOW, "cuda"): 4}),
        rival=(COMMIT, {(DENSE, "cuda"): 3, (DENSE, "cudnn"): 9, (DENSE, "fa4"): 5, (WINDOW, "fa4"): 7}),
        older=("0" * 12, {(DENSE, "cuda"): 3, (DENSE, "fa3"): 1}),
    )  # fmt: skip
    text = report.table(records)
    assert "| work | dtype | ours | cuDNN | FlashAttention-4 | ours, useful" in text
    assert f"| {DENSE} | float32 | 2 / 2 | 3 / 3 | 5 / 5 |" in text
    # The run of the rivals does not have our side.
    assert "sliding window B1 H2 N64 D64 w8 | float32 | 4 / 4 |  |  |" in text
    assert (
        "FlashAttention-4 was measured in a separate run at the same commit ([record](rival.json))"
        in text
    )
    assert "In that run our times were 1.50 to 1.50 times those in this table." in text
    assert "; forward / backward in ms, median of 5 rounds:" in text


def test_chosen_rows_without_a_rival_are_left_out(tmp_path, monkeypatch):
    ours = (COMMIT, {(DENSE, "cuda"): 2, (DENSE, "cudnn"): 3, (WINDOW, "cuda"): 4})
    records = records_of(tmp_path, monkeypatch, ours=ours)
    assert "sliding window" in report.table(records)
    assert "sliding window" not in report.table(records, cases={DENSE, WINDOW})


def test_written_record_is_read_back_with_one_line_per_row(tmp_path):
    path = tmp_path / "folder" / "record.json"
    content = VALID | {"rows": [ROW, ROW | {"run": 1}]}
    record.write(path, content)
    assert record.read(path) == content
    assert sum('"case"' in line for line in path.read_text().splitlines()) == 2


def test_repeated_row_gets_the_number_of_its_run():
    rows = []
    for _ in range(3):
        rows = record.with_row(rows, ROW)
    assert rows == [ROW, ROW | {"run": 1}, ROW | {"run": 2}]
    record.validate(VALID | {"rows": rows})


def test_write_that_fails_leaves_the_record(monkeypatch, tmp_path):
    path = tmp_path / "record.json"
    record.write(path, VALID)

    def full(*rest):
        raise OSError("No space left on device")

    monkeypatch.setattr(record.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.write(path, VALID | {"rows": []})
    assert record.read(path) == VALID
    assert list(tmp_path.iterdir()) == [path]


def test_record_without_attention_leaves_tables_and_pictures(monkeypatch, tmp_path):
    report = pytest.importorskip("harness.report")
    host = VALID | {
        "rows": [record.row("call N8 dense", "ours", "float32", 1.0, unit="us", **MEDIAN)]
    }
    monkeypatch.setattr(report, "newest_records", lambda suffix: [("a/record.json", host)])
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "other_records", lambda path, record: [])
    assert report.table([("a/record.json", host)]) == ""
    assert report.token_table("a/record.json", host) is None


def test_rows_are_added_to_those_of_the_same_commit_alone(tmp_path):
    path = tmp_path / "record.json"
    assert record.rows_to_extend(path, COMMIT) == []
    record.write(path, VALID)
    assert record.rows_to_extend(path, COMMIT) == [ROW]
    with pytest.raises(ValueError, match=f"record.json: got rows of commit {COMMIT}, expected"):
        record.rows_to_extend(path, "fedcba987654")


@pytest.mark.parametrize(
    "place, value, message",
    [
        (["commit"], "before the first", "record.commit: got 'before the first', expected a commit"),
        (["command"], "", "record.command: got a blank text"),
        (["command"], "bench.py run --case serving, one length of time for a cell", "record.command: got .*, expected a program"),
        (["command"], "bench.py run the case host twice", "record.command: got .*, expected a program"),
        (["command"], "bench.py run; host_time.py", "record.command: got .*, expected a program"),
        (["command"], "flash_dmattn_func on both builds", "record.command: got .*, expected a program"),
        (["command"], "bench.py run --case 'dense", "record.command: No closing quotation"),
        (["machine"], {}, "machine.name: got none"),
        (["machine"], {"name": "a GPU", "clocks": "1980 MHz"}, "machine.driver: got none"),
        (["machine"], {"name": "a processor", "threads": 1}, "machine.family_model: got none"),
        (["machine", "speed"], 1, "machine: got 'speed', expected one of"),
        (["versions"], {}, "versions.torch: got none"),
        (["rows", 0, "side"], "before fa4", "versions.flash-attn-4: got none"),
        (["speed"], [], "record: got 'speed', expected one of"),
        (["tests"], [], "record: got 'tests', expected one of"),
        (["rows", 0, "commit"], "", "rows\\[0\\].commit: got a blank text"),
        (["rows", 0, "unit"], "s", "rows\\[0\\].unit: got 's', expected ms or us"),
        (["rows", 0, "unit"], None, "rows\\[0\\].unit: got None, expected ms or us"),
        (["rows", 0], ROW | {"forward": None, "backward": None}, "unit: got 'ms', expected null"),
        (["rows", 0, "statistic"], None, "statistic: got None, expected median or least"),
        (["rows", 0, "statistic"], "p50", "statistic: got 'p50', expected median or least"),
        (["rows", 0, "statistic"], "unknown", "statistic: got unknown, expected that of the command"),
        (["rows", 0, "rounds"], 0, "rounds: got 0, expected a finite number, more than 0"),
        (["rows", 0, "rounds"], "5", "rounds: got '5', expected"),
        (["rows", 0, "values"], {"loss": 1.5}, "rows\\[0\\].values.loss: got 1.5, expected"),
        (["rows", 0, "values"], {"loss": [1.5, "ms"]}, "values.loss: got \\[1.5, 'ms'\\], expected \\[number, unit\\]"),
        (["rows", 0, "values"], {"loss": [["1"], "nats/byte"]}, "values.loss: got .*, expected \\[number, unit\\]"),
        (["rows", 0, "forward"], "1.25", "rows\\[0\\].forward: got '1.25', expected"),
        (["rows", 0, "forward"], True, "rows\\[0\\].forward: got True, expected"),
        (["rows", 0, "kind"], "dense", "rows\\[0\\]: got 'kind', expected one of"),
        (["rows", 0, "parts"], {"warm": None}, "rows\\[0\\].parts.warm: got None, expected"),
        (["rows", 0], {}, "rows\\[0\\].case: got none"),
        (["rows", 0], ROW | {"forward": None, "backward": None, "peak_mb": None}, "expected"),
        (["rows"], [ROW, ROW], "expected a `run` that tells them apart"),
        (["rows"], [1], "rows\\[0\\]: got 1, expected an object"),
        (["rows", 0, "side"], 3, "side: got 3, expected a text"),
        (["rows", 0, "side"], " ", "side: got a blank text"),
        (["rows", 0, "side"], "eager", "versions.transformers: got none"),
        (["rows", 0, "dtype"], "banana", "dtype: got 'banana', expected one of bfloat16"),
        (["rows", 0, "forward"], float("nan"), "forward: got nan, expected a finite number, more than 0"),
        (["rows", 0, "forward"], -1.0, "forward: got -1.0, expected a finite number, more than 0"),
        (["rows", 0, "peak_mb"], float("inf"), "peak_mb: got inf, expected a finite number"),
        (["rows", 0, "kernels"], 0, "kernels: got 0, expected a finite number, more than 0"),
        (["rows", 0, "run"], -1, "run: got -1, expected a finite number, 0 or more"),
        (["rows", 0, "parts"], {}, "parts: got no entry"),
        (["rows", 0, "values"], {"recall": [7.5, "share"]}, "recall: got .*, expected a share from 0 to 1"),
        (["rows", 0, "statistic"], "quantile", "statistic: got quantile, expected it only for parts"),
        (["machine", "threads"], 0, "machine.threads: got 0, expected a finite number, more than 0"),
        (["versions", "torch"], "", "versions.torch: got a blank text"),
    ],
)  # fmt: skip
def test_invalid_record_names_the_field(place, value, message):
    content = copy.deepcopy(VALID)
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        record.validate(content)


def test_ratio_is_median_over_first_side():
    def row(side, run, ms):
        return record.row("a case", side, "float32", ms, 2 * ms, **MEDIAN, run=run)

    rows = [row("cpu", run, ms) for run, ms in enumerate([1, 9, 2])] + [row("sdpa", 0, 3)]
    assert [line.split() for line in ratios(rows)] == [
        "a case, float32; base: cpu".split(),
        "cpu forward 2 ms 1 to 9 1.000".split(),
        "cpu backward 4 ms 2 to 18 1.000".split(),
        "sdpa forward 3 ms 1.500".split(),
        "sdpa backward 6 ms 1.500".split(),
    ]


def test_ratio_of_overlapping_runs_is_marked():
    rows = [
        record.row("a case", side, "float32", ms, **MEDIAN, run=run)
        for side, times in {"cpu": (2, 4), "sdpa": (3, 5), "flex": (8, 9)}.items()
        for run, ms in enumerate(times)
    ]
    assert [line.split()[-1] for line in ratios(rows)[1:]] == ["1.000", "~1.333", "2.833"]


def test_builds_of_several_commits_are_sides_of_their_own():
    rows = [
        record.row("a case", "cpu", "float32", ms, **MEDIAN, commit=commit)
        for commit, ms in ((COMMIT, 2), ("fedcba9", 1))
    ]
    title, before, after = ratios(rows)
    assert title.endswith(f"base: cpu {COMMIT}")
    assert before.endswith("1.000") and after.split()[:2] == ["cpu", "fedcba9"]
    assert after.endswith("0.500")


def test_parts_values_and_memory_are_compared():
    rows = [
        record.row("a case", side, "float32", unit="ms", **MEDIAN, parts={"select": factor * 2.0, "kernels": factor * 1.5},
            values={"throughput": [factor * 5, "tokens/s"]}, peak_mb=factor * 7.0, kernels=factor * 9)
        for side, factor in (("cpu", 1), ("sdpa", 3))
    ]  # fmt: skip
    lines = [line.split() for line in ratios(rows)[-5:]]
    assert [line[1] for line in lines] == ["select", "kernels", "launches", "peak_mb", "throughput"]
    assert [line[-1] for line in lines] == ["3.000"] * 5


def test_times_of_different_statistics_have_no_ratio():
    row = record.row("a case", "cpu", "float32", 2.0, **MEDIAN)
    least, unknown = row | {"side": "sdpa", "statistic": "least"}, row | {"statistic": "unknown"}
    assert ratios([row, least])[-1].endswith("no ratio")
    assert ratios([row, row | {"run": 1, "statistic": "mean"}])[-1].endswith("no ratio")
    assert ratios([unknown])[-1].endswith("no ratio")


def test_record_without_command_or_method_is_refused():
    by_hand = {key: value for key, value in VALID.items() if key != "command"}
    with pytest.raises(ValueError, match="got neither command nor method"):
        record.validate(by_hand)
    record.validate(by_hand | {"method": "calls by hand", "rows": [ROW | {"statistic": "unknown"}]})


def test_command_is_the_programs_path_with_its_launcher(monkeypatch):
    program = str(RECORDS.parent / "context_parallel.py")
    monkeypatch.setattr("sys.argv", [program, "--json", "a record.json"])
    command = machine.command("torchrun --nproc_per_node 2")
    launched = "torchrun --nproc_per_node 2 benchmarks/context_parallel.py"
    assert command == f"{launched} --json 'a record.json'"
    assert split_commands(f"{command} && make bench") == [
        (launched, ["--json", "a record.json"]),
        ("make bench", []),
    ]


def test_command_names_the_settings_that_choose_kernels(monkeypatch):
    monkeypatch.setattr("sys.argv", [str(RECORDS.parent / "bench.py"), "run"])
    monkeypatch.setenv("FLASH_DMATTN_MAX_ISA", "avx2")
    monkeypatch.setenv("FLASH_DMATTN_LIBRARY", "/a/folder/_C.so")
    command = machine.command()
    assert command == "FLASH_DMATTN_MAX_ISA=avx2 python benchmarks/bench.py run"
    assert split_commands(command) == [("python benchmarks/bench.py", ["run"])]


def test_comparison_of_two_records_names_their_machines(capsys, tmp_path):
    paths = []
    for name in ("a processor", "another"):
        paths.append(tmp_path / f"{name}.json")
        record.write(paths[-1], VALID | {"machine": CPU | {"name": name}})
    assert bench.main(["compare", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"before: a processor, commit {COMMIT}\nafter: another, commit")


def test_table_of_several_statistics_is_refused(tmp_path, monkeypatch):
    records = records_of(tmp_path, monkeypatch, ours=(COMMIT, {(DENSE, "cuda"): 2}))
    records[0][1]["rows"].append(ROW | {"statistic": "least"})
    with pytest.raises(ValueError, match="statistic: got least and median in a table"):
        report.table(records)


def test_before_and_after_are_compared_per_side():
    rows = [
        record.row("a case", f"{when} {side}", "float32", forward=ms, **MEDIAN)
        for when, side, ms in [("before", "cpu", 2), ("before", "sdpa", 5), ("after", "cpu", 1), ("after", "sdpa", 5)]
    ]  # fmt: skip
    assert [line.split() for line in ratios(rows)] == [
        "a case, float32; base: before cpu".split(), "before cpu forward 2 ms 1.000".split(), "after cpu forward 1 ms 0.500".split(),
        "a case, float32; base: before sdpa".split(), "before sdpa forward 5 ms 1.000".split(), "after sdpa forward 5 ms 1.000".split(),
    ]  # fmt: skip
    title, line = ratios(rows[2:3])
    assert title == "a case, float32; only after cpu" and line.endswith("no ratio")
