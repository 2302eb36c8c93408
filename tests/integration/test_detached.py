"""Detached jobs on two ready hosts: they go on without this machine, are found from another one, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hosts import as_machine, good, provision, report, root, running, wait_until
from jobs import folders_of_jobs, processes_of_jobs

from provision.sandbox import Sandbox

#: Prints numbered lines until a file is there on the first host; then each rank leaves a file, and rank 1 ends with an error.
PROGRAM = """
import itertools, os, time
import numpy
import collective_core as cc
cc.init()
for step in itertools.count():
    if cc.broadcast(numpy.array([os.path.exists("go")]), 0)[0]:
        break
    if cc.rank() == 0:
        print("step", step, flush=True)
    time.sleep(0.05)
open(f"of-rank-{cc.rank()}.txt", "w").close()
cc.barrier()
if cc.rank() == 1:
    raise ValueError("a bad batch")
"""


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("detached")


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The folder from which programs are launched."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def listed(cluster: Sandbox) -> dict[str, str]:
    """Job → its state."""
    return {each["job"]: each["state"] for each in report(good(provision("jobs", str(cluster.inventory), "--json")))["jobs"]}


def end(cluster: Sandbox) -> None:
    """Let the program end."""
    root(cluster.hosts[0], "for folder in ~trainer/provision-run/work-??????; do touch $folder/go; done")


def steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^\[0\] step (\d+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("launcher", ["own", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_job_outlives_its_controller_and_is_found_from_another(cluster, work, monkeypatch, launcher):
    hosts = str(cluster.inventory)
    started = good(provision("run", "--launcher", launcher, "--hosts", hosts, "--detach", "train.py"))
    job = started.stdout.strip()
    with running("logs", "-f", job) as first:
        first.wait_for("step 3")
        first.process.kill()
    monkeypatch.setenv("PROVISION_HOME", str(work / "another"))
    monkeypatch.chdir(work)
    assert listed(cluster)[job] == "running"
    for more in ((), ("--detach",)):
        refused = provision("run", "--hosts", hosts, *more, "work/train.py")
        assert refused.returncode == 1
        assert f"provision: node1: in use by job {job} of trainer" in refused.stderr
        assert "--wait waits for its end" in refused.stderr
    waiting = good(provision("run", "--hosts", hosts, "--detach", "--wait", "work/train.py"))
    assert re.search(rf"waiting: node1.* is busy: in use by job {job} of trainer", waiting.stderr)
    with running("logs", "-f", job, "--hosts", hosts) as second:
        second.wait_for("step 3")
        end(cluster)
        ended = second.finish(timeout=120)
    assert ended.returncode == 1
    shown = steps(provision("logs", job, "--hosts", hosts).stdout)
    assert len(shown) > 3
    assert shown == list(range(len(shown))), "all of them, also those that were printed to the first controller"
    assert re.search(r"rank 1 on node1 failed first: ValueError: a bad batch \(.*train\.py, line \d+", ended.stderr)
    assert good(provision("fetch", job, "of-rank-0.txt", "--hosts", hosts)).stdout == "of-rank-0.txt\n"
    assert (work / "of-rank-0.txt").exists()
    second_job = waiting.stdout.strip()
    wait_until(lambda: listed(cluster)[second_job] == "running")
    good(provision("cancel", second_job, "--hosts", hosts))
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])
    assert set(listed(cluster).values()) == {"ended"}
    root(cluster.hosts[0], "rm ~trainer/provision-run/work-*/go")


#: Each process prints numbered lines for some seconds: all must be in the log, and once.
COUNTS = """
import itertools, os, sys, time
count, who = itertools.count(), f"{os.uname().nodename}/{os.getpid()}"
def work():
    print(who, next(count), flush=True)
    time.sleep(0.05)
if sys.argv[1] == "elastic":
    import collective_core as cc
    from collective_core.common import elastic_states
    cc.init()
    @elastic_states.run
    def train(state):
        while state.step < 60:
            work()
            state.step += 1
            state.commit()
    train(elastic_states.ObjectState(step=0))
else:
    for _ in range(60):
        work()
print(who, "last", flush=True)
"""
KINDS = {
    "own": ("--oversubscribe", "--launcher", "own"),
    "mpi": ("--oversubscribe", "--launcher", "mpi"),
    "restarts": ("--oversubscribe", "--launcher", "own", "--max-restarts", "1"),
    "elastic": ("--min-np", "2"),
}


def processes_of(job: str) -> dict[int, list[str]]:
    """This machine's number of each process of a job, and of its keeper, on any host: its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            if {f"PROVISION_RUN_ID={job}", f"PROVISION_RUN_ID={job}-keeper"} & set(variables):
                found[int(folder.name)] = variables
    return found


