"""This machine's package indexes and wheel folders as one index: pages are merged, and files go by names that only a page of ours knows."""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from provision.sandbox.settings import local_path

#: Reads a page of an index: its text, None where the index does not have it.
Read = Callable[[str], "str | None"]

_AGAIN_S = 30.0  # after which an index that did not answer is asked again
_ARCHIVES = (".whl", ".tar.gz", ".zip")


class Unavailable(Exception):
    """Why something cannot be had, and what to answer."""

    def __init__(self, why: str, status: int = 502) -> None:
        super().__init__(why)
        self.status = status


class Indexes:
    """Pages ``/simple/NAME/`` (everything) and ``/torch/NAME/`` (PyTorch's own index), and the files that they name.

    Args:
        read: reads one page.
        pip: this machine's settings of pip.
        wheels: a folder of the user's that comes first.
        index: takes the place of pip's own index.
        torch_index: where PyTorch's build lies.
    """

    def __init__(
        self,
        read: Read,
        pip: Mapping[str, tuple[str, ...]],
        *,
        wheels: Path | None = None,
        index: str | None = None,
        torch_index: str | None = None,
    ) -> None:
        self._read, self._pip, self._index, self._torch_index = read, pip, index, torch_index
        folders = [path for place in pip.get("find-links", ()) if (path := local_path(place))]
        self._folders = [*([wheels] if wheels else []), *folders]
        self._files: dict[str, str] = {}
        self._silent: dict[str, tuple[float, Unavailable]] = {}  # indexes that never answered: not asked again at once
        self._answered: set[str] = set()

    def page(self, path: str) -> str | None:
        """The page at this path; None for a path that is none. An index that cannot be asked is passed over unless it is the only one."""
        found = re.fullmatch(r"/(simple|torch)/([A-Za-z0-9][A-Za-z0-9._-]*)/?", path)
        if found is None:
            return None
        name = _normal(found[2])
        links: dict[str, tuple[str, str]] = {}
        if found[1] == "simple":
            for filename, url in self._local(name):
                links.setdefault(filename, (url, ""))
        failures: list[Unavailable] = []
        pytorch = found[1] == "torch"
        for place in ([self._torch_index] if self._torch_index else []) if pytorch else self._places:
            try:
                since, silence = self._silent.get(place, (0.0, None))
                if silence is not None and time.monotonic() - since < _AGAIN_S:
                    raise silence
                for filename, url, needs in self._links(place, name):
                    links.setdefault(filename, (url, needs))
                self._answered.add(place)
            except Unavailable as error:
                if place in self._answered:
                    raise  # it works, so pip shall ask again: another index must not stand in for it
                if silence is None or time.monotonic() - since >= _AGAIN_S:
                    self._silent[place] = (time.monotonic(), error)
                failures.append(error)
        if (
            not links and failures
        ):  # pip asks five times where a server fails, and PyTorch's is asked besides the others: it goes on at once
            raise Unavailable(str(failures[0]), 404) if pytorch else failures[0]
        return "<!DOCTYPE html>\n<html><body>\n" + "".join(self._anchor(*each) for each in links.items()) + "</body></html>\n"

    def file(self, path: str) -> str | None:
        """The real address of a file that one of our pages has named; None for any other: nothing else of this machine is handed out."""
        found = re.fullmatch(r"/file/([0-9a-f]{32})/[^/]+", path)
        return self._files.get(found[1]) if found else None

    @cached_property
    def _places(self) -> list[str]:
        if self._pip.get("no-index"):
            return []
        own = [self._index] if self._index else list(self._pip.get("index-url") or [_pips_own_index()])
        return [*self._pip.get("extra-index-url", ()), *own]

    def _local(self, name: str) -> Iterator[tuple[str, str]]:
        for folder in self._folders:
            for path in sorted(folder.glob("*")) if folder.is_dir() else ():
                if path.name.endswith(_ARCHIVES) and _project(path.name) == name:
                    yield path.name, path.resolve().as_uri()

    def _links(self, place: str, name: str) -> Iterable[tuple[str, str, str]]:
        base = f"{place.rstrip('/')}/{name}/"
        local = local_path(base)
        text = self._read((local / "index.html").as_uri() if local else base)
        if text is None:
            return
        parser = _Anchors()
        parser.feed(text)
        for href, needs in parser.found:
            url = urljoin(base, href)
            filename = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
            if filename.endswith(_ARCHIVES):
                yield filename, _with_login_of(place, url), needs

    def _anchor(self, filename: str, link: tuple[str, str]) -> str:
        url, needs = link
        real, _, fragment = url.partition("#")
        key = hashlib.sha256(real.encode()).hexdigest()[:32]
        self._files[key] = real
        requires = f' data-requires-python="{html.escape(needs)}"' if needs else ""
        checked = f"#{fragment}" if fragment else ""
        return f'<a href="/file/{key}/{html.escape(filename)}{html.escape(checked)}"{requires}>{html.escape(filename)}</a>\n'


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.found.append((str(given["href"]), given.get("data-requires-python") or ""))


def _pips_own_index() -> str:
    """The index that pip asks where nobody tells it of another: it says so in its help."""
    said = subprocess.run([sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\(default\s+(https?://\S+?)\)", said)
    if found is None:
        raise Unavailable("the pip of this machine does not say where its packages come from; name the place: --index-url")
    return found[1]


def _project(filename: str) -> str:
    if filename.endswith(".whl"):
        return _normal(filename.split("-")[0])
    return _normal(re.sub(r"-\d.*$", "", filename))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_login_of(index: str, url: str) -> str:
    """A file's address with the index's user and password, where both lie on one host and the file's names none."""
    ours, its = urlsplit(index), urlsplit(url)
    if ours.username and its.hostname == ours.hostname and not its.username:
        login = ours.netloc.rpartition("@")[0]
        return its._replace(netloc=f"{login}@{its.netloc}").geturl()
    return url
