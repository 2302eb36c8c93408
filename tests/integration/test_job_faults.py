"""What happens to jobs when hosts, networks and processes fail, done for real to both launchers."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Running, as_machine, container, good, provision, root, running, verdict, wait_until
from jobs import WAITS, at_work, folders_of_jobs, processes_of_jobs

from provision.sandbox import Sandbox, SandboxHost

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("job-faults")


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The folder from which programs are launched."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def pairs_at_work(cluster: Sandbox, work: Path, count: int) -> Iterator[dict[tuple[str, int], Running]]:
    """``count`` jobs by each launcher at the same time, a rank on each host, known by the word behind their program."""
    (work / "waits.py").write_text(WAITS)
    with contextlib.ExitStack() as stack:
        runs = {}
        for launcher, number in itertools.product(("mpi", "own"), range(count)):
            words = ("run", "--oversubscribe", "--launcher", launcher, "--hosts", str(cluster.inventory), "-H", "node1:1,node2:1")
            runs[launcher, number] = stack.enter_context(running(*words, "python", "waits.py", f"{launcher}{number}"))
        for run in runs.values():
            for _ in range(2):
                run.wait_for("is at work")
        yield runs


def test_stopped_ranks_and_launchers_are_named(cluster, work):
    """With SIGSTOP: the process lives, its connections too, and nothing goes on. The default of COLLECTIVE_TIMEOUT is half an hour."""
    one, two = cluster.hosts
    launchers = ("mpi", "own")
    with pairs_at_work(cluster, work, 2) as runs:
        for launcher in launchers:
            root(two, f"kill -STOP $(pgrep -f '[p]ython waits.py {launcher}0')")
            started = f"ps -o ppid= -p $(pgrep -f '[p]ython waits.py {launcher}1')"  # what notes how the rank ends
            root(one, f"kill -STOP $(ps -o ppid= -p $({started}))")
        ended = {which: run.finish(timeout=150) for which, run in runs.items()}
    for launcher in launchers:
        assert re.search(r"rank 1 on node2 \(.*\) has been stopped by a signal", verdict(ended[launcher, 0]))
        assert re.search(r"\w+ on node1 has been stopped by a signal", verdict(ended[launcher, 1]))
    assert {each.returncode for each in ended.values()} == {1}
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


def apart(other: SandboxHost, do: str) -> str:
    """By the kernel's nftables: nothing to and from the other host (``A``), or all again (``D``)."""
    return " && ".join(f"iptables -{do} {chain} -{side} {other.address} -j DROP" for chain, side in [("INPUT", "s"), ("OUTPUT", "d")])


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_silent_host_is_named(cluster, work, how):
    one, two = cluster.hosts
    with pairs_at_work(cluster, work, 1) as runs:
        container(two).pause() if how == "paused" else as_machine(two, "net", apart(one, "A"))
        try:
            ended = [run.finish(timeout=150) for run in runs.values()]
        finally:
            container(two).unpause() if how == "paused" else as_machine(two, "net", apart(one, "D"))
    for each in ended:
        assert each.returncode != 0
        assert f"node2 ({two.address})" in verdict(each)
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


ELASTIC = """
import time
import collective_core.torch as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while state.alone < 20:
        state.step += 1
        state.alone += hvd.size() == 2
        state.commit()
        if state.step % 10 == 0 or hvd.size() == 2:
            print(f"rank {hvd.rank()} of {hvd.size()} did step {state.step}", flush=True)
        time.sleep(0.05)
    return state.step

print("ended after step", train(hvd.elastic.ObjectState(step=0, alone=0)), flush=True)
"""


def test_host_that_goes_down_is_named_and_an_elastic_job_continues(cluster, work):
    (work / "elastic.py").write_text(ELASTIC)
    two = cluster.hosts[1]
    elastic_job = running("run", "-np", "4", "--min-np", "2", "--hosts", str(cluster.inventory), "python", "elastic.py")
    with elastic_job as elastic:
        begun = elastic.wait_for("rank 0 of 4 did step")
        with at_work(cluster, work, "own", "--oversubscribe") as run:
            container(two).kill()
            ended = run.finish(timeout=60)
        gone_on = good(elastic.finish(timeout=120))
    container(two).start()
    wait_until(lambda: provision("survey", str(cluster.inventory)).returncode == 0)
    assert ended.returncode != 0
    assert two.address in verdict(ended)
    steps = [int(step) for step in re.findall(r"rank 0 of 2 did step (\d+)", gone_on.stderr)]
    assert steps == list(range(steps[0], steps[0] + 20)), "every step once"
    assert steps[0] > int(begun.split()[-1]), "no committed step is lost"
    assert gone_on.stderr.count(f"ended after step {steps[-1]}") == 2
    assert f"host {two.address}: " in gone_on.stderr
    assert processes_of_jobs(cluster) == []


