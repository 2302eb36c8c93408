"""Newer rows for the catalogue, read from package indexes' wheels and NVIDIA's lists: an overlay that later runs merge over ours.

Of NCCL and PyTorch only releases newer than the newest known are looked at. CUDA, NCCL and the GPUs that a build has code for are read from
the wheels; of a wheel on a server that knows ranges only the library with GPU code is fetched, which is compressed, so whole.
Everything that comes from a server or a given folder is data: bounded in size, validated by models, and nothing of it is run.
"""

from __future__ import annotations

import contextlib
import datetime
import html.parser
import http.client
import io
import itertools
import lzma
import os
import re
import stat
import struct
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, Field, RootModel, ValidationError

from provision import catalog
from provision.base import downloads, uv_support
from provision.base.aptsources import without_logins
from provision.base.downloads import Unavailable
from provision.base.errors import ProvisionError, UsageError
from provision.base.terminal import neutral
from provision.base.versions import key
from provision.catalog import overlay
from provision.hostside import gpu_code

PACKAGES = {"nvidia-nccl-cu12": "nccl", "nvidia-nccl-cu13": "nccl", "torch": "pytorch"}  # package → the catalogue's file
NCCL_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
TORCH_LIBRARY = "torch/lib/libtorch_cuda.so"
_NCCL_TEXT = re.compile(rb"NCCL version (\d+\.\d+\.\d+)[^\0+]{0,40}\+cuda(\d+\.\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*= '(\d+\.\d+)'$", re.M)
_SECONDS = 30.0  # a server that is silent for this long counts as unavailable
_LARGEST_LIST = 16 << 20  # bytes of an index page or a JSON list: PyTorch's page has 400 kB
_LARGEST_TEXT = 4 << 20  # of a text in a wheel
_LARGEST_LIBRARY = 4 << 30  # of a library in a wheel
_BLOCK = 1 << 22  # bytes that are fetched at once
_LARGEST_WHEEL = 8 << 30
_LARGEST_DIRECTORY = 32 << 20  # that are read until a wheel's list of files is known: PyTorch's has 2 MB
#: What reading an archive raises where its content is not what it says.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    UnicodeDecodeError,
    NotImplementedError,
    RuntimeError,
    gpu_code.Damaged,
)
_JSON = "application/vnd.pypi.simple.v1+json"
_NOT_SEEN = "read from the wheels of a package index; that PyTorch's own index has this build was not seen"
_HEAD = """\
# Written by `provision catalog update`: merged over provision's own catalogue. Remove the file to go back to that.
"""


class _Absent(Unavailable):
    """The server answers, and has no such page."""


