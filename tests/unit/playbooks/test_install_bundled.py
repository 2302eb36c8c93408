"""What of a bundle's packages is installed on a host that has moved on since: the role's script with the real dpkg and apt.

apt only simulates, and goes by the host's record of packages in a folder of the test's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from provision.base import resources

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt is on Debian and Ubuntu")

HAS = "Package: {0}\nStatus: install ok installed\nVersion: {1}\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: d\n\n"

Install = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def apt_log(tmp_path: Path) -> Path:
    """What apt says it would do."""
    return tmp_path / "apt_log"


@pytest.fixture
def install(tmp_path: Path, apt_log: Path) -> Install:
    """``install(there, *files)``: what the script prints on a host with these packages."""
    status = tmp_path / "dpkg/status"
    status.parent.mkdir()
    fake = tmp_path / "bin/apt-get"
    fake.parent.mkdir()
    simulate = f"{shutil.which('apt-get')} --simulate -o Dir::State::status={status}"
    fake.write_text(f"#!/bin/sh\n{simulate} \"$@\" 2>&1 | tee {apt_log}; ! grep -q '^E:' {apt_log}\n")
    fake.chmod(0o755)

    def call(there: Mapping[str, str], *files: Path) -> subprocess.CompletedProcess[str]:
        status.write_text("".join(HAS.format(name, version) for name, version in there.items()))
        script = resources.folder("playbooks") / "roles/packages/files/install_bundled.sh"
        own = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "DPKG_ADMINDIR": str(status.parent)}
        return subprocess.run(["sh", script, *files], env={**os.environ, **own}, capture_output=True, text=True, check=False)

    return call


@pytest.fixture
def deb(tmp_path: Path) -> Callable[..., Path]:
    def build(name: str, version: str, depends: str = "") -> Path:
        tree = tmp_path / f"{name}-{version}"
        (tree / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.org>\n"
        (tree / "DEBIAN/control").write_text(control + (f"Depends: {depends}\n" if depends else "") + "Description: d\n")
        path = tmp_path / f"{name}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--build", tree, path], check=True, capture_output=True)
        return path

    return build


def taken(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [Path(line).name for line in done.stdout.splitlines()]


def test_packages_in_the_same_or_a_newer_version_stay(install: Install, deb: Callable[..., Path], apt_log: Path) -> None:
    files = [deb("pvnew", "1.0"), deb("pvsame", "1.0"), deb("pvnewer", "1.9"), deb("pvolder", "1.10")]
    done = install({"pvsame": "1.0", "pvnewer": "1.10", "pvolder": "1.9"}, *files)
    assert taken(done) == ["pvnew_1.0_all.deb", "pvolder_1.10_all.deb"]
    assert {line.split()[1] for line in apt_log.read_text().splitlines() if line.startswith("Inst ")} == {"pvnew", "pvolder"}


def test_packages_that_do_not_fit_the_host_are_refused_as_a_whole(install: Install, deb: Callable[..., Path]) -> None:
    files = [deb("pvtop", "1.0", "pvunder (= 1.0)"), deb("pvunder", "1.0")]
    assert taken(install({}, *files)) == ["pvtop_1.0_all.deb", "pvunder_1.0_all.deb"]
    refused = install({"pvunder": "1.1"}, *files)
    assert refused.returncode == 1
    assert "do not fit what is installed here by now; make it again:\n" in refused.stderr
    assert "pvtop : Depends: pvunder (= 1.0)" in refused.stderr


def test_nothing_to_do_is_no_change(install: Install, deb: Callable[..., Path]) -> None:
    assert taken(install({"pvnew": "1.0"}, deb("pvnew", "1.0"))) == []
