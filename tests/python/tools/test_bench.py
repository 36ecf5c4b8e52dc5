"""`python -m flash_dmattn bench`: its measurements and its output; never how fast anything is."""

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from flash_dmattn.__main__ import main
from flash_dmattn.benchmark import decode, options, record, run, working_set
from flash_dmattn.benchmark.cases import (
    DENSE,
    DENSE_MASKS,
    DOCUMENTS,
    GLOBAL,
    NAMES,
    PER_QUERY,
    SLIDING,
    Case,
    cases_of,
)
from flash_dmattn.benchmark.clock import Step, costs, peak_of
from flash_dmattn.benchmark.sides import RIVALS, build, draw
from flash_dmattn.check.oracle import causal_pairs

SMALL = ["--length", "64", "96", "--window", "16", "--repeats", "1", "--device", "cpu"]
KINDS = (DENSE, PER_QUERY, GLOBAL, SLIDING, DOCUMENTS, DENSE_MASKS)


def test_every_case_and_rival_can_be_named():
    assert set(options.CASES) == {*NAMES, decode.NAME}
    assert set(options.RIVALS) == set(RIVALS)


def test_old_names_of_cases_are_read(tmp_path):
    assert cases_of("cpu", ["pairs"]) == cases_of("cpu", ["dense_masks"]) != []
    old = tmp_path / "old.json"
    old.write_text(
        '{"speed": [{"case": "pairs B1 H2 N64 D64 w16", "kind": "pairs"}, {"case": "decode"}]}'
    )
    assert record.read(old)["speed"] == [
        {"case": "dense_masks B1 H2 N64 D64 w16", "kind": DENSE_MASKS},
        {"case": "decode"},
    ]


def test_a_record_that_was_put_together_is_shown(capsys, tmp_path):
    file = tmp_path / "record.json"
    row = {"case": "dense causal B1 H2 N64 D64", "dtype": "bfloat16", "who": "cuda"}
    file.write_text(json.dumps({"speed": [row], "decode": [{"case": "B1 N64", "floor_us": 1}]}))
    assert main(["bench", "--from", str(file)]) == 0
    printed = capsys.readouterr().out
    assert row["case"] in printed and "B1 N64" not in printed


