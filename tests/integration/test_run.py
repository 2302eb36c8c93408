"""On ready hosts: ``provision run`` copies and launches programs, a job that ends leaves nothing, hosts are locked for one controller at a
time, and nothing goes on without its controller.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from hosts import good, marked_processes, provision, root, running, verdict, wait_until
from jobs import at_work, folders_of_jobs, processes_of_jobs

from provision.sandbox import Sandbox


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("run")


PROGRAM = """
import os, sys
import torch
import collective_core.torch as hvd
hvd.init()
print(f"rank {hvd.rank()} sums to {hvd.allreduce(torch.ones(2), op=hvd.Sum)[0]:g}, {os.environ['WORD']}, {os.getcwd()}", flush=True)
if hvd.rank() == int(sys.argv[1]):
    raise ValueError("a bad batch")
hvd.barrier()
open(f"of-rank-{hvd.rank()}.txt", "w").close()
"""


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The folder from which programs are launched, with one of the user's."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("launcher", ["mpi", "own"])
def test_a_program_is_copied_and_launched(cluster, work, tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("WORD", "not on a command line")
    (work / "neighbour.py").touch()
    root(cluster.hosts[1], "rm -rf ~trainer/provision-run")  # what the other launcher's ranks have left
    words = ["run", "--launcher", launcher, "--hosts", str(cluster.inventory), "-x", "WORD", "--output-filename", str(tmp_path / "kept")]
    done = good(provision(*words, "python", "train.py", "-1"))
    for rank in range(4):
        assert f"rank {rank} sums to 4, not on a command line, /home/trainer/provision-run/work-" in done.stdout
        assert f"rank {rank} sums to 4" in (tmp_path / f"kept/rank.{rank}/stdout").read_text()
    assert root(cluster.hosts[1], "cd ~trainer/provision-run/work-* && echo *") == "neighbour.py of-rank-2.txt of-rank-3.txt train.py"

    failed = provision(*words, "python", "train.py", "2")
    assert failed.returncode == 1
    assert "rank 2 on node2 failed first: ValueError: a bad batch (train.py, line " in failed.stderr
    assert "-----" not in failed.stderr, "mpirun's boxes name other ranks"
    assert "[2]   File" in failed.stderr
    assert "rank 1 sums to 4" in failed.stdout
    assert failed.stderr.count("Traceback") == 1, "what it did to others is a line"
    wait_until(lambda: processes_of_jobs(cluster) == [])


#: Run on the first host itself, by name: what `up` has left there is the way to the second, and the ranks of each divide its cores.
RUNNER = """
import os
import numpy
import collective_core as cc

