"""Writes the generated tables (cpu, gpu, token, triton) and pictures of the documentation from the newest records."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from flash_dmattn import KVSlots, select_key_intervals

from . import pictures
from .case import KEPT, RECENT, Case, useful_tflops
from .machine import RECORDS
from .pictures import plt  # after pictures has chosen how matplotlib draws
from .record import TIMES, forward_and_backward, read
from .side_table import SIDES
from .sides import RIVALS

ROOT = RECORDS.parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
PANELS = IMAGES / "panels"
NAMES = {side: about.name for side, about in SIDES.items()}
# On the page of the Triton backend, "ours" would be ambiguous.
TRITON_NAMES = {"cuda": "our CUDA backend"}
KINDS = {
    "per_query": "dynamic mask", "sliding": "sliding window", "documents": "packed documents",
    "dense_masks": "dense mask and bias", "forgetting": "forgetting attention", "evicted": "recent keys and the best",
}  # fmt: skip
# The cases in README's tables. A case with no rival in the record is left out.
README_CASES = {
    "dense causal B1 H8 N4096 D128",
    "per_query B1 H8 N8192 D64 w1024",
    "per_query B1 H8 N16384 D64 w1024",
    "dense causal B1 H16 N8192 D128",
    "dense causal B1 H16 N32768 D128",
    "dense causal B1 H16 N32768 D64",
    "dense causal B1 H16 N16384 D192/128",
    "per_query B1 H16 Hkv8 N32768 D128 w2048",
    "per_query B2 H32 N4096 D128 w2048",
    "sliding B1 H16 Hkv8 N32768 D128 w2048",
    "dense_masks B1 H2 Hkv1 N32768 D64 w1024",
}

# Tokens per second and GPU by sequence length, with context parallelism of 1, 2, 4 and 8. Source:
# https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, table 2.
DENSE_SPEEDS = {32768: 3890, 65536: 2540, 131072: 1071, 262144: 548}

# {(case, dtype): {side: row}}
Work = dict[tuple[str, str], dict[str, dict]]

_TOKEN_CASE = re.compile(r"token after (\d+), (.*)")
TOKENS_BEFORE = (256, 1024, 4096, 16384)  # the columns of the table of a generated token


def newest_records(suffix: str) -> list[tuple[str, dict]]:
    """Returns the newest `*-<suffix>.json` of every machine, as (path, record)."""
    newest = {path.parent: path for path in sorted(RECORDS.glob(f"*/*-{suffix}.json"))}
    return [(str(p.relative_to(ROOT)), read(p)) for p in newest.values()]


def table(
    records: list[tuple[str, dict]],
    to_root: str = "",
    cases: set[str] | None = None,
    names: dict[str, str] = NAMES,
) -> str:
    """Returns a Markdown table per machine, with a row per case and dtype. The columns are our backend, the rivals of the same run,
    and then rivals from other records of the same machine and commit.

    to_root: the relative path from the document to the repository's root.
    cases: the cases to write, each only if a rival measured it; None writes all attention cases.
    names: the column heading of each side.
    """
    lines = []
    for path, record in records:
        work = rows_of_work(record, cases)
        if not work:
            continue
        sides = list(dict.fromkeys(side for by_side in work.values() for side in by_side))
        notes = []
        for other_path, other in other_records(path, record):
            other_work = rows_of_work(other, cases)
            if added := add_rivals(work, other_work, sides):
                sides += added
                notes.append(
                    _note_of_other_run(work, other_work, sides[0], added, to_root + other_path)
                )
        if cases is not None:
            work = {key: by_side for key, by_side in work.items() if len(by_side) > 1}
        sides = [side for side in sides if any(side in by_side for by_side in work.values())]
        if not work:
            continue
        lines += [
            f"{_source(path, record, to_root)}; forward / backward in ms, {_statistic(work)}:",
            "",
            f"| work | dtype | {' | '.join(names[side] for side in sides)} | {names[sides[0]]}, useful TFLOP/s |",
            f"|---|---|{'---|' * len(sides)}---|",
        ]
        for (case, dtype), by_side in work.items():
            times = [
                forward_and_backward(by_side[side]) if side in by_side else "" for side in sides
            ]
            rates = ""
            if sides[0] in by_side:
                numbers = useful_tflops(by_side[sides[0]])
                rates = forward_and_backward(dict(zip(TIMES, numbers, strict=True)))
            cells = [_title(case), dtype, *times, rates]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(line for note in notes for line in (note, ""))]
    return "\n".join(lines)


def rows_of_work(record: dict, cases: set[str] | None) -> Work:
    """Groups a record's attention rows by case and dtype, then by side. Leaves out sides that have no column in a table."""
    work: Work = {}
    for row in record["rows"]:
        is_wanted = cases is None or row["case"] in cases
        if Case.parse(row["case"]) and is_wanted and row["side"] in NAMES:
            work.setdefault((row["case"], row["dtype"]), {}).setdefault(row["side"], row)
    return work


