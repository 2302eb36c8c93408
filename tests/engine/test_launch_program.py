"""A program on several ranks by the engine's own launcher, here and over a real sshd: output, exit codes, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import slow_but_last
from collective_core.errors import CollectiveError
from collective_core.launch import stopped
from collective_core.launch.frames import Frame
from collective_core.launch.hosts import Host
from collective_core.launch.nodes import Size, size_of
from collective_core.launch.tracebacks import Tracebacks
from collective_core.runtime import cores
from collective_core.runtime.horovod_variables import rank_variables, translate
from processes import IMPATIENT, children_of, signal_all, state_of, wait_for, wait_until_gone

LIMIT = 60

PROGRAM = """
import os, sys, time
import numpy
import collective_core as cc
cc.init()
secret = [name for name in os.environ if name == "COLLECTIVE_SECRET"]
place = " ".join(os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "RANK", "LOCAL_RANK", "CROSS_RANK"))
place += "/" + " ".join(os.environ.get(name, "-") for name in (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME"
))
assert os.environ["MASTER_PORT"].isdigit() and os.environ["MASTER_PORT"] not in os.environ["COLLECTIVE_STORE"]
total = cc.allreduce(numpy.ones(1), op=cc.Sum)[0]
print(f"{place} {total:g} {os.environ['FRUIT']} {os.getcwd()} {sys.stdin.read()!r} {secret}", flush=True)
print("a complaint", file=sys.stderr, flush=True)
cc.barrier()
if sys.argv[1:] and cc.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), int(sys.argv[2])) if int(sys.argv[2]) > 0 else os._exit(-int(sys.argv[2]))
if sys.argv[1:]:
    time.sleep(600)
"""


def command(*words: str, ssh: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "collective_core.launch", *(("--ssh-config", ssh[2]) if ssh else ()), *words]


def launch(*words: str, ssh: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return run(command(*words, ssh=ssh), **environment)


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT, check=False)


def launch_patiently(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Where all ranks end by themselves: none of them is ended because it is slow."""
    patient = "import sys; from collective_core.launch import __main__, program; program.GRACE = 30.0; sys.exit(__main__.main())"
    return run([sys.executable, "-c", patient, *words], **environment)


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """Stands in the command lines of one test's ranks."""
    return f"mark-{tmp_path.name}"


def python(mark: str, *words: str) -> list[str]:
    return ["python", "-c", f"{PROGRAM}\n# {mark}", *words]


def test_where_a_rank_sits_in_horovods_variables():
    hosts = ["a", "a", "b", "b", "b", "c"]
    assert rank_variables(3, hosts) == {
        "HOROVOD_HOSTNAME": "b",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "6",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }
    assert [rank_variables(rank, hosts)["HOROVOD_CROSS_RANK"] for rank in range(6)] == ["0", "0", "1", "1", "0", "2"]
    assert translate({**rank_variables(0, hosts), "HOROVOD_START_TIMEOUT": "5", "HOROVOD_ELASTIC_TIMEOUT": "6"}) == ({}, [])


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("localhost:3", [f"localhost {rank} {rank} 0/{rank} 3 {rank} 3 0 1 127.0.0.1 - -" for rank in range(3)]),
        (
            "localhost:1,other:2",
            [
                "localhost 0 0 0/0 3 0 1 0 2 127.0.0.1 lo -",
                "other 1 0 1/1 3 0 2 1 2 127.0.0.1 lo -",
                "other 2 1 0/2 3 1 2 1 2 127.0.0.1 lo -",
            ],
        ),
    ],
)
def test_all_ranks_get_what_they_need_and_their_output_is_tagged(ssh, hosts, places, mark, tmp_path):
    outer = {"RANK": "7", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "9", "ROLE_RANK": "7"}  # of a job in which this one is started
    words = ("--tag-output", "-H", hosts, "-x", "FRUIT", "--wdir", str(tmp_path), *python(mark))
    done = launch(*words, ssh=ssh, FRUIT="a pear", **outer)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"3 a pear {tmp_path} '' []"
    expected = [f"[1,{rank}]<stdout>:{places[rank]} {said}" for rank in range(3)] + [f"[1,{rank}]<stderr>:a complaint" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("hosts", "end", "code", "verdict"),
    [
        ("localhost:3", "-7", 7, "rank 1 on localhost ended with exit code 7"),
        ("localhost:1,other:2", "9", 137, "rank 1 on other was ended by SIGKILL"),
    ],
)
def test_the_first_failing_rank_gives_the_exit_code_and_the_others_are_ended(ssh, hosts, end, code, verdict, mark):
    done = launch("-np", "3", "-H", hosts, "-x", "FRUIT=fig", *python(mark, "1", end), ssh=ssh)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == f"collective_core.launch: {verdict}"
    assert wait_until_gone(mark) == []


