"""Which rank is late, and why: with samples of each kind, and with real processes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load_script

from provision.launch import stragglers
from provision.launch.stragglers import Sign, Straggler, Stragglers, Window

EVEN: dict[Sign, float] = {"cpu": 0.5, "ready": 0.02, "clock": 0.9}


def window(rank: int, signs: Mapping[Any, float]) -> Window:
    return Window(rank=rank, signs={**EVEN, **signs})


def found(hosts: Callable[[int], Mapping[str, Sequence[Window]]], rounds: int = 22) -> list[Straggler]:
    """What is found after some rounds, of which each is what the hosts say."""
    judged = Stragglers()
    for at in range(rounds):
        for host, windows in hosts(at).items():
            judged.take(host, windows)
    return judged.found


def with_one(signs: Mapping[str, float], others: Mapping[str, float] | None = None) -> list[Straggler]:
    """Four ranks on two hosts; the third has these signs."""
    ranks = [window(rank, signs if rank == 2 else others or {}) for rank in range(4)]
    return found(lambda _: {"node1": ranks[:2], "node2": ranks[2:]})


CASES: list[tuple[dict[str, float], dict[str, float], str, str]] = [
    (
        {"ready": 0.5, "throttled": 0.9},
        {},
        "throttled",
        "is late, by 48 % of the time: a quota of processor time holds it, in 90 % of its periods: it waits for a core 50 % of the time",
    ),
    (
        {"ready": 0.48, "throttled": 0.05},
        {},
        "ready",
        "is late, by 46 % of the time: other processes use its core: it waits for it 48 % of the time, others 2 %",
    ),
    ({"disk": 0.4}, {}, "disk", "is late, by 40 % of the time: it waits for a disk or a file server 40 % of the time, others 0 %"),
    (
        {"cpu": 0.95, "clock": 0.4},
        {},
        "clock",
        "is late, by 45 % of the time: its core runs at 40 % of its clock rate, others' at 90 %: it computes 95 % of the time, others 50 %",
    ),
    ({"cpu": 0.95, "clock": 0.85}, {}, "cpu", "is late, by 45 % of the time: it has more work, or a slower core: it computes 95 %"),
    (
        {"loader_disk": 0.9, "loader_cpu": 0.1},
        {"loader_cpu": 0.1},
        "disk",
        "is late, by 48 % of the time: in its data loader it waits for a disk or a file server 90 % of the time, others 0 %",
    ),
    # Ranks wait spinning: it may have time to lose; but one that waits for its loader does not spin.
    (
        {"cpu": 0.7, "ready": 0.3},
        {"cpu": 0.99},
        "ready",
        "may be late, by up to 28 % of the time: other processes use its core: it waits for it 30 % of the time, others 2 %",
    ),
    (
        {"cpu": 0.3, "loader_cpu": 1.0},
        {"cpu": 1.0, "loader_cpu": 0.4},
        "cpu",
        "is late, by 60 % of the time: in its data loader it has more",
    ),
    (
        {"unsent": 0.9, "resent": 0.034},
        {"unsent": 0.2},
        "unsent",
        "is late, by 70 % of the time: its link or a receiver's loses data, 3.4 % is sent again: what it sends is not acknowledged 90 %",
    ),
]


@pytest.mark.parametrize(("signs", "others", "cause", "said"), CASES)
def test_the_late_rank_and_why(signs: dict[str, float], others: dict[str, float], cause: str, said: str) -> None:
    (late,) = with_one(signs, others)
    assert (late.rank, late.host, late.cause, late.seconds) == (2, "node2", cause, None)
    assert late.said.startswith(f"rank 2 on node2 {said}")


@pytest.mark.parametrize(
    ("signs", "others"),
    [
        ({}, {}),
        ({"cpu": 0.65}, {}),  # a little more work
        ({"loader_cpu": 1.0}, {}),  # a process of its own, for checkpoints or logs: the others have no loader
        ({"cpu": 0.97, "loader_cpu": 1.0}, {"cpu": 0.97, "loader_cpu": 0.5}),  # a loader that is fast enough
        ({"loader_cpu": 0.6}, {"loader_cpu": 0.2}),  # it has time left
        ({"cpu": 1.0}, {"cpu": 0.0, "ready": 0.0}),  # the others do not step: they wait for the end of an evaluation
        ({"cpu": 1.0}, {"cpu": 0.03}),  # in a barrier that looks again and again
        ({"cpu": 1.0}, {"cpu": 0.98}),
        ({"unsent": 0.9, "resent": 0.01}, {"unsent": 0.8}),  # all send as much as they can
        ({"unsent": 0.9, "resent": 0.01}, {"unread": 0.9}),  # to who does not read it
        ({"unsent": 0.9}, {}),  # the first stage of a pipeline
        ({"throttled": 0.9}, {}),  # others of its control group are
        ({"cpu": 0.1}, {}),  # it has less to do
        ({"cpu": 0.97, "gpu": 1.0}, {"gpu": 1.0}),  # it waits spinning for its GPU, to print a loss
    ],
)
def test_nothing_of_a_healthy_job(signs: dict[str, float], others: dict[str, float]) -> None:
    assert with_one(signs, others) == []


def test_uneven_steps_and_short_disturbances_are_no_stragglers() -> None:
    """In each window another rank has the longest sequences; one is disturbed for half a minute."""
    ranks = range(4)
    assert found(lambda at: {"a": [window(rank, {"cpu": 0.95 if at % 4 == rank else 0.5}) for rank in ranks]}, 120) == []
    assert found(lambda at: {"a": [window(rank, {"ready": 0.5 if rank == 1 and at % 20 < 8 else 0.0}) for rank in ranks]}, 120) == []
    assert found(lambda _: {"a": [window(0, {"cpu": 1.0})]}, 60) == [], "nothing waits for one that is alone"
    assert found(lambda _: {"a": []}, 60) == []


def test_a_step_may_take_longer_than_a_window_and_an_evaluation_longer_than_a_step() -> None:
    """The first rank is at work all the time, the other one in every third window; or for a minute alone, in every four."""
    both = [window(0, {"cpu": 1.0}), window(1, {"cpu": 1.0})]
    alone = [window(0, {"cpu": 1.0}), Window(rank=1, signs={})]
    (late,) = found(lambda at: {"a": both if at % 3 == 0 else alone}, 30)
    assert (late.rank, late.cause) == (0, "cpu")
    assert found(lambda at: {"a": alone if at % 48 < 12 else both}, 200) == []


def test_half_of_the_ranks_may_be_late_and_those_of_a_host_share_a_link() -> None:
    slow = [window(rank, {"ready": 0.5} if rank > 1 else {}) for rank in range(4)]
    assert [each.rank for each in found(lambda _: {"a": slow[:2], "b": slow[2:]})] == [2, 3]
    links = {name: [window(rank, {"unsent": 0.9 if name == "b" else 0.1, "resent": 0.01}) for rank in (0, 1)] for name in "abc"}
    assert [(each.host, each.cause) for each in found(lambda _: links)] == [("b", "unsent")]
    sends = {name: [Window(rank=0, signs={**each[0].signs, "cpu": 0.01})] for name, each in links.items()}
    assert [(each.host, each.cause) for each in found(lambda _: sends)] == [("b", "unsent")], "nearly all of the time"


def test_the_first_rank_of_a_host_may_have_its_network_to_do() -> None:
    def hosts(first: Mapping[str, float]) -> Mapping[str, Sequence[Window]]:
        return {"a": [window(0, {"cpu": 0.9}), window(1, {}), window(2, {})], "b": [window(3, first), window(4, {}), window(5, {})]}

    assert found(lambda _: hosts({"cpu": 0.85})) == []
    assert [each.rank for each in found(lambda _: hosts({"cpu": 0.6}))] == [0]


def test_a_rank_that_moves_to_another_host_is_another_one_there() -> None:
    def hosts(at: int) -> Mapping[str, Sequence[Window]]:
        return {"a": [window(1 if at < 30 else 0, {"ready": 0.5})], "b": [window(0 if at < 30 else 1, {})], "c": [window(2, {})]}

    assert [(each.host, each.rank, each.seconds is None) for each in found(hosts, 60)] == [("a", 1, False), ("a", 0, True)]


def test_it_ends_where_the_ranks_do_not_step_and_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Stragglers()
    for at in range(60):
        if at == 30:
            monkeypatch.setattr(stragglers, "time", SimpleNamespace(time=lambda: 0.0))
        judged.take("a", [window(0, {} if at < 30 else {"cpu": 0.0}), window(1, {"ready": 0.5})])
    (late,) = judged.found
    assert late.seconds == 0.0
    assert late.model_validate_json(late.model_dump_json()) == late


def test_hosts_are_judged_together_and_one_that_is_silent_is_not_waited_for() -> None:
    judged, late = Stragglers(), [window(1, {"ready": 0.5}), window(2, {})]
    for _ in range(30):
        judged.take("a", [window(0, {})])
    assert judged.found == [], "one rank alone"
    for at in range(40):
        judged.take("b", late)
        if at % 3 == 0:
            judged.take("a", [window(0, {})])
    assert [each.rank for each in judged.found] == [1]


def test_it_ends_when_the_rank_is_even_again() -> None:
    judged = Stragglers()
    changes = [judged.take("a", [window(0, {}), window(1, {"ready": 0.5 if at < 40 else 0.0})]) for at in range(60)]
    assert [at for at, is_change in enumerate(changes) if is_change] == [19, 51]
    (late,) = judged.found
    assert late.seconds is not None
    assert judged.found[0].model_validate_json(late.model_dump_json()) == late


#: A rank: it computes for milliseconds, then waits for the other one, as in a collective operation.
RANK = """
import os, socket, sys, threading, zlib
if sys.argv[2:]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
other = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[3:]:
    threading.Thread(target=lambda: [zlib.crc32(b"x" * 9999999) for _ in iter(int, 1)], daemon=True).start()  # without holding others
