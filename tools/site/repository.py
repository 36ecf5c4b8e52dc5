"""MkDocs hook: documents of the repository's root become pages, links to source files lead to the repository."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.repository")  # a warning fails a strict build

ROOT = Path(__file__).parents[2]
# Files of the root that are pages, by the page's address.
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ADDRESSES = {source: page for page, source in PAGES.items()} | {"README.md": "index.md"}

_BLOCK = re.compile(r"[-*] |1\. |\|")
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    address = page.file.src_uri
    source = PAGES.get(address, f"docs/{address}")

    def lead(match: re.Match) -> str:
        return _target(match[1], source, address, config)

    _check_indents(markdown, source)
    return _LINK.sub(lead, _set_apart(markdown))


def _target(link: str, source: str, address: str, config: MkDocsConfig) -> str:
    """Returns the target on the site of a link in the file `source`, which is the page `address`."""
    if ":" in link:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path in ADDRESSES:
        path = f"docs/{ADDRESSES[path]}"
    if path.startswith("docs/") and not (ROOT / path).is_dir():
        return posixpath.relpath(path[len("docs/") :], posixpath.dirname(address) or ".")
    if not (ROOT / path).exists():
        log.warning(f"{source}: a link to {link}, which does not exist")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.extra['repository']}/{kind}/main/{path}"


def on_page_content(content: str, page: Page, **_) -> None:
    """Warns of lists and tables that GitHub shows and Python-Markdown takes for text."""
    text = re.sub(r"<pre.*?</pre>", "", content, flags=re.DOTALL)
    for match in re.finditer(r"^(?:(?:[-*+]|\d+\.) |\|).*$", text, re.MULTILINE):
        log.warning(f"{page.file.src_uri}: an empty line is missing before {match[0]!r}")


def _set_apart(markdown: str) -> str:
    """Adds an empty line before lists and tables, which Python-Markdown needs and GitHub does not."""
    out: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        begins = _BLOCK.match(line)
        follows_text = out and out[-1].strip() and not out[-1].startswith(" ")
        if begins and not in_code and follows_text and not _BLOCK.match(out[-1]):
            out.append("")
        in_code ^= line.startswith("```")
        out.append(line)
    return "\n".join(out)


def _check_indents(markdown: str, source: str) -> None:
    """Warns of parts of list items that GitHub takes for such and Python-Markdown does not."""
    for code in re.findall(r"^```.*?^```", markdown, re.DOTALL | re.MULTILINE):
        markdown = markdown.replace(code, "\n" * code.count("\n"))
    for number, line in enumerate(markdown.splitlines(), 1):
        if re.match(r" {1,3}([-*+|]|\d+\.) ", line):
            log.warning(f"{source}:{number}: what belongs to a list item is indented by 4")