def test_the_rank_that_ended_first_is_named_although_its_last_words_take_longer():
    program = """
import os, subprocess, time
import collective_core as cc
cc.init()
if cc.rank() == 1:
    subprocess.Popen(["sleep", "600.0625"])
    subprocess.Popen(["sleep", "4"], start_new_session=True)  # holds its output open; it is not the job's any more
    os.kill(os.getpid(), 9)
try:
    cc.barrier()
except cc.CollectiveError:
    time.sleep(0.25)  # the launcher may have been busy when rank 1 ended
    os._exit(3)
"""
    done = launch("-np", "2", "python", "-c", program)
    assert done.returncode == 137, done.stderr
    assert done.stderr.splitlines()[-1] == "collective_core.launch: rank 1 on localhost was ended by SIGKILL"
    assert wait_until_gone("600.0625") == []


def test_the_traceback_of_the_rank_that_failed_first_is_read_first_and_what_it_did_to_others_is_a_line_each():
    program = """
import collective_core as cc
cc.init()
if cc.rank() == 1:
    raise ValueError("the cause")
cc.barrier()
"""
    done = launch_patiently("-np", "3", "python", "-c", program)
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    trace = ["[1] Traceback (most recent call last):", '[1]   File "<string>", line 5, in <module>', "[1] ValueError: the cause"]
    assert lines[:3] == trace, done.stderr
    assert [line.split(": ")[0] for line in sorted(lines[3:-1])] == [f"[{rank}] {ERROR}" for rank in (0, 2)], done.stderr
    assert lines[-1] == "collective_core.launch: rank 1 on localhost ended with exit code 1"


def test_an_error_of_all_ranks_is_printed_once():
    program = """
import numpy
import collective_core as cc
cc.init()
cc.allreduce(numpy.ones(3 + cc.rank()), name="g")
"""
    done = launch_patiently("-np", "3", "python", "-c", program)
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    first = lines[0][:3]
    assert lines[0] == f"{first} Traceback (most recent call last):"
    assert sum("the ranks ask for different things" in line for line in lines) == 1, done.stderr
    assert sorted(lines[-3:-1]) == [f"[{rank}] the same error as that of rank {first[1]}" for rank in range(3) if f"[{rank}]" != first]


def test_a_rank_whose_traceback_tells_of_another_is_not_blamed_although_it_ended_first(tmp_path):
    program = """
import os, sys, time
failed = sys.argv[1]
if os.environ["HOROVOD_RANK"] == "1":
    print("Traceback (most recent call last):\\nValueError: the cause", file=sys.stderr, flush=True)
    open(failed, "w").close()
    time.sleep(0.7)  # it says goodbye to a tracker, say
    sys.exit(3)
while not os.path.exists(failed):
    time.sleep(0.01)
time.sleep(0.1)  # its lines are read
print("Traceback (most recent call last):\\nPeerLostError: rank 1 is gone", file=sys.stderr, flush=True)
sys.exit(1)
"""
    done = launch_patiently("-np", "3", "python", "-c", program, str(tmp_path / "failed"))
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert lines[:2] == ["[1] Traceback (most recent call last):", "[1] ValueError: the cause"]
    assert sorted(lines[2:-1]) == [f"[{rank}] PeerLostError: rank 1 is gone" for rank in (0, 2)]
    assert lines[-1] == "collective_core.launch: rank 1 on localhost ended with exit code 3"


