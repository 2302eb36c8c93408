"""Whether a built site has all that its pages fetch: `python scripts/check_site.py FOLDER` names what is missing or another server's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FETCHES = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
}
NOT_FETCHED = {"canonical", "next", "prev", "alternate"}  # rel of <link>


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if not (tag == "link" and found.get("rel") in NOT_FETCHED):
            self.fetched += [found.get(FETCHES.get(tag, "")) or "", *(found.get("srcset") or "").split()]


def not_in(folder: Path) -> Iterator[str]:
    """FILE: ADDRESS for everything that a page or a style sheet fetches and the folder lacks."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            page = _Page()
            page.feed(path.read_text(encoding="utf-8"))
            addresses = page.fetched
        elif path.suffix in (".css", ".svg"):
            addresses = re.findall(r"""(?:url\(|@import\s|href=)\s*["']?([^"')\s]+)""", path.read_text(encoding="utf-8"))
        else:
            continue
        for address in addresses:
            there = path.parent / re.split("[?#]", address)[0]
            if re.match(r"(?:\w+:)?//", address) or not (there.exists() or address.startswith(("data:", "/"))):
                yield f"{path.relative_to(folder)}: {address}"


if __name__ == "__main__":
    found = list(not_in(Path(sys.argv[1])))
    sys.exit("\n".join(["pages fetch what the site does not have:", *found]) if found else 0)
