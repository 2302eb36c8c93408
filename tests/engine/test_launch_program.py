"""A program on several ranks by the engine's own launcher, here and over a real sshd: output, exit codes, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow_but_last
from collective_core.launch.frames import Frame
from collective_core.launch.tracebacks import Tracebacks
from collective_core.runtime.horovod_variables import rank_variables, translate
from processes import wait_for, wait_until_gone

LIMIT = 60

PROGRAM = """
import os, sys, time
import numpy
import collective_core as cc
cc.init()
secret = [name for name in os.environ if name == "COLLECTIVE_SECRET"]
place = " ".join(os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "RANK", "LOCAL_RANK", "CROSS_RANK"))
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
    return subprocess.run(
        command(*words, ssh=ssh), env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT, check=False
    )


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
        ("localhost:3", ["localhost 0 0 0", "localhost 1 1 0", "localhost 2 2 0"]),
        ("localhost:1,other:2", ["localhost 0 0 0", "other 1 0 1", "other 2 1 0"]),
    ],
)
def test_all_ranks_get_what_they_need_and_their_output_is_tagged(ssh, hosts, places, mark, tmp_path):
    done = launch("--tag-output", "-H", hosts, "-x", "FRUIT", "--wdir", str(tmp_path), *python(mark), ssh=ssh, FRUIT="a pear")
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
import os, subprocess
import collective_core as cc
cc.init()
if cc.rank() == 1:
    subprocess.Popen(["sleep", "600.0625"])  # holds its output open
    os.kill(os.getpid(), 9)
try:
    cc.barrier()
except cc.CollectiveError:
    os._exit(3)
"""
    done = launch("-np", "2", "python", "-c", program)
    assert done.returncode == 137, done.stderr
    assert done.stderr.splitlines()[-1] == "collective_core.launch: rank 1 on localhost was ended by SIGKILL"
    assert wait_until_gone("600.0625") == []


def test_the_traceback_of_the_rank_that_failed_first_is_what_is_read_last():
    program = """
import collective_core as cc
cc.init()
if cc.rank() == 1:
    raise ValueError("the cause")
cc.barrier()
"""
    done = launch("-np", "3", "python", "-c", program)
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[-3:-1] == ['[1]   File "<string>", line 5, in <module>', "[1] ValueError: the cause"], done.stderr
    assert lines.count("[1] ValueError: the cause") == 2, "when it was raised, and at the end"
    assert lines[-1] == "collective_core.launch: rank 1 on localhost ended with exit code 1"


def test_a_rank_whose_traceback_tells_of_another_is_not_blamed_although_it_ended_first():
    program = """
import os, sys, time
if os.environ["HOROVOD_RANK"] == "1":
    print("Traceback (most recent call last):\\nValueError: the cause", file=sys.stderr, flush=True)
    time.sleep(0.7)  # it says goodbye to a tracker, say
    sys.exit(3)
time.sleep(0.3)
print("Traceback (most recent call last):\\nCollectiveError: rank 1 is gone", file=sys.stderr, flush=True)
sys.exit(1)
"""
    done = launch("-np", "3", "python", "-c", program)
    assert done.returncode == 3, done.stderr
    last = ["[1] Traceback (most recent call last):", "[1] ValueError: the cause"]
    assert done.stderr.splitlines()[-3:] == [*last, "collective_core.launch: rank 1 on localhost ended with exit code 3"]


def said(tracebacks, rank, *lines):
    for line in lines:
        tracebacks(Frame("err", rank, line.encode() + b"\n"))


def test_which_traceback_is_the_one_to_read():
    def raised(error):
        return ("Traceback (most recent call last):", "  in train", error)

    shown = []
    tracebacks = Tracebacks(shown.append)
    lost = "collective_core.errors.CollectiveError: barrier: rank 1 (host a, pid 1) died (its process ended without a word)"
    said(tracebacks, 3, *raised("OSError: survived"), *["a line"] * 200)
    said(tracebacks, 0, *raised("KeyError: handled before"), *raised(lost))
    cause = (*raised("KeyError: 1"), "", "During handling of the above exception, another exception occurred:", "")
    said(tracebacks, 1, *cause, *raised("ValueError: two"), "lines of it")
    said(tracebacks, 2, *raised(lost))
    texts = [frame.body.decode().rstrip("\n") for frame in tracebacks.to_read_last(0)]
    assert texts == [*cause, *raised("ValueError: two"), "lines of it"], "not of the end of another, but the cause, whole"
    assert [tracebacks.cause_of(rank) for rank in range(4)] == [1, 1, 1, 3]
    assert tracebacks.to_read_last(3) == []
    said(tracebacks, 1, *raised("ValueError: three"))
    assert tracebacks.to_read_last(1) == [], "it is what was shown last"
    assert len(shown) == 3 + 200 + 6 + len(cause) + 4 + 3 + 3


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


def test_a_program_that_is_not_there_is_said_by_its_rank():
    done = launch("-np", "1", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: not found" in done.stderr
