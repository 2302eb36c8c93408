"""The two ways to launch a program, as the first host gets them. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from provision.base.errors import UsageError
from provision.cli.run_options import run_options
from provision.launch import jobs
from provision.launch.jobs import Environment

WHERE = Environment(
    "/opt/p/venv/bin/python",
    ("10.0.0.0/24",),
    ssh_config="{home}/.ssh/provision_config",
    mpirun="/opt/p/venv/bin/mpirun",
    mpi_prefix="/opt/p/venv",
)
PLACED = [("10.0.0.1", 2), ("10.0.0.2", 1)]
SECRET = {"WORD": "s3cr3t"}


def test_our_own_launcher_word_for_word() -> None:
    job = jobs.own_job(WHERE, PLACED, ["python", "train.py", "--lr", "0.1"], environment=SECRET, workdir="{home}/x", start_timeout=30)
    assert shlex.join(job.argv) == (
        "/opt/p/venv/bin/python -m collective_core.launch --tag-output -H '{job}/hostfile' --ssh-config '{home}/.ssh/provision_config' "
        "--start-timeout 30 -x COLLECTIVE_NETWORK -x PATH -x PROVISION_RUN_ID -x PYTHONUNBUFFERED -x WORD "
        "--wdir '{home}/x' -- /opt/p/venv/bin/python -I -S '{job}/rank.py'"
    )
    assert job.program == ["/opt/p/venv/bin/python", "train.py", "--lr", "0.1"]
    assert shlex.join(job.ssh).endswith("-F '{home}/.ssh/provision_config'")
    assert "-o ControlMaster=no -o ControlPath=none" in shlex.join(job.ssh)
    assert job.hosts == ["10.0.0.2"]
    assert job.files == {"hostfile": "localhost slots=2\n10.0.0.2 slots=1\n"}
    assert "--ssh-config" not in jobs.own_job(WHERE, PLACED[:1], ["train"]).argv


@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_both_ways_give_ranks_the_same_and_show_no_value(launcher: str) -> None:
    job = jobs.LAUNCHERS[launcher](replace(WHERE, libraries=("/opt/p/lib",)), PLACED, ["python", "train.py"], environment=SECRET)
    assert job.environment == {
        "COLLECTIVE_NETWORK": "10.0.0.0/24",
        "LD_LIBRARY_PATH": "/opt/p/lib:{inherited}",
        "PATH": "/opt/p/venv/bin:{inherited}",
        "PYTHONUNBUFFERED": "1",
        "WORD": "s3cr3t",
    }
    assert "s3cr3t" not in shlex.join(job.argv)
    assert {job.argv[at + 1] for at, word in enumerate(job.argv) if word == "-x"} == {*job.environment, "PROVISION_RUN_ID"}
    assert job.argv[-4:] == ["/opt/p/venv/bin/python", "-I", "-S", "{job}/rank.py"]
    # Under mpirun each rank takes its part of its host's cores first.
    assert job.program == (WHERE.limited if launcher == "mpi" else WHERE.program)(["python", "train.py"])


def test_which_launcher_is_meant() -> None:
    assert run_options(["train"]).launcher is None
    assert run_options(["train"], gloo=True).launcher == run_options(["train"], launcher="own").launcher == "own"
    assert run_options(["train"], python="/usr/bin/python3").launcher == "own"
    for wrong in (
        {"gloo": True, "mpi": True},
        {"gloo": True, "launcher": "mpi"},
        {"launcher": "ssh"},
        {"python": "/p", "mpi": True},
        {"python": "p"},
    ):
        with pytest.raises(UsageError):
            run_options(["train"], **wrong)  # type: ignore[arg-type]
