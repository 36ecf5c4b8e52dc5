"""Writes the tables of the documents from the records, between `<!-- name -->` and `<!-- end -->`."""

from __future__ import annotations

import os
from pathlib import Path

from .case import Case, useful_tflops
from .machine import BENCHMARKS
from .record import Record, Row, read

RECORDS = BENCHMARKS / "records"
ROOT = BENCHMARKS.parent
DOCS = ROOT / "docs"
NAMES = {
    "cuda": "ours", "cpu": "ours", "triton": "our Triton backend", "sdpa": "torch SDPA", "flex": "flex_attention",
    "fa2": "FlashAttention-2", "cudnn": "cuDNN", "fa4": "FlashAttention-4",
    "cudnn_flex": "cuDNN flex_attention",
}  # fmt: skip
KINDS = {
    "per_query": "dynamic mask", "sliding": "sliding window", "documents": "packed documents",
    "prefix": "prefix", "windowed_documents": "documents and window", "dense_masks": "dense mask and bias", "evicted": "recent keys and the best",
}  # fmt: skip
# The cases of README's tables.
README_CASES = {
    "dense causal B1 H8 N4096 D128",
    "per_query B1 H8 N8192 D64 w1024",
    "dense causal B1 H16 N8192 D128",
    "dense causal B1 H16 N32768 D128",
    "dense causal B1 H16 N32768 D64",
    "per_query B1 H16 Hkv8 N32768 D128 w2048",
    "per_query B2 H32 N4096 D128 w2048",
    "sliding B1 H16 Hkv8 N32768 D128 w2048",
}


def records_named(*patterns: str) -> list[Path]:
    """Returns the records whose paths below `records/`, without the suffix, match a pattern."""
    return [path for pattern in patterns for path in sorted(RECORDS.glob(f"{pattern}.json"))]


def attention_table(path: Path, document: Path, cases: set[str] | None, name_of: dict) -> str:
    """Returns a Markdown table of the record's rows of attention: a row per case and dtype, a column per side.

    cases: those to write; None writes all.
    """
    record = read(path)
    work: dict[tuple[str, str], dict[str, Row]] = {}
    for row in record.rows:
        if Case.parse(row.case) and (cases is None or row.case in cases):
            work.setdefault((row.case, row.dtype), {})[row.side] = row
    sides = list(dict.fromkeys(side for rows in work.values() for side in rows))
    if not sides:
        return ""
    titles = [name_of[side] for side in sides]
    lines = [
        f"{_source(path, record, document)}; forward / backward in ms:", "",
        f"| work | dtype | {' | '.join(titles)} | {titles[0]}, useful TFLOP/s |", f"|---|---|{'---|' * len(sides)}---|",
    ]  # fmt: skip
    for (case, dtype), rows in work.items():
        kind, _, rest = case.partition(" ")
        times = [_both_ways(rows[side].ms) if side in rows else "" for side in sides]
        rates = _both_ways(useful_tflops(rows[sides[0]])) if sides[0] in rows else ""
        lines.append(f"| {' | '.join([f'{KINDS.get(kind, kind)} {rest}', dtype, *times, rates])} |")
    return "\n".join([*lines, "", ""])


def rows_table(path: Path, document: Path) -> str:
    """Returns a Markdown table of all rows of a record that do not measure attention."""
    record = read(path)
    rows = [row for row in record.rows if not Case.parse(row.case)]
    lines = [f"{_source(path, record, document)}:", "", "| case | side | dtype | ms | other |", "|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        ms, other = (
            ", ".join(f"{name} {_short(x)}" for name, x in numbers.items() if name != "rounds")
            for numbers in (row.ms, row.other)
        )
        lines.append(f"| {row.case} | {row.side} | {row.dtype} | {ms} | {other} |")
    return "\n".join([*lines, "", ""]) if rows else ""


def _source(path: Path, record: Record, document: Path) -> str:
    link = os.path.relpath(path, document.parent)
    torch = record.versions["torch"]
    return f"{record.machine}, torch {torch}, commit `{record.commit}`, {record.date} ([record]({link}))"


def _both_ways(numbers: dict[str, float]) -> str:
    return " / ".join(
        _short(numbers[way]) if way in numbers else "–" for way in ("forward", "backward")
    )


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def tables_of_documents() -> dict[Path, dict[str, str]]:
    """Returns {document: {marker: table}}."""
    readme, page, triton = ROOT / "README.md", DOCS / "benchmarks.md", DOCS / "kernels/triton.md"

    def attention(document: Path, *patterns: str, cases=None, name_of=NAMES) -> str:
        paths = records_named(*patterns)
        return "".join(attention_table(path, document, cases, name_of) for path in paths)

    every = records_named("*/*")
    return {
        readme: {
            "cpu table": attention(readme, "amd-epyc-avx2/cpu", cases=README_CASES),
            "gpu table": attention(readme, "h200/attention", cases=README_CASES),
        },
        page: {
            "cpu table": attention(page, "*/cpu"),
            "gpu table": attention(page, "h200/[!t]*", "h100/*"),
            "other tables": "".join(rows_table(path, page) for path in every),
        },
        triton: {"triton table": attention(triton, "h200/triton", name_of=NAMES | {"cuda": "our CUDA backend"})},
    }  # fmt: skip


def with_tables(document: Path, tables: dict[str, str]) -> str:
    """Returns the document's text with each table between the markers of its name."""
    text = document.read_text()
    for name, table in tables.items():
        before, marker, rest = text.partition(f"<!-- {name} -->\n")
        text = (
            before + marker + table.rstrip() + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
        )
    return text


def main(options: object) -> int:
    for document, tables in tables_of_documents().items():
        document.write_text(with_tables(document, tables))
    return 0
