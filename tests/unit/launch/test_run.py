"""Where a user's program runs, and which of several tracebacks is the one to read. Pure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from provision import inventory as inventories
from provision.base.errors import ProvisionError, UsageError
from provision.base.validation import max_here
from provision.cli.run_options import HostsFirst, run_options
from provision.inventory import Inventory
from provision.launch import forwarded_variables, jobs, launchers, program, program_files, target_hosts
from provision.launch.jobs import Ended, Job, JobResult, Verdict
from provision.launch.launchers import Elastic, RunOptions
from provision.launch.rank_output import RankOutput
from provision.launch.stall_watch import Finding, StallOptions, StallWatch
from provision.launch.target_hosts import HostOptions
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import installed


def choose(hosts: str | None, entries: list[target_hosts.Entry], np: int | None = None) -> Inventory:
    return target_hosts.choose(hosts, entries, np, lambda _: None)


def test_hosts_of_the_command_line_and_of_a_hostfile(tmp_path: Path) -> None:
    assert target_hosts.parse_list("a:2,10.0.0.7:1,c") == [("a", 2), ("10.0.0.7", 1), ("c", 1)]
    (tmp_path / "hosts").write_text("# ours\na slots=2\n\nb  # one\n")
    assert target_hosts.read_hostfile(tmp_path / "hosts") == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("text", ["a:0", "a:x", ":2", "a:2,,b:1", "a:-1", "a:1000001", "a:99999999999999999999", f"a:{9:05000}"])
def test_invalid_entries_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:SLOTS"):
        target_hosts.parse_list(text)


@pytest.mark.parametrize(("text", "says"), [("a slots=2 max_slots=3\n", r":1"), ("a\nb two\n", r":2"), ("# none\n", "names no host")])
def test_invalid_hostfile_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=says):
        target_hosts.read_hostfile(tmp_path / "hosts")


def test_entries_select_hosts_of_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    (tmp_path / "hosts.ini").write_text("a ansible_host=10.0.0.1 slots=4\nb ansible_host=10.0.0.2 slots=4\n")
    named = str(tmp_path / "hosts.ini")
    assert [host.slots for host in choose(named, []).hosts] == [4, 4]
    chosen = choose(named, [("10.0.0.2", 3)]).hosts
    assert [(host.name, host.slots) for host in chosen] == [("b", 3)]
    with pytest.raises(UsageError, match="-H x: not in"):
        choose(named, [("x", 1)])
    assert [(host.address, host.slots) for host in choose(None, [("x", 1), ("y", 2)]).hosts] == [("x", 1), ("y", 2)]
    with pytest.raises(UsageError, match="no hosts to run on"):
        choose(None, [])


def test_default_hosts_are_those_of_the_last_run_or_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    said: list[str] = []
    (only,) = target_hosts.choose(None, [], 4, said.append).hosts
    assert (only.name, only.connection, only.slots) == ("localhost", "local", 4)
    assert said.pop().startswith("no earlier run has made hosts ready: 4 ranks on this machine")
    folder = tmp_path / "runs/20260101-000000-abcdef"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"inventory": "a,b", "hosts": [{"state": "blocked"}, {"state": "ready"}]}))
    vain = tmp_path / "runs/20260102-000000-abcdef"
    vain.mkdir()
    (vain / "report.json").write_text(json.dumps({"inventory": "mistyped", "hosts": [{"state": "blocked"}]}))
    assert [host.name for host in target_hosts.choose(None, [], 4, said.append).hosts] == ["a", "b"]
    there = "hosts of the last run: a,b"
    assert said.pop().startswith(f"{there}; the newer run of mistyped made no host ready (")
    (vain / "report.json").unlink()
    target_hosts.choose(None, [], 4, said.append)
    assert said.pop().startswith(f"{there} (")
    target_hosts.choose(None, [("a", 1)], 4, said.append)
    assert said == []


def test_named_hosts_do_not_need_the_last_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    folder = tmp_path / "runs/20260101-000000-abcdef"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"inventory": str(tmp_path / "gone.ini"), "hosts": [{"state": "ready"}]}))
    assert [host.name for host in choose(None, [("x", 1)]).hosts] == ["x"]
    with pytest.raises(UsageError, match=r"gone\.ini"):
        choose(None, [])
    (tmp_path / "gone.ini").write_text("a ansible_host=10.0.0.1\n")
    hosts = choose(None, [("a", 1), ("x", 2)]).hosts
    assert [(host.name, host.address, host.slots) for host in hosts] == [("a", "10.0.0.1", 1), ("x", "x", 2)]


def test_this_machines_environment_is_used_without_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    here, far = (replace(inventories.load(name).hosts[0], prefix=str(tmp_path / "none")) for name in ("localhost", "far"))
    session = Session(replace(inventories.load("localhost"), hosts=(here,)), Progress(), {})
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/modules exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    try:
        with pytest.raises(ProvisionError, match=rf"none of its Pythons has the engine \({python}, "):
            installed.find(session, None)
        (tmp_path / "modules/collective_core").mkdir(parents=True)
        (tmp_path / "modules/collective_core/__init__.py").touch()
        assert installed.find(session, None) == str(python)
        monkeypatch.setattr(session, "inventory", replace(session.inventory, hosts=(here, far)))
        monkeypatch.setattr(ssh, "run", lambda *_, **__: {name: ssh.Answer(0, "", "") for name in ("localhost", "far")})
        with pytest.raises(ProvisionError, match="nothing is installed here yet"):
            installed.find(session, None)
    finally:
        session.close()


SLURM = [
    ("node1", "3", [("node1", 3)]),
    ("n[08-10,3],gpu", "2(x4),1", [("n08", 2), ("n09", 2), ("n10", 2), ("n3", 2), ("gpu", 1)]),
    ("r[1-2]n[5,7].x", "1,2,3,4", [("r1n5.x", 1), ("r1n7.x", 2), ("r2n5.x", 3), ("r2n7.x", 4)]),
]


@pytest.mark.parametrize(("nodes", "tasks", "found"), SLURM)
def test_hosts_and_slots_of_a_slurm_allocation(nodes: str, tasks: str, found: list[tuple[str, int]]) -> None:
    assert target_hosts.slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}) == found
    assert target_hosts.slurm_hosts({"SLURM_JOB_NODELIST": nodes}) == [(name, 1) for name, _ in found]
    assert target_hosts.slurm_hosts({"SLURM_TASKS_PER_NODE": tasks}) == []


@pytest.mark.parametrize(("nodes", "tasks"), [("n[1-", "1"), ("n[a-b]", "1"), ("n[1-2]", "x"), ("n[1-2]", "4"), ("a,,b", "1(x3)")])
def test_invalid_slurm_allocation_is_refused(nodes: str, tasks: str) -> None:
    with pytest.raises(UsageError, match="SLURM_"):
        target_hosts.slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})


def test_discovery_script_names_hosts(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho\necho b\n")
    with pytest.raises(UsageError, match="it cannot be run"):
        target_hosts.run_discovery_script(script)
    script.chmod(0o755)
    assert target_hosts.run_discovery_script(script) == [("a", 2), ("b", 1)]
    elastic = RunOptions(("python", "t.py"), elastic=Elastic(2, 1, 4, script))
    job = launchers.own_job(launchers.Environment("/usr/bin/python3"), [("a", 2), ("b", 1)], elastic)
    assert job.argv[job.argv.index("--host-discovery-script") + 1] == "{job}/discovery"
    assert job.files["discovery"] == script.read_text()
    script.write_text("#!/bin/sh\necho the cloud is away >&2\nexit 4\n")
    with pytest.raises(UsageError, match="exit code 4 and named 0 hosts: the cloud is away"):
        target_hosts.run_discovery_script(script)


@pytest.mark.parametrize(
    ("variable", "line"),
    [("OMPI_MCA_orte_default_hostfile", "{} slots=2\n"), ("I_MPI_HYDRA_HOST_FILE", "{}:2\n"), ("HYDRA_HOST_FILE", "{}:2\n")],
)
def test_the_workers_of_an_mpi_job_on_kubernetes(tmp_path: Path, variable: str, line: str) -> None:
    names = [f"train-worker-{number}.train.team.svc" for number in range(2)]
    (tmp_path / "hostfile").write_text("".join(line.format(name) for name in names))
    environment = {variable: str(tmp_path / "hostfile"), "K_MPI_JOB_ROLE": "launcher"}
    assert target_hosts.operator_hosts(environment) == [(name, 2) for name in names]
    assert target_hosts.operator_hosts({}) == []
    with pytest.raises(UsageError, match="cannot read it"):
        target_hosts.operator_hosts({variable: str(tmp_path / "gone"), "K_MPI_JOB_ROLE": "launcher"})
    assert target_hosts.operator_hosts({variable: str(tmp_path / "hostfile")}) == [], "somebody's own hostfile"
    with pytest.raises(UsageError, match="/etc/mpi/hostfile: cannot read it"):
        target_hosts.operator_hosts({variable: "/etc/mpi/hostfile"})


def test_a_host_of_the_cluster_reaches_the_others_with_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/provision_config").write_text("# ours\nHost node1 10.0.0.1\n    HostName 10.0.0.1\nHost *\n    User ann\n")
    one, other = choose(None, [("node1", 2), ("elsewhere", 1)]).hosts
    assert shlex.join(["-F", f"{tmp_path}/.ssh/provision_config"]) in shlex.join(ssh.login(one, "true")[0])
    assert "-F" not in ssh.login(other, "true")[0]


class Shown(Progress):
    """Keeps what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str, style: str | None = None) -> None:  # noqa: ARG002
        self.lines.append(text)

    def output(self, stream: str, tag: str, text: str, style: str) -> None:  # noqa: ARG002
        self.lines.append(tag + text)