class Trial:
    """A detached job that is disturbed once, by chance: which kind of job, how, when, and which of its processes is killed.

    Attributes:
        goes_on: whether the job must end well all the same: what was disturbed is of this machine, or a rank that is replaced.
    """

    def __init__(self, cluster: Sandbox, seed: int, number: int) -> None:
        self.cluster, self.word = cluster, f"trial-{seed}-{number}-{os.getpid()}"
        self.chance = random.Random(f"{seed} {number}")
        self.kind = list(KINDS)[number % len(KINDS)]
        self.how = self.chance.choice(("starter", "reader", "connections", "network", "canceller", *["process"] * 5))
        self.needs_all = self.kind == "elastic" or self.how in ("connections", "network")  # else it would disturb its neighbours
        self.goes_on, self.said = True, f"{self.word}: {self.kind}, {self.how}"

    def run(self) -> str:
        """What happened. Raises AssertionError where the job is lost, has lost a line, or has left something."""
        hosts = ("--hosts", str(self.cluster.inventory))
        words = ("run", *hosts, "--detach", "-np", "4", *KINDS[self.kind], "counts.py", self.kind, self.word)
        with started(*words) as starter:
            if self.how == "starter":
                self.kill(starter, 5)
            said = starter.communicate(timeout=120)[0].decode().split()
        job = said[0] if said else self.by_word()
        assert job or self.how == "starter", f"{self.said}: it did not begin"
        if job:
            with started("logs", "-f", job, *hosts) as reader:  # it must get all of them by as many connections as it takes
                self.disturb(job, hosts)
                self.check(job, *(output.decode() for output in reader.communicate(timeout=200)), reader.returncode)
        self.said += f"; {job or 'not begun'}"
        return self.said

    def by_word(self) -> str | None:
        """The job that was started, where its id was not printed."""
        jobs = report(good(provision("jobs", str(self.cluster.inventory), "--json")))["jobs"]
        found = [one["job"] for one in jobs if one.get("program", "").split()[-1:] == [self.word]]
        return found[0] if found else None

    def kill(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        moment = self.chance.uniform(0, seconds)
        self.said += f" after {moment:.1f} s"
        time.sleep(moment)
        process.kill()

    def disturb(self, job: str, hosts: tuple[str, ...]) -> None:
        one = self.cluster.hosts[0]
        if self.how in ("reader", "canceller"):
            self.goes_on = self.how == "reader"
            with started(*{"reader": ("logs", "-f"), "canceller": ("cancel",)}[self.how], job, *hosts) as process:
                self.kill(process, 3)
        elif self.how == "connections":  # sshd's processes of the login user: those that are connected to this machine
            time.sleep(self.chance.uniform(0, 2))
            root(one, "pkill -KILL -u trainer -x sshd || pkill -KILL -u trainer sshd-session || true")
        elif self.how == "network":
            time.sleep(self.chance.uniform(0, 2))
            rule = f"INPUT -p tcp --dport 22 ! -s {self.cluster.hosts[1].address} -j DROP"  # also what is connected
            as_machine(one, "net", f"iptables -A {rule}")
            time.sleep(self.chance.uniform(0, 3))
            as_machine(one, "net", f"iptables -D {rule}")
        elif self.how == "process":
            time.sleep(self.chance.uniform(0, 2))
            found = processes_of(job)
            if found:
                pid = self.chance.choice(sorted(found))
                with contextlib.suppress(OSError):  # it has ended
                    self.said += f"; killed {Path(f'/proc/{pid}/cmdline').read_text()[-60:]!r} on {os.readlink(f'/proc/{pid}/ns/uts')}"
                    os.kill(pid, signal.SIGKILL)
                is_rank = any(one.startswith(("PROVISION_RANK=", "COLLECTIVE_WORKER=")) for one in found[pid])
                self.goes_on = is_rank and self.kind in ("restarts", "elastic")

    def check(self, job: str, output: str, errors: str, code: int) -> None:
        self.said += f"; exit code {code}"
        lines = dict[str, list[str]]()
        for who, line in re.findall(r"^\[\d+\] (node\d/\d+) (\w+)$", output, re.MULTILINE):
            lines.setdefault(who, []).append(line)
        whole = [each for each in lines.values() if each[-1] == "last"]
        for each in lines.values():
            numbers = [int(line) for line in each if line != "last"]
            assert numbers == list(range(len(numbers))), f"{self.said}: {lines}"
        if self.goes_on or code == 0:
            most = 7 if self.kind == "restarts" else 4  # where the last rank is killed, the others have printed all of it twice
            assert code == 0, f"{self.said}: {lines}\n{errors}"
            assert 4 <= len(whole) <= most, f"{self.said}: {lines}\n{errors}"
        wait_until(lambda: not processes_of(job), 90)


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """``provision WORDS…``, killed at the end should it hang."""
    command = [sys.executable, "-m", "provision", *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def trials(cluster: Sandbox, work: Path, seed: int, numbers: Sequence[int]) -> None:
    """Some at a time, except those that need all of the hosts."""
    (work / "work/counts.py").write_text(COUNTS)
    every, begun = [Trial(cluster, seed, number) for number in numbers], 0
    for workers, chosen in ((3, [each for each in every if not each.needs_all]), (1, [each for each in every if each.needs_all])):
        with ThreadPoolExecutor(workers) as pool:
            for said in pool.map(Trial.run, chosen):
                print(said, flush=True)
                begun += not said.endswith("not begun")
    assert begun >= len(every) // 2
    wait_until(lambda: set(listed(cluster).values()) <= {"ended", "killed"})
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


@pytest.mark.slow
def test_kills_and_disconnects_at_random_lose_no_job_and_no_line(cluster, work):
    """50, or as many as the environment says."""
    seed, times = int(os.environ.get("DISTURB_SEED", time.time())), int(os.environ.get("DISTURB_TIMES", "50"))
    print("seed", seed)
    trials(cluster, work, seed, range(times))