while True:
    sum(range(200000))
    other.send(b"x")
    if not other.recv(1):
        break
"""
NEIGHBOUR = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.fixture
def started() -> Iterator[Callable[..., int]]:
    """Starts a Python program before which other processes of this machine, busy as it may be, have to wait, and kills it in the end."""
    if os.getuid() != 0:
        pytest.skip("needs root: for a priority that other processes do not have")
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    except PermissionError:
        pytest.skip("needs the capability SYS_NICE, too")
    with ExitStack() as stack:
        stack.callback(os.setpriority, os.PRIO_PROCESS, 0, usual)
        group = Path("/proc/self/autogroup")  # where there is one, a priority counts within it alone; some kernels show an empty file
        if group.exists() and (words := group.read_text().split()):
            stack.callback(group.write_text, words[-1])
            group.write_text("-20")

        def start(program: str, *arguments: str, files: Sequence[int] = (), **environment: str) -> int:
            words = [sys.executable, "-S", "-c", program, *arguments]
            process = stack.enter_context(subprocess.Popen(words, pass_fds=files, env=environment))
            stack.callback(process.kill)
            return process.pid

        yield start


def job(started: Callable[..., int], cores: Sequence[Sequence[str]]) -> tuple[str, list[int]]:
    """(the run, the pids) of two ranks, each on the core that is named."""
    run, ends = f"unit-stragglers-{os.getpid()}", socket.socketpair()
    pids = []
    for rank, (end, core) in enumerate(zip(ends, cores, strict=True)):
        with end:
            variables = {"PROVISION_RUN_ID": run, "PROVISION_RANK": str(rank)}
            pids.append(started(RANK, str(end.fileno()), *core, files=[end.fileno()], **variables))
    return run, pids


def watched(run: str, rounds: int = 25) -> list[Straggler]:
    guard, judged = load_script("guard.py"), Stragglers()
    shares = guard.Shares()
    for _ in range(rounds):
        for _ in range(3):
            time.sleep(0.1)
            shares.glance()
        said = json.loads(json.dumps(shares.windows(guard.of_run(run))))
        judged.take("here", [Window.model_validate(each) for each in said])
    return judged.found


@pytest.mark.slow  # what else this machine does has its share in the time
def test_real_ranks_that_share_everything_are_even(started: Callable[..., int]) -> None:
    core = str(min(os.sched_getaffinity(0)))
    assert watched(job(started, [[core], [core]])[0]) == []


@pytest.mark.slow
def test_a_real_thread_that_is_always_busy_is_not_the_rank(started: Callable[..., int]) -> None:
    """As one that writes logs or a checkpoint; the ranks have their own core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    run, _ = job(started, [[str(cores[0])], [str(cores[1]), "with a thread"]])
    (late,) = watched(run) or [None]
    assert late is None or late.cause == "ready", late  # it shares the core with its thread


