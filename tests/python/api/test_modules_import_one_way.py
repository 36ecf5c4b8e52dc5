"""No circle of imports inside the package, whether at the top of a module, in a function or for types only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flash_dmattn

PACKAGE = "flash_dmattn"
ROOT = Path(flash_dmattn.__file__).parent
FILES = {
    ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
}


def imported(name, path):
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = ".".join(part for part in base if part)
            candidates = {base, *(f"{base}.{alias.name}" for alias in node.names)}
            yield from candidates & FILES.keys()


def test_modules_import_one_way():
    graph = {name: set(imported(name, path)) for name, path in FILES.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert order.index(f"{PACKAGE}._ops") < order.index(f"{PACKAGE}.attention")
    assert order.index(f"{PACKAGE}.attention") < order.index(f"{PACKAGE}.flash_dmattn_interface")