LEAVES = """
import sys
import numpy
import collective_core as cc
cc.init()
if cc.rank() == 0:
    sys.exit(int(sys.argv[1]))
cc.allreduce(numpy.ones(4), name="x")
"""


@pytest.mark.parametrize(("own", "code"), [(0, 1), (3, 3)])
def test_a_rank_that_leaves_while_others_wait_is_the_cause(own, code):
    done = launch_patiently("-np", "3", "python", "-c", LEAVES, str(own))
    assert done.returncode == code, done.stderr
    *others, last = done.stderr.splitlines()
    assert last == f"collective_core.launch: rank 0 on localhost ended with exit code {own} while others waited for it"
    assert sorted(line[:24] for line in others) == [f"[{rank}] {ERROR}"[:24] for rank in (1, 2)], "one line each"


SURVIVES = """
import os, sys, time, traceback
import collective_core.errors
if os.environ["COLLECTIVE_RANK"] == "0":
    try:
        raise ValueError("survived")
    except ValueError:
        traceback.print_exc()
    sys.exit(0)
time.sleep(1)
raise collective_core.errors.CollectiveError("barrier: rank 2 (host a, pid 1) is gone", "peer_lost")
"""


def test_a_rank_that_survived_its_error_and_succeeded_is_not_blamed():
    done = launch("-np", "2", "python", "-c", SURVIVES)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "collective_core.launch: rank 1 on localhost ended with exit code 1")


ERROR = "collective_core.errors.PeerLostError"


def said(tracebacks, rank, *lines):
    for line in lines:
        tracebacks(Frame("err", rank, line.encode() + b"\n"))


def test_which_traceback_is_the_one_to_read():
    def raised(error):
        return ("Traceback (most recent call last):", "  in train", error)

    shown = []
    tracebacks = Tracebacks(shown.append)
    lost = "collective_core.errors.PeerLostError: barrier: rank 1 (host a, pid 1) died (its process ended without a word)"
    said(tracebacks, 3, *raised("OSError: survived"), *["a line"] * 200)
    said(tracebacks, 0, *raised("KeyError: handled before"), *raised(lost))
    cause = (*raised("KeyError: 1"), "", "During handling of the above exception, another exception occurred:", "")
    said(tracebacks, 1, *cause, *raised("ValueError: two"), "lines of it")
    of_server = "collective_core.errors.PeerLostError: rank 1 (host a, pid 1) sends no more: it has left the group or ended"
    said(tracebacks, 2, *raised(of_server))
    texts = [(frame.rank, frame.body.decode().rstrip("\n")) for frame in shown]
    whole = [(1, line) for line in [*cause, *raised("ValueError: two"), "lines of it"]]
    survived = [(3, line) for line in [*raised("OSError: survived"), *["a line"] * 200]]
    assert texts == [*survived, *((0, line) for line in raised("KeyError: handled before")), *whole]
    assert [tracebacks.cause_of(rank) for rank in range(4)] == [1, 1, 1, 3]
    del shown[:]
    tracebacks.show_cause(0)
    assert shown == [], "it is what was shown last"
    tracebacks(Frame("out", 4, b"a line\n"))
    tracebacks.show_cause(0)
    tracebacks.show_held()
    texts = [(frame.rank, frame.body.decode().rstrip("\n")) for frame in shown]
    assert texts == [(4, "a line"), *whole, (0, lost), (2, of_server)], (
        "not of the end of another, but the cause, whole, and the others after it"
    )


