"""Opens every page of the built site in a headless browser of a phone's width; exit status 1 where something is wrong.

    python tools/site/look.py FOLDER [--browser /usr/bin/chromium]

Needs `pip install playwright` and a Chromium. Writes a screenshot of every page into FOLDER, and reports links and anchors
that lead nowhere, pages wider than the phone, pictures that do not load, and everything that is fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).parents[2] / "build" / "site"
WIDTH = 390
READ = """() => ({
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  links: [...document.querySelectorAll('a[href]')].map(e => e.href),
  width: document.documentElement.scrollWidth,
  broken: [...document.images].filter(e => !e.naturalWidth).map(e => e.src),
})"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


def look(page: Page, start: str, folder: Path) -> list[str]:
    """Follows all links from `start`; the complaints."""
    complaints: list[str] = []
    elsewhere = lambda url: not url.startswith((start, "data:"))  # noqa: E731
    page.on(
        "request",
        lambda r: complaints.append(f"{page.url}: fetches {r.url}") if elsewhere(r.url) else None,
    )
    page.on(
        "console",
        lambda m: complaints.append(f"{page.url}: {m.text}") if m.type == "error" else None,
    )
    found: dict[str, dict] = {}
    waiting = [start]
    while waiting:
        address = waiting.pop().partition("#")[0]
        if address in found or elsewhere(address):
            continue
        status = page.goto(address).status
        page.wait_for_timeout(150)
        found[address] = content = page.evaluate(READ)
        if status != 200:
            complaints.append(f"{address}: status {status}")
        if content["width"] > WIDTH:
            complaints.append(f"{address}: {content['width']} pixels wide")
        complaints += [f"{address}: no picture {source}" for source in content["broken"]]
        name = urlsplit(address).path.strip("/").replace("/", "_") or "index"
        page.screenshot(path=folder / f"{name}.png", full_page=True)
        waiting += content["links"]
    for address, content in found.items():
        for link in content["links"]:
            target, _, anchor = link.partition("#")
            # "__" begins the names that the theme handles itself.
            known = target not in found or anchor == "" or anchor.startswith("__")
            if not known and unquote(anchor) not in found[target]["ids"]:
                complaints.append(f"{address}: no anchor {link}")
    print(f"{len(found)} pages")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        phone = {"width": WIDTH, "height": 844}
        page = browser.new_page(viewport=phone, device_scale_factor=2, is_mobile=True)
        complaints = look(page, f"http://127.0.0.1:{server.server_port}/", options.folder)
        browser.close()
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