@pytest.mark.slow
def test_a_real_busy_neighbour_is_told(started: Callable[..., int]) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    run, _ = job(started, [[str(core)] for core in cores])
    for _ in range(3):
        started(NEIGHBOUR, str(cores[1]))
    (late,) = watched(run)
    assert (late.rank, late.cause) == (1, "ready"), late.said


@pytest.fixture
def quota() -> Iterator[Path]:
    """A control group that gets a fifth of a core."""
    for mounted, file, text in (("cpu", "cpu.cfs_quota_us", "20000"), ("", "cpu.max", "20000 100000")):
        group = Path("/sys/fs/cgroup", mounted, f"provision-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(text)
            break
        except OSError:
            group.rmdir()
    else:
        pytest.skip("needs control groups that can be written")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.slow
def test_a_real_quota_is_told(quota: Path, started: Callable[..., int]) -> None:
    run, pids = job(started, [[], []])
    (quota / "cgroup.procs").write_text(str(pids[1]))
    (late,) = watched(run)
    assert (late.rank, late.cause) == (1, "throttled"), late.said
    assert late.behind > 0.3


FILES = {
    "/proc/7/cgroup": "9:name=systemd:/x\n4:cpu,cpuacct:/pod/job\n0::/\n",
    "/sys/fs/cgroup/cpu/pod/job/cpu.stat": "nr_periods {periods}\nnr_throttled {held}\nthrottled_time 900\n",
    "/sys/fs/cgroup/cpu/cpu.stat": "nr_periods 900\nnr_throttled 900\n",
    "/sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods {periods}\nnr_throttled 5\nthrottled_usec 100\n",
    "/proc/net/sockstat": "sockets: used 9\nTCP: inuse 4 orphan 0 tw {waiting} alloc 9 mem 3\n",
    "/proc/net/snmp": "Ip: 1 2\nTcp: RtoAlgorithm RtoMin\nTcp: 1 200 120000 -1 5 5 0 0 4 900 {sent} {resent} 0 0 0\n",
    "/proc/net/tcp": """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:1F90 0200000A:0016 01 {unsent}:00000000 00:00000000 00000000 0        0 11 1 0
   1: 0100000A:1F90 0300000A:0016 01 00000000:00000000 00:00000000 00000000 0        0 12 1 0
   2: 0100000A:1F90 0200000A:0016 01 00000001:00000001 00:00000000 00000000 0        0 99 1 0
   3: 0100007F:1F90 0100007F:0016 01 00000001:00000001 00:00000000 00000000 0        0 12 1 0
   4: 0100000A:1F90 0200000A:0016 06 00000001:00000001 00:00000000 00000000 0        0 11 1 0
""",
    "/proc/7/environ": "PROVISION_RANK=3",
    "/sys/devices/system/cpu/cpu9/cpufreq/scaling_cur_freq": "1200000",
    "/sys/devices/system/cpu/cpu9/cpufreq/cpuinfo_max_freq": "3000000",
}


def test_what_a_host_sees_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas, disks and connections, out of files as Linux writes them; other connections than the ranks' to other hosts do not count."""
    guard = load_script("guard.py")
    state = {"sent": 1000, "resent": 10, "unsent": "00000000", "periods": 100, "held": 5, "waiting": 3}
    monkeypatch.setattr(guard, "content", lambda path: FILES.get(path, "").format(**state).encode())
    monkeypatch.setattr(guard, "sockets_of", lambda _pid: {"11", "12"})
    monkeypatch.setattr(guard, "stat_of", lambda _pid: ["S" if state["unsent"] == "00000000" else "D", *["9"] * 40])
    monkeypatch.setattr(guard, "REST", 0)
    shares = guard.Shares()
    assert shares.windows([7]) == [], "it was not there before"
    for unsent in ("00000000", "00000001", "0000FFFF", "00000000"):
        state["unsent"] = unsent
        shares.glance()
    state.update(sent=1100, resent=12, periods=150, held=30)
    (said,) = shares.windows([7])
    assert said["rank"] == 3
    signs = Window.model_validate(said).signs
    expected = {"disk": 0.5, "unsent": 0.5, "unread": 0.0, "resent": 0.02, "throttled": 0.5, "clock": 0.4, "cpu": 0.0}
    assert {name: value for name, value in signs.items() if name in expected} == expected
    state.update(waiting=30000, unsent="00000001")
    shares.glance()
    assert shares.windows([7])[0]["signs"]["unsent"] == 0.0, "of so many sockets none is looked at"
    state.update(waiting=3)
    monkeypatch.setattr(guard, "REST", 1e6)
    shares.glance()
    monkeypatch.setitem(FILES, "/proc/net/tcp", "a look would fail")
    for _ in range(2):
        assert shares.windows([7])[0]["signs"]["unsent"] == 1.0, "a window without a look is as the last one"
        shares.glance()


@pytest.mark.parametrize("text", [b"x", b"1:2:3 4\n", b"\xff\xff", b"  0: 1 2 01 5:6 7 8 9 10 11\n" * 3])
def test_odd_files_of_a_host_do_not_end_a_job(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    guard = load_script("guard.py")
    shares = guard.Shares()
    monkeypatch.setattr(guard, "content", lambda path: b"PROVISION_RANK=3" if path.endswith("environ") else text)
    for _ in range(2):
        guard.courtesy(shares.glance)
        assert guard.courtesy(shares.windows, [7, 8]) == []


def test_which_processes_are_a_rank_and_its_loader(started: Callable[..., int]) -> None:
    """A shell that starts the program, a worker that it has forked, and a tool that it has started; a parameter server is left out."""
    run, guard = f"unit-ranks-{os.getpid()}", load_script("guard.py")
    tool = f"subprocess.Popen([{sys.executable!r}, '-S', '-c', 'import time; time.sleep(99)'])"
    program = f"import os, subprocess, time; os.fork() and {tool}; time.sleep(99)"
    shell = f"import os; os.execv('/bin/sh', ['sh', '-c', '{sys.executable} -S -c \"$0\"; :', {program!r}])"
    variables = {"PROVISION_RUN_ID": run, "PROVISION_RANK": "5"}
    started(shell, **variables)
    server = started("import time; time.sleep(99)", **{**variables, "PROVISION_RANK": "6", "COLLECTIVE_SERVERS": "1"})
    deadline = time.monotonic() + 30
    while len(found := guard.of_run(run)) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        ((number, (main, (worker,))),) = guard.ranks_of(found).items()
        assert number == 5
        assert guard.parent_of(worker) == main
        assert guard.name_of(guard.parent_of(main)) == "sh"
        assert server in found
    finally:
        for pid in found:
            os.kill(pid, 9)
