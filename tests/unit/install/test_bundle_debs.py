"""Packages for another machine, brought by the real apt out of archives in folders, by that machine's own lists."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from provision.base import aptsources
from provision.base.errors import ProvisionError
from provision.install.bundle import debs

pytestmark = pytest.mark.skipif(not Path("/usr/bin/apt-get").exists(), reason="apt is on Debian and Ubuntu")

BOOKWORM = debs.Release("debian", "bookworm")
LOCAL = "deb [trusted=yes] file:/var/nccl-local-repo-debian12-2.21.5-cuda12.4 /\n"  # a folder of the host's, not of this machine's
UNREACHABLE = "deb [trusted=yes] http://127.0.0.2:9/vendor anything main\n"
NAMESAKE = "deb [trusted=yes] http://127.0.0.2:9/docker bookworm stable\n"  # a suite of the distribution's name, but not its parts
INSTALLED = (
    "Package: {}\nStatus: install ok installed\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: stand-in\n"
)
DISC = "deb cdrom:[Debian GNU/Linux 12.0.0 _Bookworm_]/ bookworm main\n"


def archive(folder: Path, name: str, version: str, suite: str = "bookworm", needs: str = "") -> None:
    """An archive with one package more."""
    tree = folder.parent / f"{name}-{version}"
    (tree / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: stand-in\n"
    control += f"Depends: {needs}\n" if needs else ""
    (tree / "DEBIAN/control").write_text(control)
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    deb = folder / f"pool/{name}_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--build", tree, deb], check=True, capture_output=True)
    content = deb.read_bytes()
    listed = f"{control}Filename: pool/{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n".encode()
    packages = folder / f"dists/{suite}/main/binary-amd64/Packages"
    packages.parent.mkdir(parents=True, exist_ok=True)
    listed = (packages.read_bytes() + b"\n" if packages.exists() else b"") + listed
    packages.write_bytes(listed)
    sums = f" {hashlib.sha256(listed).hexdigest()} {len(listed)} main/binary-amd64/Packages"
    release = f"Codename: {suite}\nArchitectures: amd64\nComponents: main\nDate: Sat, 01 Nov 2025 00:00:00 UTC\nSHA256:\n{sums}\n"
    (folder / f"dists/{suite}/Release").write_text(release)


def apt_files(*installed: str, **lists: str) -> str:
    """What a host says of itself that has these packages in version 1.0, with these lists."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        files = {
            "var/lib/dpkg/status": "\n".join(map(INSTALLED.format, installed)),
            **{f"etc/apt/sources.list.d/{name}.list": text for name, text in lists.items()},
        }
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return base64.b64encode(packed.getvalue()).decode()


@pytest.fixture
def download(tmp_path: Path) -> Callable[..., list[str]]:
    def call(package: str, apt_files: str, release: debs.Release = BOOKWORM) -> list[str]:
        return debs.Apt("amd64", apt_files, tmp_path / "work", release).download([package], tmp_path / "out")

    return call


@pytest.fixture
def own(tmp_path: Path) -> str:
    archive(tmp_path / "debian", "pvdemo", "1.0")
    return f"deb [trusted=yes] file://{tmp_path}/debian bookworm main\n"


def test_repositories_that_only_the_host_reaches_are_left_out(download: Callable[..., list[str]], own: str, tmp_path: Path) -> None:
    assert download("pvdemo", apt_files(own=own, local=LOCAL, vendor=UNREACHABLE, namesake=NAMESAKE, disc=DISC)) == ["pvdemo_1.0_all.deb"]
    assert (tmp_path / "out/pvdemo_1.0_all.deb").is_file()


def test_packages_of_an_unreachable_repository_are_named_with_it(download: Callable[..., list[str]], own: str) -> None:
    with pytest.raises(ProvisionError, match=r"Unable to locate package pvother\n.*nccl-local-repo-debian12"):
        download("pvother", apt_files(own=own, local=LOCAL))


def test_the_distribution_must_answer(download: Callable[..., list[str]], own: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "debian/dists")
    archive(tmp_path / "vendor", "pvdemo", "0.9", suite="anything")  # which has it, too, but is older
    vendor = f"deb [trusted=yes] file:{tmp_path}/vendor anything main\n"
    with pytest.raises(ProvisionError, match=rf"package lists: .*{tmp_path}/debian/dists/bookworm/") as refused:
        download("pvdemo", apt_files(own=own, vendor=vendor))
    assert "--apt-mirror" in str(refused.value.hint)


def test_a_mirror_replaces_a_distribution_that_only_the_host_reaches(download: Callable[..., list[str]], own: str, tmp_path: Path) -> None:
    mirror = aptsources.Mirror(f"file:{tmp_path}/debian", ("main",))
    theirs = "deb [trusted=yes] file:/mnt/debian bookworm main\n"
    assert download("pvdemo", apt_files(own=theirs), debs.Release("debian", "bookworm", mirror)) == ["pvdemo_1.0_all.deb"]


