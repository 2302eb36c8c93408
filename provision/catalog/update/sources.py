"""Where an update of the catalogue looks, how it reads there (what comes back is data, bounded in size), and what it has found."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uv

from provision.base import downloads, uv_support
from provision.base.aptsources import without_logins
from provision.base.downloads import Unavailable, local_path
from provision.base.errors import UsageError
from provision.catalog import Catalog

_SECONDS = 30.0  # a server that is silent for this long counts as unavailable
LARGEST_LIST = 16 << 20  # bytes of an index page or a JSON list: PyTorch's page has 400 kB


class Absent(Unavailable):
    """The server answers, and has no such page."""


@dataclass(frozen=True)
class Sources:
    """Where an update looks. ``setup``: how servers are reached.

    Attributes:
        indexes: addresses of simple indexes, and folders with wheels.
        cuda: address of, or a folder with, NVIDIA's ``redistrib_*.json``.
        drivers: address or path of NVIDIA's releases.json.
        catalog: the one in use, which lacks what is looked for.
        images: address or path of NVIDIA's list of images, supported-tags.md.
    """

    indexes: tuple[str | Path, ...]
    cuda: str | Path
    drivers: str | Path
    images: str | Path
    catalog: Catalog
    setup: uv_support.Setup = field(default_factory=lambda: uv_support.online({}))

    @classmethod
    def of_folder(cls, folder: Path, catalog: Catalog) -> Sources:
        return cls((folder,), folder, folder / "releases.json", folder / "supported-tags.md", catalog)

    @classmethod
    def of_pip(cls, catalog: Catalog, index_url: str | None = None) -> Sources:
        """The indexes that pip is set up for, or ``index_url`` instead of its main one, and NVIDIA's own servers."""
        setup = uv_support.online(uv_support.pip_settings(os.environ, sys.prefix), index_url)
        pip = setup.settings
        addresses = [] if pip["no-index"] else [*_index_of(pip), *pip["extra-index-url"]]
        folders = [place for place in pip["find-links"] if "://" not in place or place.startswith("file://")]
        if not addresses and not folders:
            raise UsageError("pip is set up for no package index", hint="name one, or a folder with wheels: --from URL|DIR")
        indexes, lists = tuple(local_path(each) or each for each in (*addresses, *folders)), catalog.cuda().lists
        return cls(indexes, lists.cuda, lists.drivers, lists.images, catalog, setup)

    @contextlib.contextmanager
    def opened(self, url: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """An answer of a server. Raises Unavailable."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise Unavailable("not an http or https address")
        try:
            request = urllib.request.Request(without_logins(url), headers={"User-Agent": "provision", **headers})  # noqa: S310  scheme checked above
            answer = downloads.index_opener(request.full_url, self.setup).open(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            raise (Absent if error.code in (404, 410) else Unavailable)(f"HTTP {error.code} {error.reason}") from error
        except http.client.HTTPException as error:
            raise Unavailable("it does not answer as a web server does") from error
        except (urllib.error.URLError, ValueError) as error:
            raise Unavailable(str(getattr(error, "reason", error))) from error
        try:
            with answer:
                yield answer
        except http.client.HTTPException as error:
            raise Unavailable("its answer is cut off") from error

    def content(self, place: str | Path) -> bytes:
        """What a file or an address holds, at most `LARGEST_LIST` bytes. Raises Unavailable, and OSError for a file."""
        with downloads.opened_file(place) if isinstance(place, Path) else self.opened(place, {}) as source:
            return downloads.content_of(source, shown(place), LARGEST_LIST)


@dataclass
class Update:
    """What an update found: rows by catalogue file, a line for each new fact, and why what else was looked for could not be had.

    Attributes:
        index_read: a package index, or a folder with wheels, answered.
        seen: the packages, and the files of the catalogue for NVIDIA's lists, of which a list has something known or new.
        set_aside: files of the folder that were invalid, and where they are now.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    index_read: bool = False
    seen: set[str] = field(default_factory=set)


def _index_of(pip: Mapping[str, Any]) -> list[str]:
    """pip's main index; where it is set up for none, the one that uv, as pip, has for that case. uv tells it without a network."""
    if "index-url" in pip:
        return [pip["index-url"]]
    words = ("pip", "compile", "--quiet", "--no-config", "--offline", "--no-header", "--emit-index-url", "--python", sys.executable, "-")
    done = subprocess.run([uv.find_uv_bin(), *words], input="", capture_output=True, text=True, timeout=_SECONDS, check=False)
    return re.findall(r"^--index-url (\S+)$", done.stdout, re.M)


def below(place: str | Path, name: str) -> str | Path:
    """The path or address of what is in a folder."""
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


def sentence(error: Exception) -> str:
    return str(error) or type(error).__name__


def shown(place: str | Path) -> str:
    return without_logins(str(place))
