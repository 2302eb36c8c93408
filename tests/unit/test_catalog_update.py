"""`catalog update` against a package index that the test serves: small wheels with libraries that nvcc made."""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.server
import json
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from provision import catalog
from provision.base import downloads
from provision.base.errors import ProvisionError
from provision.catalog import overlay, update
from provision.catalog.update import Sources
from provision.cli.main import app

LIBRARY = (Path(__file__).parents[1] / "data" / "gpu_code" / "linked.so").read_bytes()  # 8.0 in both of its containers, 9.0 in one
TODAY = datetime.date(2027, 3, 1)
NCCL_TEXT = b"\0NCCL version 2.40.1+cuda13.9\0"  # as strings in libnccl.so.2 have it


@pytest.fixture(autouse=True)
def _only_ours_afterwards() -> Iterator[None]:
    yield
    catalog.use(None)


@dataclass
class Index:
    """A package index and NVIDIA's list: path → (type, content). ``fetched``: bytes of each path that were sent."""

    url: str
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    login: str | None = None


@pytest.fixture
def index() -> Iterator[Index]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = served.pages.get(self.path, ("", None))
            if served.login not in (None, self.headers.get("Authorization")):
                self.send_error(401)
                return
            if content is None:
                self.send_error(404)
                return
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if served.ranges else None
            body = content[int(part[1]) : int(part[2]) + 1] if part else content
            self.send_response(206 if part else 200)
            if part:
                self.send_header("Content-Range", f"bytes {part[1]}-{int(part[1]) + len(body) - 1}/{len(content)}")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            served.fetched[self.path] = served.fetched.get(self.path, 0) + len(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Index(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def wheel(files: dict[str, bytes], path: Path) -> bytes:
    """A wheel, with much beside what is read of it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("filler"), b"".join(hashlib.sha256(bytes([n % 251, n // 251])).digest() for n in range(60_000)))
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()


def nccl(path: Path, library: bytes = LIBRARY + NCCL_TEXT) -> bytes:
    return wheel({update.NCCL_LIBRARY: library}, path)


def torch(path: Path, required: str = "nvidia-nccl-cu13==2.40.1; platform_system == 'Linux'") -> bytes:
    version = b"__version__ = '2.90.0+cu139'\ncuda: Optional[str] = '13.9'\nhip: Optional[str] = None\n"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.90.0\nRequires-Dist: {required}\n".encode()
    files = {"torch/version.py": version, "torch-2.90.0.dist-info/METADATA": metadata, update.TORCH_LIBRARY: LIBRARY}
    return wheel(files, path)


NCCL = "nvidia_nccl_cu13-2.40.1-py3-none-manylinux_2_18_x86_64.whl"
TORCH = ["torch-2.90.0-cp312-cp312-manylinux_2_28_x86_64.whl", "torch-2.90.0-cp313-cp313-manylinux_2_28_x86_64.whl"]


def serve(index: Index, tmp_path: Path, *, as_html: bool) -> None:
    """NCCL as JSON or HTML, PyTorch likewise, and a list of NVIDIA's."""
    others = ["torch-2.91.0rc1-cp312-cp312-manylinux_2_28_x86_64.whl", "torch-2.90.0-cp312-cp312-win_amd64.whl", "torch-1.13.1.tar.gz"]
    for package, names in {"nvidia-nccl-cu13": [NCCL], "nvidia-nccl-cu12": [], "torch": [*TORCH, *others]}.items():
        links = "".join(f'<a href="/files/{name}#sha256=00">{name}</a>' for name in names)
        files = [{"filename": name, "url": f"/files/{name}", "hashes": {}} for name in names]
        page = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": files})
        kind = "text/html" if as_html else "application/vnd.pypi.simple.v1+json"
        index.pages[f"/{package}/"] = (kind, (links if as_html else page).encode())
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


def sources(index: Index) -> Sources:
    return Sources((index.url,), f"{index.url}/nvidia", f"{index.url}/releases.json")


def run(index: Index, folder: Path) -> update.Update:
    return update.update(sources(index), folder, TODAY, lambda _line: None)


@pytest.mark.parametrize("as_html", [False, True])
def test_newer_rows_come_from_the_index(tmp_path: Path, index: Index, as_html: bool) -> None:
    serve(index, tmp_path, as_html=as_html)
    folder = tmp_path / "config" / "catalog"
    made = run(index, folder)
    assert made.unreached == []
    assert len(made.found) == 5
    catalog.use(overlay.read([folder]))
    assert catalog.nccl().wheels.builds["nvidia-nccl-cu13"]["2.40.1"] == "13.9"
    assert [entry.has for entry in catalog.nccl().wheels.code if "2.40.1" in entry.wheels.get("nvidia-nccl-cu13", ())] == [("8.0",)]
    release = catalog.pytorch().releases["2.90.0"]
    assert release.pythons == ("3.12", "3.13")
    build = release.builds["13.9"]
    assert (build.nccl, build.code) == ("2.40.1", {"x86_64": ("8.0",)})
    assert build.weak
    assert catalog.cuda().toolkits.drivers["13.9"] == "640.10"
    assert {name: kind for name, kind in catalog.driver().branches.of.items() if int(name) > 620} == {"640": "long-term", "630": "feature"}
    assert (catalog.reach().pytorch, catalog.reach().cuda, catalog.reach().nccl) == ("2.90.0", "13.9", "2.40.1")
    again = run(index, folder)
    assert (again.found, again.written) == ([], [])


def test_of_large_wheels_only_parts_are_fetched(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_BLOCK", 1 << 14)
    serve(index, tmp_path, as_html=False)
    assert run(index, tmp_path / "c").unreached == []
    place = f"/files/{NCCL}"
    assert index.fetched[place] < len(index.pages[place][1]) / 5
    assert f"/files/{TORCH[1]}" not in index.fetched  # one wheel for each architecture is enough


def test_a_server_without_ranges(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path, as_html=False)
    index.ranges = False
    assert len(run(index, tmp_path / "c").found) == 5


def test_a_folder_instead_of_servers(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    nccl(given / NCCL)
    label = {"release_label": "13.9.1", "nvidia_driver": {"version": "640.20"}}
    (given / "redistrib_13.9.1.json").write_text(json.dumps(label), encoding="utf-8")
    made = update.update(Sources.of_folder(given), tmp_path / "c", TODAY, lambda _line: None)
    assert made.unreached == []
    written = yaml.safe_load((tmp_path / "c" / "cuda.yaml").read_text(encoding="utf-8"))
    assert written["toolkits"] == {"drivers": {"13.9": "640.20"}}
    assert written["date"] == TODAY.isoformat()


def test_rows_of_the_users_own_stay(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path, as_html=False)
    folder = tmp_path / "c"
    folder.mkdir()
    head = "schema: 1\nsource: me\ndate: 2027-01-01\n"
    (folder / "cuda.yaml").write_text(head + 'toolkits: {drivers: {"13.8": "630.1"}}\n', encoding="utf-8")
    run(index, folder)
    catalog.use(overlay.read([folder]))
    assert {"13.8": "630.1", "13.9": "640.10"}.items() <= catalog.cuda().toolkits.drivers.items()


def test_what_cannot_be_read_is_said_and_the_rest_is_written(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path, as_html=False)
    index.pages[f"/files/{NCCL}"] = ("", nccl(tmp_path / NCCL, library=b"\x7fELF nothing"))
    del index.pages["/nvidia/"]
    index.pages["/releases.json"] = ("application/json", b"{}" + b" " * (16 << 20))
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["nvidia-nccl-cu13 2.40.1", "CUDA", "driver branches"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["pytorch.yaml"]


@pytest.mark.parametrize(
    "page",
    [b"{}", b'{"files": 1}', b'{"files": [{"filename": "../../x.whl", "url": "file:///etc/passwd"}]}', b"[" * 100_000],
)
def test_hostile_lists_add_nothing(tmp_path: Path, index: Index, page: bytes) -> None:
    for package in update.PACKAGES:
        index.pages[f"/{package}/"] = ("application/vnd.pypi.simple.v1+json", page)
    index.pages["/nvidia/"] = ("text/html", b'<a href="redistrib_13.9.0.json">x</a>')
    nvidia(index, "13.9.0", "$(reboot)")
    branches(index, {"640": "\x1b[31mproduction branch; reboot", "64": "lts branch", "../../../etc": "lts branch"})
    made = run(index, tmp_path / "c")
    assert (made.found, made.written) == ([], [])
    assert made.unreached


def test_wheels_that_are_no_archives_or_unpack_to_too_much(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(index, tmp_path, as_html=False)
    index.pages[f"/files/{NCCL}"] = ("", b"PK" * 500)
    monkeypatch.setattr(update, "_LARGEST_LIBRARY", 100)
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["nvidia-nccl-cu13 2.40.1", "torch 2.90.0"]


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"640": {"type": "lts branch"}}', b'{"640": {"type": 1, "driver_info": []}}', b'{"640": ' + b"[" * 100_000, b"<html>"],
)
def test_lists_of_branches_that_are_none(tmp_path: Path, index: Index, content: bytes) -> None:
    serve(index, tmp_path, as_html=False)
    index.pages["/releases.json"] = ("application/json", content)
    made = run(index, tmp_path / "c")
    assert [line.partition(":")[0] for line in made.unreached] == ["driver branches"]
    assert len(made.written) == 3


def test_invalid_files_are_set_aside_and_nothing_of_them_is_lost(tmp_path: Path, index: Index) -> None:
    serve(index, tmp_path, as_html=False)
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
    catalog.use(overlay.read([folder]))
    assert catalog.reach().nccl == "2.40.1"


def test_all_files_are_written_or_none(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(index, tmp_path, as_html=False)
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
    serve(index, tmp_path, as_html=True)
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
    lists = f"lists: {{cuda: '{address}/nvidia', drivers: '{index.url}/missing.json'}}\n"
    folder = tmp_path / "provision" / "catalog"
    folder.mkdir(parents=True)
    (folder / "cuda.yaml").write_text(f"schema: 1\nsource: me\ndate: 2027-01-01\n{lists}", encoding="utf-8")
    said = commanded(code=0)  # a list of NVIDIA's that is not there is a warning
    assert {path.name for path in folder.iterdir()} == {"cuda.yaml", "nccl.yaml", "pytorch.yaml"}
    assert f"not read: driver branches: {index.url}/missing.json: HTTP 404" in said.replace("\n", "")
    assert "secret" not in said
    assert "secret" not in (folder / "nccl.yaml").read_text(encoding="utf-8")


def test_without_any_index_the_command_fails_and_leaves_nothing(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    gone = f"lists: {{cuda: '{index.url}/nvidia', drivers: '{index.url}/releases.json'}}\n"
    catalog.use(None)
    given = tmp_path / "given"
    given.mkdir()
    (given / "cuda.yaml").write_text(f"schema: 1\nsource: me\ndate: 2027-01-01\n{gone}", encoding="utf-8")
    assert "no package index could be read" in commanded("--from", index.url, "--out", str(given), code=1)
    assert [path.name for path in given.iterdir()] == ["cuda.yaml"]
    assert not (tmp_path / "config").exists()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "pip is set up for no package index" in commanded(code=2)
    assert "no such folder" in commanded("--from", "nowhere", code=2)