def other_records(path: str, record: dict) -> list[tuple[str, dict]]:
    """Returns the other records of the same machine, commit and torch version, as (path, record). Not every record has torch's
    build, as in 2.11.0+cu130."""
    records = [
        (str(p.relative_to(ROOT)), read(p)) for p in sorted((ROOT / path).parent.glob("*.json"))
    ]
    return [
        (other_path, other)
        for other_path, other in records
        if other_path != path
        and other["machine"]["name"] == record["machine"]["name"]
        and other["commit"] == record["commit"]
        and other["versions"]["torch"].partition("+")[0]
        == record["versions"]["torch"].partition("+")[0]
    ]


def add_rivals(work: Work, others: Work, sides: list[str]) -> list[str]:
    """Adds rows of rivals that are not in `sides` to `work`, for cases that `work` already has. Returns the names of these rivals."""
    added = {}
    for key, rows_by_side in others.items():
        for side, row in rows_by_side.items():
            if side in RIVALS and side not in sides and key in work and sides[0] in rows_by_side:
                work[key][side] = row
                added[side] = None
    return list(added)


def _note_of_other_run(work: Work, others: Work, ours: str, added: list[str], path: str) -> str:
    """Returns a sentence that says which run the rivals' times come from, and how much slower or faster ours ran there."""
    factors = [
        others[key][ours][way] / rows_by_side[ours][way]
        for key, rows_by_side in work.items()
        for way in TIMES
        if any(rows_by_side.get(side) is others.get(key, {}).get(side, 0) for side in added)
    ]
    names = " and ".join(NAMES[side] for side in added)
    return (
        f"{names} {'was' if len(added) == 1 else 'were'} measured in a separate run at the same commit ([record]({path})), "
        f"alternating with our kernels. In that run our times were {min(factors):.2f} to {max(factors):.2f} times those in "
        "this table."
    )


def _statistic(work: Work) -> str:
    """Returns what the times of a table are. Raises ValueError if they are not all of one statistic."""
    rows = [row for by_side in work.values() for row in by_side.values()]
    names = {row["statistic"] for row in rows}
    if len(names) > 1:
        raise ValueError(f"statistic: got {' and '.join(sorted(names))} in a table, expected one")
    rounds = sorted({row["rounds"] for row in rows if "rounds" in row})
    return f"{names.pop()} of {' or '.join(map(str, rounds)) or 'several'} rounds"


def _source(path: str, record: dict, to_root: str) -> str:
    """Returns where the numbers come from: machine, torch version, commit, and a link to the record."""
    about = record["machine"]
    threads = ""
    if "threads" in about:
        count = about["threads"]
        threads = f" ({about['isa']}), {count} {'thread' if count == 1 else 'threads'}"
    return (
        f"{about['name']}{threads}, torch {record['versions']['torch']}, commit `{record['commit']}` "
        f"([record]({to_root}{path}))"
    )