def test_rows_table_file_and_picture(capsys, tmp_path):
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    wanted = ["--case", "dense", "scaling", "dense_masks", "--dtype", "float32"]
    assert main(["bench", *wanted, *SMALL, "--json", str(file), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "per_query B1 H8 N96 D64 w16" in printed and "useful TFLOP/s" in printed
    record = json.loads(file.read_text())
    assert record["machine"]["name"] and record["torch"] == torch.__version__
    assert {(row["kind"], row["seqlen"], row["who"]) for row in record["speed"]} == {
        (kind, n, who)
        for kind in (DENSE, PER_QUERY, DENSE_MASKS)
        for n in (64, 96)
        for who in ("cpu", "sdpa")
    }
    for row in record["speed"]:
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["peak_mb"] > 0
    assert "sequence length N" in picture.read_text()

    again = tmp_path / "again.svg"  # from the record, with nothing measured
    assert main(["bench", "--from", str(file), "--plot", str(again)]) == 0
    assert "per_query B1 H8 N96 D64 w16" in capsys.readouterr().out
    assert again.read_text() == picture.read_text()


def test_decoding_has_rows_of_its_own(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 16)
    file = tmp_path / "bench.json"
    wanted = ["bench", "--case", "decode", "--dtype", "bfloat16", *SMALL, "--json", str(file)]
    assert main(wanted) == 0
    printed = capsys.readouterr().out
    assert "a copy moves" in printed and "slots w16, any context B8" in printed
    steps = json.loads(file.read_text())["decode"]
    assert {(row["who"], row["keys"]) for row in steps} == {
        ("slots", 16), ("ours", 64), ("ours", 96), ("sdpa", 64), ("sdpa", 96),
    }  # fmt: skip
    for row in steps:
        assert row["cold_us"] > 0 and row["warm_us"] > 0 and row["of_copy_bandwidth"] > 0
        assert row["visited_mb"] >= 0.07
    assert main(["bench", "--from", str(file)]) == 0
    assert capsys.readouterr().out.count("slots w16") == 2


def save_cache(folder, index, level, size):
    (folder / f"index{index}").mkdir()
    (folder / f"index{index}" / "level").write_text(f"{level}\n")
    (folder / f"index{index}" / "size").write_text(f"{size}\n")


def test_the_last_level_of_the_caches(tmp_path):
    assert working_set.last_level_cache(tmp_path / "missing") == 0
    for index, (level, size) in enumerate([(1, "48K"), (1, "32K"), (3, "266240K"), (2, "2M")]):
        save_cache(tmp_path, index, level, size)
    assert working_set.last_level_cache(tmp_path) == 260 << 20
    save_cache(tmp_path, 9, 4, "unknown")
    assert working_set.last_level_cache(tmp_path) == 260 << 20


def test_the_memory_that_is_available(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24684000 kB\nMemAvailable:   8388608 kB\n")
    assert working_set.available_memory(meminfo) == 8 << 30
    assert working_set.available_memory(tmp_path / "missing") is None
    meminfo.write_text("MemTotal:       24684000 kB\n")
    assert working_set.available_memory(meminfo) is None


@pytest.mark.parametrize(
    "cache, available, expected",
    [
        (260 << 20, 20 << 30, 1040 << 20),
        (32 << 20, 20 << 30, 256 << 20),
        (0, None, 256 << 20),
        (260 << 20, 2 << 30, 512 << 20),
        (0, 512 << 20, 128 << 20),
    ],
)
def test_buffers_are_four_times_the_last_cache(cache, available, expected):
    assert working_set.beyond_cache(cache, available) == expected


@pytest.mark.parametrize(
    "name, isa, folder",
    [
        ("Intel(R) Xeon(R) Processor", "avx512", "intel-xeon-avx512"),
        ("AMD EPYC", "avx512_bf16", "amd-epyc-avx512_bf16"),
        ("NVIDIA H200", "", "h200"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "avx2", "intel-xeon-e5-2690-v4-avx2"),
    ],
)
def test_records_lie_in_the_folder_of_their_machine(name, isa, folder):
    script = Path(__file__).parents[3] / "benchmarks" / "bench.py"
    place = runpy.run_path(str(script))["place"]("cpu", {"name": name, "isa": isa})
    assert place.parent == script.parent / "records" / folder
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-cpu\.json", place.name)


def test_windows_are_a_second_row_of_panels(tmp_path):
    picture = tmp_path / "bench.svg"
    arguments = ["bench", "--case", "windows", "--dtype", "float32", "--against", "none", *SMALL]
    assert main([*arguments, "--window", "8", "16", "--plot", str(picture)]) == 0
    assert "sequence length N" in picture.read_text() and "window w" in picture.read_text()


def test_dense_attention_is_drawn_against_the_length(tmp_path):
    picture = tmp_path / "bench.svg"
    assert (
        main(["bench", "--case", "dense", "--dtype", "float32", *SMALL, "--plot", str(picture)])
        == 0
    )
    drawn = picture.read_text()
    assert "dense causal" in drawn and "torch SDPA, float32" in drawn and "window w" not in drawn


def test_nothing_to_plot_is_said(capsys, tmp_path):
    arguments = ["--case", "dense", "--length", "32", "--repeats", "1", "--dtype", "float32"]
    picture = tmp_path / "bench.png"
    status = main(["bench", *arguments, "--device", "cpu", "--plot", str(picture)])
    assert status == 2 and not picture.exists()
    assert "--plot: got no case at several lengths or windows" in capsys.readouterr().err


def test_who_cannot_run_a_case_says_so(capsys):
    said = []
    rivals = ["fa2", "cudnn", "fa3", "fa4"]
    assert run.measure(Case(DENSE, 32, 16), "float32", "cpu", rivals, 1, said.append) == []
    assert sum("declined: needs a GPU" in line for line in said) == 2
    assert sum("declined: cannot import" in line for line in said) == 2
    with pytest.raises(SystemExit):
        main(["bench", "--against", "fa9"])
    assert "expected any of" in capsys.readouterr().err


def test_a_case_that_no_memory_holds_is_a_line_for_every_side(capsys):
    arguments = [
        "--length",
        "16777216",
        "32",
        "--repeats",
        "1",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    assert main(["bench", "--case", "dense_masks", "--window", "8", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count("declined: its inputs, output and gradients take") == 2  # ours and torch's
    assert printed.count("dense_masks B1 H2 Hkv1 N32") == 2


def test_memory_that_runs_out_is_a_line(monkeypatch, capsys, tmp_path):
    def exhausted(*rest):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nand more")

    said = []
    monkeypatch.setattr(run, "costs", exhausted)
    assert run.measure(Case(DENSE, 32, 16), "float32", "cpu", ["cpu"], 1, said.append) == []
    assert len(said) == 1 and said[0].endswith("you tried")
    monkeypatch.setattr(decode, "copy_bandwidth", lambda *rest: 1.0)
    monkeypatch.setattr(decode, "_row", exhausted)
    cases = [decode.DecodeCase(8, slots=True), decode.DecodeCase(8)]
    said = []
    assert list(decode.measured(cases, ["float32"], "cpu", 1, said.append)) == []
    assert sum("declined: DefaultCPUAllocator" in line for line in said) == 3


def test_caches_that_no_memory_holds_are_a_line(monkeypatch):
    monkeypatch.setattr(decode, "copy_bandwidth", lambda *rest: 1.0)
    said = []
    cases = [decode.DecodeCase(2**24, batch=1024)]
    assert list(decode.measured(cases, ["float32"], "cpu", 1, said.append)) == []
    assert sum("declined: its caches take" in line for line in said) == 2


def test_packed_documents_are_so_many_dense_sequences():
    packed = Case(DOCUMENTS, 96, 16, 32, heads_q=2, heads_kv=1)
    batch = Case(DENSE, 32, 16, heads_q=2, heads_kv=1, batch=3)
    assert packed.pairs == batch.pairs
    rows = run.measure(packed, "float32", "cpu", ["cpu", "sdpa"], 1)
    assert [row["who"] for row in rows] == ["cpu", "sdpa"]
    visible = draw(packed, torch.float32, "cpu").intervals.to_mask()
    assert int(visible.sum()) * packed.heads_q == packed.pairs


def test_a_side_without_a_backward_has_a_row_without_one():
    step = Step(lambda: torch.zeros(1), [], torch.zeros(1))
    (cost,) = costs({"fa3": step}, "cpu", 1).values()
    row = record.row_of(Case(DENSE, 32, 16), "float32", "fa3", cost)
    assert row["backward_ms"] is None and row["backward_useful_tflops"] is None
    assert record.line(row).split().count("-") == 2


def test_the_file_has_every_row_as_soon_as_it_is_known(monkeypatch, tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["--case", "dense", "--dtype", "float32", *SMALL, "--json", str(file)]
    written = []
    measure = run.measure

    def watched(*rest):
        written.append(len(json.loads(file.read_text())["speed"]) if file.exists() else 0)
        return measure(*rest)

    monkeypatch.setattr(run, "measure", watched)
    assert main(["bench", *arguments]) == 0
    assert written == [0, 2]


def test_an_interrupt_keeps_what_is_finished(capsys, monkeypatch, tmp_path):
    measure = run.measure

    def interrupted(case, *rest):
        if case.seqlen == 96:
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(run, "measure", interrupted)
    file = tmp_path / "bench.json"
    arguments = ["--case", "dense", "--dtype", "float32", *SMALL, "--json", str(file)]
    assert main(["bench", *arguments]) == 130
    assert "Interrupted after 2 rows" in capsys.readouterr().err
    assert {row["seqlen"] for row in json.loads(file.read_text())["speed"]} == {64}


@pytest.mark.parametrize("window", [None, 5, 40, 100])
def test_useful_work_counts_visible_pairs(window):
    case = Case(PER_QUERY, 64, 16, window, heads_q=4, heads_kv=2, batch=3)
    visible = causal_pairs(64, 64).sum(-1).clamp(max=window or 64).sum().item()
    assert case.pairs == 3 * 4 * visible
    assert case.useful_flops("forward") == 4 * 16 * case.pairs


@pytest.mark.parametrize("kind", KINDS)
def test_ours_and_torchs_compute_the_same(kind):
    """Attention that is timed side by side is the same, but for the bias, which torch's side only chooses by."""
    window = None if kind == DENSE else 16
    inputs = draw(Case(kind, 96, 16, window, heads_q=4, heads_kv=2, batch=2), torch.float32, "cpu")
    if kind in (PER_QUERY, GLOBAL):
        inputs = dataclasses.replace(inputs, bias=1e-6 * inputs.bias)
    ours, torchs = build("cpu", inputs), build("sdpa", inputs)
    out, expected = ours.forward(), torchs.forward()
    seen = expected.isfinite().all(-1)  # torch has NaN for a query that sees nothing
    assert seen.float().mean() > 0.9
    torch.testing.assert_close(out.transpose(1, 2)[seen], expected[seen], rtol=1e-4, atol=1e-5)
    if seen.all():
        for a, b in zip(ours.backward(out)[:3], torchs.backward(expected)[:3], strict=True):
            torch.testing.assert_close(a.transpose(1, 2), b, rtol=1e-4, atol=1e-4)


def test_the_peak_counts_the_mask_that_a_rival_needs():
    inputs = draw(Case(PER_QUERY, 256, 16, 16, heads_q=2, heads_kv=2), torch.float32, "cpu")
    step = build("sdpa", inputs)
    assert step.mask_bytes == 2 * 256 * 256
    assert peak_of(step, "cpu") > step.mask_bytes


def test_lengths_and_windows_replace_those_of_the_cases():
    cases = cases_of("cpu", ["scaling", "dma"], seqlens=[128], windows=[32, 64])
    assert [(case.seqlen, case.window) for case in cases] == [(128, 32), (128, 64)]
    assert [case.window for case in cases_of("cpu", ["dense"], [128], [32, 64])] == [None]