def train():
    cc.init()
    cores = os.environ["OMP_NUM_THREADS"] == str(max(1, min(len(os.sched_getaffinity(0)), os.cpu_count()) // cc.local_size()))
    return os.uname().nodename, float(cc.allreduce(numpy.ones(1), op=cc.Sum)[0]), cores

if __name__ == "__main__":
    import sys
    if sys.argv[1:]:
        print(*cc.Runner(hosts=sys.argv[1]).run(train), sep="\\n")
    else:
        print(train(), flush=True)
"""


def test_on_a_host_of_the_cluster_the_engines_launcher_finds_the_way_to_the_others(cluster, ssh, work):
    (work / "runner.py").write_text(RUNNER)
    one, python = cluster.hosts[0], "/opt/provision/venv/bin/python"
    expected = ["('node1', 3.0, True)", "('node2', 3.0, True)", "('node2', 3.0, True)"]
    script = f"cat > /tmp/runner.py <<'E'\n{RUNNER}\nE\ncd /tmp && "
    done = ssh(cluster, one, f"{script}{python} runner.py node1:1,node2:2")
    assert done.stdout.split("\n")[:3] == expected, done.stderr
    done = ssh(cluster, one, f"{script}{python} -m collective_core.launch -H node1:1,{cluster.hosts[1].address}:2 {python} -c '{RUNNER}'")
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == expected, done.stderr
    done = good(provision("run", "--mpi", "--hosts", str(cluster.inventory), "-H", "node1:1,node2:2", "python", "runner.py"))
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == expected


IN_AN_ENVIRONMENT = """
import sys, einops, torch
import collective_core.torch as hvd
hvd.init()
print(f"einops {einops.__version__} sums to {hvd.allreduce(torch.ones(1), op=hvd.Sum)[0]:g} in {sys.prefix}", flush=True)
"""


@pytest.mark.slow
def test_a_project_has_its_own_packages_next_to_ours(cluster, work):
    (work / "uses.py").write_text(IN_AN_ENVIRONMENT)
    (work / "requirements.txt").write_text("einops==0.8.1\n")
    words = ["run", "--hosts", str(cluster.inventory), "--env", "requirements.txt"]
    for launcher in ("mpi", "own"):
        done = good(provision(*words, "--launcher", launcher, "python", "uses.py"))
        assert done.stdout.count("einops 0.8.1 sums to 4 in /opt/provision/envs/") == 4
        assert ("Create the environment" in done.stderr) == (launcher == "mpi"), "the second run finds it"
    for host in cluster.hosts:
        assert '"envs"' in root(host, "cat /opt/provision/record.json"), "`provision remove` removes what is recorded"
        assert root(host, "ls /opt/provision/venv/lib/python3*/site-packages | grep -c einops || true") == "0"
    (work / "requirements.txt").write_text("torch==2.5.0\n")
    refused = provision(*words, "python", "uses.py")
    assert refused.returncode == 1
    assert "it needs torch==2.5.0, but torch 2.13.0" in refused.stderr


def test_more_ranks_than_slots_are_refused(cluster, work):
    local = provision("run", "--hosts", str(cluster.inventory), "-H", "node2:9", "-np", "10", "python", "train.py", "-1")
    assert local.returncode == 2
    assert "10 ranks, but 1 host with 9 slots" in local.stderr
    smoke = provision("smoke", str(cluster.inventory), "--np", "99")
    assert smoke.returncode == 2
    assert "99 ranks, but 2 hosts with 4 slots" in smoke.stderr
    program = "import collective_core as cc; cc.init(); print(cc.rank(), 'of', cc.size())"
    meant = good(provision("run", "--hosts", str(cluster.inventory), "-np", "5", "--oversubscribe", "python", "-c", program))
    assert "4 of 5" in meant.stdout


#: How the second host cannot take part: what is done to the inventory's text, or on the host and back; what is said.
UNFIT = {
    "an unknown name": (("ansible_host=ADDRESS", "ansible_host=nowhere.invalid"), "", "", "its name is not known"),
    "a closed port": (("ansible_host=ADDRESS", "ansible_host=ADDRESS ansible_port=2"), "", "", "Connection refused"),
    "no interpreter": (None, "mv venv/bin venv/away", "mv venv/away venv/bin", "there is no Python at /opt/provision/venv/bin/python"),
    "no engine": (
        None,
        "cd venv/lib/python3*/site-packages && mv collective_core away",
        "cd venv/lib/python3*/site-packages && mv away collective_core",
        "the engine is not installed",
    ),
}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("a closed port", "no interpreter")), "an unknown name", "no engine"]
)
def test_a_host_that_cannot_take_part_is_named_in_one_message(cluster, work, how):
    text, before, after, says = UNFIT[how]
    hosts, two = work.parent / "hosts.ini", cluster.hosts[1]
    old, new = (part.replace("ADDRESS", two.address) for part in text) if text else ("", "")
    hosts.write_text(cluster.inventory.read_text().replace(old, new))
    root(two, f"cd /opt/provision && {before or 'true'}")
    try:
        failed = provision("run", "--gloo", "--start-timeout", "20", "--hosts", str(hosts), "python", "train.py", "-1", timeout=120)
    finally:
        root(two, f"cd /opt/provision && {after or 'true'}")
    assert failed.returncode == 1
    said = [line for line in failed.stderr.splitlines() if line.startswith("provision: ")]
    assert len(said) == 1
    assert said[0].startswith("provision: node2: ")
    assert says in said[0]
    wait_until(lambda: processes_of_jobs(cluster) == [])


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        *(pytest.param("own", number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)),
        ("own", signal.SIGKILL),
        ("mpi", signal.SIGINT),
    ],
)
def test_job_ends_everywhere_with_its_controller(cluster, work, launcher, number):
    for _ in range(3):  # a busy machine may be late, but hardly three times
        with at_work(cluster, work, launcher) as run:
            began = time.monotonic()
            run.process.send_signal(number)
            wait_until(lambda: not any("waits.py" in line for line in processes_of_jobs(cluster)), timeout=30)
            seconds = time.monotonic() - began
            ended = run.finish(timeout=60)
        if seconds < 5:
            break
    assert seconds < 5, "what is promised"
    assert ended.returncode == (-9 if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert ended.stderr.splitlines()[-1] == "provision: interrupted; nothing of this run is left running"
        assert "Traceback" not in ended.stderr
    wait_until(lambda: processes_of_jobs(cluster) == [])
    wait_until(lambda: folders_of_jobs(cluster) == [])


@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=pytest.mark.slow), "own"])
def test_a_rank_that_is_killed_is_named_with_its_host(cluster, work, launcher):
    two = cluster.hosts[1]
    with at_work(cluster, work, launcher) as run:
        root(two, "kill -9 $(pgrep -f '[p]ython waits.py' | tail -n 1)")
        ended = run.finish(timeout=60)
    assert ended.returncode == 137
    assert re.match(r"rank [23] on node2 was ended by SIGKILL\b", verdict(ended))
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


LEAVES = """
import sys
import numpy
import collective_core as cc
cc.init()
if cc.rank() == int((sys.argv + ["0"])[2]):
    sys.exit(sys.argv[1] if sys.argv[1] == "the data is missing" else int(sys.argv[1]))
cc.allreduce(numpy.ones(4), name="x")
"""


def run_until_all_spoke(words, line):
    """On a busy machine the launcher may have to end a rank that is late to speak, but hardly three times."""
    for _ in range(3):
        ended = provision(*words)
        if re.search(line, ended.stderr, re.MULTILINE):
            break
    assert re.search(line, ended.stderr, re.MULTILINE), ended.stderr
    return ended


@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=pytest.mark.slow), "own"])
def test_a_rank_that_leaves_while_others_wait_is_named_with_its_words(cluster, work, launcher):
    (work / "leaves.py").write_text(LEAVES)
    words = ("run", "--launcher", launcher, "--hosts", str(cluster.inventory), "leaves.py")
    for how, code, said in (
        ("the data is missing", 1, " while others waited for it: the data is missing"),
        ("3", 3, " while others waited for it"),
        ("0", 1, " with exit code 0 while others waited for it"),
    ):
        ended = run_until_all_spoke((*words, how), "^  ranks 1, 2 and 3: PeerLostError: ")
        assert (ended.returncode, verdict(ended)) == (code, f"rank 0 on node1 ended{said}"), ended.stderr
        assert "Traceback" not in ended.stderr
        assert "-----" not in ended.stderr
    # Another one than rank 0 may hang in MPI until mpirun kills it.
    ended = run_until_all_spoke((*words, "the data is missing", "1"), "^  ranks 0, 2 and 3: PeerLostError: ")
    assert (ended.returncode, verdict(ended)) == (1, "rank 1 on node1 ended while others waited for it: the data is missing"), ended.stderr


@pytest.mark.parametrize("launcher", ["mpi", "own"])
def test_errors_without_a_traceback_are_the_verdict(cluster, work, launcher):
    words = ("run", "--launcher", launcher, "--hosts", str(cluster.inventory), "-np", "2")
    missing = run_until_all_spoke((*words, "nosuchprog"), "^  rank [01] ended the same way$")
    assert missing.returncode == 127
    assert re.match(r"rank [01] on node1 failed first: nosuchprog cannot be started: No such file or directory$", verdict(missing))
    wrong = provision(*words, "python", "-c", "print(")
    assert wrong.returncode == 1
    assert re.match(r"rank [01] on node1 failed first: SyntaxError: ", verdict(wrong))


#: Processes of a job under mpirun: on which host, how `pgrep -f` finds it, what is said when it is killed.
VICTIMS = {
    "mpirun": (0, "venv/bin/mpirun", "the launcher on node1"),
    "orted": (1, "venv/bin/orted", "node2"),
    "job": (0, "job.py.*exec", "the connection to node1 has ended, or the job's process there was killed"),
}


@pytest.mark.parametrize("victim", ["orted", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpirun", "job"))])
def test_killed_launcher_leaves_nothing(cluster, work, victim):
    number, pattern, says = VICTIMS[victim]
    with at_work(cluster, work, "mpi") as run:
        assert len(folders_of_jobs(cluster)) == 6  # one in each place on each host, Open MPI's within them, and a claim
        root(cluster.hosts[number], f"kill -9 $(pgrep -f '^[^ ]*({pattern}|python -c .*{pattern})' | head -n 1)")
        ended = run.finish(timeout=60)
    assert ended.returncode not in (0, 130)
    assert says in verdict(ended)
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


# --- several controllers, and controllers that end --------------------------------------------------------------------------------


def test_second_controller_is_told_who_has_the_lock(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "1", "--np", "3") as first:
        first.wait_for("Survey")
        second = provision("up", str(cluster.inventory))
        assert second.returncode == 1
        assert f"pid {first.process.pid}" in second.stderr
        assert "`provision smoke`" in second.stderr
        trained = first.finish()
    assert trained.returncode == 0, trained.stderr
    assert "3 ranks on 2 hosts, 1 epoch" in trained.stdout


@pytest.mark.slow
def test_a_controller_on_another_machine_is_named_too(cluster):
    lock = '{"run": "20260101-000000-abcdef", "owner": "ann on laptop (pid 7)", "since": "this morning"}'
    root(cluster.hosts[1], f"echo '{lock}' > /run/provision.lock")
    try:
        result = provision("up", str(cluster.inventory))
    finally:
        root(cluster.hosts[1], "rm /run/provision.lock")
    assert result.returncode == 1
    assert "ann on laptop (pid 7) has been working on this host since this morning" in result.stdout
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


@pytest.mark.slow
def test_killed_installation_does_not_lock_out_the_next(cluster):
    with running("up", str(cluster.inventory), "--no-smoke", "--full") as run:
        run.wait_for_task("python: Install Python packages")
        children = [int(child) for child in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()]
        os.kill(run.process.pid, signal.SIGKILL)
        for child in children:  # Ansible, in a session of its own; it would go on to the end and give the lock back
            os.killpg(child, signal.SIGKILL)
    assert root(cluster.hosts[0], "cat /run/provision.lock")
    good(provision("up", str(cluster.inventory), "--no-smoke"))
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


@pytest.mark.slow
def test_ctrl_c_in_training_leaves_nothing_running_anywhere(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "500") as run:
        run.wait_for("epoch 1 of 500")
        assert marked_processes(cluster)
        run.process.send_signal(signal.SIGINT)
        ended = run.finish(timeout=60)
    assert ended.returncode == 130
    assert "nothing of this run is left running" in ended.stderr
    assert "Traceback" not in ended.stderr.split("interrupted:")[-1]
    assert marked_processes(cluster) == []


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_no_training_behind(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "500") as run:
        run.wait_for("epoch 1 of 500")
        os.kill(run.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (left := marked_processes(cluster)) and time.monotonic() < deadline:
            time.sleep(0.5)
    assert left == []