@dataclass(frozen=True)
class Sources:
    """Where an update looks. ``pip``, ``variables``: how servers are reached, as `uv_support.online` says it.

    Attributes:
        indexes: addresses of simple indexes, and folders with wheels.
        cuda: address of, or a folder with, NVIDIA's ``redistrib_*.json``.
        drivers: address or path of NVIDIA's releases.json.
    """

    indexes: tuple[str | Path, ...]
    cuda: str | Path
    drivers: str | Path
    pip: Mapping[str, Any] = field(default_factory=lambda: uv_support.online({})[0])
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> Sources:
        return cls((folder,), folder, folder / "releases.json")

    @classmethod
    def of_pip(cls, index_url: str | None = None) -> Sources:
        """The indexes that pip is set up for, or ``index_url`` instead of its main one, and NVIDIA's own servers."""
        pip, variables, _ = uv_support.online(uv_support.pip_settings(os.environ, sys.prefix), index_url)
        addresses = [] if pip["no-index"] else [pip.get("index-url") or catalog.python_packages().index, *pip["extra-index-url"]]
        folders = [place for place in pip["find-links"] if "://" not in place or place.startswith("file://")]
        if not addresses and not folders:
            raise UsageError("pip is set up for no package index", hint="name one, or a folder with wheels: --from URL|DIR")
        lists = catalog.cuda().lists
        return cls(tuple(_local(each) or each for each in (*addresses, *folders)), lists.cuda, lists.drivers, pip, variables)

    @contextlib.contextmanager
    def opened(self, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """An answer of a server. Raises Unavailable."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise Unavailable("not an http or https address")
        try:
            request = urllib.request.Request(without_logins(url), headers={"User-Agent": "provision", **headers})  # noqa: S310  scheme checked above
            opener = downloads.index_opener(
                request.full_url, {"extra-index-url": (), "allow-insecure-host": (), **self.pip}, self.variables
            )
            answer = opener.open(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            raise (_Absent if error.code in (404, 410) else Unavailable)(f"HTTP {error.code} {error.reason}") from error
        except http.client.HTTPException as error:
            raise Unavailable("it does not answer as a web server does") from error
        except (urllib.error.URLError, ValueError) as error:
            raise Unavailable(str(getattr(error, "reason", error))) from error
        try:
            with answer:
                yield answer
        except http.client.HTTPException as error:
            raise Unavailable("its answer is cut off") from error

    def page(self, url: str) -> bytes:
        with self.opened(url, {}) as answer:
            content: bytes = answer.read(_LARGEST_LIST + 1)
        if len(content) > _LARGEST_LIST:
            raise Unavailable(f"{url} is larger than {_LARGEST_LIST:,} bytes")
        return content


def _opened_file(path: Path) -> IO[bytes]:
    """A regular file. Raises Unavailable for anything else, such as a pipe, which would block."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise Unavailable(f"{path} is not a regular file")


def _local(place: str) -> Path | None:
    """The path of a file: address, or of what is no address."""
    parts = urllib.parse.urlsplit(place)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme in ("", "file") else None


@dataclass
class Update:
    """What an update found: rows by catalogue file, a line for each new fact, and why what else was looked for could not be had.

    Attributes:
        index_read: a package index, or a folder with wheels, answered.
        set_aside: files of the folder that were invalid, and where they are now.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    index_read: bool = False


def update(sources: Sources, folder: Path, today: datetime.date, say: Callable[[str], None]) -> Update:
    """Write what is newer than the catalogue in use to ``folder``, over what is there. Invalid files there are renamed.

    Raises:
        UsageError: the files would be invalid with the new rows; they are unchanged.
    """
    made = Update()
    for package in PACKAGES:
        for wheels in _newer(package, sources, made):
            _add_wheels(made, package, wheels, sources, say)
    for what, place, add in (("CUDA", sources.cuda, _add_toolkits), ("driver branches", sources.drivers, _add_branches)):
        try:
            add(made, sources)
        except (Unavailable, OSError) as error:
            made.unreached.append(f"{what}: {_shown(place)}: {_sentence(error)}")
    places = [_shown(each) for each in (*sources.indexes, sources.cuda, sources.drivers)]
    _write(made, folder, f"`provision catalog update` from {', '.join(dict.fromkeys(places))}", today)
    return made


# --- the package index -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wheel:
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


class _Links(html.parser.HTMLParser):
    """The links of a page of a simple index."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.files: list[_IndexFile] = []
        try:
            self.feed(page.decode("utf-8", "replace"))
        except (AssertionError, ValueError) as error:  # the parser's own, and an address that is none
            raise Unavailable("its page is no list of links") from error

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag == "a" and named.get("href"):
            name = urllib.parse.unquote(urllib.parse.urlsplit(str(named["href"])).path.rpartition("/")[2])
            self.files.append(_IndexFile(filename=name, url=str(named["href"]), yanked="data-yanked" in named))


def _newer(package: str, sources: Sources, made: Update) -> Iterator[list[_Wheel]]:
    """The wheels of each release that is newer than what the catalogue knows, the oldest first."""
    known = catalog.pytorch().releases if package == "torch" else catalog.nccl().wheels.builds.get(package, {})
    newest = max(map(key, known), default=())
    releases: dict[str, list[_Wheel]] = {}
    for file in _listed(package, sources, made):
        wheel = _wheel(package, file)
        if wheel is not None and key(wheel.version) > newest:
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
            (absent if isinstance(error, _Absent) else made.unreached).append(f"{package}: {_shown(place)}: {_sentence(error)}")
    made.unreached += absent if not files else []
    return files.values()


def _files(package: str, index: str | Path, sources: Sources) -> list[_IndexFile]:
    if isinstance(index, Path):
        return _files_of_folder(package, index)
    address = f"{index.rstrip('/')}/{package}/"
    with sources.opened(address, {"Accept": f"{_JSON}, text/html;q=0.2"}) as answer:
        content, kind, address = answer.read(_LARGEST_LIST + 1), answer.headers.get_content_type(), answer.url
    if len(content) > _LARGEST_LIST:
        raise Unavailable(f"its list of {package} is larger than {_LARGEST_LIST:,} bytes")
    try:
        files = _IndexPage.model_validate_json(content).files if kind == _JSON else _Links(content).files
        files = [file.model_copy(update={"url": urllib.parse.urljoin(address, file.url)}) for file in files]
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"its list of {package} is not one of a package index") from error
    return [file for file in files if _local(file.url) is None]  # a server names no files of this machine


