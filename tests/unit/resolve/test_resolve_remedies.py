"""The resolver: remedies for conflicts work."""

from __future__ import annotations

import re

from invented_hosts import changed, gpu, host, plan_for, remedies

from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements


def test_a_host_that_is_the_only_one_cannot_be_left_out() -> None:
    alone = plan_for({"old": gpu("10.2", "7.0")})
    assert alone.conflicts
    assert not any("leave old out" in way for conflict in alone.conflicts for way in remedies(conflict))
    among = plan_for({"old": gpu("10.2", "7.0"), "new": gpu("12.4", address="10.0.0.2")})
    assert all("leave old out: --limit '!old'" in remedies(conflict) for conflict in among.conflicts)


def test_without_torch_is_no_remedy_where_nccl_has_a_conflict_too() -> None:
    made = plan_for({"old": gpu("10.2", "7.0")})
    assert {"no build of PyTorch", "no build of NCCL fi"} == {conflict.what[:19] for conflict in made.conflicts}
    assert not any("--torch none" in way for conflict in made.conflicts for way in remedies(conflict))


def test_an_offered_driver_is_new_enough_for_everything() -> None:
    made = plan_for({"old": gpu("10.2", "7.0")})
    ways = {way for conflict in made.conflicts for way in remedies(conflict) if way.startswith("update")}
    assert len(ways) == 1
    cuda = re.search(r"to ([\d.]+) or newer \(CUDA ([\d.]+)\)", ways.pop())
    assert cuda
    updated = changed(gpu(cuda[2], "7.0"), driver={"version": cuda[1], "cuda": cuda[2]})
    assert plan_for({"old": updated}).hosts


def test_all_hosts_with_a_conflict_are_left_out_together() -> None:
    hosts = {"a": gpu("10.2", "7.0"), "b": gpu("10.2", "6.1", "10.0.0.2"), "new": gpu("12.4", address="10.0.0.3")}
    made = plan_for(hosts)
    assert all("leave a and b out: --limit '!a,!b'" in remedies(conflict) for conflict in made.conflicts)


def test_allowing_a_bad_release_is_offered_with_the_file_that_it_needs() -> None:
    made = plan_for({"a": host()}, Requirements(openmpi_version="4.1.7"))  # no checksum of its tarball is known
    assert remedies(made.conflicts[0]) == (
        "leave --openmpi 4.1.7 out: the plan takes 4.1.8",
        "--allow-bad with --openmpi openmpi-4.1.7.tar.gz, your own file",
    )


def test_hosts_with_an_odd_prefix_are_left_out_together() -> None:
    hosts = {name: host(f"10.0.0.{number}") for number, name in enumerate("abcde", 1)}
    made = plan_for(hosts, a=HostRequirements(prefix="/srv/p"), b=HostRequirements(prefix="/srv/q"))
    assert remedies(made.conflicts[0]) == (
        "give all hosts one prefix: below [all:vars] in the inventory, provision_prefix=/opt/provision",
        "leave a and b out: --limit '!a,!b'",
    )