ENDURES = """
import time, sys
import numpy
import collective_core as cc
cc.init()
begun = last = time.monotonic()
longest = 0.0
while cc.broadcast(numpy.array([time.monotonic() - begun < float(sys.argv[1])]), 0)[0]:
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    print(f"rank {cc.rank()} is at work", flush=True)
    time.sleep(0.2)
print(f"rank {cc.rank()} waited {longest:.0f} s", flush=True)
"""


CUT_S = 20


SAVES = """
import sys
import collective_core.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(100, 100)
checkpoints = hvd.Checkpoints(sys.argv[1], keep=1000, model=model)
step = checkpoints.restore().get("step", 0)
for step in range(step + 1, step + 1 + int(sys.argv[2])):
    checkpoints.save(step)
    print("saved", step, flush=True)
"""


def test_cut_network_ends_only_the_job_with_a_short_timeout(cluster, work):
    """Twenty seconds, by the kernel's nftables; meanwhile a job on one host meets a full disk."""
    (work / "endures.py").write_text(ENDURES)
    (work / "waits.py").write_text(WAITS)
    one, two = cluster.hosts
    words = ("run", "--gloo", "--oversubscribe", "--hosts", str(cluster.inventory))
    with (
        running(*words, "python", "endures.py", str(CUT_S + 20)) as patient,
        running(*words, "-x", "COLLECTIVE_TIMEOUT=8", "python", "waits.py") as impatient,
    ):
        for run in (patient, impatient):
            for rank in range(4):
                run.wait_for(f"rank {rank} is at work" if run is patient else "is at work")
        healing = threading.Timer(CUT_S, as_machine, (two, "net", apart(one, "D")))
        as_machine(two, "net", apart(one, "A"))
        healing.start()
        try:
            given_up = impatient.finish(timeout=60)
        finally:
            healing.join()
        checkpoints_fill_a_disk(cluster, work)
        assert given_up.returncode != 0
        last = verdict(given_up)
        assert "CollectiveError" in last or "PeerLostError" in last
        assert "host node2" in last
        gone_on = good(patient.finish(timeout=90))
    waited = [int(seconds) for seconds in re.findall(r"rank \d waited (\d+) s", gone_on.stderr)]
    assert len(waited) == 4
    assert max(waited) >= CUT_S - 1, "it was the cut that they waited for"
    wait_until(lambda: processes_of_jobs(cluster) == [], timeout=90)


def checkpoints_fill_a_disk(cluster: Sandbox, work: Path) -> None:
    """They fill a small disk of node1: one message, the earlier ones stay, and the next job goes on from the last of them."""
    (work / "saves.py").write_text(SAVES)
    one, small = cluster.hosts[0], "/home/trainer/small"
    as_machine(one, "mount", f"mkdir -p {small} && mount -t tmpfs -o size=256k,mode=777 none {small}")
    try:
        words = ("run", "--gloo", "--oversubscribe", "--hosts", str(cluster.inventory), "-H", "node1:2")
        full = provision(*words, "python", "saves.py", small, "1000")
        assert full.returncode == 1
        last = verdict(full)
        step = int(re.search(rf"checkpoint of step (\d+) cannot be written on node1 into {small}: No space left on device\b", last)[1])
        saved = [f"step-{number:012d}.checkpoint" for number in range(1, step)]
        assert root(one, f"ls -A {small}").split() == saved, "the earlier ones stay, and no draft"
        again = good(provision(*words, "--restart-from", small, "python", "saves.py", "elsewhere", "1"))
        assert f"goes on from {small}/{saved[-1]} (step {step - 1})" in again.stderr
        assert f"saved {step}" in again.stdout
    finally:
        as_machine(one, "mount", f"umount {small} && rmdir {small}")
