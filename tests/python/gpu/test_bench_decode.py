"""`python -m flash_dmattn bench --case decode` on a GPU: its rows; never how fast anything is."""

import json

from flash_dmattn.__main__ import main
from flash_dmattn.benchmark import decode
from gpu import needs_gpu

pytestmark = needs_gpu


def test_rows_of_decoding(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "cache_bytes", lambda device: 1 << 18)
    monkeypatch.setattr(decode, "copy_bytes", lambda device: 1 << 18)
    file = tmp_path / "bench.json"
    sizes = ["--length", "100", "--window", "64", "--repeats", "1"]
    assert main(["bench", "--case", "decode", "--device", "cuda", *sizes, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["decode"]
    assert {(row["who"], row["batch"]) for row in rows} >= {
        (who, batch) for who in ("slots", "ours") for batch in (1, 64)
    }
    assert all(row["cold_us"] > 0 and row["warm_us"] > 0 for row in rows)
