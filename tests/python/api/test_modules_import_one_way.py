"""Imports inside the package go one way, whether at the top of a module, in a function or only for types."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import flash_dmattn

ROOT = Path(flash_dmattn.__file__).parent
# The folders of a level import only from their own and earlier levels. "" is the package itself.
LEVELS = [
    {"_core"},
    {"keys"},
    {"_backends"},
    {"", "generation", "distributed"},
    {"integrations", "check", "command_line", "utils"},
]
LONGEST_CHAIN = 5  # modules of one folder that import each other in a row


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in ROOT.rglob("*.py") if path.name != "__main__.py"}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def folder_of(name):
    return name if name in PACKAGES else name.rpartition(".")[0]


def imported(name):
    """Returns the modules that a module imports, and their parent packages, whose `__init__` runs first."""
    folder = folder_of(name).split(".")
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
        base = ".".join(filter(None, base))
        for alias in node.names:
            other = ".".join(filter(None, (base, alias.name)))
            yield other if other in FILES else base
        while base:
            if base in PACKAGES and not f"{name}.".startswith(f"{base}."):
                yield base
            base = base.rpartition(".")[0]


@cache
def graph():
    return {name: set(imported(name)) - {name} for name in FILES}


SHIMS = {
    "flash_dmattn_flex",
    "flash_dmattn_interface",
    "flash_dmattn_triton",
    "integrations.flash_dynamic_mask_attention",
    "integrations.import_utils",
    "integrations.modeling_flash_dynamic_mask_attention_utils",
    "utils",
    "utils.padding",
}
SHIM_DOCSTRING = '"""The 1.x module of this name."""\n'


def level_of(name):
    folder = folder_of(name).partition(".")[0]
    return next(i for i, folders in enumerate(LEVELS) if folder in folders)


def chain_lengths():
    """Returns the length of each folder's longest chain of imports. An `__init__` only re-exports and does not count."""
    lengths, longest = {}, defaultdict(int)
    for name in TopologicalSorter(graph()).static_order():
        siblings = [other for other in graph()[name] if folder_of(other) == folder_of(name)]
        length = max((lengths[other] for other in siblings), default=0) + (name not in PACKAGES)
        lengths[name] = length
        longest[folder_of(name)] = max(longest[folder_of(name)], length)
    return longest


def test_modules_of_1_x_say_so_in_their_first_line():
    assert SHIMS == {n for n, path in FILES.items() if path.read_text().startswith(SHIM_DOCSTRING)}


def test_modules_of_1_x_are_imported_only_by_each_other():
    others = graph().keys() - SHIMS
    imports = [f"{name} imports {other}" for name in others for other in SHIMS & graph()[name]]
    assert not imports


def test_modules_and_packages_import_without_circles():
    assert graph()["integrations.kvpress"] >= {"integrations.transformers"}
    list(TopologicalSorter(graph()).static_order())  # raises CycleError with the circle


def test_levels_import_downwards():
    upwards = [
        f"{name} imports {other}"
        for name in graph()
        for other in graph()[name]
        if level_of(other) > level_of(name)
    ]
    assert not upwards


def test_chains_within_a_folder_are_short():
    longest = chain_lengths()
    assert longest["_core"] > 1
    assert not {folder: length for folder, length in longest.items() if length > LONGEST_CHAIN}
