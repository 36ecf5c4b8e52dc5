"""Griffe extension: converts the descriptions of arguments in docstrings to sections of Google's style.

mkdocstrings shows such a section with the types and defaults of the signature. A description has the form

    name, other: what they mean
        and how it continues

where all names are parameters of the function or of the constructor. It stands below `Args:` or without it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import griffe

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_DESCRIPTION = re.compile(r"^(\w+(?:, \w+)*): +(.*)$")
_NEXT = re.compile(r"; (?=(\w+(?:, \w+)*): )")


class Descriptions(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_) -> None:
        if func.docstring:
            parameters = {parameter.name for parameter in func.parameters}
            func.docstring.value = in_sections(func.docstring.value, parameters, "Args:")

    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        if not cls.docstring:
            return
        names, title = {parameter.name for parameter in cls.parameters}, "Args:"
        if "dataclass" in cls.labels or not names:  # a TypedDict has no constructor
            parts = [cls, *(cls.module.members.get(str(base)) for base in cls.bases)]
            names = {m for part in parts if isinstance(part, griffe.Class) for m in part.members}
            title = "Attributes:"
        cls.docstring.value = in_sections(cls.docstring.value, names, title)


def in_sections(docstring: str, names: set[str], title: str) -> str:
    """Returns the docstring with each run of descriptions as a section."""
    docstring = _SECTION.sub(lambda match: textwrap.dedent(match[1]), docstring + "\n")
    out: list[str] = []
    others: list[tuple[str, str]] = []  # names that share the description which is being read
    inside = False

    def finish() -> None:
        out.extend(f"    {name}: as `{first}`." for first, name in others)
        others.clear()

    for line in _apart(docstring, names):
        match = _DESCRIPTION.match(line)
        described = match[1].split(", ") if match else []
        if described and set(described) <= names:
            finish()
            out += [] if inside else ["", title]
            inside = True
            out.append(f"    {described[0]}: {match[2]}")
            others += [(described[0], name) for name in described[1:]]
        elif inside and line.startswith("    "):
            out.append(f"    {line}")
        else:
            finish()
            out += ["", line] if inside and line.strip() else [line]
            inside = False
    finish()
    return "\n".join(out)


def _apart(docstring: str, names: set[str]) -> Iterator[str]:
    """Yields the lines. After "; " a new line begins if names of arguments follow."""
    for line in docstring.splitlines():
        begin = 0
        for match in _NEXT.finditer(line):
            if _DESCRIPTION.match(line) and set(match[1].split(", ")) <= names:
                yield line[begin : match.start()]
                begin = match.start(1)
        yield line[begin:]