def test_a_list_of_mirrors_is_read_from_the_hosts_files(download: Callable[..., list[str]], own: str, tmp_path: Path) -> None:
    cloud = "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm\nComponents: main\n"
    root = tmp_path / "host"
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    (root / "etc/apt/sources.list.d/debian.sources").write_text(cloud)
    debs.adapt_lists(root, BOOKWORM)
    laid = (root / "etc/apt/sources.list.d/debian.sources").read_text()
    assert f"URIs: mirror+file://{root}/etc/apt/mirrors/debian.list\n" in laid


def test_packages_of_an_earlier_run_are_downloaded_and_installed_dependencies_named(own: str, tmp_path: Path) -> None:
    archive(tmp_path / "debian", "pvlib", "1.0")
    archive(tmp_path / "debian", "pvapp", "1.0", needs="pvlib")
    apt = debs.Apt("amd64", apt_files("pvapp", "pvlib", "pvdemo", own=own), tmp_path / "work", BOOKWORM)
    assert apt.download(["pvapp"], tmp_path / "out") == ["pvapp_1.0_all.deb"]
    assert apt.installed_dependencies(["pvapp"]) == ["pvapp", "pvlib"]


def test_a_host_cannot_change_another_hosts_packages(tmp_path: Path) -> None:
    answers, names = [], []
    for number in (1, 2):
        archive(tmp_path / f"{number}/debian", "pvdemo", "1.0")
        if number == 2:  # a host that believes somebody else for the same package
            deb = tmp_path / "2/debian/pool/pvdemo_1.0_all.deb"
            subprocess.run(["dpkg-deb", "-Zgzip", "--build", tmp_path / "2/pvdemo-1.0", deb], check=True, capture_output=True)
            packages = tmp_path / "2/debian/dists/bookworm/main/binary-amd64/Packages"
            old, new = packages.read_bytes(), deb.read_bytes()
            fields = f"Size: {len(new)}\nSHA256: {hashlib.sha256(new).hexdigest()}\n"
            listed = (old.decode().partition("Size: ")[0] + fields).encode()
            packages.write_bytes(listed)
            release = tmp_path / "2/debian/dists/bookworm/Release"
            sums = f" {hashlib.sha256(listed).hexdigest()} {len(listed)} main/binary-amd64/Packages\n"
            release.write_text(release.read_text().partition("SHA256:\n")[0] + "SHA256:\n" + sums)
        answers.append(apt_files(own=f"deb [trusted=yes] file://{tmp_path}/{number}/debian bookworm main\n"))
    names += debs.Apt("amd64", answers[0], tmp_path / "one", BOOKWORM).download(["pvdemo"], tmp_path / "out")
    first = (tmp_path / "out" / names[0]).read_bytes()
    with pytest.raises(ProvisionError, match=r"another pvdemo_1\.0_all\.deb than those of a host before it"):
        debs.Apt("amd64", answers[1], tmp_path / "two", BOOKWORM).download(["pvdemo"], tmp_path / "out")
    assert (tmp_path / "out" / names[0]).read_bytes() == first


def test_a_hosts_answer_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, kind in (("etc/apt/x", tarfile.SYMTYPE), ("etc/apt/sources.list.d/../../../../evil", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path)
            tar.addfile(member)
    with pytest.raises(ProvisionError, match="cannot be read"):
        debs.Apt("amd64", base64.b64encode(packed.getvalue()).decode(), tmp_path / "work", BOOKWORM)
    assert not (tmp_path / "work/host/etc/apt/x").exists()
    assert not (tmp_path / "evil").exists()


ONE_LINE, STANZA = "deb [trusted=yes] {}://u:pw@127.0.0.2/x anything main\n", "Types: deb\nURIs: {}://u:pw@127.0.0.2/x\nSuites: a\n"


@pytest.mark.parametrize("form", [ONE_LINE, STANZA])
@pytest.mark.parametrize("scheme", ["ssh", "rsh", "ftp", "mirror", "mirror+http", "SSH", "tor+https"])
def test_a_scheme_with_which_a_host_could_run_programs_here_is_refused(scheme: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "etc/apt/sources.list.d/theirs").write_text(form.format(scheme))
    with pytest.raises(ProvisionError, match=rf"invalid address in its package lists: {re.escape(scheme)}://127") as refused:
        debs.adapt_lists(tmp_path, BOOKWORM)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("entry", ["ssh://127.0.0.2/x", "mirror+file:MIRRORS"])
def test_no_program_runs_whatever_a_list_says(entry: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a list of mirrors says it, or apt reads a list otherwise than we do, and this machine's settings allow it."""
    (tmp_path / "mirrors").write_text("ssh://127.0.0.2/x\n")
    (tmp_path / "apt.conf").write_text('Dir::Bin::Methods::ssh "ssh";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    monkeypatch.setattr(aptsources, "parse_list", lambda _: [])
    theirs = f"deb [trusted=yes] {entry.replace('MIRRORS', str(tmp_path / 'mirrors'))} anything main\n"
    apt = debs.Apt("amd64", apt_files(own=own, theirs=theirs), tmp_path / "work", BOOKWORM)
    with pytest.raises(ProvisionError):
        apt.download(["pvother"], tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_an_answer_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debs, "_LARGEST_FILES", 1000)
    with pytest.raises(ProvisionError, match="cannot be read: it has more than 0 MB"):
        debs.Apt("amd64", apt_files(own="#" * 2000), tmp_path / "work", BOOKWORM)
