"""The wheels that package indexes and folders list: of final releases, for Linux, which the catalogue does not know."""

from __future__ import annotations

import html.parser
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from pydantic import BaseModel, Field

from provision.base.downloads import Unavailable, content_of, local_path
from provision.base.versions import key
from provision.catalog.update.sources import LARGEST_LIST, Absent, Sources, Update, below, sentence, shown

_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class Wheel:
    """A wheel for Linux on one architecture, and one of the Pythons that its release has wheels for.

    ``build``: the local part of its version, such as cu130; empty without one.
    """

    version: str
    build: str
    arch: str
    python: str
    name: str
    url: str
    size: int | None


class _IndexFile(BaseModel):
    filename: str
    url: str
    size: int | None = None
    yanked: bool | str = False


class _IndexPage(BaseModel):
    files: list[_IndexFile] = Field(max_length=200_000)


class Links(html.parser.HTMLParser):
    """The links of a page of a simple index."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.files: list[_IndexFile] = []
        try:
            self.feed(page.decode("utf-8", "replace"))
        except (AssertionError, ValueError) as error:  # the parser's own, and an address that is none
            raise Unavailable("invalid page: expected a list of links") from error

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag == "a" and named.get("href"):
            name = urllib.parse.unquote(urllib.parse.urlsplit(str(named["href"])).path.rpartition("/")[2])
            self.files.append(_IndexFile(filename=name, url=str(named["href"]), yanked="data-yanked" in named))


def unknown_wheels(package: str, sources: Sources, made: Update) -> Iterator[list[Wheel]]:
    """The wheels of each release that the catalogue does not know, the oldest first; none of what is older than all that it knows."""
    known = sources.catalog.pytorch().releases if package == "torch" else sources.catalog.nccl().wheels.builds.get(package, {})
    keys = set(map(key, known))
    oldest = min(keys, default=())
    releases: dict[str, list[Wheel]] = {}
    for file in _listed(package, sources, made):
        wheel = _wheel(package, file, sources)
        if wheel is None:
            continue
        made.seen.add(package)
        if key(wheel.version) not in keys and key(wheel.version) > oldest:
            releases.setdefault(wheel.version, []).append(wheel)
    for version in sorted(releases, key=key):
        yield releases[version]


def _listed(package: str, sources: Sources, made: Update) -> Iterable[_IndexFile]:
    """The files of a package in all indexes; of one that several have, the first's."""
    files: dict[str, _IndexFile] = {}
    absent: list[str] = []
    for place in sources.indexes:
        try:
            for file in _files(package, place, sources):
                files.setdefault(file.filename, file)
            made.index_read = True
        except (Unavailable, OSError) as error:
            (absent if isinstance(error, Absent) else made.unreached).append(f"{package}: {shown(place)}: {sentence(error)}")
    made.unreached += absent if not files else []
    return files.values()


def _files(package: str, index: str | Path, sources: Sources) -> list[_IndexFile]:
    if isinstance(index, Path):
        return _files_of_folder(package, index, sources)
    with sources.opened(f"{below(index, package)}/", {"Accept": f"{_JSON}, text/html;q=0.2"}) as answer:
        content, kind, address = content_of(answer, f"its list of {package}", LARGEST_LIST), answer.headers.get_content_type(), answer.url
    try:
        files = _IndexPage.model_validate_json(content).files if kind == _JSON else Links(content).files
        files = [file.model_copy(update={"url": urllib.parse.urljoin(address, file.url)}) for file in files]
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"its list of {package} is not one of a package index") from error
    return [file for file in files if local_path(file.url) is None]  # a server names no files of this machine


def _files_of_folder(package: str, folder: Path, sources: Sources) -> list[_IndexFile]:
    """The wheels in a folder, or those that its page of the package names, where it has one as an index does."""
    page = folder / package / "index.html"
    if page.is_file():
        files = Links(sources.content(page)).files
        return [each.model_copy(update={"url": urllib.parse.urljoin(page.absolute().as_uri(), each.url)}) for each in files]
    found = sorted(folder.rglob("*.whl"))
    return [_IndexFile(filename=path.name, url=path.absolute().as_uri(), size=path.stat().st_size) for path in found]


def _wheel(package: str, file: _IndexFile, sources: Sources) -> Wheel | None:
    """A file as one of the wheels that are looked at: of a final release, for Linux on an architecture that we know."""
    try:
        name, version, _build, tags = parse_wheel_filename(file.filename)
    except InvalidWheelFilename:
        return None
    of_linux = {str(tag.platform) for tag in tags if "linux" in tag.platform}
    arch = next((arch for arch in sources.catalog.os().architectures if any(platform.endswith(arch) for platform in of_linux)), None)
    python = next(iter(tags)).interpreter
    free_threaded = any(tag.abi.endswith("t") for tag in tags)
    if (
        name != canonicalize_name(package)
        or arch is None
        or version.is_prerelease
        or version.is_postrelease
        or version.epoch
        or file.yanked
        or free_threaded
    ):
        return None
    return Wheel(version.base_version, version.local or "", arch, python, file.filename, file.url, file.size)
