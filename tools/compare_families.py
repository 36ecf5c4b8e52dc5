"""Compares every family of transformers with eager attention, and writes the list in docs/model-families.md.

python tools/compare_families.py [CLASS ...] [--name NAME] [--no-docs]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import textwrap
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no family is built from the network

import torch


def prepare_torchvision() -> None:
    """Lets a torch without CUDA import the torchvision of PyPI, which timm needs.

    torchvision's library does not load with such a torch, but its Python code registers rules for two of the library's operators.
    The import succeeds if these operators are defined.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None:
        return
    try:
        torch.ops.load_library(Path(package.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


prepare_torchvision()  # before transformers imports it

import transformers  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tools/families"), str(ROOT / "tests/python/support/definitions")]

import flash_dmattn.integrations.transformers  # noqa: E402, F401
from eager_comparison import Verdict, compare  # noqa: E402
from scored_families import TASKS as GENERATING  # noqa: E402
from scored_families import compare_scores, facts_of_class  # noqa: E402
from tiny_models import TASKS, ModelClass, model_classes  # noqa: E402

TABLE = ROOT / "python/flash_dmattn/integrations/transformers/family_table.py"
PAGE = ROOT / "docs" / "model-families.md"
BEGIN, END = "<!-- families -->", "<!-- end -->"
SCORES_BEGIN = "<!-- learned scores -->"
TITLES = {
    "wrong": "**wrong**",
    "equal": "equal",
    "own": "equal: uses its own attention under any name",
    "raises": "an error at the first call",
    "refused": "refused when the name is set",
    "none": "without softmax attention",
    "untested": "not tested",
}

# A pattern in a message, and the words for all models of its kind.
REASONS = {
    r", which (has a head dimension).*": r"\1 above 256",
    r", which (.*)\. Use another one": r"\1",
    r"requires the (\w+) library|No module named '(\w+)'": r"needs \1\2",
    r"KeyError: '\w+'": "looks its layers up in a table of names",
    r"is not supported when (.*?):": r'refuses names with "flash" in them where \1',
    r"`kernels` is|FlashAttention\d has been": 'takes every name with "flash" in it for a kernel of the hub',
    r"ValidationError|CannotBeBuilt|Config' object has no attribute": "its config is not shrunk by names",
    r"required positional|cannot be None|You must specify|has no attribute 'image_outputs'": "other inputs",
    r"of transformers: (\w+ )?(layers|none) ([^;.]*)": r"\2 \3",
    r"got a \w+, which ([^.]*)": r"\1",
    r"The size of tensor|torch\.finfo\(\)": "computes with the attention mask as a tensor of numbers",
    r"is_causal: got False": "asks for attention without causality under a causal mask",
}

Verdicts = dict[ModelClass, Verdict]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "classes", nargs="*", metavar="CLASS", help="these alone; then the page stays as it is"
    )
    parser.add_argument("--name", default="flash_dmattn", help="of attn_implementation")
    parser.add_argument("--no-docs", action="store_true", help="the page stays as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts: Verdicts = {}
    known_classes = list(model_classes())
    known_names = {model_class.name for model_class in known_classes}
    for name in options.classes:
        if name not in known_names:
            parser.error(
                f"CLASS: got {name}, expected a class of transformers {transformers.__version__} for language or images"
            )
    for model_class in known_classes:
        if not options.classes or model_class.name in options.classes:
            verdict = verdicts[model_class] = compare(model_class, options.name)
            print(
                f"{model_class.name}: {verdict.kind} {verdict.error:.1e} {verdict.reason}",
                flush=True,
            )
    scored, rows = {}, {name: set() for name in ("ATTENTION", *DECODERS)}
    for model_class in [c for c in verdicts if set(GENERATING) & set(c.tasks)]:
        facts, attention = facts_of_class(model_class)
        verdict = scored[model_class] = compare_scores(model_class, attention or None)
        if verdict.kind == "equal":
            rows["ATTENTION"] |= set(facts.attention)
        if facts.by_positions:
            rows[DECODERS[facts.several_axes]].add(facts.kind)
        if facts.by_type:
            rows[DECODERS[2]].add(facts.kind)
    rows["COMPARED"] = {
        c.family.removesuffix("_text") for c, v in verdicts.items() if v.kind in ("equal", "own")
    }
    for model_class, verdict in scored.items():
        print(
            f"{model_class.name} with scores: {verdict.kind} {verdict.error:.1e} {verdict.reason}"
        )
    if not options.classes and not options.no_docs:
        write(BEGIN, section(verdicts))
        write(SCORES_BEGIN, section_of_scores(scored))
        add_rows(rows)
    both = [*verdicts.items(), *scored.items()]
    wrong = [model_class.name for model_class, verdict in both if verdict.kind == "wrong"]
    # The name is accepted for these, and nothing shows that they equal eager attention.
    unproved = [
        c.name for c, v in verdicts.items() if v.kind == "untested" and "BASE" not in c.tasks
    ]
    print(f"{len(verdicts)} classes, wrong: {', '.join(wrong) or 'none'}")
    print(f"of a task and not tested: {', '.join(unproved) or 'none'}")
    return 1 if wrong or unproved else 0


DECODERS = ("DECODERS_BY_POSITIONS", "DECODERS_OF_SEVERAL_AXES", "MASKS_BY_TYPE")


def add_rows(rows: dict[str, set[str]]) -> None:
    """Adds names to the table of families, which keeps those of other versions of transformers."""
    text = TABLE.read_text()
    for name, new in rows.items():
        before, rest = text.split(f"{name} = frozenset({{\n")
        old, after = rest.split("})  # fmt: skip", 1)
        names = sorted(new | set(re.findall(r'"([^"]+)"', old)))
        lines = textwrap.wrap(", ".join(f'"{n}"' for n in names) + ",", 116, break_on_hyphens=False)
        table = "".join(f"    {line}\n" for line in lines)
        text = f"{before}{name} = frozenset({{\n{table}}})  # fmt: skip{after}"
    TABLE.write_text(text)


def write(begin: str, text: str) -> None:
    """Replaces the text between a marker of the page and the next end."""
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{begin}\n{text}\n{END}{after}")


def section(verdicts: Verdicts) -> str:
    """Returns two lists: the models of tasks, and text and image models of other families."""
    main = {c: v for c, v in verdicts.items() if "BASE" not in c.tasks}
    others = {c: v for c, v in verdicts.items() if "BASE" in c.tasks}
    families = {c.family for c in main}
    return "\n".join(
        [
            "## Models of a task",
            f"All classes that transformers {transformers.__version__} has for "
            f"{', '.join(task.lower().replace('_', ' ') for task in TASKS)}: {len(main)} classes of {len(families)} families. {_counts(main)}.",
            "",
            *_table(main),
            "",
            "## Base models",
            f"Base models of families without these tasks, and parts of composite ones: {_counts(others)}.",
            "",
            *_table(others),
        ]
    )


def section_of_scores(verdicts: Verdicts) -> str:
    text = "\n".join([f"{len(verdicts)} classes: {_counts(verdicts)}.", "", *_table(verdicts)])
    return text.replace(TITLES["refused"], "refused by `add_learned_scores`")


def _counts(verdicts: Verdicts) -> str:
    kinds = [verdict.kind for verdict in verdicts.values()]
    return ", ".join(f"{kinds.count(kind)} {TITLES[kind]}" for kind in TITLES if kind in kinds)


def _table(verdicts: Verdicts) -> list[str]:
    rows: dict[tuple[str, str], list[ModelClass]] = {}
    for model_class, verdict in verdicts.items():
        reason = _reason(model_class, verdict)
        rows.setdefault((verdict.kind, reason), []).append(model_class)
    order = list(TITLES)
    equal = rows.pop(("equal", ""), [])
    lines = [
        *textwrap.wrap(f"Equal: {_families(equal, verdicts)}.", 120, break_on_hyphens=False),
        "",
        "| verdict | why | families |",
        "|---|---|---|",
    ]
    for kind, reason in sorted(rows, key=lambda row: (order.index(row[0]), -len(rows[row]))):
        lines.append(f"| {TITLES[kind]} | {reason} | {_families(rows[kind, reason], verdicts)} |")
    return lines


def _families(classes: list[ModelClass], verdicts: Verdicts) -> str:
    """Lists families, with the names of classes if only some of a family are listed."""
    names = []
    for family in dict.fromkeys(c.family for c in classes):
        here = [c for c in classes if c.family == family]
        everywhere = [c for c in verdicts if c.family == family]
        names.append(
            family
            if len(here) == len(everywhere)
            else f"{family} ({', '.join(c.name for c in here)})"
        )
    return ", ".join(sorted(names))


def _reason(model_class: ModelClass, verdict: Verdict) -> str:
    """Returns the message without its model-specific parts."""
    if verdict.kind == "untested" and "BASE" in model_class.tasks:
        return "other inputs, another package, or a config that is not shrunk by names; the run prints which"
    for pattern, words in REASONS.items():
        match = re.search(pattern, verdict.reason)
        if match is not None:
            return match.expand(words)
    return verdict.reason.replace("|", "\\|")[:140]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted: the page stays as it is.", file=sys.stderr)
        sys.exit(130)
