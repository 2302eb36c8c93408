"""Wheels of the engine that hosts without a compiler take."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rollouts import manifest_with

from provision.base import engine_source
from provision.base.errors import ProvisionError
from provision.catalog import OURS
from provision.install import artifacts, builds, engine_builds
from provision.install.artifacts import UserFiles
from provision.plan.model import Plan
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.survey import Facts

ENGINE = engine_source.pack()
REQUIREMENTS = Requirements(torch=False, engine_version=ENGINE.version, engine_sha256=ENGINE.sha256)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def host(system: str, version: str, libc: str | None, arch: str = "x86_64", **more: Any) -> Facts:
    interfaces = [{"name": "eth0", "addresses": ["192.0.2.1/24"], "up": True}]
    network = {"interfaces": interfaces, "ssh_connection": {"interface": "eth0"}}
    return Facts.model_validate({"os": {"id": system, "version": version, "libc": libc}, "arch": arch, "network": network, **more})


def wheel(folder: Path, platform: str, *, version: str = ENGINE.version, changed: str = "") -> Path:
    """A wheel with the engine's Python modules, as far as this is about it."""
    path = folder / f"collective_core-{version}-py3-none-{platform}.whl"
    with tarfile.open(fileobj=io.BytesIO(ENGINE.content)) as sources, zipfile.ZipFile(path, "w") as made:
        for member in sources:
            if "/src/" in member.name and (file := sources.extractfile(member)):
                name = member.name.partition("/src/")[2]
                made.writestr(name, file.read() + (b"# other\n" if name == changed else b""))
        made.writestr("collective_core/lib/libcollective_core.so", b"\x7fELF")
    return path


def planned(known: dict[str, Facts]) -> Plan:
    plan = resolve(known, REQUIREMENTS, {})
    assert not plan.conflicts, plan.conflicts
    return plan


def test_hosts_take_the_wheel_that_their_glibc_and_architecture_run(wheels: Path, tmp_path: Path) -> None:
    wheel(wheels, "manylinux_2_34_x86_64.manylinux_2_35_x86_64")
    wheel(wheels, "manylinux_2_36_aarch64")
    (wheels / "collective_core-strange.whl").write_text("")
    known = {
        "debian": host("debian", "12", "2.36"),
        "ubuntu": host("ubuntu", "22.04", "2.35"),
        "old": host("ubuntu", "20.04", "2.31"),
        "arm": host("ubuntu", "22.04", "2.35", "aarch64"),
        "unknown": host("ubuntu", "24.04", None),
    }
    plan = planned(known)
    engine_builds.adopt_wheels(plan, known, ENGINE, wheels, OURS)
    variables = artifacts.gather(plan, tmp_path / "run", UserFiles(), OURS, fetch=False)["provision_engine_builds"]
    taken = {name: variables["builds"][build]["sha256"] for name, build in variables["build_of"].items()}
    assert {name for name, sha256 in taken.items() if sha256} == {"debian", "ubuntu"}
    assert taken["debian"] == taken["ubuntu"]
    known_for = engine_builds.known_for(ENGINE, None, OURS)
    assert [name for name, found in known.items() if known_for(found)] == ["debian", "ubuntu"], "kept for later runs"


def test_a_wheel_of_another_version_is_left(wheels: Path) -> None:
    wheel(wheels, "manylinux_2_28_x86_64", version="99.0.0")
    assert not engine_builds.known_for(ENGINE, wheels, OURS)(host("debian", "12", "2.36"))


def test_a_wheel_of_other_sources_is_refused(wheels: Path) -> None:
    known = {"a": host("debian", "12", "2.36")}
    path = wheel(wheels, "manylinux_2_28_x86_64", changed="collective_core/arrays.py")
    with pytest.raises(ProvisionError, match="was not built from the engine of this toolkit") as refused:
        engine_builds.adopt_wheels(planned(known), known, ENGINE, wheels, OURS)
    assert refused.value.where == str(path)
    whole = path.read_bytes()
    listed = whole.index(b"PK\1\2")  # sizes of the first member
    at = whole.index(b".py") + 200  # within the first module
    for damaged in (
        b"PK half",
        whole[:at] + b"?" * 20 + whole[at + 20 :],
        whole.replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"),
        whole[: listed + 20] + b"\xff\xff\xff\0" * 2 + whole[listed + 28 :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ProvisionError, match="cannot be read"):
            engine_builds.adopt_wheels(planned(known), known, ENGINE, wheels, OURS)
    assert builds.cached(builds.ENGINE, engine_builds.key_of(planned(known).hosts["a"], OURS)) is None


def test_a_host_that_holds_the_engine_needs_nothing() -> None:
    manifest = manifest_with(engine={"sha256": ENGINE.sha256})
    assert engine_builds.known_for(ENGINE, None, OURS)(host("debian", "12", "2.36", installed={"manifest": manifest}))
    assert not engine_builds.known_for(ENGINE, None, OURS)(host("debian", "12", "2.36", installed={"manifest": {"host": "odd"}}))
