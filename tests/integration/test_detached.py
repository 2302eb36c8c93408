"""Detached jobs on two ready hosts: they go on without this machine, are found from another one, and leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import good, provision, report, root, running, wait_until
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


@pytest.mark.parametrize("launcher", ["own", "mpi"])
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


def disturb(cluster: Sandbox, job: str, chance: random.Random) -> str:
    """Kill or cut off what belongs to this machine, at any moment."""
    moment = chance.uniform(0, 3)
    how = chance.choice(("reader", "starter", "lister", "connections"))
    words = {"reader": ("logs", "-f", job), "lister": ("jobs",), "connections": ("logs", "-f", job)}.get(
        how, ("run", "--detach", "--oversubscribe", "train.py")
    )
    place = ("--hosts", str(cluster.inventory)) if how != "lister" else (str(cluster.inventory),)
    process = subprocess.Popen(
        [sys.executable, "-m", "provision", words[0], *place, *words[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(moment)
    if how == "connections":  # sshd's processes of the login user: those that are connected to this machine
        root(cluster.hosts[0], "pkill -KILL -u trainer -x sshd || pkill -KILL -u trainer sshd-session || true")
        time.sleep(chance.uniform(0, 2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    return f"{how} after {moment:.1f} s"


@pytest.mark.slow
def test_kills_and_disconnects_at_random_lose_no_job_and_no_line(cluster, work):
    """50, or as many as the environment says. What a killed controller has started is a job that is listed, or nothing."""
    seed, times = int(os.environ.get("DISTURB_SEED", time.time())), int(os.environ.get("DISTURB_TIMES", "50"))
    chance = random.Random(seed)
    print("seed", seed)
    job = good(provision("run", "--hosts", str(cluster.inventory), "--detach", "train.py")).stdout.strip()
    for number in range(times):
        print(number, disturb(cluster, job, chance), flush=True)
        assert listed(cluster)[job] == "running"
    others = [name for name, state in listed(cluster).items() if name != job and state in ("starting", "running")]
    print(len(others), "jobs of killed controllers go on")
    end(cluster)
    for name in (job, *others):
        ended = provision("logs", "-f", name, "--hosts", str(cluster.inventory), timeout=300)
        assert ended.returncode == 1
        shown = steps(ended.stdout)
        assert shown == list(range(len(shown)))
        assert len(shown) > 0
        assert "failed first: ValueError: a bad batch" in ended.stderr
    assert set(listed(cluster).values()) == {"ended"}
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])
