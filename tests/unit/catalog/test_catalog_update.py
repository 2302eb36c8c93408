"""`catalog update` against a package index that the test serves: small wheels with libraries that nvcc made."""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.server
import json
import os
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as inputs
from hypothesis import settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from provision.base import downloads
from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import key
from provision.catalog import OURS, Catalog, overlay, update
from provision.catalog.update import archive, wheels
from provision.catalog.update.sources import Sources, Update
from provision.cli.main import app
from provision.hostside import gpu_code

LIBRARY = (Path(__file__).parents[2] / "data" / "gpu_code" / "linked.so").read_bytes()  # 8.0 in both of its containers, 9.0 in one
TODAY = datetime.date(2027, 3, 1)
NCCL_TEXT = b"\0NCCL version 2.40.1+cuda13.9\0"  # as strings in libnccl.so.2 have it


@dataclass
class Index:
    """A package index and NVIDIA's list: path → (type, content).

    ``fetched``: bytes of each path that were sent; ``total``: the size that files claim to have; ``raw``: path → all that is sent instead.
    """

    url: str
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    raw: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    total: int | None = None
    login: str | None = None


@pytest.fixture
def index() -> Iterator[Index]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = served.pages.get(self.path, ("", None))
            if served.login not in (None, self.headers.get("Authorization")):
                self.send_error(401)
                return
            if self.path in served.raw:
                self.wfile.write(served.raw[self.path])
                return
            if content is None:
                self.send_error(404)
                return
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if served.ranges else None
            body = content[int(part[1]) : int(part[2]) + 1] if part else content
            self.send_response(206 if part else 200)
            if part:
                self.send_header("Content-Range", f"bytes {part[1]}-{int(part[1]) + len(body) - 1}/{served.total or len(content)}")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            served.fetched[self.path] = served.fetched.get(self.path, 0) + len(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Index(f"http://127.0.0.1:{server.server_port}", {"/supported-tags.md": ("text/plain", b"")})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


FILLER = b"".join(hashlib.sha256(bytes([n % 251, n // 251])).digest() for n in range(60_000))


def wheel(files: dict[str, bytes], path: Path) -> bytes:
    """A wheel, with much beside what is read of it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("filler"), FILLER)
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()


def nccl(path: Path, library: bytes = LIBRARY + NCCL_TEXT) -> bytes:
    return wheel({wheels.NCCL_LIBRARY: library}, path)


def torch(path: Path, required: str = "nvidia-nccl-cu13==2.40.1; platform_system == 'Linux'") -> bytes:
    version = b"__version__ = '2.90.0+cu139'\ncuda: Optional[str] = '13.9'\nhip: Optional[str] = None\n"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.90.0\nRequires-Dist: {required}\n".encode()
    files = {"torch/version.py": version, "torch-2.90.0.dist-info/METADATA": metadata, wheels.TORCH_LIBRARY: LIBRARY}
    return wheel(files, path)


NCCL = "nvidia_nccl_cu13-2.40.1-py3-none-manylinux_2_18_x86_64.whl"
TORCH = ["torch-2.90.0-cp312-cp312-manylinux_2_28_x86_64.whl", "torch-2.90.0-cp313-cp313-manylinux_2_28_x86_64.whl"]


def library(*entries: tuple[int, float]) -> bytes:
    """An ELF file with one container of these (kind, compute capability)."""
    content = b"".join(struct.pack("<HHIQ12xI8xQ8xQ", kind, 0x101, 64, 0, int(of * 10), 0, 4096) for kind, of in entries)
    content = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content
    names = b"\0.nv_fatbin\0"
    sections = [(0, 0, 0, 0), (1, 1, 64, len(content)), (0, 3, 64 + len(content), len(names))]
    table = b"".join(struct.pack("<II16xQQ24x", *each) for each in sections)
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(content) + len(names))
    return head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2) + content + names + table


MACHINE_CODE_90, PTX_90 = (gpu_code.MACHINE_CODE, 9.0), (gpu_code.PTX, 9.0)


def serve(index: Index, tmp_path: Path) -> None:
    """NCCL, PyTorch, and lists of NVIDIA's."""
    others = ["torch-2.91.0rc1-cp312-cp312-manylinux_2_28_x86_64.whl", "torch-2.90.0-cp312-cp312-win_amd64.whl", "torch-1.13.1.tar.gz"]
    for package, names in {"nvidia-nccl-cu13": [NCCL], "nvidia-nccl-cu12": [], "torch": [*TORCH, *others]}.items():
        links = "".join(f'<a href="/files/{name}#sha256=00">{name}</a>' for name in names)
        index.pages[f"/{package}/"] = ("text/html", links.encode())
    index.pages[f"/files/{NCCL}"] = ("", nccl(tmp_path / NCCL))
    for name in TORCH:
        index.pages[f"/files/{name}"] = ("", torch(tmp_path / name))
    nvidia(index, "13.9.0", "640.10")
    branches(index, {"640": "lts branch", "630": "new feature branch", "535": "lts branch"})
    index.pages["/nvidia/"] = (
        "text/html",
        b'<a href="redistrib_13.9.0.json">x</a><a href="redistrib_12.0.0.json">x</a><a href="cuda_nvcc/">x</a>',
    )


def nvidia(index: Index, release: str, driver: str) -> None:
    content = {"release_date": "2027-02-01", "release_label": release, "nvidia_driver": {"version": driver}, "cuda_cccl": {}}
    index.pages[f"/nvidia/redistrib_{release}.json"] = ("application/json", json.dumps(content).encode())


def branches(index: Index, kinds: dict[str, str]) -> None:
    """A list of driver branches, with the keys that NVIDIA's has."""
    release = {
        "release_date": "2027-02-01",
        "release_notes": "https://docs.nvidia.com/x",
        "architectures": ["x86_64"],
        "runfile_url": {"x86_64": "https://us.download.nvidia.com/x"},
    }
    content = {name: {"type": kind, "driver_info": [{"release_version": f"{name}.10.01", **release}]} for name, kind in kinds.items()}
    content["650"] = {"type": "new feature branch", "driver_info": []}  # announced
    index.pages["/releases.json"] = ("application/json", json.dumps(content).encode())


def sources(index: Index, used: Catalog = OURS) -> Sources:
    return Sources((index.url,), f"{index.url}/nvidia", f"{index.url}/releases.json", f"{index.url}/supported-tags.md", used)


def run(index: Index, folder: Path) -> Update:
    return update.update(sources(index), folder, TODAY, lambda _line: None)


def test_newer_rows_come_from_the_index(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    folder = tmp_path / "config" / "catalog"
    made = run(index, folder)
    assert made.unreached == []
    assert len(made.found) == 5
    used = Catalog(overlay.read([folder]))
    assert used.nccl().wheels.builds["nvidia-nccl-cu13"]["2.40.1"] == "13.9"
    assert [entry.has for entry in used.nccl().wheels.code if "2.40.1" in entry.wheels.get("nvidia-nccl-cu13", ())] == [("8.0",)]
    release = used.pytorch().releases["2.90.0"]
    assert release.pythons == ("3.12", "3.13")
    build = release.builds["13.9"]
    assert (build.nccl, build.code) == ("2.40.1", {"x86_64": ("8.0",)})
    assert build.weak
    assert used.cuda().toolkits.of["13.9"] == "640.10"
    assert {name: kind for name, kind in used.driver().branches.of.items() if int(name) > 620} == {"640": "long-term", "630": "feature"}
    assert (used.reach().pytorch, used.reach().cuda, used.reach().nccl) == ("2.90.0", "13.9", "2.40.1")
    own = used.overlay
    later = datetime.date(2027, 4, 1)
    again = update.update(sources(index, used), folder, later, lambda _line: None)
    assert again.found == []
    # That nothing newer is there is knowledge of that day, too; of NCCL for CUDA 12 nothing was seen.
    assert {Path(path).name for path in again.written} == {"pytorch.yaml", "cuda.yaml", "driver.yaml"}
    found = overlay.read([folder])
    assert own is not None
    assert found is not None
    assert {name: file.head.date for name, file in found.files.items()} == dict.fromkeys(("pytorch", "cuda", "driver"), later) | {
        "nccl": TODAY
    }
    assert found.digest == own.digest
    assert found.files["pytorch"].rows == own.files["pytorch"].rows


def test_gaps_are_filled_and_what_is_older_than_all_that_is_known_stays_out(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    known = OURS.pytorch().releases
    first, second, *_ = sorted(map(key, known))[1]
    gap = f"{first}.{second}.9"
    assert key(gap) < max(map(key, known))
    names = [f"torch-{version}-cp312-cp312-manylinux_2_28_x86_64.whl" for version in (gap, "1.12.1", max(known, key=key))]
    for name in names:
        index.pages[f"/files/{name}"] = ("", torch(tmp_path / name))
    index.pages["/torch/"] = ("text/html", "".join(f'<a href="/files/{name}">x</a>' for name in names).encode())
    branches(index, {"575": "new feature branch", "418": "lts branch", "535": "lts branch"})
    made = run(index, tmp_path / "c")
    assert list(made.rows["pytorch"]["releases"]) == [gap]
    assert made.rows["driver"]["branches"]["of"] == {"575": "feature"}
    used = Catalog(overlay.read([tmp_path / "c"]))
    assert gap in used.pytorch().releases
    assert {each.version for each in used.pytorch().defaults} <= set(known)


def test_where_nothing_is_new_the_plan_is_as_before_and_the_knowledge_of_today(tmp_path: Path, index: Index) -> None:
    known = {"torch": OURS.pytorch().releases, **OURS.nccl().wheels.builds}
    for package in update.PACKAGES:
        version = max(known[package], key=key)
        name = f"{package.replace('-', '_')}-{version}-{'cp312-cp312' if package == 'torch' else 'py3-none'}-manylinux_2_28_x86_64.whl"
        index.pages[f"/{package}/"] = ("text/html", f'<a href="/files/{name}">x</a>'.encode())
    index.pages["/nvidia/"] = ("text/html", b'<a href="redistrib_12.4.0.json">x</a>')
    branches(index, {"535": "lts branch"})
    del index.pages["/nvidia-nccl-cu12/"]
    made = run(index, tmp_path / "a")
    assert [Path(path).name for path in made.written] == ["pytorch.yaml", "cuda.yaml", "driver.yaml"]
    used = Catalog(overlay.read([tmp_path / "a"]))
    assert used.reach().date < TODAY.isoformat(), "NCCL was not looked for"
    index.pages["/nvidia-nccl-cu12/"] = index.pages["/nvidia-nccl-cu13/"][0], index.pages["/nvidia-nccl-cu13/"][1].replace(b"cu13", b"cu12")
    before = OURS.reach()
    made = run(index, tmp_path / "b")
    assert (made.found, made.unreached, made.rows) == ([], [], {})
    used = Catalog(overlay.read([tmp_path / "b"]))
    assert used.reach() == replace(before, date=TODAY.isoformat())


def test_of_large_wheels_only_parts_are_fetched(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_BLOCK", 1 << 14)
    serve(index, tmp_path)
    assert run(index, tmp_path / "c").unreached == []
    place = f"/files/{NCCL}"
    assert index.fetched[place] < len(index.pages[place][1]) / 5
    assert f"/files/{TORCH[1]}" not in index.fetched  # one wheel for each architecture is enough


def test_a_server_without_ranges(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    index.ranges = False
    assert len(run(index, tmp_path / "c").found) == 5


def test_a_folder_instead_of_servers(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    nccl(given / NCCL)
    label = {"release_label": "13.9.1", "nvidia_driver": {"version": "640.20"}}
    (given / "redistrib_13.9.1.json").write_text(json.dumps(label), encoding="utf-8")
    made = update.update(Sources.of_folder(given, OURS), tmp_path / "c", TODAY, lambda _line: None)
    assert made.unreached == []
    written = yaml.safe_load((tmp_path / "c" / "cuda.yaml").read_text(encoding="utf-8"))
    assert written["toolkits"] == {"of": {"13.9": "640.20"}}
    assert written["date"] == TODAY.isoformat()


def test_rows_of_the_users_own_stay(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    folder = tmp_path / "c"
    folder.mkdir()
    head = "schema: 1\nsource: me\ndate: 2027-01-01\n"
    (folder / "cuda.yaml").write_text(head + 'toolkits: {of: {"13.8": "630.1"}}\n', encoding="utf-8")
    run(index, folder)
    used = Catalog(overlay.read([folder]))
    assert {"13.8": "630.1", "13.9": "640.10"}.items() <= used.cuda().toolkits.of.items()


def test_what_cannot_be_read_is_said_and_the_rest_is_written(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    index.pages[f"/files/{NCCL}"] = ("", nccl(tmp_path / NCCL, library=b"\x7fELF nothing"))
    del index.pages["/nvidia/"]
    index.pages["/releases.json"] = ("application/json", b"{}" + b" " * (16 << 20))
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["nvidia-nccl-cu13 2.40.1", "CUDA", "driver branches"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["pytorch.yaml"]


@pytest.mark.parametrize(
    "page",
    [
        b"{}",
        f'<a href="file:///etc/{NCCL}">x</a><a href="file:///etc/{TORCH[0]}">x</a>'.encode(),
        f'<a href="http://[x/{TORCH[0]}">x</a>'.encode(),
        b"<a" * 100_000,
        b"<!--" * 100_000 + b"\xff",
    ],
)
def test_hostile_lists_add_nothing(tmp_path: Path, index: Index, page: bytes) -> None:
    for package in update.PACKAGES:
        index.pages[f"/{package}/"] = ("text/html", page)
    index.pages["/nvidia/"] = ("text/html", b'<a href="redistrib_13.9.0.json">x</a>')
    nvidia(index, "13.9.0", "$(reboot)")
    branches(index, {"640": "\x1b[31mproduction branch; reboot", "64": "lts branch", "../../../etc": "lts branch"})
    made = run(index, tmp_path / "c")
    assert (made.found, made.written) == ([], [])
    assert made.unreached


def test_wheels_that_are_no_archives_or_unpack_to_too_much(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(index, tmp_path)
    index.pages[f"/files/{NCCL}"] = ("", b"PK" * 500)
    monkeypatch.setattr(archive, "_LARGEST_LIBRARY", 100)
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["nvidia-nccl-cu13 2.40.1", "torch 2.90.0"]


def refused(index: Index, folder: Path) -> list[str]:
    """What is said of PyTorch where its row cannot be had; that of NCCL is written anyway."""
    made = run(index, folder)
    assert sorted(path.name for path in folder.iterdir() if path.name != "pytorch.yaml") == ["cuda.yaml", "driver.yaml", "nccl.yaml"]
    assert "pytorch" not in made.rows
    return [line.partition(": ")[2] for line in made.unreached]


def test_a_wheel_that_claims_to_be_larger_than_any(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    index.total = 900 * 10**9
    assert {line.partition(": ")[2] for line in run(index, tmp_path / "c").unreached} == {"a file of more than 8,589,934,592 bytes"}


@pytest.mark.parametrize("ranges", [True, False])
def test_the_list_of_files_of_a_wheel_is_bounded(tmp_path: Path, index: Index, ranges: bool) -> None:
    serve(index, tmp_path)
    index.ranges = ranges
    size = 33 << 20
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0)
    index.pages[f"/files/{TORCH[0]}"] = ("", bytes(size) + end)
    assert refused(index, tmp_path / "c") == ["its list of files is larger than 33,554,432 bytes"]
    assert not ranges or index.fetched[f"/files/{TORCH[0]}"] < 1 << 20


def test_links_of_a_server_to_files_of_this_machine_are_left_out(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    (tmp_path / TORCH[0]).unlink()
    os.mkfifo(tmp_path / TORCH[0])
    links = "".join(f'<a href="{(tmp_path / name).as_uri()}">x</a>' for name in TORCH)
    index.pages["/torch/"] = ("text/html", links.encode())
    assert refused(index, tmp_path / "c") == []


def test_a_pipe_instead_of_a_wheel(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    os.mkfifo(given / TORCH[0])
    os.mkfifo(given / "redistrib_13.9.1.json")
    made = update.update(Sources.of_folder(given, OURS), tmp_path / "c", TODAY, lambda _line: None)
    assert made.unreached == [
        f"torch 2.90.0: {given / TORCH[0]} is not a regular file",
        f"CUDA: {given}: {given / 'redistrib_13.9.1.json'} is not a regular file",
    ]


@pytest.mark.parametrize("page", [b'<a href="http://[">x</a>', b"<![x["])
def test_pages_that_are_no_lists_of_links(tmp_path: Path, index: Index, page: bytes) -> None:
    serve(index, tmp_path)
    index.pages["/torch/"] = index.pages["/nvidia/"] = ("text/html", page)
    made = run(index, tmp_path / "c")
    assert [line.partition(": ")[0] for line in made.unreached] == ["torch", "CUDA"]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"garbage\r\n\r\n", "it does not answer as a web server does"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/html\r\n\r\nff\r\nabc", "its answer is cut off"),
    ],
)
def test_a_server_that_speaks_no_http_or_stops_in_between(tmp_path: Path, index: Index, sent: bytes, said: str) -> None:
    serve(index, tmp_path)
    index.raw = dict.fromkeys(["/torch/", f"/files/{NCCL}", "/nvidia/", "/releases.json"], sent)
    assert [line.rpartition(": ")[2] for line in run(index, tmp_path / "c").unreached] == [said] * 4


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_wheel_with_damaged_content(tmp_path: Path, index: Index, method: int) -> None:
    serve(index, tmp_path)
    path = tmp_path / "damaged.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("torch/version.py", hashlib.sha256().hexdigest())
        at = archive.getinfo("torch/version.py").header_offset + 30 + len("torch/version.py")
    content = bytearray(path.read_bytes())
    content[at + 4 : at + 24] = b"\xff" * 20
    index.pages[f"/files/{TORCH[0]}"] = ("", bytes(content))
    assert len(refused(index, tmp_path / "c")) == 1


@settings(max_examples=60, deadline=None)
@inputs(st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=5))
def test_damaged_wheels_are_named_or_read(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    with zipfile.ZipFile(folder / TORCH[0], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("torch/version.py", "cuda: str = '13.9'\n")
        archive.writestr(wheels.TORCH_LIBRARY, library(MACHINE_CODE_90))
    content = bytearray((folder / TORCH[0]).read_bytes())
    for at, new in changes:
        start = at % len(content)
        content[start : start + len(new)] = new
    (folder / TORCH[0]).write_bytes(content)
    made = update.update(Sources.of_folder(folder, OURS), folder / "c", TODAY, lambda _line: None)  # anything raised is a defect
    assert len(made.unreached) + len(made.found) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("torch-2.90.0-py3-none-manylinux_2_28_x86_64.whl", MACHINE_CODE_90, "it has wheels for no release of Python"),
        (TORCH[0], PTX_90, "its library has no machine code for all GPUs of a compute capability"),
    ],
)
def test_of_a_release_that_would_make_a_useless_row_nothing_is_added(
    tmp_path: Path, name: str, content: tuple[int, float], said: str
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    wheel({"torch/version.py": b"cuda: str = '13.9'\n", wheels.TORCH_LIBRARY: library(content)}, given / name)
    made = update.update(Sources.of_folder(given, OURS), tmp_path / "c", TODAY, lambda _line: None)
    assert (made.unreached, made.rows) == ([f"torch 2.90.0: {said}"], {})


def test_an_index_with_several_builds_of_a_release(tmp_path: Path) -> None:
    """As PyTorch's download pages have them; a build without CUDA says nothing about Pythons."""
    given = tmp_path / "given"
    given.mkdir()
    for build, python, cuda in (("cpu", "314", "None"), ("cu126", "312", "'12.6'"), ("cu130", "313", "'13.0'")):
        name = f"torch-2.90.0+{build}-cp{python}-cp{python}-linux_x86_64.whl"
        code = library(MACHINE_CODE_90, PTX_90) if build == "cu130" else library(MACHINE_CODE_90)
        wheel({"torch/version.py": f"cuda: Optional[str] = {cuda}\n".encode(), wheels.TORCH_LIBRARY: code}, given / name)
    made = update.update(Sources.of_folder(given, OURS), tmp_path / "c", TODAY, lambda _line: None)
    assert (made.unreached, len(made.found)) == ([], 2)
    used = Catalog(overlay.read([tmp_path / "c"]))
    release = used.pytorch().releases["2.90.0"]
    assert release.pythons == ("3.12", "3.13")
    code_of = {cuda: build.code for cuda, build in release.builds.items()}
    assert code_of == {"12.6": {"x86_64": ("9.0",)}, "13.0": {"x86_64": ("9.0+PTX",)}}


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"640": {"type": "lts branch"}}', b'{"640": {"type": 1, "driver_info": []}}', b'{"640": ' + b"[" * 100_000, b"<html>"],
)
def test_lists_of_branches_that_are_none(tmp_path: Path, index: Index, content: bytes) -> None:
    serve(index, tmp_path)
    index.pages["/releases.json"] = ("application/json", content)
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["driver branches"]
    assert len(made.written) == 3


def test_invalid_files_are_set_aside_and_nothing_of_them_is_lost(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path)
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("nccl.yaml", "os.yaml", "nccl.yaml.invalid"):
        (folder / name).write_text(f"schema: 1  # {name}\n", encoding="utf-8")
    (folder / "ncl.yaml").mkdir()
    made = run(index, folder)
    assert [line.rpartition(" ")[2] for line in made.set_aside] == ["nccl.yaml.invalid1", "ncl.yaml.invalid", "os.yaml.invalid"]
    assert f"{folder / 'nccl.yaml'}:1: `source` is missing" in made.set_aside[0]
    kept = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.invalid*") if path.is_file()}
    assert kept == {
        "nccl.yaml.invalid": "schema: 1  # nccl.yaml.invalid\n",
        "nccl.yaml.invalid1": "schema: 1  # nccl.yaml\n",
        "os.yaml.invalid": "schema: 1  # os.yaml\n",
    }
    used = Catalog(overlay.read([folder]))
    assert used.reach().nccl == "2.40.1"


def test_all_files_are_written_or_none(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(index, tmp_path)
    store = downloads.store

    def full(path: Path, content: bytes) -> None:
        if path.name == "pytorch.yaml":
            raise OSError(28, "No space left on device")
        store(path, content)

    monkeypatch.setattr(downloads, "store", full)
    with pytest.raises(ProvisionError, match="No space left"):
        run(index, tmp_path / "config" / "catalog")
    assert not (tmp_path / "config").exists()


def commanded(*words: str, code: int) -> str:
    done = CliRunner().invoke(app, ["catalog", "update", *words])
    found = done.exception.exit_code if isinstance(done.exception, ProvisionError) else done.exit_code
    assert found == code, done.output
    return done.output + str(done.exception or "")


def test_the_command_asks_all_of_pips_indexes_with_their_logins(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(index, tmp_path)
    index.login = "Basic " + base64.b64encode(b"me:secret").decode()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    own = tmp_path / "own" / "torch"
    own.mkdir(parents=True)
    torch(own / TORCH[0])
    (own / "index.html").write_text(f'<a href="{TORCH[0]}">x</a>', encoding="utf-8")
    del index.pages["/torch/"]  # a mirror need not have all
    config = tmp_path / "pip.conf"
    address = index.url.replace("//", "//me:secret@")
    config.write_text(f"[global]\nindex-url = {address}\nextra-index-url = {own.parent.as_uri()}\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    lists = f"lists: {{cuda: '{address}/nvidia', drivers: '{index.url}/missing.json', images: '{index.url}/supported-tags.md'}}\n"
    folder = tmp_path / "provision" / "catalog"
    folder.mkdir(parents=True)
    (folder / "cuda.yaml").write_text(f"schema: 1\nsource: me\ndate: 2027-01-01\n{lists}", encoding="utf-8")
    said = commanded(code=0)  # a list of NVIDIA's that is not there is a warning
    assert {path.name for path in folder.iterdir()} == {"cuda.yaml", "nccl.yaml", "pytorch.yaml"}
    assert f"not read: driver branches: {index.url}/missing.json: HTTP 404" in said.replace("\n", "")
    assert "secret" not in said
    assert "secret" not in (folder / "nccl.yaml").read_text(encoding="utf-8")


def test_pip_that_is_set_up_for_nothing_has_an_index_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (own,) = Sources.of_pip(OURS).indexes
    assert re.fullmatch(r"https://[^/]+/simple/?", str(own))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UsageError, match="pip is set up for no package index"):
        Sources.of_pip(OURS)


def test_without_any_index_the_command_fails_and_leaves_nothing(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    gone = f"lists: {{cuda: '{index.url}/nvidia', drivers: '{index.url}/releases.json', images: '{index.url}/supported-tags.md'}}\n"
    given = tmp_path / "given"
    given.mkdir()
    (given / "cuda.yaml").write_text(f"schema: 1\nsource: me\ndate: 2027-01-01\n{gone}", encoding="utf-8")
    assert "no package index could be read" in commanded("--from", index.url, "--out", str(given), code=1)
    assert [path.name for path in given.iterdir()] == ["cuda.yaml"]
    assert not (tmp_path / "config").exists()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "pip is set up for no package index" in commanded(code=2)
    assert "no such folder" in commanded("--from", "nowhere", code=2)
