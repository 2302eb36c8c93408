"""The launchers' command lines, as the first host gets them, and how many ranks run where. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provision.base.errors import UsageError
from provision.cli.run_options import run_options
from provision.launch import launchers, placement, rank_output
from provision.launch.jobs import Job
from provision.launch.launchers import Environment, RunOptions, mpi_job, own_job

WHERE = Environment(
    "/opt/p/venv/bin/python",
    ("10.0.0.0/24",),
    ssh_config="{home}/.ssh/provision_config",
    mpirun="/opt/p/venv/bin/mpirun",
    mpi_prefix="/opt/p/venv",
    as_root=True,
    names={"10.0.0.1": "node1", "10.0.0.2": "node2"},
)
PLACED = [("10.0.0.1", 2), ("10.0.0.2", 1)]
PROGRAM = RunOptions(("python", "train.py", "--lr", "0.1"), None, {"WORD": "s3cr3t"}, "{home}/x", start_timeout=30)
RANK = ["/opt/p/venv/bin/python", "-I", "-S", "{job}/rank.py"]


def test_mpirun_word_for_word() -> None:
    job = mpi_job(WHERE, PLACED, replace(PROGRAM, mpi_args=("--report-bindings",)))
    assert shlex.join(job.argv) == (
        "/opt/p/venv/bin/mpirun --allow-run-as-root --prefix /opt/p/venv --hostfile '{job}/hostfile' -np 3 --map-by slot --bind-to none "
        "--oversubscribe --tag-output --mca pml ob1 --mca btl self,vader,tcp --mca btl_vader_single_copy_mechanism none "
        "--mca orte_keep_fqdn_hostnames 1 --mca plm_rsh_no_tree_spawn 1 --mca plm_rsh_agent ssh --mca mpi_yield_when_idle 1 "
        "--mca orte_tmpdir_base '{job}' --mca btl_vader_backing_directory '{shm}' "
        "--mca orte_launch_agent 'env PROVISION_RUN_ID={run} orted' --mca plm_rsh_args '-F {home}/.ssh/provision_config' "
        "--mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24 "
        "-x COLLECTIVE_NETWORK -x MASTER_ADDR -x MASTER_PORT -x PATH -x PROVISION_RUN_ID -x PYTHONUNBUFFERED -x WORD --wdir '{home}/x' "
        "--report-bindings "
        "/opt/p/venv/bin/python -I -S '{job}/rank.py'"
    )
    assert job.files == {"hostfile": "10.0.0.1 slots=2\n10.0.0.2 slots=1\n"}
    assert (job.host, job.hosts) == ("node1", ["10.0.0.2"])


def test_a_distributions_mpirun_on_one_host_needs_less() -> None:
    argv = mpi_job(Environment("/usr/bin/python3", mpirun="/usr/bin/mpirun"), [("localhost", 2)], PROGRAM).argv
    assert not {"--prefix", "--allow-run-as-root", "btl_tcp_if_include", "plm_rsh_args"} & set(argv)


def test_the_engines_launcher_word_for_word() -> None:
    job = own_job(WHERE, PLACED, PROGRAM)
    assert shlex.join(job.argv) == (
        "/opt/p/venv/bin/python -m collective_core.launch --tag-output -H '{job}/hostfile' --ssh-config '{home}/.ssh/provision_config' "
        "--start-timeout 30 -x COLLECTIVE_NETWORK -x PATH -x PROVISION_RUN_ID -x PYTHONUNBUFFERED -x WORD "
        "--wdir '{home}/x' -- /opt/p/venv/bin/python -I -S '{job}/rank.py'"
    )
    assert shlex.join(job.ssh).endswith("-F '{home}/.ssh/provision_config'")
    assert "-o ControlMaster=no -o ControlPath=none" in shlex.join(job.ssh)
    assert (job.host, job.hosts) == ("node1", ["10.0.0.2"])
    assert job.files == {"hostfile": "localhost slots=2\n10.0.0.2 slots=1\n"}
    assert "--ssh-config" not in own_job(WHERE, PLACED[:1], PROGRAM).argv


@pytest.mark.parametrize("launcher", [mpi_job, own_job])
def test_both_launchers_give_ranks_the_same_and_show_no_value(launcher: Callable[..., Job]) -> None:
    job = launcher(replace(WHERE, libraries=("/opt/p/lib",)), PLACED, PROGRAM)
    # The engine's launcher tells its ranks itself where torch.distributed meets.
    master = {"MASTER_ADDR": "10.0.0.1"} if launcher is mpi_job else {}
    assert job.free_ports == (["MASTER_PORT"] if launcher is mpi_job else ())
    assert job.environment == {
        **master,
        "COLLECTIVE_NETWORK": "10.0.0.0/24",
        "LD_LIBRARY_PATH": "/opt/p/lib:{inherited}",
        "PATH": "/opt/p/venv/bin:{inherited}",
        "PYTHONUNBUFFERED": "1",
        "WORD": "s3cr3t",
    }
    assert "s3cr3t" not in shlex.join(job.argv)
    assert job.argv[-4:] == RANK
    # Under mpirun each rank takes its part of its host's cores first.
    assert job.program[-4:] == ["/opt/p/venv/bin/python", "train.py", "--lr", "0.1"]
    assert (len(job.program) > 4) == (launcher is mpi_job)
    with pytest.raises(UsageError, match="'A=1' is not the name of an environment variable"):
        launcher(WHERE, PLACED, replace(PROGRAM, environment={"A=1": "x"}))


def test_where_torch_distributed_meets_under_mpirun() -> None:
    assert mpi_job(WHERE, PLACED[:1], PROGRAM).environment["MASTER_ADDR"] == "127.0.0.1"
    own = {"MASTER_ADDR": "10.1.0.1", "MASTER_PORT": "4711"}
    job = mpi_job(WHERE, PLACED, replace(PROGRAM, environment=own))
    assert own.items() <= job.environment.items()
    assert job.free_ports == []


def test_restarts_are_the_engines_launchers() -> None:
    assert "--max-restarts 2 -x" in shlex.join(own_job(WHERE, PLACED, replace(PROGRAM, restarts=2)).argv)
    assert run_options(["train"], max_restarts=2).launcher == "own"
    assert run_options(["train"], max_restarts=0).restarts is None
    assert run_options(["train"], max_restarts=0, min_np=1).restarts == 0
    with pytest.raises(UsageError, match="mpirun starts no rank again"):
        run_options(["train"], max_restarts=2, mpi=True)


@pytest.mark.parametrize(
    ("addresses", "reason"), [(["a b"], "not an address"), ([""], "not an address"), (["a#"], "not an address"), (["a", "b", "a"], "twice")]
)
def test_a_hostfile_that_would_be_misread_is_refused(addresses: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        launchers.hostfile([(address, 1) for address in addresses])


def test_the_options_name_the_launcher() -> None:
    assert run_options(["train"]).launcher is None
    assert run_options(["train"], gloo=True).launcher == run_options(["train"], launcher="own").launcher == "own"
    assert run_options(["train"], python="/usr/bin/python3").launcher == "own"
    wrong: dict[str, Any]
    for wrong in (
        {"gloo": True, "mpi": True},
        {"gloo": True, "launcher": "mpi"},
        {"launcher": "ssh"},
        {"python": "/p", "mpi": True},
        {"python": "p"},
    ):
        with pytest.raises(UsageError):
            run_options(["train"], **wrong)


@pytest.mark.parametrize(
    ("slots", "np", "counts"),
    [
        ((2, 2), 4, [2, 2]),
        ((2, 2), 2, [1, 1]),
        ((2, 2), 3, [2, 1]),
        ((1, 4), 4, [1, 3]),
        ((1, 4), 9, [3, 6]),
        ((8, 1, 8), 3, [1, 1, 1]),
        ((4,), 1, [1]),
        ((1,), 4, [4]),
    ],
)
def test_ranks_are_spread_over_all_hosts(slots: tuple[int, ...], np: int, counts: list[int]) -> None:
    hosts = [(f"h{number}", count) for number, count in enumerate(slots)]
    assert placement.spread(hosts, np, oversubscribe=True) == [(f"h{number}", count) for number, count in enumerate(counts)]
    if np > sum(slots):
        for place in (placement.spread, placement.fill):
            with pytest.raises(UsageError, match=r"ranks, but \d hosts? with \d+ slots?.*\n.*--oversubscribe"):
                place(hosts, np)
        assert sum(count for _, count in placement.fill(hosts, np, oversubscribe=True)) == np


def test_fewer_ranks_than_hosts_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot take part on all 2 hosts"):
        placement.spread([("a", 2), ("b", 2)], 1)


def test_ranks_fill_one_host_after_the_other() -> None:
    hosts = [("a", 2), ("b", 2), ("c", 1)]
    assert placement.fill(hosts, None) == hosts
    assert placement.fill(hosts, 3) == [("a", 2), ("b", 1)]
    with pytest.raises(UsageError, match="6 ranks, but 3 hosts"):
        placement.fill(hosts, 6)


def test_hosts_of_a_script_get_the_ranks_that_torchruns_option_says(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho a\n")
    elastic = run_options(["train"], nnodes="1:4", nproc_per_node="4", host_discovery_script=script).elastic
    assert elastic is not None
    assert (elastic.min_np, elastic.max_np, elastic.slots_per_host) == (4, 16, 4)
    assert "--slots-per-host 4" in shlex.join(elastic.arguments())


def test_ranks_by_hosts_and_ranks_on_each() -> None:
    hosts = [("a", 4), ("b", 4), ("c", 2)]
    assert placement.fill(hosts, None, nodes=2) == hosts[:2]
    assert placement.fill(hosts, None, nodes=2, per_node=3) == [("a", 3), ("b", 3)]
    assert placement.fill(hosts, 4, per_node=2) == [("a", 2), ("b", 2)]
    assert placement.fill(hosts, None, per_node=3, oversubscribe=True) == [("a", 3), ("b", 3), ("c", 3)]
    with pytest.raises(UsageError, match="3 ranks do not fit into the 2 slots of c"):
        placement.fill(hosts, None, per_node=3)
    with pytest.raises(UsageError, match="--nnodes 4: only 3 hosts"):
        placement.fill(hosts, None, nodes=4)
    elastic = run_options(["train"], nnodes="1:3", nproc_per_node="2")
    assert placement.of_program(hosts, elastic) == [("a", 2), ("b", 2), ("c", 2)]
    assert placement.fill([("a", 1), ("b", 1)], None, per_node=2) == [("a", 2), ("b", 2)], "of which nobody has said the slots"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[1,0]<stdout>:Train Epoch: 1", "Train Epoch: 1"),
        ("[1,0]<stdout>: indented", " indented"),
        ("[1,12]<stderr>:Traceback", "rank 12: Traceback"),
        ("[1,0]<stderr>:warning", "rank 0: warning"),
        ("Loss: 0.4[1,0]<stdout>:", "Loss: 0.4"),
        ("a message of mpirun", "a message of mpirun"),
    ],
)
def test_lines_lose_their_tags(line: str, shown: str) -> None:
    assert rank_output.readable(line) == shown
