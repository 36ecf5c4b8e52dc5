"""Writes README's tables and picture from the newest records, so that neither is ever typed by hand.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import pathlib
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from flash_dmattn import select_key_intervals

ROOT = pathlib.Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"


def newest_records(suffix: str) -> list[tuple[str, dict]]:
    """The newest `*-<suffix>.json` of every machine, as (path, record)."""
    newest = {path.parent: path for path in sorted(RECORDS.glob(f"*/*-{suffix}.json"))}
    return [(str(p.relative_to(ROOT)), json.loads(p.read_text())) for p in newest.values()]


def table(records: list[tuple[str, dict]]) -> str:
    """A Markdown row per case and dtype, forward / backward in one cell, a block per machine."""
    lines = []
    for path, record in records:
        about = record["machine"]
        lines += [
            f"{about['cpu']} ({about['isa']}), {about['threads']} threads, torch {about['torch']}, "
            f"commit `{record['commit']}` ([record]({path})):",
            "",
            "| B1 H8, forward / backward | dtype | ours, ms | torch SDPA, ms | ratio |",
            "|---|---|---|---|---|",
        ]
        rows = [row for row in record["rows"] if "torch_ms" in row]
        seen = set()  # a row of work that two cases share is listed once
        for forward, backward in zip(rows[::2], rows[1::2], strict=True):
            window = f" w{forward['window']}" if forward["window"] else ""
            name = f"{forward['case']} N{forward['seqlen']} D{forward['head_dim']}{window}"
            cells = (
                f"{forward[key]:.{digits}f} / {backward[key]:.{digits}f}"
                for key, digits in (("ours_ms", 0), ("torch_ms", 0), ("ratio", 1))
            )
            if (name, forward["dtype"]) not in seen:
                lines.append(f"| {name} | {forward['dtype']} | {' | '.join(cells)} |")
            seen.add((name, forward["dtype"]))
        lines.append("")
    return "\n".join(lines)


def gpu_table(records: list[tuple[str, dict]]) -> str:
    """A Markdown row per case, ours beside the rivals of the same run, a block per machine."""
    lines = []
    for path, record in records:
        cases: dict[str, dict[str, dict]] = {}
        for row in record["speed"]:
            if "forward_ms" in row:
                cases.setdefault(row["case"], {})[row["who"]] = row
        rivals = sorted({who for case in cases.values() for who in case} - {"ours"})
        lines += [
            f"{record['machine']}, bf16, torch {record['torch']}, commit `{record['commit']}` "
            f"([record]({path})); ms, forward / backward, with selection, plan and the bias's gradient:",
            "",
            f"| case | ours | useful TFLOP/s | {' | '.join(rivals)} |",
            f"|---|---|---|{'---|' * len(rivals)}",
        ]
        for name, case in cases.items():
            times = [_both(case[who], "ms", 2) if who in case else "" for who in ("ours", *rivals)]
            rate = _both(case["ours"], "useful_tflops", 0)
            lines.append(f"| {name} | {times[0]} | {rate} | {' | '.join(times[1:])} |")
        lines.append("")
    return "\n".join(lines)


def _both(row: dict, unit: str, digits: int) -> str:
    return " / ".join(f"{row[f'{way}_{unit}']:.{digits}f}" for way in ("forward", "backward"))


def put_between_markers(text: str, name: str, content: str) -> str:
    """Replaces what stands between `<!-- name -->` and the next `<!-- end -->`."""
    markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return markers.sub(lambda found: found[1] + content + found[2], text)


def draw_intervals(axes: plt.Axes) -> None:
    """Which keys each query sees: n = 96, w = 16, scores with a few strong keys."""
    torch.manual_seed(3)
    n = 96
    scores = torch.randn(1, 1, n) + 3 * (torch.rand(1, 1, n) < 0.06)
    first, last = select_key_intervals(scores, 16).intervals[0, 0].unbind(-1)
    row = torch.arange(n)[:, None]
    seen = (first <= row) & (row < last)
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title="16 best keys of every query:\none interval a key")


def draw_cost(axes: plt.Axes, record: dict) -> None:
    """Forward + backward time against N at fixed w, log-log."""
    for dtype, marker in (("float32", "o"), ("bfloat16", "s")):
        for side, colour in (("torch", "tab:gray"), ("ours", "tab:blue")):
            total: dict[int, float] = {}
            for row in record["rows"]:
                key = f"{side}_ms"
                if row["window"] and row["dtype"] == dtype and key in row:
                    ways = total.setdefault(row["seqlen"], {})
                    ways[row["direction"]] = row[key] / 1e3
            points = sorted((n, sum(ways.values())) for n, ways in total.items())
            label = f"{'flash_dmattn' if side == 'ours' else 'torch SDPA, N×N mask'} {dtype}"
            axes.loglog(*zip(*points, strict=True), marker=marker, color=colour, label=label)
    axes.set(xlabel="sequence length N", ylabel="seconds, forward + backward")
    axes.set_title("w = 1024, 8 heads, D 64, 2 threads")
    lengths = sorted({row["seqlen"] for row in record["rows"] if row["window"]})
    axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3)


def main() -> None:
    records = newest_records("cpu")
    readme = ROOT / "README.md"
    text = put_between_markers(readme.read_text(), "cpu table", table(records))
    text = put_between_markers(text, "gpu table", gpu_table(newest_records("torch")))
    readme.write_text(text)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_intervals(axes[0])
    draw_cost(axes[1], records[0][1])
    plt.rcParams["svg.hashsalt"] = "flash_dmattn"
    figure.savefig(ROOT / "docs" / "images" / "overview.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
