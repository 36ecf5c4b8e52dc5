#!/usr/bin/env python3
"""Checks the words of comments, docstrings, documents and test names.

check_language.py PATH ...

A comment or docstring begins with its subject, the docstring of a function with its verb. Words are plain English. The name
of a test says a result.
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
# "Each" with a verb names no unit.
NO_RESULT = re.compile(
    r"def (test_(?:a|an|of|the|those|what|where|whether|which|each_(?:equals|gives|has|is|matches|runs))_\w+|test_[a-z0-9]+)\(|"
    r"TEST\w*\(\w+, ((?:A|An|Of|The|Those|What|Where|Whether|Which|Each(?:Equals|Gives|Has|Is|Matches|Runs))[A-Z]\w+)\)"
)
# A first sentence of a docstring that ends before any clause follows such a word.
HEADLESS = re.compile(
    r"(As|By|Else|From|Not|Since|So that|To|Where|With|Without)\b[^,:;]*?\.(\s|$)"
)
# The docstring of a function begins with a verb, and not with a noun in the plural.
NOUNS = (
    "Args|Bias|Bytes|Documents|Elements|Families|Gradients|Heads|Inputs|Intervals|Its|Keys|Lengths|Masks|Names|Operations|Positions|"
    "Queries|Rows|Sequences|Sizes|Subclasses|Tensors|This|Tokens|Values|Weights"
)
VERB = re.compile(rf"(?!(?:{NOUNS})\b)(?:[A-Z][a-z]+s|Whether)\b")
# A name in C++ that is "of" something. After its class it is a named constructor: Block::of_threads().
CPP_WITHOUT_NOUN = re.compile(r"(?<![\w:])of_\w+")
# A variable or an argument with such a name does not say what it holds.
WITHOUT_NOUN = ("behind", "found", "given", "made", "own")
CPP = (".cpp", ".cu", ".cuh", ".h")
FUNCTIONS = (ast.AsyncFunctionDef, ast.FunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
MARKERS = {
    **dict.fromkeys(CPP, "//"),
    **dict.fromkeys((".cmake", ".in", ".py", ".sh"), "#"),
}
NAMES = ("CMakeLists.txt", "Makefile", "run")  # whose comments begin with #


def marker_of(path: Path) -> str | None:
    """Returns the characters that begin a comment, "" for a document, or None for a file that is not checked."""
    if path.suffix == ".md" or path.name in NAMES:
        return "" if path.suffix == ".md" else "#"
    code = Path(path.stem) if path.suffix == ".in" else path  # a template
    return MARKERS.get(code.suffix, MARKERS.get(path.suffix))


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, whether a comment or docstring begins there)."""
    text = path.read_text()
    marker = marker_of(path)
    in_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        if not marker:
            yield number, re.sub("`[^`]*`", "", line), False
        elif match := re.search(rf"(?:^|\s){marker}+ (.*)", line):
            whole = line.lstrip().startswith(marker)
            yield number, match[1], whole and not in_comment
            in_comment = whole
        else:
            in_comment = False
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
                yield node.body[0].lineno, docstring, True


def headless_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, first sentence) of docstrings that have no subject."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            if match := HEADLESS.match(docstring):
                yield node.body[0].lineno, match[0].strip()


def docstrings_without_verb(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, first word) of docstrings of functions that do not say what the function does.

    The name of a test says that; its docstring gives the reason. A constructor's docstring may have arguments alone.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTIONS) and not node.name.startswith("test_"):
            docstring = ast.get_docstring(node) or "Whether"
            is_constructor = node.name == "__init__" and docstring.startswith("Args:")
            if not VERB.match(docstring) and not is_constructor:
                yield node.body[0].lineno, docstring.split()[0]


def locals_without_noun(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of variables and arguments that are named "of" something or are WITHOUT_NOUN."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else ""
        if name.startswith("of_") or name in WITHOUT_NOUN:
            yield node.lineno, name


def cpp_names_without_noun(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of variables and functions that are named "of" something."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.partition("//")[0]
        if not re.search(r"\bstatic\b", code):  # the definition of a named constructor
            yield from ((number, name) for name in CPP_WITHOUT_NOUN.findall(code))


def complaints(path: Path) -> Iterator[str]:
    for number, text, begins in texts(path):
        if begins and (match := NO_SUBJECT.match(text)):
            yield f"{path}:{number}: got a sentence that begins with {match[0]!r}, expected its subject"
        for match in DIALECT.finditer(text):
            yield f"{path}:{number}: got {match[0]!r}, expected plain English"
    names = []
    if path.suffix == ".py":
        for number, sentence in headless_docstrings(path):
            yield f"{path}:{number}: got {sentence!r}, expected a subject and a verb"
        for number, word in docstrings_without_verb(path):
            yield f"{path}:{number}: got {word!r}, expected 'Returns', 'Whether' or what else the function does"
        names = locals_without_noun(path)
    elif path.suffix in CPP:
        names = cpp_names_without_noun(path)
    for number, name in names:
        yield f"{path}:{number}: got the name {name}, expected one that begins with its noun"
    if "test" in path.name:
        for match in NO_RESULT.finditer(path.read_text()):
            yield f"{path}: got the test name {match[1] or match[2]}, expected a name with a result"


def main() -> int:
    paths = []
    missing = [word for word in sys.argv[1:] if not Path(word).exists()]
    if missing or not sys.argv[1:]:
        got = ", ".join(missing) or "nothing"
        print(f"check_language.py: got {got}, expected files and folders", file=sys.stderr)
        return 2
    for path in map(Path, sys.argv[1:]):
        paths += sorted(path.rglob("*")) if path.is_dir() else [path]
    paths = [path for path in paths if path.is_file() and marker_of(path) is not None]
    lines = [line for path in paths for line in complaints(path)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