def show(lines: list[str], **more: Any) -> tuple[RankOutput, list[str]]:
    shown = Shown()
    output = RankOutput(shown, **more)
    for line in lines:
        output(line)
    output.close()
    return output, shown.lines


SYMPTOM = [
    "[1,0]<stderr>:Traceback (most recent call last):",
    '[1,0]<stderr>:  File "train.py", line 8, in <module>',
    "[1,0]<stderr>:collective_core.errors.PeerLostError: allreduce 'x': rank 1 (host b, pid 7) is gone (its connection ended)",
]
CAUSE = [
    "[1,1]<stderr>:Traceback (most recent call last):",
    '[1,1]<stderr>:  File "train.py", line 7, in <module>[1,0]<stdout>:epoch 1',
    "[1,1]<stderr>:",
    "[1,1]<stderr>:ValueError: a bad batch",
]
SYMPTOM_IN_ONE_LINE = "rank 0: PeerLostError: allreduce 'x': rank 1 (host b, pid 7) is gone (its connection ended)"


def test_cause_is_shown_and_not_its_symptom() -> None:
    for lines in (SYMPTOM + CAUSE, CAUSE + SYMPTOM):
        output, shown = show(lines)
        found = output.first_failure()
        assert found is not None
        assert (found.rank, found.exception, found.place) == (1, "ValueError: a bad batch", "train.py, line 7, in <module>")
        at = shown.index("[1] Traceback (most recent call last):")
        assert shown[at : at + 3] == [*shown[at : at + 1], '[1]   File "train.py", line 7, in <module>', "[1] ValueError: a bad batch"]
        assert "[0] epoch 1" in shown
        said = [line for line in [*shown, *output.consequences(found)] if "PeerLostError" in line]
        assert len(said) == 1, "the symptom is one line: at the end, or before what the rank prints next"
        assert not any("line 8" in line for line in shown)
    only = show(SYMPTOM)[0].first_failure()
    assert only is not None
    assert only.rank == 0
    assert show(["[1,0]<stdout>:all well"])[0].first_failure() is None


@pytest.mark.parametrize(
    ("verdict", "last"),
    [
        (
            Verdict("ended", "10.0.0.2", rank=1, code=-9),
            "rank 1 on b was ended by SIGKILL; often the kernel does that when memory runs out: `dmesg` on b says so (exit code 1; ",
        ),
        (Verdict("ended", "10.0.0.2", rank=1, code=-11), "rank 1 on b was ended by SIGSEGV (exit code 1; "),
        (Verdict("ended", "10.0.0.2", rank=1, code=3), "rank 1 on b ended with exit code 3"),
        (Verdict("launcher", "", code=-9), "the launcher on a was ended by SIGKILL"),
        (Verdict("stopped", "10.0.0.2", rank=1, seconds=45, pid=7), "rank 1 on b (10.0.0.2) has been stopped by a signal for 45 s (pid 7"),
        (Verdict("stopped", "", seconds=45, pid=7, name="mpirun"), "mpirun on a has been stopped by a signal for 45 s (pid 7; "),
        (Verdict("silent", "10.0.0.2", seconds=45), "b (10.0.0.2) has not answered for 45 s"),
        (Verdict("refused", "10.0.0.2", output=("/tmp: Read-only file system",)), "b (10.0.0.2) cannot take part: /tmp: Read-only"),
        (Verdict("controller", "", seconds=60), "a has not heard from `provision` for 1 min: it was stopped (Ctrl-Z)"),
        (Verdict("unreachable", "10.0.0.2", output=("No route to host",)), "from the first host: No route to host"),
    ],
)
def test_verdict_is_shown_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, last: str) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    shown = Shown()
    job = Job([], host="a", names={"10.0.0.2": "b"})

    def ended(_session: Any, _job: Any, _title: str, _log: Any, on_line: Any, **_: Any) -> JobResult:
        for line in SYMPTOM:
            on_line(line)
        return JobResult(1, None, False, verdict)

    monkeypatch.setattr(jobs, "run", ended)
    with Session(inventories.load("localhost"), shown, {}) as session:
        assert program.follow(session, job, [("10.0.0.1", 1), ("10.0.0.2", 1)], RunOptions(("train",))) == 1
    assert last in shown.lines[-2]
    assert shown.lines[-1] == f"  {SYMPTOM_IN_ONE_LINE}", "what it did to others comes after it"


