"""Tests the comparison of two builds, each measured by a driver of its own, which these tests imitate."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import bench
from harness import compare, record


def builds_of(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        (folder / "python").mkdir(parents=True)
        for name in ("_C.so", "commit"):
            (folder / name).touch()
    return list(map(str, folders))


def test_interrupted_comparison_of_builds_keeps_finished_rounds(capsys, monkeypatch, tmp_path):
    row = record.row("a case", "cpu", "float32", 1.0, statistic="median")
    about = {"name": "a", "driver": "1", "clocks": "unknown"}
    origin = {
        "machine": about, "commit": "0123456", "command": "bench.py run", "versions": {"torch": "2"},
    }  # fmt: skip
    calls = []

    def measured(*rest):
        calls.append(rest)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return origin | {"rows": [row]}

    monkeypatch.setattr(compare, "_measure", measured)
    record_file = tmp_path / "record.json"
    assert bench.main(["compare", *builds_of(tmp_path), "--json", str(record_file)]) == 130
    assert len(record.read(record_file)["rows"]) == 3
    assert "Interrupted after 3 rows" in capsys.readouterr().err


@pytest.mark.parametrize("is_whole", [True, False])
def test_build_whose_side_fails_is_compared_and_an_error_ends(
    is_whole, capsys, monkeypatch, tmp_path
):
    row = record.row("a case", "cpu", "float32", 1.0, statistic="median")
    origin = {
        "machine": {"name": "a", "driver": "1", "clocks": "unknown"}, "commit": "0123456",
        "command": "bench.py run", "versions": {"torch": "2"},
    }  # fmt: skip

    def run_driver(command, **options):
        path = command[command.index("--json") + 1]
        record.write(path, origin | {"rows": [row]})
        end = f"wrote {path}\n" if is_whole else ""
        line = "a case  sdpa  failed: RuntimeError: no\n"
        return SimpleNamespace(returncode=1, stdout=line + end, stderr="Traceback of a case")

    builds = builds_of(tmp_path)
    for folder in builds:
        (Path(folder) / "commit").write_text("0123456")
    monkeypatch.setattr(compare.subprocess, "run", run_driver)
    if is_whole:
        assert bench.main(["compare", *builds, "--rounds", "1"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("failed: RuntimeError: no") == 2 and "base: before cpu" in printed
    else:
        with pytest.raises(SystemExit, match="Traceback of a case"):
            bench.main(["compare", *builds, "--rounds", "1"])


def test_bad_option_of_a_build_prints_one_line(capsys, monkeypatch, tmp_path):
    builds = builds_of(tmp_path)
    for folder in builds:
        (Path(folder) / "commit").write_text("0123456")
    refused = "usage: bench.py run\nbench.py run: error: --case: got groups"
    done = SimpleNamespace(returncode=2, stdout="", stderr=refused)
    monkeypatch.setattr(compare.subprocess, "run", lambda *command, **options: done)
    with pytest.raises(SystemExit):
        bench.main(["compare", *builds])
    error = capsys.readouterr().err
    assert "--run: " in error and error.endswith("error: --case: got groups\n")


def test_comparison_of_builds_refuses_an_output_before_it_measures(capsys, monkeypatch, tmp_path):
    monkeypatch.delattr(compare, "_measure")
    with pytest.raises(SystemExit):
        bench.main(["compare", *builds_of(tmp_path), "--json", str(tmp_path)])
    assert "--json: [Errno 21] Is a directory" in capsys.readouterr().err