def test_a_rank_that_goes_on_and_one_that_is_ended_while_it_prints():
    lost = "collective_core.errors.PeerLostError: barrier: rank 1 (host a, pid 1) died (its process ended without a word)"
    for raw in (False, True):
        shown: list[Frame] = []
        tracebacks = Tracebacks(shown.append, raw=raw)
        said(tracebacks, 0, "Traceback (most recent call last):", "  in train", "ValueError: one")
        assert len(shown) == 3
        shown.clear()
        tracebacks = Tracebacks(shown.append, raw=raw)
        said(tracebacks, 0, "Traceback (most recent call last):", "  in train", lost, "")
        tracebacks(Frame("out", 0, b"epoch 2\n"))
        said(tracebacks, 1, "Traceback (most recent call last):", "  in train")
        tracebacks.show_held()
        texts = [frame.body.decode().rstrip("\n") for frame in shown]
        assert texts[-2:] == ["Traceback (most recent call last):", "  in train"]
        assert texts[:-2] == (["Traceback (most recent call last):", "  in train", lost, "", "epoch 2"] if raw else [lost, "epoch 2"])


@pytest.mark.parametrize("number", [*slow_but_last(signal.SIGTERM, signal.SIGINT), signal.SIGKILL])
def test_no_process_outlives_the_launcher(ssh, number, mark):
    words = command("-H", "localhost:2,other:2", "-x", "FRUIT=fig", *python(mark, "-1", "0"), ssh=ssh)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            for _ in range(4):
                assert "4 fig" in process.stdout.readline()
            assert wait_for(mark, 4)
            process.send_signal(number)
            assert wait_until_gone(mark) == []
            process.wait(LIMIT)
        finally:
            process.kill()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)


WORKS = """
import os, sys, time
import numpy
import collective_core as cc
cc.init()
print(cc.rank(), os.getpid(), os.getppid(), flush=True)
while not cc.allreduce(numpy.array([os.path.exists(sys.argv[1])]), op=cc.Max, name="ends")[0]:
    time.sleep(0.01)
"""


@contextlib.contextmanager
def at_work(launcher, words, mark, ranks):
    """The launcher of a job, and the process and its parent of each rank, when all of them are at work; nothing of it is left."""
    with subprocess.Popen([*launcher, *words, *python_of(WORKS, mark)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        everyone = []
        try:
            lines = [job.stdout.readline().split()[-3:] for _ in range(ranks)]
            places = {int(rank): (int(pid), int(parent)) for rank, pid, parent in lines}
            everyone = [job.pid, *(parent for _, parent in places.values()), *(pid for pid, _ in places.values())]
            yield job, places
        finally:
            signal_all(everyone, signal.SIGCONT)
            job.kill()
    assert wait_until_gone(mark) == []


def python_of(program: str, mark: str) -> list[str]:
    return ["python", "-c", program, f"/nowhere/{mark}"]


@pytest.mark.parametrize("which", ["a rank", "the launcher"])
def test_a_rank_or_a_launcher_that_is_stopped_ends_the_job_and_is_named(which, mark):
    with at_work(IMPATIENT, ["-np", "3"], mark, 3) as (job, places):
        pid, seconds = (places[1][0], 1) if which == "a rank" else (job.pid, 2)
        os.kill(pid, signal.SIGSTOP)
        _, said = job.communicate(timeout=LIMIT)
    last = said.splitlines()[-1]
    assert job.returncode == 137, said
    assert re.sub("rank [0-2]", "rank 1", last) == (
        f"collective_core.launch: rank 1 on localhost: process {pid} has been stopped for {seconds} s (kill -CONT would have continued it)"
    )
    assert "rank 1" in last or which == "the launcher"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "seconds"), [("its rank", 45), ("its agent", 60)])
def test_what_is_stopped_on_another_host_ends_the_job_within_a_minute(ssh, mark, which, seconds):
    with at_work(command(ssh=ssh), ["-H", "localhost:1,other:1", "--wdir", "/"], mark, 2) as (job, places):
        pid = places[1][0 if which == "its rank" else 1]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        _, said = job.communicate(timeout=3 * LIMIT)
    assert time.monotonic() - begun > seconds
    reason = f"process {pid} has been stopped for {seconds} s (kill -CONT would have continued it)"
    assert said.splitlines()[-1] == f"collective_core.launch: rank 1 on other: {reason}"