@pytest.mark.parametrize(("code", "has_stalled"), [(137, True), (1, False)])
def test_a_stall_is_why_the_killed_ranks_were_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, has_stalled: bool
) -> None:
    """Crashes had used up the restarts of the launcher; hosts that were not reached are named."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    shown = Shown()

    def ended(*_: Any, watch: StallWatch, **__: Any) -> JobResult:
        watch.last_words, watch._restarted = "the job has stalled", 60.0
        return JobResult(code, None, False, Verdict("ended", "", rank=0, code=code - 146))

    monkeypatch.setattr(jobs, "run", ended)
    monkeypatch.setattr(ssh, "run_cleanup", lambda *_: {"a": ssh.Answer(255, "", ""), "b": ssh.Answer(137, "", "Killed")})
    options = RunOptions(("train",), stall=StallOptions(60, "restart", lambda *_: Finding(True, "", (), {}), restarts=1))
    with Session(inventories.load("localhost"), shown, {}) as session:
        assert program.follow(session, Job([], host="a"), [("10.0.0.1", 1)], options) == (124 if has_stalled else 1)
    assert any(line.startswith("the job has stalled; a cannot be reached") for line in shown.lines) == has_stalled


def test_cause_is_said_with_rank_host_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    shown = Shown()

    def ended(_session: Any, _job: Any, _title: str, _log: Any, on_line: Any, **_: Any) -> JobResult:
        for line in [*CAUSE, *SYMPTOM, *(f"[1,2]<stdout>:more {number}" for number in range(more))]:
            on_line(line)
        return JobResult(1, None, False, Verdict("ended", "", rank=0, code=1))

    monkeypatch.setattr(jobs, "run", ended)
    for more in (0, 20):
        shown.lines.clear()
        with Session(inventories.load("localhost"), shown, {}) as session:
            job = Job([], host="a", names={"10.0.0.2": "b"})
            program.follow(session, job, [("10.0.0.1", 1), ("10.0.0.2", 1)], RunOptions(("train",)))
        at = shown.lines.index("rank 1 on b failed first: ValueError: a bad batch (train.py, line 7, in <module>)")
        again = "    ValueError: a bad batch" in shown.lines[at:]
        assert again == (more == 20), "the traceback is printed again where it has scrolled away"


RULE = "-" * 74
#: As Open MPI 4.1 writes them where a rank ends with another exit code than 0.
BOXES = f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[16709,1],1]
  Exit code:    1
{RULE}""".splitlines()
SLOTS = [RULE, "There are not enough slots available in the system to satisfy the 4", "slots that were requested by the application:", RULE]


def test_of_mpiruns_boxes_those_are_shown_that_say_something_new() -> None:
    warning = "[node1:02655] plm:rsh: Warning: setpgid(2451,2451) failed in parent with errno=Permission denied(13)"
    assert show([warning, *BOXES, "[1,0]<stdout>:epoch 1"])[1] == ["[0] epoch 1"]
    assert show([*BOXES[:3], "[1,0]<stdout>:epoch 1", *BOXES[3:], *SLOTS])[1] == ["[0] epoch 1", *SLOTS]
    killed = [RULE, "mpirun noticed that process rank 2 with PID 7 on node b exited on signal 9 (Killed).", RULE]
    assert show([*BOXES[:4], *killed])[1] == killed
    for shown in (
        [*SLOTS[:-1]],
        [*BOXES[:3]],
        [RULE, "more", *BOXES[1:4]],
        [*BOXES[:3], "more", RULE],
        [RULE, *map(str, range(40))],
        [*BOXES[5:6], "---"],
    ):
        assert show(shown)[1] == shown, "a box without an end, or with more in it"
    assert show([f"[1,0]<stdout>:{line}" for line in BOXES])[1] == [f"[0] {line}" for line in BOXES], "what a rank prints is the program's"


def verdict_on(
    lines: list[str], result: JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Callable[[str], str] = str
) -> tuple[int, list[str]]:
    """The exit code of a job of four ranks, two of them on b, and what is said of it after the ranks' output."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    shown = Shown()

    def ended(_session: Any, _job: Any, _title: str, _log: Any, on_line: Any, **_: Any) -> JobResult:
        for line in lines:
            on_line(line)
        return result

    monkeypatch.setattr(jobs, "run", ended)
    with Session(inventories.load("localhost"), shown, {}) as session:
        job = Job([], host="a", names={"10.0.0.2": "b"})
        code = program.follow(session, job, [("10.0.0.1", 2), ("10.0.0.2", 2)], RunOptions(("train",)), here=here)
        log = f"the job's whole output: {session.folder / 'run.log'}"
    return code, [line.replace(log, "LOG") for line in shown.lines[shown.lines.index("") + 1 :]]


def ends(*codes: tuple[int, int]) -> tuple[Ended, ...]:
    """(rank, exit code), the first that ended first."""
    return tuple(Ended(rank, "10.0.0.2" if rank > 1 else "", code) for rank, code in codes)


LEFT = """Traceback (most recent call last):
  File "/home/me/provision-run/project/ex.py", line 4, in <module>
