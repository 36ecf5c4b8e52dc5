#!/usr/bin/env python3
"""Checks the words of comments, docstrings, documents and test names.

check_language.py PATH ...

A comment or docstring begins with its subject. Words are plain English. The name of a test says a result.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NO_SUBJECT = re.compile(r"(Of|Those|Also|What|Who|Whoever|So many|By (a|all|one)|Beside|Behind)\b")
DIALECT = re.compile(
    r"\b(anew|as many on every|asked for|behind|beside|but for|go(?:es)? on|in turns?|lives in|no more than(?! \d)|nobody waits|"
    r"(?<!there )are none|so many|stands? (?:at|between|for|in)|that is none|the like|what follows|whoever)\b",
    re.IGNORECASE,
)
NO_RESULT = re.compile(
    r"def (test_(?:a|an|of|the|those|what)_\w+|test_[a-z0-9]+)\(|"
    r"TEST\w*\(\w+, ((?:A|An|Of|The|Those|What)[A-Z]\w+)\)"
)
DOCUMENTED = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".md", ".py")


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, whether a comment or docstring begins there)."""
    text = path.read_text()
    marker = "#" if path.suffix == ".py" else "//"
    in_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md":
            yield number, re.sub("`[^`]*`", "", line), False
        elif found := re.search(rf"(?:^|\s){marker} (.*)", line):
            whole = line.lstrip().startswith(marker)
            yield number, found[1], whole and not in_comment
            in_comment = whole
        else:
            in_comment = False
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
                yield node.body[0].lineno, docstring, True


def complaints(path: Path) -> Iterator[str]:
    for number, text, begins in texts(path):
        if begins and (found := NO_SUBJECT.match(text)):
            yield f"{path}:{number}: got a sentence that begins with {found[0]!r}, expected its subject"
        for found in DIALECT.finditer(text):
            yield f"{path}:{number}: got {found[0]!r}, expected plain English"
    if "test" in path.name:
        for found in NO_RESULT.finditer(path.read_text()):
            yield f"{path}: got the test name {found[1] or found[2]}, expected a name with a result"


def main() -> int:
    paths = []
    for path in map(Path, sys.argv[1:]):
        paths += sorted(path.rglob("*")) if path.is_dir() else [path]
    paths = [path for path in paths if path.suffix in SUFFIXES and "notebook" not in path.parts]
    found = [line for path in paths for line in complaints(path)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