def token_table(path: str, record: dict) -> str | None:
    """Returns a table of the cost of a generated token with each cache, with one column per text length. Returns None if no length
    has rows of both caches."""
    token_rows = {}
    for row in record["rows"]:
        if title := _TOKEN_CASE.fullmatch(row["case"]):
            token_rows[row["side"], int(title[1])] = row
            model = title[2]
    sides = {
        "eager": ("eager attention, `DynamicCache`", "its keys and values"),
        "ours": ("ours, `DynamicMaskCache`", "its slots"),
    }
    lengths = [n for n in TOKENS_BEFORE if all((side, n) in token_rows for side in sides)]
    if not lengths:
        return None
    shown = {(side, str(n)): {side: token_rows[side, n]} for side in sides for n in lengths}
    lines = [
        f"A token of a {model}, float32, batch 1: {_source(path, record, '../')}; {_statistic(shown)}:",
        "",
        f"| tokens before | {' | '.join(f'{n:,}' for n in lengths)} |",
        f"|---|{'---|' * len(lengths)}",
    ]
    for side, (times, memory) in sides.items():
        rows = [token_rows[side, n] for n in lengths]
        cells = [f"{row['forward']:.1f} ms, {1e3 / row['forward']:.0f} tokens/s" for row in rows]
        lines.append(f"| {times} | {' | '.join(cells)} |")
        cells = [f"{row['cache_mib']:.1f} MiB" for row in rows]
        lines.append(f"| {memory} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _title(case: str) -> str:
    kind, _, rest = case.partition(" ")
    return f"{KINDS.get(kind, kind)} {rest}"


def put_between_markers(text: str, name: str, content: str) -> str:
    """Replaces the text between `<!-- name -->` and the next `<!-- end -->`."""
    markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return markers.sub(lambda match: match[1] + content + match[2], text)


def draw_intervals(axes: plt.Axes) -> None:
    """Draws which keys each query sees, for n = 96, w = 16 and scores with a few strong keys."""
    torch.manual_seed(3)
    n = 96
    scores = torch.randn(1, 1, n) + 3 * (torch.rand(1, 1, n) < 0.06)
    seen = select_key_intervals(scores, 16).to_mask()[0, 0]
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title="16 best keys of every query:\none interval a key")


def draw_slots(path: Path) -> None:
    """Draws which tokens a cache of 5 slots and two key heads holds after each of 14 tokens."""
    torch.manual_seed(5)
    heads, window, tokens, width = 2, 5, 14, 8
    cache = KVSlots(1, heads, window, width)
    scores = torch.randn(1, heads, tokens)
    # The figure is narrow so that its text is legible on a phone.
    figure, panels = plt.subplots(
        1, heads, figsize=(4.7, 4.4), sharey=True, gridspec_kw={"wspace": 0}, layout="constrained"
    )
    for token in range(tokens):
        one = slice(token, token + 1)
        states = (torch.zeros(1, 1, h, width) for h in (heads, heads, heads))
        cache.step(*states, scores[..., one])
        for head, axes in enumerate(panels):
            count = int(cache.counts[0, head, 0])
            held = cache.positions[0, head, :count].tolist()
            for slot, position in enumerate(held):
                rank = float(scores[0, head, position].sigmoid())
                box = {"facecolor": plt.cm.Blues(0.1 + 0.7 * rank), "edgecolor": "white", "lw": 1.5}
                if position == token:
                    box |= {"edgecolor": "black", "zorder": 2}
                axes.add_patch(plt.Rectangle((slot, token), 1, 1, **box))
                colour = "white" if rank > 0.6 else "black"
                middle = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3}
                axes.text(slot + 0.5, token + 0.5, position, color=colour, **middle)
            if token not in held:
                where = (window + 0.2, token + 0.5)
                axes.text(*where, f"{token} is worse", va="center", fontsize=8, color="tab:red")
    for head, axes in enumerate(panels):
        axes.set(
            xlim=(0, window + 2.6), ylim=(tokens, 0), xlabel="slot", title=f"key head {head}",
            xticks=[s + 0.5 for s in range(window)], xticklabels=range(window),
            yticks=[t + 0.5 for t in range(tokens)], yticklabels=range(tokens),
        )  # fmt: skip
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_ylabel("token that arrives")
    pictures.save(figure, path)