def test_a_job_that_is_stopped_and_continued_as_a_whole_goes_on(tmp_path):
    """As batch systems suspend one: for as long as it takes."""
    ends = tmp_path / "ends"
    words = [*IMPATIENT, "-np", "2", "python", "-c", WORKS, str(ends)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        for _ in range(2):
            job.stdout.readline()
        everyone = children_of(job.pid)
        everyone.sort(key=lambda pid: "stopped.py" not in Path(f"/proc/{pid}/cmdline").read_text())  # what looks is the first to stop
        everyone.append(job.pid)
        signal_all(everyone, signal.SIGSTOP)
        time.sleep(4.0)
        signal_all(everyone[::-1], signal.SIGCONT)
        ends.touch()
        _, said = job.communicate(timeout=LIMIT)
    assert (job.returncode, said) == (0, "")


def test_which_processes_count_as_stopped(tmp_path):
    """Those that a signal has stopped, not those of a debugger, and only as long as they are."""
    traced = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"
    sleeps = "import time; time.sleep(600)"
    with contextlib.ExitStack() as running:
        of_debugger, by_signal, at_work_ = (
            running.enter_context(subprocess.Popen([sys.executable, "-c", code])) for code in (traced, sleeps, sleeps)
        )
        for each in (of_debugger, by_signal, at_work_):
            running.callback(each.kill)
        by_signal.send_signal(signal.SIGSTOP)
        end = time.monotonic() + LIMIT
        while state_of(of_debugger.pid) != "t" and time.monotonic() < end:
            time.sleep(0.01)
        assert state_of(of_debugger.pid) == "t"
        limits = [str(word) for each in (of_debugger, by_signal, at_work_) for word in (each.pid, 0.2)]
        watcher = running.enter_context(
            subprocess.Popen([sys.executable, stopped.__file__, *limits], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert [int(watcher.stdout.readline()) for _ in range(2)] == [by_signal.pid] * 2
        watcher.stdin.close()
        assert watcher.wait(LIMIT) == 0


@pytest.mark.parametrize(("looks", "found"), [("T" * 9, 0), ("T" * 9 + "S" + "T" * 9, 0), ("T" * 10, 1), ("T" * 9 + "S" + "T" * 10, 1)])
def test_a_process_that_is_continued_in_time_is_not_reported(monkeypatch, capsys, looks, found):
    left = list(looks)
    monkeypatch.setattr(stopped.sys, "argv", ["stopped.py", "7", "45.0"])
    monkeypatch.setattr(stopped, "is_stopped", lambda _: left.pop(0) == "T")
    monkeypatch.setattr(stopped.select, "select", lambda *_: ([] if left else [0], [], []))
    stopped.main()
    assert capsys.readouterr().out == "7\n" * found


def test_a_program_that_waits_for_all_its_children_waits_for_none_of_ours():
    waits = "import os, sys\ntry: os.wait()\nexcept ChildProcessError: print('no children')"
    done = launch("-np", "1", "python", "-c", waits)
    assert (done.returncode, done.stdout) == (0, "[0] no children\n")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["-H", "localhost:1,nowhere.invalid:1"], 1, "no agent could be started on host nowhere.invalid"),
        (["-H", "other:1", "--wdir", "/no/such/folder"], 1, "rank 0 on other could not be started"),
        (["-H", "a:2,b:x"], 2, "the number of slots of host b"),
        (["-np", "5", "-H", "a:2,b:2"], 2, "5 ranks do not fit into the 4 slots"),
        (["-np", "0"], 2, "at least 1"),
        (["-np", "100000"], 2, "or allow it: --oversubscribe"),
        (["-H", "a:²"], 2, "the number of slots of host a"),
        (["--master-port", "99999"], 2, "--master-port 99999: write a port"),
        (["--master-port", "-5"], 2, "--master-port -5: write a port"),
        (["-x", "NOT_THERE"], 2, "-x NOT_THERE: there is no such variable"),
    ],
)
def test_what_cannot_be_started_is_one_clear_error(ssh, words, code, complaint):
    done = launch("--start-timeout", "20", *words, "sleep", "600.125", ssh=ssh)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("collective_core.launch: ")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert wait_until_gone("600.125") == []


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "9"],
        ["--nproc-per-node", "9"],
        ["--nnodes", "1:3", "--nproc-per-node", "9"],
        ["-np", "2", "--min-np", "1", "--max-np", "9"],
    ],
)
def test_more_ranks_than_this_machine_takes_are_refused(words):
    done = launch_on_one_core(*words, "echo", "started")
    assert (done.returncode, done.stdout) == (2, "")
    assert "9 ranks: this machine takes 8 for each of its cores (1)" in done.stderr


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["-np", "9", "--oversubscribe"], 9),
        (["-H", "localhost:9"], 9),
        (["--host-discovery-script", "echo localhost:2", "-np", "2", "--min-np", "1", "--max-np", "64"], 2),
    ],
)
def test_ranks_of_named_hosts_and_those_asked_for_twice_are_started(words, started):
    done = launch_on_one_core(*words, "echo", "started")
    assert (done.returncode, done.stdout.count("started")) == (0, started), done.stderr