collective_core.errors.PeerLostError: allreduce 'x': rank 0 (host a, pid 7) has shut its engine down while others wait for it"""
IN_ONE_LINE = LEFT.splitlines()[-1].removeprefix("collective_core.errors.")


@pytest.mark.parametrize(
    ("of_first", "said", "code"),
    [
        (1, "ended while others waited for it: data folder is missing", 1),
        (3, "ended while others waited for it: data folder is missing", 3),
        (0, "ended with exit code 0 while others waited for it", 1),
        (-15, "ended while others waited for it: data folder is missing", 1),  # before it could say how
        (-9, "ended while others waited for it: data folder is missing", 1),  # with what would have recorded it
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_rank_that_leaves_while_others_wait_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_first: int, said: str, code: int, is_last: bool
) -> None:
    """Whether its end is noted before that of the others, or after it: it waits for them on its way out, where mpirun ends it."""
    others = [(2, 1), (1, 1)]
    ranks = ends(*others, (3, -15), (0, of_first)) if is_last else ends((0, of_first), *others, (3, -15))
    first = next(one for one in ranks if one.code not in (0, -15, -9))
    lines = ["[1,0]<stderr>:data folder is missing", *of_rank(2, LEFT), *of_rank(1, LEFT), *BOXES]
    result = JobResult(1, None, False, Verdict("ended", first.host, rank=first.rank, code=first.code), ranks)
    assert verdict_on(lines, result, tmp_path, monkeypatch) == (
        code,
        [f"rank 0 on a {said}", f"  exit code {code}; LOG", f"  ranks 1 and 2: {IN_ONE_LINE}"],
    )
    own = [*lines, "collective_core.launch: rank 2 on b ended with exit code 1"]
    assert verdict_on(own, result, tmp_path, monkeypatch)[1][0] == f"rank 0 on a {said}"


def test_who_left_is_known_from_the_ends_and_not_from_what_others_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = LEFT.partition("rank 0")[0] + "the group stopped after an earlier failure"
    result = JobResult(1, None, False, Verdict("ended", "10.0.0.2", rank=2, code=1), ends((2, 1), (1, 1), (3, -15), (0, 3)))
    code, said = verdict_on([*of_rank(1, nameless), *of_rank(2, nameless)], result, tmp_path, monkeypatch)
    assert (code, said[0]) == (3, "rank 0 on a ended while others waited for it")


def test_without_such_a_rank_the_first_that_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = JobResult(1, None, False, Verdict("ended", "10.0.0.2", rank=2, code=1), ends((2, 1), (1, 1), (3, -15)))
    said = verdict_on([*of_rank(1, LEFT), *of_rank(2, LEFT)], result, tmp_path, monkeypatch)[1]
    assert said[0].startswith(f"rank 2 on b failed first: {IN_ONE_LINE} (")


def test_an_error_without_a_traceback_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ["usage: arg.py [-h] --lr LR", "arg.py: error: the following arguments are required: --lr"]
    lines = [f"[1,{rank}]<stderr>:{line}" for rank in (2, 0, 3) for line in wrong]
    ranks = ends((2, 2), (0, 2), (1, 5), (3, 2))
    result = JobResult(2, None, False, Verdict("ended", "10.0.0.2", rank=2, code=2), ranks)
    said = verdict_on([*lines, "[1,1]<stderr>:no disk", "[1,1]<stderr>:", "[1,1]<stderr>: 10%|#|\r 20%|##|"], result, tmp_path, monkeypatch)
    assert said == (
        2,
        [
            f"rank 2 on b failed first: {wrong[1]}",
            "  exit code 2; LOG",
            "  ranks 0 and 3 ended the same way",
            "  rank 1 ended with exit code 5: no disk",
        ],
    )
    long = verdict_on(["[1,2]<stderr>:" + "x" * 400], result, tmp_path, monkeypatch)[1]
    assert long[0] == f"rank 2 on b failed first: {'x' * 300}…"
    silent = replace(result, ended=ends((2, 2), (1, -15)))
    assert verdict_on([], silent, tmp_path, monkeypatch) == (2, ["rank 2 on b ended with exit code 2", "  LOG"]), "said once"


@pytest.mark.parametrize("ranks", [ends((1, 0), (0, 3)), ends((0, 3), (1, -15)), ends((0, 3), (1, -9))])
def test_a_traceback_of_a_rank_that_went_on_is_not_the_cause(
    ranks: tuple[Ended, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = JobResult(3, None, False, Verdict("ended", "", rank=0, code=3), ranks)
    assert verdict_on([*CAUSE, "[1,0]<stderr>:no disk"], result, tmp_path, monkeypatch)[1][0] == "rank 0 on a failed first: no disk"


def test_the_exit_code_is_that_of_the_rank_whose_error_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = JobResult(1, None, False, Verdict("ended", "", rank=0, code=1), ends((0, 1), (1, 7)))
    assert verdict_on([*SYMPTOM, *CAUSE], result, tmp_path, monkeypatch)[0] == 7


def test_the_verdict_names_the_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project/src/models").mkdir(parents=True)
    for name in ("src/ex.py", "src/helper.py", "src/models/deep.py", "data.py"):
        (tmp_path / "project" / name).touch()
    monkeypatch.chdir(tmp_path / "project")
    packed = program_files.pack(["python", "src/ex.py"], [Path("data.py")])
    there = f"/home/me/{packed.folder}"
    for name, here in (("ex", "src/ex"), ("helper", "src/helper"), ("models/deep", "src/models/deep"), ("data", "data")):
        assert packed.here(f"{there}/{name}.py, line 4, in f") == f"{here}.py, line 4, in f"
    for other in (f"{there}/written.py, line 4", f"{there}/models/written.py, line 4", "/home/me/ex.py, line 4", "<string>, line 1"):
        assert packed.here(other) == other
    result = JobResult(1, None, False, Verdict("ended", "", rank=0, code=1), ends((0, 1)))
    error = LEFT.replace(IN_ONE_LINE, "errors.Wrong: x").replace("collective_core.errors.", "")
    error = error.replace("/home/me/provision-run/project", there)
    said = verdict_on(of_rank(0, error), result, tmp_path, monkeypatch, packed.here)[1]
    assert said[0] == "rank 0 on a failed first: Wrong: x (src/ex.py, line 4, in <module>)"


def of_rank(rank: int, text: str) -> list[str]:
    return [f"[1,{rank}]<stderr>:{line}" for line in text.splitlines()]


MISMATCH = """Traceback (most recent call last):
  File "/home/me/train.py", line 4, in <module>
    hvd.allreduce(x)
  File "/opt/venv/lib/python3.11/site-packages/collective_core/_native.py", line 269, in check
    raise error
