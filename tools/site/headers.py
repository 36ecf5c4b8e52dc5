"""MkDocs hook: replaces `<!-- headers -->` in a page by the public C++ headers, a section each.

The headers are laid out for it: an empty line ends a declaration, and the comment above it describes it. Everything
outside of private parts is shown, so nothing can be missing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

INCLUDE = Path(__file__).parents[2] / "include"
UMBRELLA = "flash_dmattn/flash_dmattn.h"
MARKER = "<!-- headers -->"

_INCLUDED = re.compile(r'^#include "(.*)"$', re.MULTILINE)
_TYPE = re.compile(r"^(?:struct|class|enum class|using) (\w+)(?! *;)\b(?!;)")
_VALUE = re.compile(r"^(?:inline )?constexpr [\w:<>, ]+? (\w+) =")
_FUNCTION = re.compile(r"^[\w:<>, ]+?[ &*](\w+)\(")
_PRIVATE = re.compile(r"^ private:\n(?:(?!^\}).*\n)*", re.MULTILINE)


def on_page_markdown(markdown: str, **_) -> str:
    return markdown.replace(MARKER, "".join(sections())) if MARKER in markdown else markdown


def sections() -> Iterator[str]:
    """Yields Markdown for every header, in the order in which the one for all includes them."""
    for header in _INCLUDED.findall((INCLUDE / UMBRELLA).read_text()):
        yield f"\n## {Path(header).name}\n"
        for paragraph in paragraphs((INCLUDE / header).read_text()):
            yield section(paragraph)


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yields the lines of each declaration of a header with its comment, and of each comment that stands alone."""
    text = _PRIVATE.sub("", text)
    lines: list[str] = []
    depth = 0
    for line in [*text.splitlines(), ""]:
        if line.startswith(("#", "namespace flash_dmattn", "}  // namespace flash_dmattn")):
            line = ""
        depth += line.count("{") - line.count("}")
        if line or depth:
            lines.append(line)
        elif lines:
            if not lines[0].startswith("namespace detail"):
                yield lines
            lines = []


def section(lines: list[str]) -> str:
    """Returns a heading with the declared names, the comment, and the declaration."""
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    comment, code = lines[:end], "\n".join(lines[end:])
    heading = ", ".join(f"`{name}`" for name in names(code))
    parts = [f"### {heading}" if heading else "", prose(comment)]
    parts.append(f"```cpp\n{code}\n```" if code else "")
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def names(code: str) -> list[str]:
    """Returns the names that the unindented lines of a declaration declare."""
    outer = [line for line in code.splitlines() if not line.startswith((" ", "}", "extern"))]
    matches = [p.match(line) for line in outer for p in (_TYPE, _VALUE, _FUNCTION)]
    return list(dict.fromkeys(match[1] for match in matches if match))


def prose(comment: list[str]) -> str:
    """Converts a comment to Markdown: what it indents is kept as it stands."""
    out: list[str] = []
    in_code = False
    for line in comment:
        text = line.removeprefix("//").removeprefix(" ")
        if text.startswith("  ") != in_code and text:
            in_code = not in_code
            out += ["", "```text"] if in_code else ["```", ""]
        escaped = html.escape(text, quote=False).replace("*_", r"\*_")
        out.append(text if in_code else escaped)
    return "\n".join([*out, "```"] if in_code else out)
