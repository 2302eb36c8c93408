"""What the controller gathers for the hosts: checked before anything runs, shared where hosts are alike, kept for the next time."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_catalogue import change

from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.install import artifacts, builds, engine_builds, from_source, wheels
from provision.install.artifacts import UserFiles
from provision.plan.model import Plan, Repository, SystemPackages
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.survey import Facts

TARBALL = b"sources"
REQUIREMENTS = Requirements(
    torch=False,
    openmpi="source",
    openmpi_tarball="openmpi-4.1.6.tar.gz",
    openmpi_tarball_sha256=hashlib.sha256(TARBALL).hexdigest(),
    nccl_source="wheel",
)


def host(system: str, version: str, arch: str = "x86_64", *, gpu: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"os": {"id": system, "version": version}, "arch": arch}
    if gpu:
        found["driver"] = {"version": "550.54.15", "cuda": "12.4"}
        found["gpus"] = [{"name": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0"}]
    return found


def planned(requirements: Requirements = REQUIREMENTS, **hosts: dict[str, Any]) -> Plan:
    network = {
        "network": {
            "interfaces": [{"name": "eth0", "addresses": ["192.0.2.1/24"], "up": True}],
            "ssh_connection": {"interface": "eth0"},
        }
    }
    plan = resolve({name: Facts.model_validate({**network, **known}) for name, known in hosts.items()}, requirements, {})
    assert not plan.conflicts, plan.conflicts
    return plan


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tarball(tmp_path: Path) -> Path:
    path = tmp_path / "openmpi-4.1.6.tar.gz"
    path.write_bytes(TARBALL)
    return path


def gather(plan: Plan, folder: Path, tarball: Path | None = None, *, fetch: bool = True, bundled: Path | None = None) -> dict[str, Any]:
    return artifacts.gather(plan, folder, UserFiles(openmpi_tarball=tarball), OURS, fetch=fetch, bundled=bundled)


def openmpi(found: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = found["provision_from_source"]["openmpi"]
    return part


def kept_of(found: dict[str, Any], name: str) -> str:
    """The checksum of the kept build for a host; empty where it must be built."""
    checksum: str = found["builds"][found["build_of"][name]]["sha256"]
    return checksum


def test_hosts_share_a_build_by_distribution_and_architecture(tmp_path: Path, tarball: Path) -> None:
    plan = planned(a=host("debian", "12"), b=host("ubuntu", "22.04"), c=host("debian", "12", gpu=True), d=host("debian", "12", "aarch64"))
    found = openmpi(gather(plan, tmp_path / "supplies", tarball))
    together = {name: found["builds"][key]["hosts"] for name, key in found["build_of"].items()}
    assert together == {"a": ["a", "c"], "b": ["b"], "c": ["a", "c"], "d": ["d"]}
    assert len(found["builds"]) == 3


def test_a_build_is_named_by_everything_it_depends_on() -> None:
    plan = planned(a=host("debian", "12")).hosts["a"]
    others = [
        replace(plan, system="debian 13"),
        replace(plan, arch="aarch64"),
        replace(plan, prefix="/srv/provision"),
        replace(plan, openmpi=replace(plan.openmpi, options=(*plan.openmpi.options, "--with-cuda"))),
        replace(plan, openmpi=replace(plan.openmpi, sha256="0" * 64)),
    ]
    keys = [from_source.OPENMPI.key(each, OURS) for each in (plan, *others)]
    assert len(set(keys)) == len(keys)
    assert from_source.OPENMPI.key(replace(plan, name="b", hostname="b", slots=7), OURS) == keys[0]


def test_a_build_is_kept_and_next_time_no_tarball_is_needed(tmp_path: Path, tarball: Path) -> None:
    plan = planned(a=host("debian", "12"))
    first = openmpi(gather(plan, tmp_path / "one", tarball))
    assert Path(first["tarball"]).read_bytes() == TARBALL
    key = first["build_of"]["a"]
    (Path(first["folder"]) / f"{key}.tar.gz").write_bytes(b"built")
    (Path(first["folder"]) / f"{key}.tar.gz.sha256").write_text(hashlib.sha256(b"built").hexdigest() + "\n")
    builds.adopt(tmp_path / "one")

    second = openmpi(gather(plan, tmp_path / "two"))
    assert second["builds"][key]["sha256"] == hashlib.sha256(b"built").hexdigest()
    assert (Path(second["folder"]) / f"{key}.tar.gz").read_bytes() == b"built"
    assert second["tarball"] == ""


@pytest.mark.parametrize("note", [None, "0" * 64])
def test_a_build_that_was_cut_off_while_it_was_handed_over_is_not_kept(note: str | None, tmp_path: Path, tarball: Path) -> None:
    found = openmpi(gather(planned(a=host("debian", "12")), tmp_path / "one", tarball))
    archive = Path(found["folder"]) / f"{found['build_of']['a']}.tar.gz"
    archive.write_bytes(b"half")
    if note:
        archive.with_name(archive.name + ".sha256").write_text(note)
    builds.adopt(tmp_path / "one")
    again = openmpi(gather(planned(a=host("debian", "12")), tmp_path / "two", tarball))
    assert kept_of(again, "a") == ""


def test_a_build_that_was_damaged_in_the_cache_is_made_anew(tmp_path: Path, tarball: Path, cache: Path) -> None:
    test_a_build_is_kept_and_next_time_no_tarball_is_needed(tmp_path, tarball)
    next((cache / "openmpi").glob("*.tar.gz")).write_bytes(b"rotten")
    again = openmpi(gather(planned(a=host("debian", "12")), tmp_path / "three", tarball))
    assert kept_of(again, "a") == ""
    assert again["tarball"]


def test_what_a_bundle_carries_is_taken_where_there_is_no_network(tmp_path: Path, tarball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(a=host("debian", "12"), b=host("ubuntu", "22.04"))
    first = openmpi(gather(plan, tmp_path / "one", tarball))
    key = first["build_of"]["a"]
    (Path(first["folder"]) / f"{key}.tar.gz").write_bytes(b"built")
    (Path(first["folder"]) / f"{key}.tar.gz.sha256").write_text(hashlib.sha256(b"built").hexdigest() + "\n")
    builds.adopt(tmp_path / "one")
    carried = artifacts.carry(plan, tmp_path / "carried", UserFiles(openmpi_tarball=tarball), OURS)
    assert carried == {"openmpi_tarball": "openmpi/openmpi-4.1.6.tar.gz"}

    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "another cache"))
    tarball = tmp_path / "carried" / carried["openmpi_tarball"]
    found = openmpi(gather(plan, tmp_path / "two", tarball, bundled=tmp_path / "carried"))
    assert {name: bool(kept_of(found, name)) for name in ("a", "b")} == {"a": True, "b": False}
    assert Path(found["tarball"]).read_bytes() == TARBALL
    assert (Path(found["folder"]) / f"{key}.tar.gz").read_bytes() == b"built"
    builds.adopt(tmp_path / "two")
    assert kept_of(openmpi(gather(plan, tmp_path / "three", tarball)), "a") == "", "other hosts do not get what a bundle brings"


def test_builds_of_the_engine_and_uv_are_taken_from_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Requirements(torch=False), a=host("debian", "12"), b=host("debian", "13"))
    key = engine_builds.key_of(plan.hosts["a"], OURS)
    builds.keep(builds.ENGINE, key, b"built")
    assert artifacts.carry(plan, tmp_path / "carried", UserFiles(), OURS) == {}
    known = OURS.python_packages().uv
    name = f"uv-{known.version}-py3-none-manylinux_2_17_x86_64.whl"
    (tmp_path / "carried/uv").mkdir()
    (tmp_path / "carried/uv" / name).write_bytes(b"uv")

    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "another cache"))
    assert builds.cached(builds.ENGINE, key) is None
    assert builds.cached(builds.ENGINE, key, tmp_path / "carried") == hashlib.sha256(b"built").hexdigest()
    monkeypatch.setattr(wheels, "gather", None)  # no index is asked
    monkeypatch.setitem(known.sha256, "x86_64", hashlib.sha256(b"uv").hexdigest())
    assert artifacts.uv_wheel("x86_64", None, OURS, print, tmp_path / "carried").read_bytes() == b"uv"


def with_gpu(cuda: str, capability: str = "8.0", toolkit: str | None = None) -> dict[str, Any]:
    found = host("debian", "12", gpu=True)
    found["driver"] = {"version": "550.54.15", "cuda": cuda}
    found["gpus"] = [{"name": "GPU", "compute_capability": capability}]
    toolkits = [{"path": "/usr/local/cuda", "version": toolkit, "nvcc": True}] if toolkit else []
    return {**found, "cuda": {"toolkits": toolkits, "nvcc": None}}


NCCL = Requirements(
    torch=False,
    nccl_source="source",
    nccl_tarball="mine.tar.gz",
    nccl_tarball_version="2.22.3",
    nccl_tarball_sha256=hashlib.sha256(TARBALL).hexdigest(),
)


@pytest.fixture
def nccl_tarball(tmp_path: Path) -> Path:
    path = tmp_path / "mine.tar.gz"
    path.write_bytes(TARBALL)
    return path


def nccl(plan: Plan, folder: Path, tarball: Path | None = None, *, bundled: Path | None = None) -> dict[str, Any]:
    found = artifacts.gather(plan, folder, UserFiles(nccl_tarball=tarball), OURS, fetch=True, bundled=bundled)
    part: dict[str, Any] = found["provision_from_source"]["nccl"]
    return part


def test_nccl_is_built_once_per_cuda_by_hosts_with_a_compiler(tmp_path: Path, nccl_tarball: Path) -> None:
    plan = planned(
        NCCL,
        a=with_gpu("12.4"),
        b=with_gpu("12.6", toolkit="12.4"),
        c=with_gpu("12.4", "9.0", toolkit="12.4"),
        d=with_gpu("12.2", toolkit="12.2"),
        cpu=host("debian", "12"),
    )
    found = nccl(plan, tmp_path / "supplies", nccl_tarball)
    together = {name: found["builds"][key]["hosts"] for name, key in found["build_of"].items()}
    assert together == {"a": ["a", "b", "c"], "b": ["a", "b", "c"], "c": ["a", "b", "c"], "d": ["d"]}
    assert {tuple(build["builders"]) for build in found["builds"].values()} == {("b", "c"), ("d",)}
    assert found["homes"]["a"] == "/opt/provision/nccl-built"
    assert (found["make"], found["taken"]) == (["src.lib"], ["include", "lib"])
    assert found["words"] == {name: ["CUDA_HOME=/usr/local/cuda"] for name in ("b", "c", "d")}
    assert Path(found["tarball"]).read_bytes() == TARBALL


def test_a_build_of_nccl_is_named_by_its_cuda_and_gpus_too(nccl_tarball: Path) -> None:
    plans = [
        planned(NCCL, a=with_gpu(*each))
        for each in (("12.4", "8.0", "12.4"), ("12.4", "8.0", "12.2"), ("12.4", "9.0", "12.4"), ("12.6", "8.0", "12.4"))
    ]
    keys = [from_source.NCCL.key(plan.hosts["a"], OURS) for plan in plans]
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[0]  # a newer driver alone changes nothing
    without_root = replace(plans[0].hosts["a"], root=False)
    assert from_source.NCCL.key(without_root, OURS) not in keys


def test_a_build_of_nccl_is_kept_and_travels_in_a_bundle(tmp_path: Path, nccl_tarball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(NCCL, a=with_gpu("12.4", toolkit="12.4"))
    first = nccl(plan, tmp_path / "one", nccl_tarball)
    key = first["build_of"]["a"]
    (Path(first["folder"]) / f"{key}.tar.gz").write_bytes(b"built")
    (Path(first["folder"]) / f"{key}.tar.gz.sha256").write_text(hashlib.sha256(b"built").hexdigest() + "\n")
    builds.adopt(tmp_path / "one")
    assert kept_of(nccl(plan, tmp_path / "two"), "a") == hashlib.sha256(b"built").hexdigest()  # and no tarball is needed
    carried = artifacts.carry(plan, tmp_path / "carried", UserFiles(nccl_tarball=nccl_tarball), OURS)
    assert carried == {"nccl_tarball": "nccl/mine.tar.gz"}
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "another cache"))
    assert kept_of(nccl(plan, tmp_path / "three", bundled=tmp_path / "carried"), "a") == hashlib.sha256(b"built").hexdigest()


def test_sources_of_nccl_that_cannot_be_had_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "nccl", {"tarball": {"url": "http://127.0.0.1:1/v{version}-1.tar.gz"}})
    plan = planned(Requirements(torch=False, nccl_source="source", nccl_version="2.27.5"), a=with_gpu("12.4", toolkit="12.4"))
    with pytest.raises(ProvisionError, match=r"cannot download NCCL 2\.27\.5") as error:
        nccl(plan, tmp_path / "one")
    assert "--nccl FILE, or take a prebuilt one" in str(error.value)


def test_a_local_repository_package_is_carried_where_a_host_needs_it(tmp_path: Path) -> None:
    package = tmp_path / "nccl-local-repo-debian12-2.21.5-cuda12.4_1.0-1_amd64.deb"
    package.write_bytes(b"packages")
    requirements = Requirements(
        torch=False, nccl_source="local_repository", nccl_local=package.name, nccl_local_sha256=hashlib.sha256(b"packages").hexdigest()
    )
    needed = planned(requirements, a=host("debian", "12", gpu=True))
    carried = artifacts.carry(needed, tmp_path / "one", UserFiles(nccl_local=package), OURS)
    assert (tmp_path / "one" / carried["nccl_local"]).read_bytes() == b"packages"
    without = planned(requirements, a=host("debian", "12"))
    assert artifacts.carry(without, tmp_path / "two", UserFiles(nccl_local=package), OURS) == {}


def test_another_tarball_than_the_planned_one_is_refused(tmp_path: Path, tarball: Path) -> None:
    tarball.write_bytes(b"something else")
    with pytest.raises(UsageError, match=r"it is not the tarball of Open MPI 4\.1\.6 that was planned with"):
        gather(planned(a=host("debian", "12")), tmp_path / "one", tarball)


def test_a_dry_run_needs_no_files(tmp_path: Path) -> None:
    found = gather(planned(a=host("debian", "12")), tmp_path / "one", None, fetch=False)
    assert openmpi(found)["tarball"] == ""
    assert found["provision_openmpi_homes"] == {"a": "/opt/provision/openmpi"}


RPM_KEY = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: GnuPG v2.0.22 (GNU/Linux)\n\nmQ==\n-----END PGP PUBLIC KEY BLOCK-----\n"


def with_repository(**changes: Any) -> Plan:
    plan = planned(Requirements(torch=False, nccl_source="wheel"), a=host("debian", "12", gpu=True))
    values = {"kind": "rpm", "name": "cuda-rhel9-x86_64", "url": "u", "entry": "e", "key_url": "http://127.0.0.1:1/key", "keyring": "/k"}
    a = plan.hosts["a"]
    assert a.nccl is not None
    return replace(
        plan,
        hosts={"a": replace(a, nccl=SystemPackages("2.21.5", "libnccl", "repository", (), repository=Repository(**{**values, **changes})))},
    )


def test_the_key_of_an_rpm_repository_counts_without_its_version_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = RPM_KEY.replace(b"Version: GnuPG v2.0.22 (GNU/Linux)\n", b"")
    monkeypatch.setattr(artifacts.downloads, "read", lambda _url: RPM_KEY)
    digest = hashlib.sha256(bare).hexdigest()
    keys = gather(with_repository(key_sha256=digest), tmp_path / "one")["provision_repository_keys"]
    assert Path(keys[digest]).read_bytes() == bare
    with pytest.raises(ProvisionError, match="is not the expected one"):
        gather(with_repository(key_sha256="0" * 64), tmp_path / "two")


def test_a_key_that_is_unavailable_and_one_without_a_checksum_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="cannot download"):
        gather(with_repository(key_sha256="0" * 64), tmp_path / "one")
    with pytest.raises(ProvisionError, match="cannot download"):
        gather(with_repository(kind="apt", key_sha256="0" * 64), tmp_path / "two")
    with pytest.raises(ProvisionError, match="checksum of the repository's key is not known"):
        gather(with_repository(key_sha256=None), tmp_path / "three")


def test_a_tarball_that_is_given_is_built_although_the_distribution_has_the_same_version() -> None:
    requirements = replace(REQUIREMENTS, openmpi="auto", openmpi_tarball="openmpi-4.1.4.tar.gz")
    assert planned(requirements, a=host("debian", "12")).hosts["a"].openmpi.source == "source"