def _files_of_folder(package: str, folder: Path) -> list[_IndexFile]:
    """The wheels in a folder, or those that its page of the package names, where it has one as an index does."""
    page = folder / package / "index.html"
    if page.is_file():
        files = _Links(_content(page)).files
        return [each.model_copy(update={"url": urllib.parse.urljoin(page.absolute().as_uri(), each.url)}) for each in files]
    found = sorted(folder.rglob("*.whl"))
    return [_IndexFile(filename=path.name, url=path.absolute().as_uri(), size=path.stat().st_size) for path in found]


def _wheel(package: str, file: _IndexFile) -> _Wheel | None:
    """A file as one of the wheels that are looked at: of a final release, for Linux on an architecture that we know."""
    try:
        name, version, _build, tags = parse_wheel_filename(file.filename)
    except InvalidWheelFilename:
        return None
    of_linux = {str(tag.platform) for tag in tags if "linux" in tag.platform}
    arch = next((arch for arch in catalog.os().architectures if any(platform.endswith(arch) for platform in of_linux)), None)
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
    return _Wheel(version.base_version, version.local or "", arch, python, file.filename, file.url, file.size)


def _add_wheels(made: Update, package: str, wheels: list[_Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    """Add the row of a release; what cannot be read of it is said, and nothing of it added."""
    try:
        if package == "torch":
            _add_torch(made, wheels, sources, say)
        else:
            _add_nccl(made, package, wheels, sources, say)
    except (Unavailable, OSError, *_DAMAGED) as error:
        made.unreached.append(f"{package} {wheels[0].version}: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__


def _add_nccl(made: Update, package: str, wheels: list[_Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    wheel = min(wheels, key=lambda each: each.arch != "x86_64")
    say(f"reading {wheel.name}")
    with _archive(wheel, sources) as archive, _library(archive, NCCL_LIBRARY) as path:
        cuda, code = nccl_of(path)
    rows = made.rows.setdefault("nccl", {}).setdefault("wheels", {"builds": {}, "code": []})
    rows["builds"].setdefault(package, {})[wheel.version] = cuda
    rows["code"].append({"has": code, "wheels": {package: [wheel.version]}})
    made.found.append(f"{package} {wheel.version}: CUDA {cuda}, code for {', '.join(code)}")


def nccl_of(path: Path) -> tuple[str, list[str]]:
    """(CUDA, compute capabilities) of an NCCL library. Raises Unavailable for another file."""
    code = gpu_code.read(str(path))
    found = _searched(path, _NCCL_TEXT)
    if code is None or found is None:
        raise Unavailable(f"{NCCL_LIBRARY} is not an NCCL with GPU code")
    return found[2].decode(), _capabilities(code)


def _searched(path: Path, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """The first match in a large file; of one that crosses a border of blocks, too."""
    with path.open("rb") as file:
        before = b""
        while block := file.read(_BLOCK):
            if found := pattern.search(before + block):
                return found
            before = block[-256:]
    return None


def _capabilities(code: gpu_code.GpuCode) -> list[str]:
    """The compute capabilities of machine code for all kernels, lowest first; the newest with +PTX where all have its PTX.

    Kernels for one GPU or family alone (``9.0a``) are in containers of their own, which do not count.

    Raises:
        Unavailable: there is none.
    """
    most = max(code.machine_code.values(), default=0)
    plain = sorted((each for each, count in code.machine_code.items() if each[-1].isdigit() and count == most), key=key)
    if not plain:
        raise Unavailable("its library has no machine code for all GPUs of a compute capability")
    if code.ptx.get(plain[-1], 0) >= most:
        plain[-1] += "+PTX"
    return plain


def _add_torch(made: Update, wheels: list[_Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    """A build for each CUDA: an index as PyTorch's has several of a release, and some without CUDA."""
    version, builds, pythons = wheels[0].version, dict[str, dict[str, Any]](), set[str]()
    for build, arch in itertools.product(dict.fromkeys(each.build for each in wheels), catalog.os().architectures):
        of_build = [each for each in wheels if (each.build, each.arch) == (build, arch)]
        if of_build and (read := _torch_of(of_build[0], sources, say)):
            cuda, nccl, code = read
            row = builds.setdefault(cuda, {"nccl": nccl, "code": {}, "weak": _NOT_SEEN})
            row["nccl"] = row["nccl"] or nccl
            row["code"].setdefault(arch, code)
            pythons |= {f"3.{each.python[3:]}" for each in of_build if re.fullmatch(r"cp3\d+", each.python)}
    if not builds:
        raise Unavailable("its wheels have no CUDA")
    if not pythons:
        raise Unavailable("it has wheels for no release of Python")
    row = {"pythons": sorted(pythons, key=key), "builds": builds}
    made.rows.setdefault("pytorch", {}).setdefault("releases", {})[version] = row
    for cuda, build_row in builds.items():
        listed = "; ".join(f"{arch}: {', '.join(has)}" for arch, has in build_row["code"].items())
        of = f"Python {row['pythons'][0]} to {row['pythons'][-1]}"
        made.found.append(f"torch {version}: CUDA {cuda}, NCCL {build_row['nccl'] or 'of its own'}, {of}, code for {listed}")


def _torch_of(wheel: _Wheel, sources: Sources, say: Callable[[str], None]) -> tuple[str, str | None, list[str]] | None:
    """(CUDA, the NCCL that it pins, compute capabilities) of a wheel; None for a build without CUDA."""
    say(f"reading {wheel.name}")
    with _archive(wheel, sources) as archive:
        cuda = _TORCH_CUDA.search(_text(archive, "torch/version.py"))
        if cuda is None:
            return None
        with _library(archive, TORCH_LIBRARY) as path:
            code = gpu_code.read(str(path))
        if code is None:
            raise Unavailable(f"{TORCH_LIBRARY} has no GPU code")
        return cuda[1], _nccl_required(archive), _capabilities(code)


def _nccl_required(archive: zipfile.ZipFile) -> str | None:
    """The NCCL that a wheel's metadata pins."""
    name = next((each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)), None)
    for line in _text(archive, name).splitlines() if name else ():
        if line.startswith("Requires-Dist: nvidia-nccl-cu"):
            with contextlib.suppress(InvalidRequirement):
                pins = [each.version for each in Requirement(line.partition(": ")[2]).specifier if each.operator == "=="]
                if pins and re.fullmatch(r"\d+(\.\d+)+", pins[0]):
                    return Version(pins[0]).base_version
    return None


# --- wheels ------------------------------------------------------------------------------------------------------------------------------


class _Parts(io.RawIOBase):
    """A file of which parts are fetched when they are read. ``left``: bytes that may be; None for all."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch, self._at = size, fetch, 0
        self.left: int | None = _LARGEST_DIRECTORY

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise Unavailable(f"its list of files is larger than {_LARGEST_DIRECTORY:,} bytes")
        part = self._fetch(self._at, size)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@contextlib.contextmanager
def _archive(wheel: _Wheel, sources: Sources) -> Iterator[zipfile.ZipFile]:
    """A wheel, opened where it lies; one on a server without ranges is fetched whole."""

    def fetched(at: int, size: int) -> bytes:
        with sources.opened(wheel.url, {"Range": f"bytes={at}-{at + size - 1}"}) as answer:
            if answer.status != 206:
                raise Unavailable("the server knows no ranges")
            part: bytes = answer.read(size)
        return part

    with contextlib.ExitStack() as stack:
        whole = None
        if (path := _local(wheel.url)) is not None:
            whole = stack.enter_context(_opened_file(path))
        else:
            with sources.opened(wheel.url, {"Range": "bytes=0-0"}) as answer:
                total = re.fullmatch(r"bytes 0-0/(\d{1,12})", answer.headers.get("Content-Range") or "") if answer.status == 206 else None
                if total is None:
                    whole = stack.enter_context(tempfile.TemporaryFile())
                    _copy(answer, whole, _LARGEST_WHEEL)
        if whole is not None:
            file = whole.fileno()
            parts = _Parts(whole.seek(0, io.SEEK_END), lambda at, size: os.pread(file, size, at))
        elif total and int(total[1]) <= _LARGEST_WHEEL:
            parts = _Parts(int(total[1]), fetched)
        else:
            raise Unavailable(f"a file of more than {_LARGEST_WHEEL:,} bytes")
        try:
            archive = stack.enter_context(zipfile.ZipFile(io.BufferedReader(parts, _BLOCK)))
        except (MemoryError, OverflowError) as error:
            raise Unavailable("its list of files is too large") from error
        parts.left = None
        yield archive


def _copy(source: IO[bytes], target: IO[bytes], largest: int) -> None:
    size = 0
    while block := source.read(_BLOCK):
        size += len(block)
        if size > largest:
            raise Unavailable(f"a file of more than {largest:,} bytes")
        target.write(block)


def _text(archive: zipfile.ZipFile, name: str) -> str:
    """A text in a wheel, empty where it is missing or too large."""
    if name not in archive.namelist():
        return ""
    with archive.open(name) as file:
        content = file.read(_LARGEST_TEXT + 1)
    return content.decode("utf-8", "replace") if len(content) <= _LARGEST_TEXT else ""


@contextlib.contextmanager
def _library(archive: zipfile.ZipFile, name: str) -> Iterator[Path]:
    """A library of a wheel, unpacked into a file of ours."""
    if name not in archive.namelist():
        raise Unavailable(f"it has no {name}")
    with tempfile.NamedTemporaryFile(prefix="provision-", suffix=".so") as target:
        with archive.open(name) as file:
            _copy(file, target, _LARGEST_LIBRARY)
        target.flush()
        yield Path(target.name)


# --- NVIDIA's lists ----------------------------------------------------------------------------------------------------------------------


class _Driver(BaseModel):
    version: str = Field(pattern=r"^\d+(\.\d+){1,2}$")


class _Redistributables(BaseModel):
    """What is read of a ``redistrib_*.json``: the CUDA release, and the driver that was packaged with it."""

    release_label: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    nvidia_driver: _Driver


def _add_toolkits(made: Update, sources: Sources) -> None:
    """The driver of each CUDA release that the catalogue does not know."""
    place = sources.cuda
    known = catalog.cuda().toolkits.drivers
    newest = max(map(key, known))
    found: dict[str, str] = {}
    for name in _lists(sources):
        cuda = re.fullmatch(r"redistrib_(\d+\.\d+)\.\d+\.json", name)
        if cuda is None or key(cuda[1]) <= newest:
            continue
        content = _content(place / name) if isinstance(place, Path) else sources.page(f"{place.rstrip('/')}/{name}")
        try:
            read = _Redistributables.model_validate_json(content)
        except ValidationError:
            made.unreached.append(f"{name}: it names no CUDA release and driver as NVIDIA's lists do")
            continue
        driver = read.nvidia_driver.version
        found[cuda[1]] = min(driver, found.get(cuda[1], driver), key=key)
    if found:
        made.rows["cuda"] = {"toolkits": {"drivers": found}}
        made.found += [f"CUDA {cuda}: driver {driver}" for cuda, driver in found.items()]


def _lists(sources: Sources) -> list[str]:
    if isinstance(sources.cuda, Path):
        return sorted(path.name for path in sources.cuda.glob("redistrib_*.json"))
    links = _Links(sources.page(f"{sources.cuda.rstrip('/')}/"))
    return sorted({file.filename for file in links.files})


def _content(path: Path) -> bytes:
    with _opened_file(path) as file:
        content = file.read(_LARGEST_LIST + 1)
    if len(content) > _LARGEST_LIST:
        raise Unavailable(f"{path.name} is larger than {_LARGEST_LIST:,} bytes")
    return content


class _DriverRelease(BaseModel):
    release_version: str = Field(max_length=30)


class _DriverBranch(BaseModel):
    type: str = Field(max_length=60)
    driver_info: list[_DriverRelease] = Field(max_length=1000)


class _DriverReleases(RootModel[dict[str, _DriverBranch]]):
    """What is read of NVIDIA's releases.json: branch → what it is for, and its releases."""


_KINDS = {"lts branch": "long-term", "production branch": "production", "new feature branch": "feature"}  # NVIDIA's words → ours


def _add_branches(made: Update, sources: Sources) -> None:
    """The driver branches that are newer than those of the catalogue, and released."""
    place = sources.drivers
    if isinstance(place, Path) and not place.exists():
        return  # a folder need not have it
    try:
        branches = _DriverReleases.model_validate_json(_content(place) if isinstance(place, Path) else sources.page(place)).root
    except ValidationError as error:
        raise Unavailable("it does not name branches and their releases as NVIDIA's list does") from error
    newest = max(map(int, catalog.driver().branches.of))
    for name, branch in sorted(branches.items()):
        released = any(each.release_version.startswith(f"{name}.") for each in branch.driver_info)
        if not re.fullmatch(r"[1-9]\d\d", name) or int(name) <= newest or not released:
            continue
        kind = _KINDS.get(branch.type.strip().lower())
        if kind is None:
            made.unreached.append(f"driver branch {name}: what it is for is unknown: {neutral(branch.type)}")
            continue
        made.rows.setdefault("driver", {"branches": {"of": {}}})["branches"]["of"][name] = kind
        made.found.append(f"driver branch {name}: {kind}")


# --- the files ---------------------------------------------------------------------------------------------------------------------------


def _write(made: Update, folder: Path, source: str, today: datetime.date) -> None:
    """Merge the rows into the folder's files: all or none. What is invalid there is renamed, so that it counts no more."""
    before, invalid = overlay.usable([folder])
    texts: dict[str, str] = {}
    for name, rows in made.rows.items():
        kept = before.files[name].rows if before and name in before.files else {}
        content = {"schema": 1, "source": source, "date": today.isoformat(), **overlay.merge(kept, rows)}
        texts[name] = _HEAD + yaml.safe_dump(content, sort_keys=False, width=140, default_flow_style=None)
    with tempfile.TemporaryDirectory() as place:
        for name, text in texts.items():
            (Path(place) / f"{name}.yaml").write_text(text, encoding="utf-8")
        overlay.check([Path(place)])
    if not texts and not invalid:
        return
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".update-", dir=folder) as fresh:  # what the disk has no room for is not half there
            for name, text in texts.items():
                downloads.store(Path(fresh) / f"{name}.yaml", text.encode())
            made.set_aside += [_set_aside(path, error) for path, error in invalid.items()]
            for name in texts:
                os.replace(Path(fresh) / f"{name}.yaml", folder / f"{name}.yaml")
                made.written.append(str(folder / f"{name}.yaml"))
    except OSError as error:
        raise ProvisionError(
            f"cannot be written: {error.strerror or error}", where=str(folder), hint="name another folder: --out DIR"
        ) from error
    finally:
        for each in created:
            with contextlib.suppress(OSError):  # only empty ones can be removed
                each.rmdir()


def _set_aside(path: Path, error: UsageError) -> str:
    """Rename a file of the user's, so that nothing of theirs is lost; a sentence about it."""
    names = (path.with_name(f"{path.name}.invalid{number or ''}") for number in itertools.count())
    kept = next(each for each in names if not each.exists())
    path.rename(kept)
    return f"{next(iter(error.parts()))[0]}; it is now {kept.name}"


def _shown(place: str | Path) -> str:
    return without_logins(str(place))