def draw_overview(record: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_intervals(axes[0])
    rows = pictures.sweep(record["rows"], "seqlen")
    pictures.draw_sweep(axes[1], rows, "seqlen", pictures.seconds)
    axes[1].legend(fontsize=7, loc="lower right")
    pictures.save(figure, path)


def draw_evicted(record: dict, path: Path) -> None:
    """Draws time against length with eviction of old keys. The left panel keeps a share of them, the right a fixed number."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for panel, window in zip(axes, (None, 2048), strict=True):
        rows = [row for row in record["rows"] if Case.parse(row["case"]).window == window]
        pictures.draw_sweep(panel, pictures.sweep(rows, "seqlen"), "seqlen", pictures.seconds)
        kept = window or f"1/{1 / KEPT:.0f}"
        panel.set_title(f"the last {RECENT} keys, and {kept} of the older ones", fontsize=9)
    axes[0].legend(fontsize=7, loc="lower right")
    pictures.save(figure, path)


def draw_long_context(record: dict, path: Path) -> None:
    """Draws the speed of a training step against the length, and the losses of trainings on whole sequences and on pieces."""
    speeds, losses = {}, {}
    for row in record["rows"]:
        if row["case"].startswith("losses"):
            losses[row["side"]], _ = row["values"]["loss of each step"]
        else:
            length = int(re.search(r" N(\d+)", row["case"])[1])
            speed, _ = row["values"]["throughput per GPU"]
            speeds.setdefault(f"Doge, ours, {row['side']}", {})[length] = speed
    speeds["Llama 8B, dense, 8 GPUs (TorchTitan, 2024)"] = DENSE_SPEEDS
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, points in speeds.items():
        best = max(points.values())
        left.semilogx(points.keys(), [x / best for x in points.values()], "o-", base=2, label=name)
    ticks = sorted({length for points in speeds.values() for length in points})
    left.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
    left.set(
        xlabel="sequence length N",
        ylabel="tokens/s per GPU,\nrelative to each line's best",
        ylim=(0, None),
    )
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        right.plot(values, style, label=name)
    right.set(xlabel="step", ylabel="loss, nats a byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    pictures.save(figure, path)


def draw_intervals_alone(path: Path) -> None:
    figure, axes = plt.subplots(figsize=pictures.PANEL, layout="constrained")
    draw_intervals(axes)
    pictures.save(figure, path)


def with_tables(document: Path, tables: dict[str, str]) -> str:
    """Returns the document's text with each table written between the markers of its name."""
    text = document.read_text()
    for name, content in tables.items():
        text = put_between_markers(text, name, content)
    return text


def documents() -> dict[Path, dict[str, str]]:
    """Returns {document: {marker name: table}} from the newest records."""
    on_cpus, on_gpus = newest_records("cpu"), newest_records("torch")
    tables = {
        ROOT / "README.md": {
            "cpu table": table(on_cpus, cases=README_CASES),
            "gpu table": table(on_gpus, cases=README_CASES),
        },
        DOCS / "benchmarks.md": {
            "cpu table": table(on_cpus, "../"),
            "gpu table": table(on_gpus, "../"),
        },
        DOCS / "kernels" / "triton.md": {
            "triton table": table(newest_records("triton"), "../../", names=NAMES | TRITON_NAMES)
        },
    }
    for path, record in newest_records("token"):
        # Only a CPU's record has threads.
        if "threads" in record["machine"] and (written := token_table(path, record)):
            tables[DOCS / "generation.md"] = {"token table": written}
    return tables


def main(options: object) -> int:
    """Writes all tables and pictures."""
    for document, tables in documents().items():
        document.write_text(with_tables(document, tables))
    swept = [r for _, r in newest_records("cpu") if pictures.sweep(r["rows"], "seqlen")]
    if swept:
        draw_overview(swept[0], IMAGES / "overview.svg")
        pictures.draw_panels(swept[0]["rows"], PANELS, "cpu")
    draw_intervals_alone(PANELS / "intervals.svg")
    draw_slots(IMAGES / "slots.svg")
    for _, record in newest_records("evicted"):
        draw_evicted(record, IMAGES / "evicted.svg")
    for _, record in newest_records("long-context"):
        draw_long_context(record, IMAGES / "long-context.svg")
    for _, record in newest_records("sweeps"):
        pictures.draw(record["rows"], IMAGES / "cost.svg")
        pictures.draw_panels(record["rows"], PANELS, "gpu")
    return 0
