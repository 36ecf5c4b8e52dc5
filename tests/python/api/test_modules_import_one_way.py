"""Imports inside the package go one way, at the top of a module, in a function and for types alike."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flash_dmattn

ROOT = Path(flash_dmattn.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
}
# Each level imports from itself and from those before it. "" are the modules of the package itself.
LEVELS = ["_core", "keys", "_backends", "", "others"]


def imported(name, path):
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = ".".join(part for part in base if part)
            candidates = {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
            yield from candidates & FILES.keys()


def level_of(name):
    folder = name.rpartition(".")[0].partition(".")[0]
    return LEVELS.index(folder if folder in LEVELS else "others")


SHIMS = {name for name, path in FILES.items() if path.read_text().startswith('"""The 1.x module')}


def test_no_module_imports_a_module_of_1_x():
    assert SHIMS
    found = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        for other in SHIMS & set(imported(name, path))
    ]
    assert not found


def test_modules_import_without_circles():
    graph = {name: set(imported(name, path)) for name, path in FILES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_levels_import_downwards():
    upwards = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        for other in imported(name, path)
        if level_of(other) > level_of(name)
    ]
    assert not upwards