def launch_on_one_core(*words):
    command, core = [sys.executable, "-m", "collective_core.launch", *words], min(os.sched_getaffinity(0))
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, preexec_fn=lambda: os.sched_setaffinity(0, {core}))


SAYS = """
import os, sys
print(os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get("NCCL_SOCKET_IFNAME"), *sys.argv[1:])
"""


def test_a_command_line_of_torchrun(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "says.py").chmod(0o755)  # torchrun has Python run it all the same
    words = ["--standalone", "--nnodes=1", "--nproc_per_node=2", "--rdzv-backend", "c10d", "--master_port", "4711", "--max_restarts=0"]
    for program in (["says.py", "--lr", "1"], ["-m", "says", "--lr", "1"]):
        done = launch("--wdir", str(tmp_path), *words, *program)
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 127.0.0.1 4711 None --lr 1" for rank in range(2)], done.stderr
        assert done.stderr.splitlines() == [
            f"collective_core.launch: {name} has no effect: the launcher starts all ranks and tells them where to meet"
            for name in ("--rdzv-backend", "--standalone")
        ]
    done = launch("--nnodes", "2", "--node-rank", "1", "says.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "started once, on one machine" in done.stderr


def test_what_the_user_says_of_torchs_variables_stays(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    given = ("-x", "MASTER_ADDR=here", "-x", "MASTER_PORT=12", "-x", "NCCL_SOCKET_IFNAME=ib0", "-x", "COLLECTIVE_NETWORK=lo")
    done = launch("-np", "1", "--wdir", str(tmp_path), *given, "says.py")
    assert done.stdout == "[0] 0 here 12 ib0\n", done.stderr
    done = launch("-np", "1", "--wdir", str(tmp_path), *given[:4], *given[6:], "says.py")
    assert done.stdout == "[0] 0 here 12 =lo\n", done.stderr


FAILS = """
import os, sys, time
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if count < int(sys.argv[1]) and os.environ["RANK"] == "1":
    raise ValueError(f"attempt {count}")
time.sleep(0 if count == int(sys.argv[1]) else 600)
print("done after", count)
"""


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_all_ranks_are_started_again_after_a_failure(failures, code):
    done = launch("-np", "2", "--max-restarts", "2", "python", "-c", FAILS, str(failures))
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("collective_core.launch")]
    again = "collective_core.launch: rank 1 on localhost ended with exit code 1; all ranks are started again ({} of 2)"
    assert said[:2] == [again.format(1), again.format(2)]
    if code == 0:
        assert sorted(done.stdout.splitlines()) == ["[0] done after 2", "[1] done after 2"]
        return
    assert done.stderr.splitlines()[-2:] == [
        "[1] ValueError: attempt 2",
        "collective_core.launch: rank 1 on localhost ended with exit code 1",
    ]


HOSTS = [Host("a", 4), Host("b", 4), Host("c", 1)]


@pytest.mark.parametrize(
    ("np", "nodes", "per_node", "hosts", "expected"),
    [
        (None, None, None, HOSTS, (None, None, None, [4, 4, 1])),
        (None, None, "2", [], (2, None, None, [2])),
        (None, "1", "2", [], (2, None, None, [2])),
        (None, "2", "4", HOSTS, (8, None, None, [4, 4])),
        (8, "2", "4", HOSTS, (8, None, None, [4, 4])),
        (4, "2", None, HOSTS, (4, None, None, [2, 2])),
        (None, "2", None, HOSTS, (None, None, None, [4, 4])),
        (None, "3", "3", HOSTS, (9, None, None, [3, 3, 3])),
        (None, "2", "auto", HOSTS, (None, None, None, [4, 4])),
        (4, None, "2", HOSTS, (4, None, None, [2, 2, 2])),
        (None, "2:3", "2", HOSTS, (None, 4, 6, [2, 2, 2])),
        (None, "1:4", "2", [], (None, 2, 8, [2])),
    ],
)
def test_how_many_ranks_torchruns_options_mean(np, nodes, per_node, hosts, expected):
    size = size_of(Size(np, None, None, hosts), nodes, per_node)
    assert (*size[:3], [host.slots for host in size.hosts]) == expected
    discovered = size_of(Size(None, None, None, []), "2:4", "2", discovered=True)
    assert discovered == (None, 4, 8, []), "the script says which hosts there are"


@pytest.mark.parametrize(
    ("np", "least", "nodes", "per_node", "complaint"),
    [
        (3, None, "2", "2", "-np 3 contradicts --nnodes 2 and --nproc-per-node 2: these are 4 ranks"),
        (3, None, "2", None, "-np 3 contradicts --nnodes 2: they cannot be divided equally"),
        (3, None, None, "2", "-np 3 contradicts --nproc-per-node 2"),
        (None, None, "4", "1", "--nnodes 4, and there is 3"),
        (None, None, "0", None, "--nnodes 0: write N, or MIN:MAX"),
        (None, None, "4:5", "1", "--nnodes 4:5, and there is 3"),
        (None, None, "2:1", "1", "--nnodes 2:1: write"),
        (None, None, "two", None, "--nnodes two: write"),
        (None, None, "1:2", None, "needs a number of ranks for each host"),
        (None, 2, "1:2", "2", "say the same thing"),
        (None, 2, "2", "2", "a fixed number of hosts"),
        (None, None, None, "0", "--nproc-per-node 0: write a positive number"),
        (None, None, None, "²", "--nproc-per-node ²: write a positive number"),
        (None, None, None, "gpu", "say the number, or leave it out"),
        (None, None, None, "5", "5 ranks do not fit into the 4 slots of host a"),
    ],
)
def test_sizes_that_contradict_each_other(np, least, nodes, per_node, complaint):
    with pytest.raises(CollectiveError, match=re.escape(complaint)) as caught:
        size_of(Size(np, least, None, HOSTS), nodes, per_node)
    assert caught.value.kind == "invalid"


def test_ranks_for_the_gpus_and_the_cores_of_this_machine(monkeypatch):
    def ranks(word):
        return size_of(Size(None, None, None, []), None, word).np

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    assert [ranks(word) for word in ("auto", "gpu", "cpu")] == [3, 3, cores.share(1)]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert ranks("gpu") == 2
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ranks("auto") == cores.share(1)
    with pytest.raises(CollectiveError, match="no NVIDIA GPU"):
        ranks("gpu")


def test_a_program_that_is_not_there_is_said_by_its_rank():
    done = launch("-np", "1", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: not found" in done.stderr
