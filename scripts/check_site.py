"""Whether a built site is complete: `python scripts/check_site.py FOLDER`.

It names what pages fetch and the site does not have, links that lead nowhere in it, and names of the Python API that are not described.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

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
SOURCES = Path(__file__).parents[1] / "collective_core/src"
NOT_FETCHED = {"canonical", "next", "prev", "alternate"}  # rel of <link>


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found.get("id") or "", found.get("name") or ""}
        if tag in ("a", "area"):
            self.links.append(found.get("href") or "")
        if not (tag == "link" and found.get("rel") in NOT_FETCHED):
            self.fetched += [found.get(FETCHES.get(tag, "")) or "", *(found.get("srcset") or "").split()]


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def not_in(folder: Path) -> Iterator[str]:
    """FILE: ADDRESS for everything that a page or a style sheet fetches and the folder lacks."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            addresses = _read(path).fetched
        elif path.suffix in (".css", ".svg"):
            addresses = re.findall(r"""(?:url\(|@import\s|href=)\s*["']?([^"')\s]+)""", path.read_text(encoding="utf-8"))
        else:
            continue
        for address in addresses:
            there = path.parent / re.split("[?#]", address)[0]
            if re.match(r"(?:\w+:)?//", address) or not (there.exists() or address.startswith(("data:", "/"))):
                yield f"{path.relative_to(folder)}: {address}"


def dead_links(folder: Path) -> Iterator[str]:
    """FILE: ADDRESS for every link to a file that the folder lacks, or to an anchor that the page does not have."""
    folder = folder.resolve()
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for address in dict.fromkeys(page.links):
            if re.match(r"[a-zA-Z][\w+.-]*:|//", address):
                continue
            name, _, anchor = address.partition("#")
            name = unquote(name.partition("?")[0])
            # Addresses that begin with / count from the site's root: those of the page for what is not found.
            there = (folder / name[1:] if name.startswith("/") else path.parent / name).resolve() if name else path
            if there.is_dir():
                there /= "index.html"
            if not there.exists() or (anchor and there in pages and unquote(anchor) not in pages[there].anchors):
                yield f"{path.relative_to(folder)}: {address}"


def undescribed(page: str) -> Iterator[str]:
    """MODULE.NAME for every name of the `__all__` of a module on the Python API's page that the page lacks."""
    modules, ids = re.findall(r"<h2[^>]*>(collective_core[\w.]*)", page), set(re.findall(r'\bid="([^"]+)"', page))
    for module in modules:
        for name in _exported(module):
            # Modules have a part of the page.
            is_module = not {f"{module}.{name}", _imported(module).get(name)}.isdisjoint(modules)
            if f"{module}.{name}" not in ids and not is_module:
                yield f"{module}.{name}"


def _imported(module: str) -> dict[str, str]:
    """What a module has imported from others, by its name there."""
    froms = [node for node in ast.walk(_parsed(module)) if isinstance(node, ast.ImportFrom)]
    return {each.asname or each.name: f"{node.module}.{each.name}" for node in froms for each in node.names}


def _parsed(module: str) -> ast.Module:
    path = SOURCES / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"))


def _exported(module: str) -> list[str]:
    for statement in _parsed(module).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


if __name__ == "__main__":
    site = Path(sys.argv[1])
    wrong = [f"not in the site: {each}" for each in not_in(site)]
    wrong += [f"leads nowhere: {each}" for each in dead_links(site)]
    python = site / "reference/python.html"
    wrong += [
        f"not described in {python.name}: {each}" for each in (undescribed(python.read_text(encoding="utf-8")) if python.exists() else ())
    ]
    sys.exit("\n".join(wrong) if wrong else 0)
