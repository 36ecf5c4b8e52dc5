"""Times flash_dmattn on the CPU beside torch's scaled_dot_product_attention, in one process.

    python benchmarks/bench.py                       every case, a table, no file
    python benchmarks/bench.py --record cpu          and benchmarks/records/<machine>/<date>-cpu.json
    python benchmarks/bench.py --cases dma --dtypes bfloat16 --repeats 9

The two sides take turns and the medians are compared, so a drifting clock favours neither. Times are
of the whole call as a user makes it: ours includes selection, plan and the gradient of the bias;
torch's N x N mask is ready before its clock starts and its mask has no gradient.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.availability import backends

RECORDS = pathlib.Path(__file__).parent / "records"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of work: causal attention of B1, `heads` heads, optionally with a dynamic mask."""

    name: str
    seqlen: int
    head_dim: int
    window: int | None = None  # keep_window_size; None is dense causal attention
    heads: int = 8

    @property
    def rival(self) -> bool:
        """Whether torch runs it too: its mask takes 5 N^2 bytes a head."""
        return self.seqlen <= 16384

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head: query i sees min(i + 1, window) keys."""
        n, w = self.seqlen, min(self.window or self.seqlen, self.seqlen)
        return w * (w + 1) // 2 + (n - w) * w

    def useful_gflop(self, backward: bool) -> float:
        """2 products of 2 D flops a pair forward, 5 backward."""
        return (10 if backward else 4) * self.head_dim * self.pairs * self.heads / 1e9


CASES = {
    "dense": [Case("dense causal", 4096, 128)],
    "dma": [Case("DMA per_query", 8192, 64, window=1024)],
    "scaling": [
        Case("DMA per_query", n, 64, window=1024) for n in (4096, 8192, 16384, 32768, 65536)
    ],
}


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def ours(case: Case, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    """The call and the tensors it is differentiated by."""
    shape = (1, case.seqlen, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    if case.window is None:
        return lambda: flash_dmattn_func(q, k, v, is_causal=True), [q, k, v]
    bias = torch.randn(1, case.heads, case.seqlen).to(dtype).requires_grad_()
    return (
        lambda: flash_dmattn_func(
            q, k, v, attn_bias=bias, is_causal=True, keep_window_size=case.window
        ),
        [q, k, v, bias],
    )


def torchs(case: Case, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    shape = (1, case.heads, case.seqlen, case.head_dim)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    if case.window is None:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]
    scores = torch.randn(1, case.heads, case.seqlen)
    first, last = select_key_intervals(scores, case.window).intervals.unbind(-1)
    row = torch.arange(case.seqlen, dtype=torch.int32)[:, None]
    mask = (first[..., None, :] <= row) & (row < last[..., None, :])
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), [q, k, v]


def measure(case: Case, dtype: torch.dtype, repeats: int) -> list[dict]:
    """Median forward and backward times of both sides, a dict per direction."""
    sides = {"ours": ours(case, dtype)}
    if case.rival:
        sides["torch"] = torchs(case, dtype)
    times = {(side, way): [] for side in sides for way in ("forward", "backward")}
    for repeat in range(repeats + 1):  # the first round warms up
        for side, (call, inputs) in sides.items():
            forward, out = timed(call)
            dout = torch.randn_like(out)
            backward, _ = timed(lambda: torch.autograd.grad(out, inputs, dout))  # noqa: B023
            if repeat:
                times[side, "forward"].append(forward)
                times[side, "backward"].append(backward)
    rows = []
    for way in ("forward", "backward"):
        row = {
            "case": case.name,
            "seqlen": case.seqlen,
            "head_dim": case.head_dim,
            "heads": case.heads,
            "window": case.window,
            "dtype": str(dtype).removeprefix("torch."),
            "direction": way,
            "ours_ms": round(statistics.median(times["ours", way]), 2),
        }
        row["ours_gflops"] = round(case.useful_gflop(way == "backward") / row["ours_ms"] * 1e3, 1)
        if case.rival:
            row["torch_ms"] = round(statistics.median(times["torch", way]), 2)
            row["ratio"] = round(row["torch_ms"] / row["ours_ms"], 2)
        rows.append(row)
    return rows


def machine() -> dict:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    fields = dict(
        [part.strip() for part in line.split(":", 1)]
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if ":" in line
    )
    return {
        "cpu": fields.get("model name", "unknown"),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "isa": next(backend.reason for backend in backends() if backend.name == "cpu"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RECORDS.parent, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", metavar="NAME", help="also write a record under this name")
    parser.add_argument("--machine", metavar="FOLDER", help="record folder; default: CPU and ISA")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    about = machine()
    print(f"{about['cpu']} ({about['isa']}), {about['threads']} threads, torch {about['torch']}")
    print(f"{'case':<14}{'N':>7}{'D':>5}{'w':>6} {'dtype':<9}{'':<9}"
          f"{'ours ms':>9}{'GFLOP/s':>9}{'torch ms':>10}{'ratio':>7}")  # fmt: skip
    rows = []
    for name in arguments.cases:
        for case in CASES[name]:
            for dtype in arguments.dtypes:
                for row in measure(case, DTYPES[dtype], arguments.repeats):
                    rows.append(row)
                    print(
                        f"{row['case']:<14}{row['seqlen']:>7}{row['head_dim']:>5}"
                        f"{row['window'] or '-':>6} {row['dtype']:<9}{row['direction']:<9}"
                        f"{row['ours_ms']:>9.1f}{row['ours_gflops']:>9.0f}"
                        f"{row.get('torch_ms', '-'):>10}{row.get('ratio', '-'):>7}",
                        flush=True,
                    )
    if arguments.record:
        slug = f"{about['cpu'].split('@')[0].strip().lower().replace(' ', '-')}-{about['isa']}"
        folder = RECORDS / (arguments.machine or slug)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{datetime.date.today():%Y-%m-%d}-{arguments.record}.json"
        record = {"machine": about, "commit": commit(), "repeats": arguments.repeats, "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
