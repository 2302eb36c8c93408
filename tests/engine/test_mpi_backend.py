"""COLLECTIVE_BACKEND=mpi under a real mpirun: MPI carries the tensors, errors stay the engine's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cases import slow_but_last

MPI = {"COLLECTIVE_BACKEND": "mpi"}
#: Seconds in which a death must be noticed.
NOTICE = 2.0


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 2)))
def test_every_collective(launch, n, hosts):
    reports = launch("mpi_backend.py", n, hosts, env=MPI).must_succeed().reports()
    assert {rank for rank, entry in reports.items() if entry["done"]} == set(range(n))


def test_horovods_variable_means_the_same(launch):
    reports = launch("mpi_backend.py", 2, env={"HOROVOD_CPU_OPERATIONS": "MPI"}).must_succeed().reports()
    assert set(reports) == {0, 1}


def test_a_rank_that_dies_while_mpi_works_is_named(launch):
    reports = launch("killed.py", 3, 1, ["1", "busy"], env=MPI, keep_going=True).reports()
    assert set(reports) == {0, 1, 2}
    dead = reports.pop(1)
    for entry in reports.values():
        assert entry["kind"] == "peer_lost", entry
        assert entry["ranks"] == [1], entry
        assert entry["raised_at"] - dead["dies_at"] < NOTICE


def test_ctrl_c_while_mpi_works_ends_the_operation_and_the_others_are_told_whose(launch):
    reports = launch("interrupted_transfer.py", 2, env=MPI, keep_going=True).reports()
    assert reports[0]["error"] == "KeyboardInterrupt"
    assert (reports[1]["kind"], reports[1]["ranks"]) == ("peer_lost", [0])
    assert "interrupted" in reports[1]["error"]


def test_on_some_ranks_only_it_is_the_same_error_on_all(launch):
    reports = launch("one_backend.py", 3, keep_going=True).reports()
    assert set(reports) == {0, 1, 2}
    for entry in reports.values():
        assert (entry["kind"], entry["ranks"]) == ("invalid", [1])
        assert "COLLECTIVE_BACKEND must be the same on all ranks, and is engine on rank 0, 2; mpi on rank 1" in entry["error"]


def started_alone(**variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "COLLECTIVE_"))}
    program = "import collective_core as cc\ntry:\n    cc.init()\nexcept cc.CollectiveError as error:\n    print(error.kind, error)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_mpi_it_is_one_clear_error():
    said = started_alone(**MPI)
    assert said.startswith("invalid rank 0 (host ")
    assert "cannot start: COLLECTIVE_BACKEND=mpi needs ranks that MPI has started" in said
    assert len(said.splitlines()) == 1


def test_another_backend_is_refused():
    assert started_alone(COLLECTIVE_BACKEND="ucc") == "invalid COLLECTIVE_BACKEND='ucc' is not one of engine, mpi\n"


@pytest.mark.parametrize(
    ("when", "who"), [*slow_but_last(("later", "engine"), ("list", "engine"), ("imported", "engine")), ("imported", "script")]
)
def test_mpi_is_finalized_by_whom_it_was_initialised(launch, when, who):
    reports = launch("initialised_by_us.py", 2, arguments=[when, who]).must_succeed().reports()
    assert [reports[rank]["finalizes"] for rank in range(2)] == [who == "engine"] * 2
