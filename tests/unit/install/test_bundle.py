"""The bundle file, and the wheels for another machine's Python. Packages of hosts need real ones: tests/integration/test_bundle.py."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from provision.base import downloads
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.install import wheels
from provision.install.bundle import archive, gather
from provision.plan import lock
from provision.plan.lock import Lock, LockedFile
from provision.plan.model import Plan, SourceBuild
from provision.plan.options import Options
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve
from provision.survey.document import load_file

OUTSIDE = "wheels/../../evil"
DATA = Path(__file__).parents[2] / "data"


def plan() -> Plan:
    known = load_file(DATA / "lint-facts.json", OURS)
    return resolve(known, Requirements(), {name: HostRequirements() for name in known})


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "content"
    (folder / "wheels/kind").mkdir(parents=True)
    (folder / "wheels/kind/demo-1.0+cpu-py3-none-any.whl").write_bytes(b"wheel" * 1000)
    hosts = {
        name: {
            "machine": archive.machine_of(host),
            "requirements": archive.requirements_of(host),
            "wheels": ["kind/demo-1.0+cpu-py3-none-any.whl"],
            "nccl_wheels": ["kind/demo-1.0+cpu-py3-none-any.whl"] if host.nccl else [],
            "debs": [],
            "nccl_debs": [],
            "relies_on": ["libc6"],
        }
        for name, host in plan().hosts.items()
    }
    (folder / "supplies/openmpi").mkdir(parents=True)
    (folder / "supplies/openmpi/openmpi-4.1.8.tar.gz").write_bytes(b"sources")
    lock = Lock({}, {}).as_dict()
    listing = {"hosts": hosts, "lock": lock, "data": "digits", "supplies": {"openmpi_sources": "openmpi/openmpi-4.1.8.tar.gz"}}
    archive.pack(folder, listing, tmp_path / "hosts.bundle")
    return tmp_path / "hosts.bundle"


def test_pack_and_unpack(packed: Path, tmp_path: Path) -> None:
    bundle = archive.unpack(packed, tmp_path / "out")
    assert (bundle.folder / "wheels/kind/demo-1.0+cpu-py3-none-any.whl").read_bytes() == b"wheel" * 1000
    assert bundle.data == "digits"
    sources = bundle.supply("openmpi_sources")
    assert sources is not None
    assert sources.read_bytes() == b"sources"
    assert bundle.supply("openmpi_tarball") is None
    assert not bundle.complete(Options()).python_downloads
    bundle.check_contents(plan())
    archives = bundle.archives(tmp_path / "parcels")
    inside = {}
    for name, each in archives.items():
        with tarfile.open(each["archive"]) as packed_for_host:
            inside[name] = packed_for_host.getnames()
    wheel = "demo-1.0+cpu-py3-none-any.whl"
    assert inside == {"node1": [f"wheels/{wheel}"], "gpu1": [f"wheels/{wheel}", f"nccl_wheels/{wheel}"]}


def test_any_changed_byte_is_refused(packed: Path, tmp_path: Path) -> None:
    content = packed.read_bytes()
    at = content.index(b"wheelwheel") + 17
    (tmp_path / "changed").write_bytes(content[:at] + b"X" + content[at + 1 :])
    with pytest.raises(UsageError, match=r"damaged or changed.*nothing of it was used"):
        archive.unpack(tmp_path / "changed", tmp_path / "out")


@pytest.mark.parametrize("size", [0, 100, 2000, 6000])
def test_a_truncated_bundle_is_refused(packed: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "short").write_bytes(packed.read_bytes()[:size])
    with pytest.raises(UsageError):
        archive.unpack(tmp_path / "short", tmp_path / "out")


def rewritten(packed: Path, change: Callable[[dict[str, Any]], None], extra: str | None = None) -> Path:
    """The bundle with its list changed, or with one more member."""
    target = packed.with_name("rewritten")
    with tarfile.open(packed) as old, tarfile.open(target, "w") as new:
        for member in old:
            file = old.extractfile(member)
            content = file.read() if file else b""
            if member.name == archive.LIST:
                listing = json.loads(content)
                change(listing)
                content = json.dumps(listing).encode()
                member.size = len(content)
            new.addfile(member, io.BytesIO(content))
        if extra:
            new.addfile(tarfile.TarInfo(extra), io.BytesIO(b""))
    return target


@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        (lambda listing: listing.update(schema=9), None, "schema 9"),
        (lambda listing: listing.pop("hosts"), None, "list is damaged"),
        (lambda listing: listing["files"].update({"wheels/kind/gone.whl": {"bytes": 1, "sha256": "0" * 64}}), None, "gone.whl. is missing"),
        (lambda _listing: None, "wheels/kind/more.whl", "not in its list"),
        (
            lambda listing: listing["files"].update({OUTSIDE: {"bytes": 0, "sha256": "0" * 64}}),
            OUTSIDE,
            "not the name of a file below a folder",
        ),
    ],
)
def test_an_invalid_list_is_refused(packed: Path, tmp_path: Path, change: Any, extra: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        archive.unpack(rewritten(packed, change, extra), tmp_path / "out")
    assert not (tmp_path / "evil").exists()


WHEEL = "kind/demo-1.0+cpu-py3-none-any.whl"
HOSTS_LISTS = ("wheels", "nccl_wheels", "debs", "nccl_debs")


@pytest.mark.parametrize("kind", [*HOSTS_LISTS, "supplies"])
@pytest.mark.parametrize(
    "name", ["../../etc/shadow", "../cache/x", "/etc/shadow", "kind/../" + WHEEL, ".", "", "a\nb", "kind/other.whl", 7, None]
)
def test_a_path_outside_or_missing_is_refused(packed: Path, tmp_path: Path, kind: str, name: Any) -> None:
    def change(listing: dict[str, Any]) -> None:
        if kind == "supplies":
            listing["supplies"]["openmpi_sources"] = name
        else:
            listing["hosts"]["gpu1"][kind] = [name]

    with pytest.raises(UsageError, match=r"its list is damaged.*nothing of it was used"):
        archive.unpack(rewritten(packed, change), tmp_path / "out")


def test_two_files_that_would_be_one_on_a_host_are_refused(packed: Path, tmp_path: Path) -> None:
    def change(listing: dict[str, Any]) -> None:
        for name in (one := f"wheels/{WHEEL}", f"wheels/other/{WHEEL.rpartition('/')[2].upper()}"):
            listing["files"][name] = listing["files"][one]
        listing["hosts"]["gpu1"]["wheels"] = [name.partition("/")[2] for name in listing["files"] if name.startswith("wheels/")]

    whole = rewritten(packed, change)
    with tarfile.open(whole, "a") as more:
        member = tarfile.TarInfo(f"wheels/other/{WHEEL.rpartition('/')[2].upper()}")
        member.size = 5000
        more.addfile(member, io.BytesIO(b"wheel" * 1000))
    with pytest.raises(UsageError, match=r"(?i)DEMO.* is in it twice"):
        archive.unpack(whole, tmp_path / "out")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, "sparse", "longer"])
def test_members_that_are_not_plain_files_of_the_listed_size_are_refused(packed: Path, tmp_path: Path, kind: Any) -> None:
    stated = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    whole = rewritten(packed, lambda listing: listing["files"].update({"wheels/kind/odd.whl": stated}))
    with tarfile.open(whole, "a", format=tarfile.PAX_FORMAT) as more:
        member, content = tarfile.TarInfo("wheels/kind/odd.whl"), b""
        if kind == "longer":
            member.size, content = 1, b"x"
        elif kind == "sparse":  # a terabyte of nothing
            member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
        else:
            member.type, member.linkname = kind, "/etc/shadow"
        more.addfile(member, io.BytesIO(content))
    with pytest.raises(UsageError, match=r"odd.whl.*nothing of it was used"):
        archive.unpack(whole, tmp_path / "out")
    assert not (tmp_path / "out/wheels/kind/odd.whl").exists()


def test_an_invalid_lock_is_refused(packed: Path, tmp_path: Path) -> None:
    version = {"openmpi": [{"version": "{{ x }}", "package": "p", "source": "wheel", "hosts": [], "why": []}]}
    files = [{"name": "x\n--index-url http://x", "version": "1.0", "url": None, "sha256": "a" * 64}]
    bodies = [{"components": version, "environments": {}}, {"components": {}, "environments": {"e": files}}]
    wrong = [{**body, "digest": lock.digest(body)} for body in bodies]
    for odd in (*wrong, {}, [], {**Lock({}, {}).as_dict(), "digest": "0"}):
        with pytest.raises(UsageError, match="its list is damaged"):
            archive.unpack(rewritten(packed, lambda listing, odd=odd: listing.update(lock=odd)), tmp_path / "out")  # type: ignore[misc]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize(
    "odd",
    [
        {"machine": {}},
        {"machine": {"system": "debian 12", "architecture": "x86_64"}},
        {"machine": {"system": "debian 12", "architecture": "x86_64", "Python": "3.11", "more": "x"}},
        {"machine": []},
        *({kind: ""} for kind in (*HOSTS_LISTS, "requirements", "relies_on")),
        *({kind: {}} for kind in (*HOSTS_LISTS, "requirements", "relies_on")),
    ],
)
def test_an_incomplete_host_is_refused(packed: Path, tmp_path: Path, odd: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"its list is damaged.*nothing of it was used"):
        archive.unpack(rewritten(packed, lambda listing: listing["hosts"]["gpu1"].update(odd)), tmp_path / "out")


def test_other_files_are_not_bundles(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError, match="cannot be read as a bundle"):
        archive.unpack(tmp_path / "text", tmp_path / "out")
    with pytest.raises(UsageError, match="cannot be read as a bundle"):
        archive.unpack(tmp_path / "nowhere", tmp_path / "out")


def test_what_the_plan_needs_and_the_bundle_lacks_is_named(packed: Path, tmp_path: Path) -> None:
    bundle = archive.unpack(packed, tmp_path / "out")
    made = plan()
    other = replace(made.hosts["node1"], cmake=replace(made.hosts["node1"].cmake, version="9.9", package="cmake==9.9"))
    with pytest.raises(UsageError, match=r"does not hold cmake==9\.9"):
        bundle.check_contents(Plan({**made.hosts, "node1": other}))
    from_sources = replace(made.hosts["node1"], openmpi=SourceBuild("4.1.8", "openmpi-4.1.8.tar.bz2", "source", ()))
    with pytest.raises(UsageError, match="does not hold the sources of Open MPI"):
        bundle.check_contents(Plan({**made.hosts, "node1": from_sources}))
    with pytest.raises(UsageError, match="not made for new"):
        bundle.check_contents(Plan({"new": replace(other, name="new")}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "debian 13"}, "its system was .*, now it is debian 13"),
        ({"arch": "aarch64"}, "its architecture was x86_64, now it is aarch64"),
        ({"python": "3.13.5"}, r"its Python was 3\.\d+, now it is 3\.13"),
    ],
)
def test_a_host_that_has_changed_since_is_refused(packed: Path, tmp_path: Path, change: dict[str, str], message: str) -> None:
    bundle = archive.unpack(packed, tmp_path / "out")
    host = plan().hosts["node1"]
    if "python" in change:
        change = {"python": replace(host.python, version=change["python"])}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=message):
        bundle.check_contents(Plan({"node1": replace(host, **change)}))  # type: ignore[arg-type]


# --- wheels ---------------------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def gather_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Gathers from the folder ``links`` alone; returns the names of the files."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "links").mkdir()

    def call(platform: wheels.Platform, *pins: str, locked: Sequence[wheels.Locked] = (), to: str = "out") -> list[str]:
        indexes = wheels.Indexes(find_links=tmp_path / "links")
        found = wheels.gather(pins, platform, tmp_path / to, indexes, locked, say=lambda _line: None)
        assert sorted(path.name for path in (tmp_path / to).iterdir()) == sorted(each.file for each in found)
        return sorted(each.file for each in found)

    return call


def test_nccls_wheel_is_gathered_next_to_the_one_that_pytorch_pins(tmp_path: Path, gather_wheels: Callable[..., list[str]]) -> None:
    known = load_file(DATA / "lint-facts.json", OURS)
    host = resolve(known, Requirements(nccl_source="wheel"), {}).hosts["gpu1"]
    assert host.nccl is not None
    assert host.torch is not None
    pins = gather._pins(host, Options())
    assert pins["nccl"] == [host.nccl.package]
    assert host.torch.package in pins["venv"]
    assert host.nccl.package not in pins["venv"]
    wheel(tmp_path / "links", "pvtorch", "1.0", "pvnccl==2.0")
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "links", "pvnccl", version)
    platform = wheels.Platform("3.13", "x86_64", "2.31")
    assert gather_wheels(platform, "pvtorch==1.0") == ["pvnccl-2.0-py3-none-any.whl", "pvtorch-1.0-py3-none-any.whl"]
    assert gather_wheels(platform, "pvnccl==1.0", to="nccl") == ["pvnccl-1.0-py3-none-any.whl"]
    with pytest.raises(ProvisionError, match="pvnccl"):
        gather_wheels(platform, "pvtorch==1.0", "pvnccl==1.0", to="both")


def test_locked_packages_have_the_locks_versions_and_checksums(tmp_path: Path, gather_wheels: Callable[..., list[str]]) -> None:
    wheel(tmp_path / "links", "pvtop", "1.0", "pv-under>=1")
    for version in ("1.0", "1.5"):
        wheel(tmp_path / "links", "pv_under", version)
    platform = wheels.Platform("3.13", "x86_64", "2.31")
    sha256 = downloads.digest(tmp_path / "links/pv_under-1.0-py3-none-any.whl")
    locked = LockedFile(name="pv-under", version="1.0", url=None, sha256=sha256)
    assert gather_wheels(platform, "pvtop==1.0", locked=[locked]) == ["pv_under-1.0-py3-none-any.whl", "pvtop-1.0-py3-none-any.whl"]
    with pytest.raises(ProvisionError, match=rf"pv-under 1\.0 has checksum {sha256}, but provision\.lock says 0000"):
        gather_wheels(platform, "pvtop==1.0", locked=[locked.model_copy(update={"sha256": "0" * 64})], to="other")


def test_dependencies_are_those_of_the_other_machine(tmp_path: Path, gather_wheels: Callable[..., list[str]]) -> None:
    links = tmp_path / "links"
    wheel(links, "pvtop", "1.0", "pvnew; python_version >= '3.13'", "pvold<2; python_version < '3.13'", "pvwin; sys_platform == 'win32'")
    wheel(links, "pvnew", "1.0", "pvold>=1")
    for version in ("1.0", "1.5", "2.0"):
        wheel(links, "pvold", version)
    old = gather_wheels(wheels.Platform("3.9", "aarch64", "2.31"), "pvtop==1.0", to="old")
    new = gather_wheels(wheels.Platform("3.13", "aarch64", "2.31"), "pvtop==1.0", to="new")
    assert old == ["pvold-1.5-py3-none-any.whl", "pvtop-1.0-py3-none-any.whl"]
    assert new == ["pvnew-1.0-py3-none-any.whl", "pvold-2.0-py3-none-any.whl", "pvtop-1.0-py3-none-any.whl"]


def test_pytorchs_index_is_not_needed_where_a_folder_has_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    wheel(tmp_path / "links", "torch", "1.0+cpu", tag="cp312-cp312-manylinux_2_28_x86_64")
    folders = ["/nonexistent", f"file://{tmp_path}/links"]
    asked = {
        (pin, glibc): wheels._needs_torch_index([pin], wheels.Platform("3.12", "x86_64", glibc), folders)
        for pin in ("torch==1.0+cpu", "torch==1.0+cu126", "numpy==2.0")
        for glibc in ("2.31", "2.27")
    }
    assert [key for key, needed in asked.items() if not needed] == [
        ("torch==1.0+cpu", "2.31"),
        ("numpy==2.0", "2.31"),
        ("numpy==2.0", "2.27"),
    ]


def test_wheels_are_the_best_for_the_other_machines_processor_and_c_library(
    tmp_path: Path, gather_wheels: Callable[..., list[str]]
) -> None:
    for tag in (
        *("py3-none-any", "cp312-cp312-manylinux_2_17_x86_64", "cp312-cp312-manylinux_2_17_aarch64"),
        *("cp312-cp312-manylinux_2_28_aarch64", "cp312-cp312-manylinux_2_38_aarch64", "cp313-cp313-manylinux_2_17_aarch64"),
    ):
        wheel(tmp_path / "links", "pvbin", "1.0", tag=tag)
    for glibc, found in (("2.34", "cp312-cp312-manylinux_2_28_aarch64"), ("2.26", "cp312-cp312-manylinux_2_17_aarch64")):
        assert gather_wheels(wheels.Platform("3.12", "aarch64", glibc), "pvbin==1.0", to=glibc) == [f"pvbin-1.0-{found}.whl"]
    with pytest.raises(ProvisionError, match=r"no wheels are made for glibc 2\.12"):
        gather_wheels(wheels.Platform("3.12", "aarch64", "2.12"), "pvbin==1.0")


def test_the_login_of_an_index_fetches_its_wheels_and_is_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "pvsecret", "1.0")
    login = "Basic " + base64.b64encode(b"me:s3cr@t").decode()

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'<a href="/files/pvsecret-1.0-py3-none-any.whl">pvsecret-1.0-py3-none-any.whl</a>'
            if self.path.startswith("/files/"):
                body = (tmp_path / "pvsecret-1.0-py3-none-any.whl").read_bytes()
            self.send_response(200 if self.headers.get("Authorization") == login else 401)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s3cr%40t@127.0.0.1:{server.server_address[1]}/simple")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
        printed: list[str] = []
        platform = wheels.Platform("3.12", "x86_64", "2.31")
        (found,) = wheels.gather(["pvsecret==1.0"], platform, tmp_path / "out", wheels.Indexes(), say=printed.append)
        with pytest.raises(ProvisionError, match=r"pvsecret==2\.0") as refused:
            wheels.gather(["pvsecret==2.0"], platform, tmp_path / "out", wheels.Indexes(), say=printed.append)
        server.shutdown()
    assert downloads.digest(tmp_path / "out" / found.file) == downloads.digest(tmp_path / found.file)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and b"s3cr" in path.read_bytes()]
    assert (kept, "s3cr" in f"{printed} {refused.value} {found}") == ([], False)


def test_missing_system_packages_are_named(packed: Path, tmp_path: Path) -> None:
    bundle = archive.unpack(packed, tmp_path / "out")
    made = plan()
    complete = {name: ["libc6", *host.packages] for name, host in made.hosts.items()}
    bundle.check_packages(made, complete)
    with pytest.raises(UsageError, match=r"lacks packages that are not installed there: g\+\+, libc6") as refused:
        bundle.check_packages(made, {**complete, "node1": [name for name in complete["node1"] if name not in ("g++", "libc6")]})
    assert refused.value.where == "node1"
    assert "make a new one where there is a network" in str(refused.value.hint)
    held = bundle.hosts["node1"].model_copy(update={"debs": ("g++_4%3a12.2.0-3_amd64.deb",)})
    holding = replace(bundle, hosts={**bundle.hosts, "node1": held})
    holding.check_packages(made, {**complete, "node1": [name for name in complete["node1"] if name != "g++"]})
