"""Where a user's program runs, and which of several tracebacks is the one to read. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provision import launch, mpirun, remote, run_hosts
from provision.errors import UsageError
from provision.options import run_options
from provision.rank_output import RankOutput


def test_hosts_of_the_command_line_and_of_a_hostfile(tmp_path: Path) -> None:
    assert run_hosts.of_list("a:2,10.0.0.7:1,c") == [("a", 2), ("10.0.0.7", 1), ("c", 1)]
    (tmp_path / "hosts").write_text("# ours\na slots=2\n\nb  # one\n")
    assert run_hosts.of_file(tmp_path / "hosts") == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("text", ["a:0", "a:x", ":2", "a:2,,b:1", "a:-1"])
def test_entries_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:SLOTS"):
        run_hosts.of_list(text)


@pytest.mark.parametrize(("text", "says"), [("a slots=2 max_slots=3\n", r":1"), ("a\nb two\n", r":2"), ("# none\n", "names no host")])
def test_a_hostfile_that_cannot_be_meant_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=says):
        run_hosts.of_file(tmp_path / "hosts")


def test_the_inventorys_hosts_with_the_slots_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    (tmp_path / "hosts.ini").write_text("a ansible_host=10.0.0.1 slots=4\nb ansible_host=10.0.0.2 slots=4\n")
    named = str(tmp_path / "hosts.ini")
    assert [host.slots for host in run_hosts.choose(named, []).hosts] == [4, 4]
    chosen = run_hosts.choose(named, [("10.0.0.2", 3)]).hosts
    assert [(host.name, host.slots) for host in chosen] == [("b", 3)]
    with pytest.raises(UsageError, match="-H x: not in"):
        run_hosts.choose(named, [("x", 1)])
    assert [(host.address, host.slots) for host in run_hosts.choose(None, [("x", 1), ("y", 2)]).hosts] == [("x", 1), ("y", 2)]
    with pytest.raises(UsageError, match="no hosts to run on"):
        run_hosts.choose(None, [])


def test_a_last_inventory_that_is_gone_does_not_matter_to_hosts_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    folder = tmp_path / "runs/20260101-000000-abcdef"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"inventory": str(tmp_path / "gone.ini")}))
    assert [host.name for host in run_hosts.choose(None, [("x", 1)]).hosts] == ["x"]
    with pytest.raises(UsageError, match=r"gone\.ini"):
        run_hosts.choose(None, [])


SLURM = [
    ("node1", "3", [("node1", 3)]),
    ("n[08-10,3],gpu", "2(x4),1", [("n08", 2), ("n09", 2), ("n10", 2), ("n3", 2), ("gpu", 1)]),
    ("r[1-2]n[5,7].x", "1,2,3,4", [("r1n5.x", 1), ("r1n7.x", 2), ("r2n5.x", 3), ("r2n7.x", 4)]),
]


@pytest.mark.parametrize(("nodes", "tasks", "found"), SLURM)
def test_hosts_and_slots_of_a_slurm_allocation(nodes: str, tasks: str, found: list[tuple[str, int]]) -> None:
    assert run_hosts.of_slurm({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}) == found
    assert run_hosts.of_slurm({"SLURM_JOB_NODELIST": nodes}) == [(name, 1) for name, _ in found]
    assert run_hosts.of_slurm({"SLURM_TASKS_PER_NODE": tasks}) == []


@pytest.mark.parametrize(("nodes", "tasks"), [("n[1-", "1"), ("n[a-b]", "1"), ("n[1-2]", "x"), ("n[1-2]", "4"), ("a,,b", "1(x3)")])
def test_an_allocation_that_cannot_be_read_is_said(nodes: str, tasks: str) -> None:
    with pytest.raises(UsageError, match="SLURM_"):
        run_hosts.of_slurm({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})


def test_a_script_says_which_hosts_there_are(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho\necho b\n")
    with pytest.raises(UsageError, match="it cannot be run"):
        run_hosts.of_script(script)
    script.chmod(0o755)
    assert run_hosts.of_script(script) == [("a", 2), ("b", 1)]
    job = launch.own_job(
        launch.Environment("/usr/bin/python3"), [("a", 2), ("b", 1)], ["python", "t.py"], elastic=launch.Elastic(2, 1, 4, script)
    )
    assert job.argv[job.argv.index("--host-discovery-script") + 1] == "{job}/discovery"
    assert job.files["discovery"] == script.read_text()
    script.write_text("#!/bin/sh\necho the cloud is away >&2\nexit 4\n")
    with pytest.raises(UsageError, match="exit code 4 and named 0 hosts: the cloud is away"):
        run_hosts.of_script(script)


@pytest.mark.parametrize(
    ("variable", "line"),
    [("OMPI_MCA_orte_default_hostfile", "{} slots=2\n"), ("I_MPI_HYDRA_HOST_FILE", "{}:2\n"), ("HYDRA_HOST_FILE", "{}:2\n")],
)
def test_the_workers_of_an_mpi_job_on_kubernetes(tmp_path: Path, variable: str, line: str) -> None:
    names = [f"train-worker-{number}.train.team.svc" for number in range(2)]
    (tmp_path / "hostfile").write_text("".join(line.format(name) for name in names))
    environment = {variable: str(tmp_path / "hostfile"), "K_MPI_JOB_ROLE": "launcher"}
    assert run_hosts.of_launcher(environment) == [(name, 2) for name in names]
    assert run_hosts.of_launcher({**environment, "SLURM_JOB_NODELIST": "a"}) == [("a", 1)]
    assert run_hosts.of_launcher({}) == []
    with pytest.raises(UsageError, match="cannot read it"):
        run_hosts.of_launcher({variable: str(tmp_path / "gone")})


def test_a_host_of_the_cluster_reaches_the_others_with_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/provision_config").write_text("# ours\nHost node1 10.0.0.1\n    HostName 10.0.0.1\nHost *\n    User ann\n")
    one, other = run_hosts.choose(None, [("node1", 2), ("elsewhere", 1)]).hosts
    assert remote.ssh_argv(one)[-3:] == ["-F", f"{tmp_path}/.ssh/provision_config", "node1"]
    assert "-F" not in remote.ssh_argv(other)


def test_ranks_fill_one_host_after_the_other() -> None:
    hosts = [("a", 2), ("b", 2), ("c", 1)]
    assert mpirun.fill(hosts, None) == hosts
    assert mpirun.fill(hosts, 3) == [("a", 2), ("b", 1)]
    with pytest.raises(UsageError, match="6 ranks, but the 3 host"):
        mpirun.fill(hosts, 6)


def heard(lines: list[str], **more: Any) -> tuple[RankOutput, list[str]]:
    shown: list[str] = []
    output = RankOutput(lambda text, _style: shown.append(text), **more)
    for line in lines:
        output(line)
    output.close()
    return output, shown


CONSEQUENCE = [
    "[1,0]<stderr>:Traceback (most recent call last):",
    '[1,0]<stderr>:  File "train.py", line 8, in <module>',
    "[1,0]<stderr>:collective_core.errors.CollectiveError: allreduce 'x': rank 1 (host b, pid 7) is gone (its connection ended)",
]
CAUSE = [
    "[1,1]<stderr>:Traceback (most recent call last):",
    '[1,1]<stderr>:  File "train.py", line 7, in <module>[1,0]<stdout>:epoch 1',
    "[1,1]<stderr>:",
    "[1,1]<stderr>:ValueError: a bad batch",
]


def test_the_cause_comes_before_what_follows_from_it() -> None:
    for lines in (CONSEQUENCE + CAUSE, CAUSE + CONSEQUENCE):
        output, shown = heard(lines)
        found = output.first_failure()
        assert found is not None
        assert (found[0], found[1][-1]) == (1, "ValueError: a bad batch")
        assert '[1]   File "train.py", line 7, in <module>' in shown
        assert "[0] epoch 1" in shown
    only = heard(CONSEQUENCE)[0].first_failure()
    assert only is not None
    assert only[0] == 0
    assert heard(["[1,0]<stdout>:all well"])[0].first_failure() is None


def test_a_line_that_a_rank_writes_in_pieces_is_one_line() -> None:
    """As mpirun 4.1.8 brings ``print("rank", 1)`` of two ranks that do not buffer."""
    pieces = ["[1,1]<stdout>:rank[1,1]<stdout>: [1,0]<stdout>:rank[1,1]<stdout>:1[1,1]<stdout>:", "[1,0]<stdout>: [1,0]<stdout>:0"]
    assert heard([*pieces, "[1,1]<stdout>:no end[1,0]<stdout>:last"])[1] == ["[1] rank 1", "[0] rank 0", "[0] last", "[1] no end"]


def test_our_own_launchers_word_counts_more_than_what_follows_from_a_death() -> None:
    output, shown = heard([*CONSEQUENCE, "collective_core.launch: rank 1 on b was ended by SIGKILL"])
    assert output.first_failure() is None
    assert output.verdict == "rank 1 on b was ended by SIGKILL"
    assert shown[-1] == "collective_core.launch: rank 1 on b was ended by SIGKILL"
    assert heard([*CONSEQUENCE, *CAUSE, "collective_core.launch: rank 1 on b ended with exit code 1"])[0].first_failure() is not None


def test_names_of_many_ranks_files_sort_by_rank(tmp_path: Path) -> None:
    heard(["[1,7]<stdout>:here"], folder=tmp_path, ranks=12)
    assert (tmp_path / "rank.07/stdout").read_text() == "here\n"


def test_output_by_rank_and_quiet_ranks(tmp_path: Path) -> None:
    _, shown = heard([*CAUSE, "mpirun's own words"], folder=tmp_path, quiet=True)
    assert shown == ["[0] epoch 1", "mpirun's own words"]
    assert (tmp_path / "rank.0/stdout").read_text() == "epoch 1\n"
    assert (tmp_path / "rank.1/stderr").read_text().splitlines()[-1] == "ValueError: a bad batch"


def test_an_elastic_job_goes_through_our_own_launcher() -> None:
    assert launch.Elastic(4, 2, None).words() == ["-np", "4", "--min-np", "2"]
    chosen = run_options(["python", "train.py"], np=4, min_np=2, max_np=8)
    assert (chosen.launcher, chosen.elastic) == ("own", launch.Elastic(4, 2, 8))
    assert run_options(["python", "train.py"], np=4).elastic is None
    for wrong in ({"np": 4, "min_np": 5}, {"np": 4, "max_np": 3}, {"min_np": 4, "max_np": 3}):
        with pytest.raises(UsageError, match="they must rise"):
            run_options(["true"], **wrong)
    with pytest.raises(UsageError, match="mpirun ends a job when a rank dies"):
        run_options(["true"], min_np=2, mpi=True)