collective_core.errors.CollectiveError: allreduce 'g' (float32[{}]): the ranks ask for different things"""


def test_an_error_of_all_ranks_is_printed_once() -> None:
    output, shown = show([line for rank in (2, 0, 1) for line in of_rank(rank, MISMATCH.format(rank + 3))])
    found = output.first_failure()
    assert found is not None
    assert (found.rank, found.place) == (2, "/home/me/train.py, line 4, in <module>"), "a library is not the place"
    assert shown == [f"[2] {line}" for line in MISMATCH.format(5).splitlines()]
    assert output.consequences(found) == ["ranks 0 and 1: the same error as that of rank 2"]


def test_tracebacks_of_ranks_that_print_at_the_same_time_are_whole() -> None:
    first, second = (of_rank(rank, MISMATCH.format(3).replace("CollectiveError", f"Error{rank}")) for rank in (0, 1))
    shown = show([line for pair in zip(first, second, strict=True) for line in pair])[1]
    assert [line[:3] for line in shown] == ["[0]"] * 6 + ["[1]"] * 6


def test_a_rank_that_goes_on_has_its_symptom_shown() -> None:
    """As a program does that catches the error of a lost rank, prints it and trains on."""
    output, shown = show([*SYMPTOM, "[1,0]<stdout>:epoch 2"])
    assert shown[-2:] == ["[0] " + SYMPTOM_IN_ONE_LINE.partition(": ")[2], "[0] epoch 2"]
    assert output.consequences(None) == []


def test_a_traceback_that_goes_on_from_another_is_one_failure() -> None:
    chained = [
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "ValueError: no batch",
    ]
    symptom = [line.replace("[1,0]", "[1,1]") for line in SYMPTOM if "stderr" in line]
    output, shown = show([*symptom, *of_rank(1, "\n".join(chained)), *of_rank(2, MISMATCH.format(3))])
    found = output.first_failure()
    assert found is not None
    assert found.rank == 2, "what a lost rank has led to is no cause"
    assert output.consequences(found) == ["rank 1: ValueError: no batch"]
    assert all(line.startswith("[2]") for line in shown)


def test_a_traceback_that_a_rank_has_survived_is_not_the_cause() -> None:
    output, _ = show([*CAUSE, *(f"[1,1]<stderr>:step {number}" for number in range(300))])
    assert output.first_failure() is None
    output, shown = show([*of_rank(0, 'Traceback (most recent call last):\n  File "a.py", line 1, in f'), *CAUSE])
    output.close()
    assert shown[-1] == '[0]   File "a.py", line 1, in f', "a rank that was killed meanwhile"


def test_a_line_that_a_rank_writes_in_pieces_is_one_line() -> None:
    """As mpirun 4.1.8 brings ``print("rank", 1)`` of two ranks that do not buffer."""
    pieces = ["[1,1]<stdout>:rank[1,1]<stdout>: [1,0]<stdout>:rank[1,1]<stdout>:1[1,1]<stdout>:", "[1,0]<stdout>: [1,0]<stdout>:0"]
    assert show([*pieces, "[1,1]<stdout>:no end[1,0]<stdout>:last"])[1] == ["[1] rank 1", "[0] rank 0", "[0] last", "[1] no end"]


def test_verdict_of_the_engines_launcher_wins_over_symptoms() -> None:
    output, shown = show([*SYMPTOM, "collective_core.launch: rank 1 on b was ended by SIGKILL"])
    assert output.first_failure() is None
    assert output.verdict == "rank 1 on b was ended by SIGKILL"
    assert shown[-1] == "collective_core.launch: rank 1 on b was ended by SIGKILL"
    assert show([*SYMPTOM, *CAUSE, "collective_core.launch: rank 1 on b ended with exit code 1"])[0].first_failure() is not None


def test_names_of_many_ranks_files_sort_by_rank(tmp_path: Path) -> None:
    show(["[1,7]<stdout>:here"], folder=tmp_path, ranks=12)
    assert (tmp_path / "rank.07/stdout").read_text() == "here\n"


def test_output_by_rank_and_quiet_ranks(tmp_path: Path) -> None:
    _, shown = show([*CAUSE, "a message of mpirun"], folder=tmp_path, quiet=True)
    assert shown == ["[0] epoch 1", "a message of mpirun"]
    assert (tmp_path / "rank.0/stdout").read_text() == "epoch 1\n"
    assert (tmp_path / "rank.1/stderr").read_text().splitlines()[-1] == "ValueError: a bad batch"


def test_elastic_job_uses_the_engines_launcher() -> None:
    assert Elastic(4, 2, None).arguments() == ["-np", "4", "--min-np", "2"]
    assert Elastic(None, 1, 1_000_000, timeout=31_536_000.0).arguments()[2:] == ["--max-np", "1000000", "--elastic-timeout", "31536000"]
    chosen = run_options(["python", "train.py"], np=4, min_np=2, max_np=8)
    assert (chosen.launcher, chosen.elastic) == ("own", Elastic(4, 2, 8))
    assert run_options(["python", "train.py"], np=4).elastic is None
    with pytest.raises(UsageError, match="--oversubscribe: an elastic job"):
        run_options(["python", "train.py"], np=4, min_np=2, oversubscribe=True)
    for wrong in ({"np": 4, "min_np": 5}, {"np": 4, "max_np": 3}, {"min_np": 4, "max_np": 3}):
        with pytest.raises(UsageError, match="wrong order"):
            run_options(["true"], **wrong)
    with pytest.raises(UsageError, match="mpirun ends a job when a rank dies"):
        run_options(["true"], min_np=2, mpi=True)


def folder_with_modules(folder: Path) -> Path:
    (folder / "project/models/deep").mkdir(parents=True)
    (folder / "project/models/deep/layers.py").touch()
    (folder / "project/models/__init__.py").touch()
    (folder / "project/models/__pycache__").mkdir()
    (folder / "project/data").mkdir()
    (folder / "project/data/images.bin").touch()
    for name in ("train.py", "helper.py", "notes.txt", ".hidden.py"):
        (folder / "project" / name).touch()
    return folder / "project"


def written(packed: program_files.Archive) -> tarfile.TarFile:
    pipe = io.BytesIO()
    packed.write(pipe)
    return tarfile.open(fileobj=io.BytesIO(pipe.getvalue()))


def members(packed: program_files.Archive) -> list[str]:
    with written(packed) as archive:
        return sorted(member.name for member in archive if member.isfile())


def test_modules_next_to_the_program_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = folder_with_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    packed = program_files.pack(["python", "project/train.py", "--lr", "1"], [project / "data", project / "helper.py"])
    assert packed.command == ["python", "train.py", "--lr", "1"]
    assert members(packed) == ["data/images.bin", "helper.py", "models/__init__.py", "models/deep/layers.py", "train.py"]
    assert members(program_files.pack(["python", "project/train.py"], [], modules=False)) == ["train.py"]
    monkeypatch.chdir(project)
    assert members(program_files.pack(["python", "-m", "models.deep"], [])) == ["helper.py", *members(packed)[2:]]
    assert members(program_files.pack(["./notes.txt"], [])) == ["notes.txt"]
    monkeypatch.setattr(program_files, "MAX_NEIGHBOURS", 1 << 20)
    (project / "models/tables.py").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(UsageError, match=r"larger than 1 MB, most of it models\n.*--no-modules"):
        program_files.pack(["python", "train.py"], [])


def test_data_and_what_is_ignored_is_copied_only_by_name(tmp_path: Path) -> None:
    project = folder_with_modules(tmp_path)
    (project / "models/weights.bin").write_bytes(bytes((1 << 20) + 1))
    for name in ("models/words.csv", "models/deep/draft.py", "models/deep/kept.py"):
        (project / name).touch()
    (project / program_files.IGNORE).write_text("# drafts\n/models/deep/*\n!kept.py\n/helper.py\n")
    program = ["python", str(project / "train.py")]
    packed = program_files.pack(program, [])
    assert members(packed) == ["models/__init__.py", "models/deep/kept.py", "models/words.csv", "train.py"]
    assert len(packed.sizes) == 4
    assert packed.left_out == [
        "not copied: models/weights.bin, large data, logs or checkpoints; a whole package is: --copy models",
        "not copied because of .provisionignore: helper.py, models/deep/draft.py and models/deep/layers.py",
    ]
    (project / os.fsdecode(b"models/\xff.py")).touch()
    (project / program_files.IGNORE).write_text("\ufeff/helper.py\n[[:alpha:]]x\n", encoding="utf-8")
    assert "helper.py" not in members(program_files.pack(program, []))
    (project / os.fsdecode(b"models/\xff.py")).unlink()
    for pattern in ("!", "[z-a]"):
        (project / program_files.IGNORE).write_text(pattern)
        with pytest.raises(UsageError, match=r"invalid pattern: expected the grammar of \.gitignore"):
            program_files.pack(program, [])
    (project / program_files.IGNORE).unlink()
    assert {"models/weights.bin", "models/deep/draft.py"} <= set(members(program_files.pack(program, [project / "models"])))


def test_two_projects_of_one_name_have_two_folders(tmp_path: Path) -> None:
    folders = set()
    for name in ("mine", "yours"):
        (tmp_path / name).mkdir()
        folders.add(program_files.pack(["python", str(folder_with_modules(tmp_path / name) / "train.py")], []).folder)
    assert len(folders) == 2


def test_links_keep_their_names_and_named_files_win(tmp_path: Path) -> None:
    project = folder_with_modules(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "helper.py").write_text("mine = True\n")
    (elsewhere / "train_v2.py").write_text("import utils\n")
    (elsewhere / "python3").write_text("#!/bin/sh\n")
    (project / "utils.py").symlink_to(project / "helper.py")
    (project / "start.py").symlink_to(elsewhere / "train_v2.py")
    (project / "models/.env").write_text("KEY=secret\n")
    packed = program_files.pack([str(elsewhere / "python3"), str(project / "start.py")], [elsewhere / "helper.py"])
    assert packed.command[1] == "start.py", "the interpreter is not the program"
    assert members(packed) == ["helper.py", "models/__init__.py", "models/deep/layers.py", "start.py", "train.py", "utils.py"]
    assert packed.left_out == []
    with written(packed) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in ("helper.py", "start.py")}  # type: ignore[union-attr]
    assert found == {"helper.py": "mine = True\n", "start.py": "import utils\n"}


def test_no_link_brings_a_file_from_elsewhere(tmp_path: Path) -> None:
    project, outside = folder_with_modules(tmp_path), tmp_path / "private"
    outside.mkdir()
    (outside / "key").write_text("SECRET")
    (outside / "key.py").write_text("SECRET")
    leading_out = {
        "settings.py": outside / "key",  # a module by its name
        "keys": outside,  # a package by what is in it
        "models/key.py": outside / "key.py",
        "models/keys": Path("../../private"),
        "models/deep/up": Path("../../.."),
        "data/key": outside / "key",
    }
    for name, target in leading_out.items():
        (project / name).symlink_to(target)
    (project / ".private").mkdir()
    for name in ("models/.netrc", ".private/key"):
        (project / name).write_text("SECRET")
    (project / "hidden.py").symlink_to(project / ".private/key")
    (project / "models/other.py").symlink_to(project / "helper.py")
    os.mkfifo(project / "models/pipe")
    packed = program_files.pack(["python", str(project / "train.py")], [project / "data"])
    with written(packed) as archive:
        found = {member.name: member for member in archive}
        archive.extractall(tmp_path / "host", filter="data")  # which refuses links that lead out
    assert not {*leading_out, "models/pipe"} & set(found)
    assert not any(part.startswith(".") for name in found for part in name.split("/")), "a hidden file may be a secret"
    assert {"data/images.bin", "helper.py", "models/__init__.py", "models/other.py", "train.py"} <= set(found)
    assert (tmp_path / "host/models/other.py").resolve() == tmp_path / "host/helper.py"
    assert "SECRET" not in "".join(path.read_text() for path in (tmp_path / "host").rglob("*") if path.is_file())
    for name in leading_out:
        assert sum(line.startswith(f"not copied: {project / name} is a link that leads out") for line in packed.left_out) == 1, name
    assert f"not copied: {project / 'models/pipe'} is not a regular file" in packed.left_out
    assert len(packed.left_out) == len(leading_out) + 1
    for named in ([outside / "key.py"], [project / "train.py", outside / "key.py"]):
        assert {"key.py", "train.py"} <= set(members(program_files.pack(["python", str(project / "train.py")], named))), "they are named"
    (project / "start.py").symlink_to(outside / "key.py")
    assert {"key.py", "start.py"} <= set(members(program_files.pack(["python", str(project / "start.py")], [outside / "key.py"])))


@pytest.mark.parametrize(
    ("typed", "there", "copied"),
    [
        ("/usr/bin/env python src/train.py --lr 1", "/usr/bin/env python train.py --lr 1", "train.py"),
        ("env -u A B=1 python3.11 src/train.py", "env -u A B=1 python3.11 train.py", "train.py"),
        ("python -u -W ignore -Xdev src/train.py set.bin", "python -u -W ignore -Xdev train.py set.bin", "train.py"),
        (
            "python --check-hash-based-pycs always src/train.py set.bin",
            "python --check-hash-based-pycs always train.py set.bin",
            "train.py",
        ),
        ("python --check-hash-based-pycs never -m pkg set.bin", "python --check-hash-based-pycs never -m pkg set.bin", "packages"),
        ("python -uX dev -Wm -EsBW error src/train.py -c", "python -uX dev -Wm -EsBW error train.py -c", "train.py"),
        ("python -X importtime=c -W m -- src/train.py", "python -X importtime=c -W m -- train.py", "train.py"),
        ("python -Ic pass src/train.py", "python -Ic pass src/train.py", ""),
        ("python -OO src/train.py src/other.sh", "python -OO train.py src/other.sh", "train.py"),
        ("python -m pkg --data {here}/set.bin", "python -m pkg --data {here}/set.bin", "packages"),
        ("python -W ignore -um pkg set.bin", "python -W ignore -um pkg set.bin", "packages"),
        ("/usr/bin/env python -mpkg set.bin", "/usr/bin/env python -mpkg set.bin", "packages"),
        ("python -c pass {here}/set.bin src/train.py", "python -c pass {here}/set.bin src/train.py", ""),
        ("python - set.bin", "python - set.bin", ""),
        ("python /opt/theirs/x.py set.bin", "python /opt/theirs/x.py set.bin", ""),
        ("python -X dev theirs set.bin", "python -X dev theirs set.bin", ""),
        ("python", "python", ""),
        ("theirs --data {here}/set.bin", "theirs --data {here}/set.bin", ""),
        ("/opt/theirs/bin/tool set.bin", "/opt/theirs/bin/tool set.bin", ""),
        ("/bin/sh src/other.sh set.bin", "/bin/sh ./other.sh set.bin", "other.sh"),
        ("timeout 60 src/tool set.bin", "timeout 60 ./tool set.bin", "tool"),
        ("torchrun --standalone src/train.py set.bin", "torchrun --standalone train.py set.bin", "train.py"),
        ("src/tool set.bin src/train.py", "./tool set.bin src/train.py", "tool"),
        ("./src/train.py set.bin", "./train.py set.bin", "train.py"),
        ("src/python_tool set.bin", "./python_tool set.bin", "python_tool"),
    ],
)
def test_copied_is_the_program_and_arguments_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, there: str, copied: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "pkg").mkdir()
    packages = {"src/train.py", "src/other.sh", "src/tool", "src/python_tool", "pkg/__init__.py"}  # what Python could import from here
    for name in (*packages, "set.bin"):
        (tmp_path / name).touch()
    (tmp_path / "src/tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    packed = program_files.pack(typed.format(here=tmp_path).split(), [])
    assert packed.command == there.format(here=tmp_path).split()
    assert set(members(packed)) == (packages if copied == "packages" else {copied} - {""})


def test_the_folder_on_a_host_is_private_and_the_archive_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set.bin").write_bytes(bytes(64 << 20))
    (tmp_path / "home/provision-run").mkdir(parents=True)  # of an earlier release, which left it open
    monkeypatch.chdir(tmp_path)
    packed = program_files.pack(["hostname"], [Path("set.bin")])
    tracemalloc.start()
    try:
        with (tmp_path / "tar").open("wb") as pipe:
            packed.write(pipe)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    with (tmp_path / "tar").open("rb") as pipe:
        subprocess.run(["/bin/sh", "-c", f"umask 022; {packed.unpack}"], stdin=pipe, env={"HOME": str(tmp_path / "home")}, check=True)
    folders = [tmp_path / "home/provision-run", tmp_path / "home" / packed.folder]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    assert (folders[1] / "set.bin").stat().st_size == 64 << 20


def test_this_machine_has_so_many_slots_where_nothing_gives_it_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    most = max_here()
    monkeypatch.setattr(installed, "find", lambda *_: sys.executable)

    def placed(words: list[str], hosts: str | None = None, **options: Any) -> list[tuple[str, int]]:
        wanted = run_options(words, **options)
        found = target_hosts.choose(hosts, [], wanted.np or wanted.per_node, lambda _: None)
        with Session(found, Shown(), {}) as session:
            return program._place(session, wanted, None, None)[2]

    for hosts in (None, "localhost"):
        assert [count for _, count in placed(["true"], hosts, np=most)] == [most]
        assert [count for _, count in placed(["true"], hosts, np=most + 1, oversubscribe=True)] == [most + 1]
        with pytest.raises(UsageError, match=f"1,000,000 ranks, but 1 host with {most} slots"):
            placed(["true"], hosts, np=1_000_000)
        with pytest.raises(UsageError, match=f"1000000 ranks do not fit into the {most} slots of"):
            placed(["true"], hosts, nproc_per_node="1000000")
    (tmp_path / "hosts.ini").write_text(f"localhost ansible_connection=local slots={most + 4}\n")
    assert [count for _, count in placed(["true"], str(tmp_path / "hosts.ini"), np=most + 4)] == [most + 4], "the inventory says it"


def seat_of(session: Session) -> program._Seat:
    (host,) = session.inventory.hosts
    return program._Seat(host, host.address, 1, "")


def test_a_folder_of_checkpoints_that_is_missing_is_an_error_before_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "provision-run/me/it's here").mkdir(parents=True)
    with Session(inventories.load("localhost"), Shown(), {}) as session:
        for folder in ("/no such", "gone", "$(true)"):
            for workdir in ("{home}/provision-run/me", str(tmp_path)):
                with pytest.raises(UsageError, match=re.escape(f"localhost: --restart-from {folder}: no such folder")):
                    program._check_restart(session, seat_of(session), workdir, run_options(["true"], np=1, restart_from=folder))
        for options in ({"restart_from": "it's here"}, {"restart_from": str(tmp_path)}, {}):
            program._check_restart(session, seat_of(session), "{home}/provision-run/me", run_options(["true"], np=1, **options))


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (["python", "nosuch.py"], True),
        (["python", "/opt/theirs/train.py"], False),
        (["python", "-m", "their.module"], False),
        (["hostname"], False),
    ],
)
def test_missing_program_is_named_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nosuch\.py: no such file") if refused else contextlib.nullcontext():
        program_files.pack(command, [])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["python", "good.py"], None),
        (["python", "-m", "bad"], None),
        (["python", "bad.py", "--lr", "1"], "line 2: invalid syntax: def f(:"),
        (["bad.py"], "line 2: invalid syntax"),
        (["/usr/bin/env", "python3", "-u", "bad.py"], "line 2: invalid syntax"),
        (["python", "-m", "pdb", "bad.py"], None),
        (["hostname"], None),
    ],
)
def test_a_syntax_error_is_found_without_running_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], says: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "bad.py").write_text("import os\ndef f(:\n")
    found = program_files.syntax_error(command)
    assert found is None if says is None else (found is not None and says in found[1]), found


def test_the_hosts_python_has_the_last_word_about_syntax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def f(:\n")
    newer = tmp_path / "newer"
    newer.write_text("#!/bin/sh\nexit 0\n")  # a Python that takes what this one does not
    newer.chmod(0o755)
    options = run_options(["bad.py"], np=2)
    with Session(inventories.load("localhost"), Shown(), {}) as session:
        program._check_syntax(session, launchers.Environment(str(newer)), seat_of(session), options)
        with pytest.raises(UsageError, match=r"bad\.py: a syntax error: line 1"):
            program._check_syntax(session, launchers.Environment(sys.executable), seat_of(session), options)


def test_a_script_without_its_ending_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"did you mean train\.py\?"):
        program_files.syntax_error(["train"])


def test_a_program_of_this_folder_needs_no_path_but_the_right_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match=r"train\.sh: not executable\n.*chmod \+x train\.sh; or name what runs it: sh train\.sh"):
        program_files.syntax_error(["train.sh", "1"])
    assert program_files.syntax_error(["sh", "train.sh"]) is None
    (tmp_path / "train.sh").chmod(0o755)
    assert program_files.syntax_error(["train.sh", "1"]) is None
    here = inventories.load("localhost")
    seats = [program._Seat(here.hosts[0], "127.0.0.1", 2, "me")]
    with Session(here, Shown(), {}) as session:
        for typed, started in (
            ("train.sh 1", "./train.sh"),
            ("./train.sh", "./train.sh"),
            ("hostname -f", "hostname"),
            ("python x", "python"),
        ):
            assert program._copy(session, seats, run_options(typed.split(), np=2))[1] == [started, *typed.split()[1:]]


def test_hosts_may_stand_before_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.ini").write_text("a\n")
    (tmp_path / "start.sh").write_text("#!/bin/sh\n")
    (tmp_path / "start.sh").chmod(0o755)
    app = typer.Typer()

    @app.command(cls=HostsFirst, context_settings={"allow_interspersed_args": False})
    def run(
        command: Annotated[list[str] | None, typer.Argument()] = None,
        hosts: Annotated[str | None, typer.Option("--hosts")] = None,
        host: Annotated[str | None, typer.Option("-H")] = None,
        np: Annotated[int | None, typer.Option("-np")] = None,
    ) -> None:
        print(json.dumps([hosts or host, np, command]))

    def understood(*words: str) -> list[Any]:
        found: list[Any] = json.loads(CliRunner().invoke(app, list(words)).stdout)
        return found

    assert understood("hosts.ini", "train.py", "--lr", "1") == ["hosts.ini", None, ["train.py", "--lr", "1"]]
    assert understood("hosts.ini", "-np", "4", "train.py", "-np", "5") == ["hosts.ini", 4, ["train.py", "-np", "5"]]
    assert understood("-np", "4", "localhost", "python", "train.py") == ["localhost", 4, ["python", "train.py"]]
    assert understood("a,b", "hostname") == ["a,b", None, ["hostname"]]
    assert understood("missing.ini", "train.py") == ["missing.ini", None, ["train.py"]], "which is then said to be missing"
    assert understood("hosts.ini") == ["hosts.ini", None, None], "which is told that there is no program"
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")  # chmod was forgotten
    for program_alone in (["./start.sh", "train.py"], ["train.py", "hosts.ini"], ["hostname", "-f"], ["train.sh", "--debug"]):
        assert understood(*program_alone) == [None, None, program_alone]
    assert understood("--", "a,b", "c") == [None, None, ["a,b", "c"]]
    assert understood("-H", "c", "hosts.ini", "train.py") == ["c", None, ["hosts.ini", "train.py"]]


def test_options_without_effect_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    run_options(["true"], np=2, reset_limit=3)
    assert "--reset-limit has no effect: it is for elastic jobs" in capsys.readouterr().err
    run_options(["true"], np=2, min_np=1, reset_limit=3)
    assert "no effect" not in capsys.readouterr().err


def test_variables_that_ranks_get_by_default() -> None:
    known = {
        "HOROVOD_TIMELINE": "t",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "lib",
        "CUDA_LAUNCH_BLOCKING": "1",
        "HIP_LAUNCH_BLOCKING": "1",
    }
    here = {
        "HOME": "/h",
        "PATH": "/bin",
        "COLLECTIVE_RANK": "1",
        "HOROVOD_LOCAL_RANK": "0",
        "PYTHONHOME": "/p",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0",
        "HIP_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
    }
    secret = {"COLLECTIVE_SECRET": "s", "WANDB_API_KEY": "s", "HF_TOKEN": "s", "TORCH_PASSWORD": "s", "AWS_SECRET_ACCESS_KEY": "s"}
    secret |= {"SSHPASS": "s", "MYSQL_PWD": "s", "GITHUB_PAT": "s", "SENTRY_DSN": "s", "HTTPS_PROXY": "http://me:word@proxy.example:1"}
    shell = {**known, **here, **secret, "MY_SETTING": "x", "BASH_FUNC_f%%": "() { :; }"}
    assert forwarded_variables.select(shell, "known") == known
    assert forwarded_variables.select({**shell, "TOKENIZERS_PARALLELISM": "0"}, "all") == {
        **known,
        "MY_SETTING": "x",
        "TOKENIZERS_PARALLELISM": "0",
    }
    assert forwarded_variables.select(shell, "none") == {}


def test_command_line_wins_over_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_NETWORK", "eth9")
    monkeypatch.setenv("COLLECTIVE_FUSION_MB", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = run_options(["train"], fusion_threshold_mb=8, x=["NCCL_DEBUG=INFO"]).environment
    assert (found["COLLECTIVE_NETWORK"], found["COLLECTIVE_FUSION_MB"], found["NCCL_DEBUG"]) == ("eth9", "8", "INFO")
    assert "COLLECTIVE_NETWORK" not in run_options(["train"], network_interfaces="eth0").environment
    assert not {"COLLECTIVE_NETWORK", "NCCL_DEBUG"} & set(run_options(["train"], variables="none").environment)
    monkeypatch.setenv("COLLECTIVE_STALL_WARNING", "60")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")
    found = run_options(["train"], stall_check_warning_time_seconds="10", network_interfaces="eth0").environment
    assert (found["COLLECTIVE_STALL_WARNING"], found["HOROVOD_STALL_CHECK_TIME_SECONDS"]) == ("", "10"), "an empty one counts as none"
    assert found.get("HOROVOD_GLOO_IFACE", "") == ""
    with pytest.raises(UsageError, match="invalid --variables some: expected one of known, all, none"):
        run_options(["train"], variables="some")


def test_horovodruns_long_form_of_hosts_is_no_inventory(tmp_path: Path) -> None:
    assert target_hosts.is_list("a:2,b:2", None)
    assert target_hosts.is_list("a:64", 4)
    for inventory in ("a,b", "a:2222,b:2222", "ann@a:2", "a:2,b", "[::1]:2", str(tmp_path)):
        assert not target_hosts.is_list(inventory, 4 if ":2222" in inventory else None)
    assert not target_hosts.is_list(None, 4)


def select(environment: dict[str, str], **given: Any) -> Inventory:
    options = HostOptions(**{**dict.fromkeys(HostOptions.__dataclass_fields__), **given})
    return target_hosts.select(options, None, None, environment, lambda _: None)


def test_ssh_port_and_key_apply_to_hosts_reached_by_ssh() -> None:
    here, far = select({}, host="localhost:1,far:1", ssh_port=2222, ssh_identity_file=Path("/keys/mine")).hosts
    assert "-i /keys/mine -p 2222 -o BatchMode=yes far true" in shlex.join(ssh.login(far, "true")[0])
    assert (here.port, here.key_file) == (None, None)


def test_the_options_win_over_slurm_and_slurm_over_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker slots=2\n")
    operator = {"HYDRA_HOST_FILE": str(tmp_path / "hostfile"), "K_MPI_JOB_ROLE": "launcher"}
    slurm = {**operator, "SLURM_JOB_NODELIST": "node"}
    for environment, given, name in ((operator, {}, "worker"), (slurm, {}, "node"), (slurm, {"host": "a"}, "a")):
        assert [host.name for host in select(environment, **given).hosts] == [name]
    with pytest.raises(UsageError, match="-H and --hostfile say the same thing"):
        select({}, host="a", hostfile=tmp_path / "hostfile")


def test_a_rank_of_torchrun_is_not_a_launcher() -> None:
    with pytest.raises(UsageError, match="start the program itself with torchrun"):
        select({"TORCHELASTIC_RUN_ID": "none"}, host="a")


def test_limit_leaves_hosts_out_as_it_does_elsewhere(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[gpu]\na slots=2\nb slots=2\n[cpu]\nc ansible_host=10.0.0.3\n")
    unfit = tmp_path / "unfit.txt"
    unfit.write_text("b\nelsewhere\n")

    def left(limit: str, **given: Any) -> list[tuple[str, int | None]]:
        return [(host.name, host.slots) for host in select({}, limit=limit, **given).hosts]

    assert left(f"!@{unfit}", hosts=str(inventory)) == [("a", 2), ("c", None)]
    assert left(f"gpu,!@{unfit}", hosts=str(inventory)) == [("a", 2)]
    assert left("gpu", hosts=str(inventory), host="b:1,10.0.0.3:4") == [("b", 1)]
    assert left(f"!@{unfit}", host="a:1,b:2,x:3") == [("a", 1), ("x", 3)]
    with pytest.raises(UsageError, match="it leaves no host") as caught:
        left(f"!@{unfit}", hosts=str(inventory), host="b:2")
    assert caught.value.hint == "hosts are b"
    with pytest.raises(UsageError, match="no host or group is called `z`"):
        left("z", host="a:1")
    with pytest.raises(UsageError, match="cannot be read"):
        left("!@nowhere", host="a:1")
    script = run_options(["train"], min_np=1, host_discovery_script=_script(tmp_path)).elastic
    options = HostOptions(**{**dict.fromkeys(HostOptions.__dataclass_fields__), "limit": "a"})
    with pytest.raises(UsageError, match="--limit and --host-discovery-script"):
        target_hosts.select(options, 2, script, {}, lambda _: None)


def _script(folder: Path) -> Path:
    path = folder / "discover.sh"
    path.write_text("#!/bin/sh\necho a:1\n")
    return path
