"""`hostside/stall.py` on processes of this machine: what it reads of them, within bounds, whatever they are. py-spy is replaced where it
has to answer what no honest one does; `tests/integration/test_stalled_jobs.py` uses the real one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pty
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provision.base import resources
from provision.doctor.stall import examination
from provision.hostside import stall

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
OWN = {**ENVIRONMENT, "MASTER_PORT": str(os.getpid())}  # of processes: a job that no other test process has started


@contextlib.contextmanager
def process(*command: str, ready: bool = False, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """``ready``: it says so by a line."""
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"], **variables}, stdout=subprocess.PIPE) as started:
        try:
            while not stall.content(f"/proc/{started.pid}/environ"):
                time.sleep(0.001)  # the kernel is about to write it
            if ready:
                assert started.stdout is not None
                started.stdout.readline()
            yield started
        finally:
            started.kill()


def waits_in(pid: int, call: str) -> dict[str, Any]:
    """What the script says once the process is in a system call."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found: dict[str, Any] = stall.call_of(pid, pid)
        if found.get("call") == call:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def wait_for_ranks(parent: int, count: int) -> None:
    """Until so many children of a shell have become programs with a rank's environment."""
    end = time.monotonic() + 30
    while sum(each.parent == parent and each.environ.get("RANK", "") != "" for each in stall.table(0).values()) < count:
        assert time.monotonic() < end, "the ranks have not begun"
        time.sleep(0.01)


def order(pids: list[int] | None, run: str | None = None) -> dict[str, Any]:
    return {"pids": pids, "run": run, "spy": None, "machine": "none", "seconds": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "WATCH_S", 0.02)
    stall.connections.cache_clear()


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        (ENVIRONMENT, (1, 4, "RANK 10.0.0.1 29500", 2)),
        ({**ENVIRONMENT, "LOCAL_WORLD_SIZE": "", "MASTER_ADDR": "127.0.0.1"}, (1, 4, "RANK 127.0.0.1 29500", 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2, "OMPI_COMM_WORLD_RANK", 2)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, (3, 8, "SLURM_PROCID 7", 0)),
        ({**ENVIRONMENT, "RANK": "²"}, None),
        ({**ENVIRONMENT, "WORLD_SIZE": "9" * 4000}, None),
        ({"HOME": "/"}, None),
    ],
)
def test_a_rank_is_what_has_a_launchers_variables(variables: dict[str, str], rank: object) -> None:
    with process("sleep", "60", **variables) as started:
        found = stall.Process(started.pid)
        assert found.rank() == rank


def test_a_fifo_is_named_with_its_file_system(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data")
    with process("cat", str(tmp_path / "data")) as started:
        target = waits_in(started.pid, "openat")["target"]
    assert target.startswith(f"{tmp_path}/data on ")


def test_the_holder_of_a_lock_of_a_file_is_named(tmp_path: Path) -> None:
    locks = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with (
        process(sys.executable, "-c", locks, str(tmp_path / "lock"), ready=True) as holder,
        process(sys.executable, "-c", locks, str(tmp_path / "lock")) as waiting,
    ):
        assert waits_in(waiting.pid, "flock")["holder"] == holder.pid


@contextlib.contextmanager
def connected() -> Iterator[tuple[int, int]]:
    """(a process that is connected with itself and waits to receive, the port)"""
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); a = s.accept();"
        "print(s.getsockname()[1], flush=True); c.recv(1)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.pid, int(started.stdout.readline())
        finally:
            started.kill()


def test_a_socket_is_named_with_its_peer() -> None:
    with connected() as (pid, port):
        found = waits_in(pid, "recvfrom")
    assert found["peer"] == f"127.0.0.1:{port}"
    assert found["socket"].endswith(f" to 127.0.0.1:{port}, established")


@pytest.mark.parametrize(
    ("timer", "again", "is_named"),
    [("01:00000013", "00000004", True), ("01:00000013", "00000000", False), ("04:00000013", "00000004", False)],
)
def test_a_connection_on_which_bytes_are_sent_again_is_named(
    monkeypatch: pytest.MonkeyPatch, timer: str, again: str, is_named: bool
) -> None:
    """The kernel's table says so only where the network is cut, as in `test_hang_seeds.py`. Timer 4 asks a receiver that is full."""
    with connected() as (pid, port):
        known = stall.connections("/proc/self/net/")
        changed = {inode: [*fields[:4], "00000400:00000000", timer, again, *fields[7:]] for inode, fields in known.items()}
        monkeypatch.setattr(stall, "connections", lambda _place: changed)
        found = stall.unanswered(pid)
    line = f" to 127.0.0.1:{port}, established, 1024 bytes not acknowledged"
    assert sorted(line in each for each in found) == ([False, True] if is_named else [])


@pytest.mark.parametrize("polled", ["select.poll", "select.epoll"])
def test_of_what_is_polled_a_socket_that_listens_comes_first(polled: str) -> None:
    program = (
        "import os, select, socket; p, _ = os.pipe(); s = socket.create_server(('127.0.0.1', 0));"
        f"c = socket.create_connection(s.getsockname()); a = s.accept()[0]; w = {polled}();"
        "[w.register(each, 1) for each in (p, c, a, s)]; print(flush=True); w.poll()"
    )
    with process(sys.executable, "-c", program, ready=True) as started:
        found = waits_in(started.pid, "poll" if polled == "select.poll" else "epoll_wait")
    assert found["peer"] == "0.0.0.0:0"


def recorded(*events: tuple[int, int, int, bytes], magic: bytes = b"ccfr0001", begun: int = 0) -> bytes:
    """A recorder's memory. Events: (state, process set, kind, name)."""
    head = struct.pack("=8siiqqqQQ64s", magic, 0, 2, 1, 0, 0, begun or len(events), 0, b"node1")
    return head + b"".join(
        stall.EVENT.pack(state, group, number, 4, kind, name) for number, (state, group, kind, name) in enumerate(events, 1)
    )


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (recorded((2, 0, 0, b"gradient"), (1, 3, 0, b"accuracy")), "allreduce 'accuracy' of process set 3"),
        (recorded((1, 2, 1, b"all"), (1, 0, 3, b"end")), "barrier 'end'"),
        (recorded((2, 0, 0, b"gradient")), ""),
        (recorded((1, 0, 99, b"of another version")), ""),
        (recorded((1, 0, 0, b"loss"), magic=b"ccfr9999"), ""),
        (recorded((1, 0, 0, b"\xff" * 72), begun=2**64 - 1), ""),
        (b"", ""),
    ],
)
def test_what_the_engine_runs_is_read_from_its_recorder(memory: bytes, said: str) -> None:
    program = (
        "import mmap, os, sys, time; fd = os.memfd_create('collective_flight'); os.ftruncate(fd, 120 + 8192 * 136);"
        "m = mmap.mmap(fd, 0); b = bytes.fromhex(sys.argv[1]); m[:len(b)] = b; print(flush=True); time.sleep(60)"
    )
    with process(sys.executable, "-c", program, memory.hex(), ready=True) as started:
        assert stall.recorded(started.pid)[1] == said


#: Of `_dump_fr_trace` of PyTorch 2.13, without stacks: a rank of Gloo that waits in its second all_reduce.
FLIGHT = Path(__file__).parents[2] / "data/stalls/flight-torch-2.13.pickle"
BEGAN = 1796093718.2  # seconds: when that operation did
HOSTILE = [
    b'cbuiltins\nexec\n(S\'open("harm", "w")\'\ntR.',
    b"\x80\x02]r\xff\xff\xff\x7fs.",  # asks for 16 GiB of memo
    b"})" + b"2\x86" * 60 + b"K\x01s.",  # to find its place in the mapping takes 2^60 steps
    b"})" + b"\x85" * 3_000_000 + b"K\x01s.",  # is nested too deeply for C
    pickle.dumps({"entries": [{"retired": False, "time_created_ns": "x"}]}),
    pickle.dumps([]),
    FLIGHT.read_bytes()[:-100],
]


@pytest.mark.parametrize(
    ("content", "since", "said"),
    [
        (FLIGHT.read_bytes(), BEGAN + 60, "all_reduce #2 of default_pg [4, 2]"),
        (FLIGHT.read_bytes(), BEGAN - 1, ""),  # it has begun since
        (FLIGHT.read_bytes().replace(b"gloo:all_reduce", b"gloo:all_gather"), BEGAN + 60, "all_gather #2 of default_pg"),
        *((each, BEGAN + 60, "") for each in HOSTILE),
    ],
)
def test_what_a_rank_waits_for_is_read_from_pytorchs_recorder(content: bytes, since: float, said: str, tmp_path: Path) -> None:
    """The thread of NCCL's process group, for which this machine has no GPU, is this test."""
    pipe, dump = tmp_path / "torch-1.pipe", tmp_path / "dump-1"
    os.mkfifo(pipe)
    variables = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "torch-"), "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump-")}
    with process("sleep", "60") as started, open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as monitor:
        dump.write_bytes(content)
        os.utime(dump, (since - 9, since - 9))
        assert stall.flight(started.pid, variables, 1, since) == ""  # of an earlier stall
        assert stall.request_flight(started.pid, variables, 1)
        assert monitor.read() == b"1"
        os.utime(dump, (since + 1, since + 1))
        assert stall.apart(stall.flight, started.pid, variables, 1, since) == said
    assert not list(Path.cwd().glob("harm"))


#: A stand-in for a thread of NCCL, which needs a GPU: it answers as NCCL 2.29's client_support.cc prints it.
RAS = """
import json, os, socket, sys
def rank(number, pid, count):
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {"rank": number, "host": "10.0.0.1", "pid": pid, "cuda_dev": number, "nvml_dev": number, "status": status,
            "collective_counts": {"Broadcast": 12, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": count}}
def group(size, *ranks):
    return {"hash": "0xae94423cfbb2ef4a", "secondary_hash": "0x1:0x2", "size": size, "ranks_count": len(ranks),
            "missing_ranks_count": 0, "ranks": ranks, "missing_ranks": []}
me, listener = os.getpid(), socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
while True:
    asked = listener.accept()[0]
    commands = asked.makefile("rb")
    said = [commands.readline(), commands.readline(), commands.readline()]
    answer = {"nccl_version": "2.29.1", "communicators_count": 1, "communicators": eval(sys.argv[1]), "ras": {"timeouts_count": 0}}
    asked.sendall(b"OK\\nOK\\n" + (eval(sys.argv[2]) if sys.argv[2:] else json.dumps(answer, indent=2).encode()))
    asked.shutdown(socket.SHUT_RDWR)
"""
TWO = ["[group(4, rank(0, 7, 4711), rank(1, 8, 4710))]"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (TWO, {1: "AllReduce #4710 of 4 ranks"}),
        (["[group(4, rank(0, 7, 4711), rank(1, 8, 4711))]"], {}),
        # Of a smaller communicator ranks have numbers of their own; which process is which, is sure where the number is there once.
        (["[group(2, rank(0, me, 5), rank(1, 8, 6))]"], {1: "AllReduce #5 of 2 ranks"}),
        (["[group(2, rank(0, me, 5), rank(1, me, 6))]"], {}),
        (["[group(2, rank(0, me, 5), rank(1, 8, 6)), group(4, rank(1, me, 2), rank(0, 8, 3))]"], {1: "AllReduce #2 of 4 ranks"}),
        ([*TWO, "b'ERROR: Unknown command set format json\\nJob summary'"], {}),
        ([*TWO, "b'[' * 1000000"], {}),
        ([*TWO, "b'{' + b'\"a\":{' * 1000000"], {}),
        (["[group(4, rank(0, 7, 10 ** 4000), rank(1, 8, 'x'))]"], {}),
        ([*TWO, "time.sleep(60)"], {}),
    ],
)
def test_how_many_operations_a_rank_has_launched_is_asked_of_nccl(answer: list[str], said: dict[int, str]) -> None:
    with process(sys.executable, "-c", "import time\n" + RAS, *answer, **OWN) as started, socket.socket() as free:
        assert started.stdout is not None
        processes, port = stall.table(0), int(started.stdout.readline())
        ((known, members),) = stall.ranks_of(processes, [started.pid], None)
        processes[started.pid].environ["NCCL_RAS_ADDR"] = f"localhost:{port}"
        stall.connections.cache_clear()
        began = time.monotonic()
        assert stall.counted([(known, members)], processes, began + 9) == {known[2]: said}
        assert time.monotonic() - began < 2 * stall.APART_S + 1
        assert stall.counted([(known, members)], processes, began - stall.APART_S) == {}, "there is no time left"
        free.bind(("127.0.0.1", 0))
        free.listen()
        processes[started.pid].environ["NCCL_RAS_ADDR"] = f"localhost:{free.getsockname()[1]}"
        stall.connections.cache_clear()
        assert stall.counted([(known, members)], processes, began + 9) == {}, "of another program nothing is asked"


@pytest.mark.parametrize(("size", "said"), [("1m", True), ("4m", False)])
def test_a_file_system_without_space_is_named(size: str, said: bool, tmp_path: Path) -> None:
    """Mounted in a name space of the process alone, which this one does not see."""
    fills = 'mount -t tmpfs -o size=$0 none "$1" && head -c 1048576 /dev/zero >"$1/x"; echo; exec sleep 60'
    with process("unshare", "--mount", "--map-root-user", "sh", "-c", fills, size, str(tmp_path), ready=True) as started:
        assert (f"{tmp_path} (tmpfs) is full" in stall.full_disks(started.pid)) is said


def test_a_full_disk_is_seen_behind_the_mounts_of_many_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"/var/lib/docker/{at}": ("overlay", "overlay", ["rw"]) for at in range(stall.MAX_MOUNTS)}
    many |= {f"/var/lib/kubelet/{at}": ("tmpfs", "tmpfs", ["rw"]) for at in range(stall.MAX_MOUNTS)}
    monkeypatch.setattr(
        stall, "mounts_of", lambda _pid: {"/": ("overlay", "overlay", ["rw"]), **many, "/data": ("ext4", "/dev/sdb", ["rw"])}
    )
    sizes = os.statvfs("/")
    full = SimpleNamespace(f_blocks=sizes.f_blocks, f_bavail=0, f_files=sizes.f_files, f_favail=1)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path.endswith(("/data", "/docker/1")) else sizes)
    assert stall.full_disks(1) == ["/data (ext4) is full"]


def test_processes_that_wait_for_memory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as those of a control group, of version 2, which this machine need not have."""
    (tmp_path / "memory.pressure").write_text(
        "some avg10=93.00 avg60=1.00 avg300=0.00 total=7\nfull avg10=71.25 avg60=1.00 avg300=0.00 total=5\n"
    )
    monkeypatch.setattr(stall, "groups_of", lambda _pid: {str(tmp_path)})
    assert next(stall.short_of_memory(1)) == "all processes of its control group wait for memory 71 % of the time"
    (tmp_path / "memory.pressure").write_text("full avg10=0.40 avg60=1.00 avg300=0.00 total=5\n")
    assert not [each for each in stall.short_of_memory(1) if "group" in each]


def test_errors_of_gpus_since_a_rank_began_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as the kernel's log: this machine has no GPU."""
    monkeypatch.setattr(stall, "has_gpu", lambda _pid: True)
    monkeypatch.setattr(stall, "KERNEL_LOG", str(tmp_path / "kmsg"))
    with process("sleep", "60") as started:
        began = stall.Process(started.pid).began * 1_000_000 // stall.TICKS
        lines = [
            "4,1,5,-;NVRM: Xid (PCI:0000:01:00): 13, old",
            f"4,2,{began + 9},-;NVRM: Xid (PCI:0000:01:00): 79, pid=7",
            " SUBSYSTEM=pci",
        ]
        (tmp_path / "kmsg").write_text("\n".join([*lines, f"6,3,{began + 99},-;eth0: up", ""]))
        assert stall.gpu_errors(started.pid) == ["NVRM: Xid (PCI:0000:01:00): 79, pid=7"]


@pytest.mark.parametrize("kind", ["link", "file", "absent", "unread"])
def test_nothing_is_written_but_into_a_pipe_of_the_ranks_user(kind: str, tmp_path: Path) -> None:
    pipe, other = tmp_path / "torch-1.pipe", tmp_path / "other"
    other.touch()
    if kind == "link":
        pipe.symlink_to(other)
    elif kind == "file":
        pipe.touch()
    elif kind == "unread":
        os.mkfifo(pipe)
    with process("sleep", "60") as started:
        assert not stall.request_flight(started.pid, {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "torch-")}, 1)
    assert not other.read_bytes()
    assert kind != "file" or not pipe.read_bytes()


@pytest.mark.parametrize(
    ("encoded", "address"),
    [
        ("0100000A:733C", "10.0.0.1:29500"),
        ("00000000000000000000000001000000:0016", "[::1]:22"),
        ("0000000000000000FFFF00000100000A:0016", "[10.0.0.1]:22"),
    ],
)
def test_addresses(encoded: str, address: str) -> None:
    assert stall.address_of(encoded) == address


def test_of_a_flood_of_threads_the_main_one_and_a_few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without this project's py-spy
    many = "import threading, time; [threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(200)];"
    with process(sys.executable, "-c", many + "print(flush=True); time.sleep(60)", ready=True, **OWN) as started:
        (rank,) = stall.document(order([started.pid]))["ranks"]
    threads = rank["processes"][0]["threads"]
    assert len(threads) == stall.MAX_THREADS
    assert threads[0]["tid"] == started.pid
    assert rank["processes"][0]["no_stacks"].startswith("py-spy is not there for this machine")


def test_a_process_that_ends_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stall.clock
    with process("sleep", "60", **OWN) as one, process("sleep", "60", **{**OWN, "RANK": "2"}) as two:

        def clock(pid: int, tid: int) -> object:
            if pid == two.pid:
                two.kill()
                two.wait()
            return real(pid, tid)

        monkeypatch.setattr(stall, "clock", clock)
        found = stall.document(order([one.pid]))
    assert [rank["rank"] for rank in found["ranks"]] == [1]
    assert found["missing"] == found["refused"] == []


def test_recorders_that_do_not_answer_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the homes are on a file server that does not answer: each is given up for itself."""
    asked: list[int] = []
    monkeypatch.setattr(stall, "APART_S", 0.1)
    monkeypatch.setattr(stall, "request_flight", lambda *_: True)
    monkeypatch.setattr(stall, "apart", lambda _work, pid, *_: (asked.append(pid), time.sleep(0.3), "")[2])
    ranks = "".join(f"RANK={rank} sleep 60 & " for rank in range(8))
    with process("setsid", "sh", "-c", f"{ranks} echo; wait", ready=True, **{**OWN, "RANK": ""}) as started:
        try:
            wait_for_ranks(started.pid, 8)
            assert len(stall.document({**order([started.pid]), "seconds": 0.1})["ranks"]) == 8
            assert len(asked) < 4
        finally:
            os.killpg(started.pid, 9)


def test_a_run_is_found_by_its_id() -> None:
    with process("sleep", "60", **OWN, PROVISION_RUN_ID="20990101-000000-abc1234") as started:
        found = stall.document(order(None, "20990101-000000-abc1234"))["ranks"]
        assert [rank["processes"][0]["pid"] for rank in found] == [started.pid]
        assert stall.document(order(None, "20990101-000000-abc1235"))["ranks"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network")
def test_jobs_of_one_name_in_containers_of_their_own_are_two() -> None:
    """As ``torchrun`` without options in each of two containers on a host."""
    ranks = "RANK=0 sleep 60 & RANK=1 sleep 60 & echo; wait"
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    container = ("setsid", "unshare", "--net", "sh", "-c", ranks)
    with process(*container, ready=True, **names) as one, process(*container, ready=True, **names) as two:
        try:
            wait_for_ranks(one.pid, 2)
            wait_for_ranks(two.pid, 2)
            assert [each["rank"] for each in stall.document(order([one.pid]))["ranks"]] == [0, 1]
            both = stall.document(order([one.pid, two.pid]))["ranks"]
            assert sorted((each["rank"], both[0]["job"] == each["job"]) for each in both) == [(0, False), (0, True), (1, False), (1, True)]
        finally:
            for each in (one, two):
                os.killpg(each.pid, 9)


def test_what_provision_run_starts_a_rank_with_is_not_the_rank() -> None:
    """Its rank.py names the rank to its program alone; the engine's launcher has another process in the group of each rank."""
    starts = "(sleep 61 & echo $!); PROVISION_RANK=1 sh -c 'echo $$; exec sleep 60' & wait"  # it has the variable when it writes
    with process("setsid", "sh", "-c", starts, **ENVIRONMENT) as started:
        assert started.stdout is not None
        pids = [int(started.stdout.readline()) for _ in (0, 1)]
        (rank,) = stall.document(order([started.pid]))["ranks"]
        assert [each["pid"] for each in rank["processes"]] == [pids[1]]
        os.killpg(started.pid, 9)
    with process("setsid", "sh", "-c", "(sleep 61 & echo $!); exec sleep 60", ready=True, **OWN) as started:
        (rank,) = stall.document(order([started.pid]))["ranks"]
        assert rank["processes"][0]["pid"] == started.pid
        assert len(rank["processes"]) == 2
        os.killpg(started.pid, 9)


def test_a_shell_on_a_terminal_of_its_own_is_not_a_rank() -> None:
    """As by ``srun --pty bash``."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/sh", ["sh", "-c", "echo; sleep 60; true"], slurm)  # noqa: S606
    try:
        os.read(terminal, 1)
        assert pid not in [rank["processes"][0]["pid"] for rank in stall.document(order(None))["ranks"]]
        assert len(stall.document(order([pid]))["ranks"]) == 1
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_a_process_that_an_old_py_spy_has_left_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In py-spy's place: what stops the process and is killed before it continues it."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nkill -STOP $4\nexec sleep 60\n")
    spy.chmod(0o700)
    monkeypatch.setattr(stall, "SPY_S", 0.3)
    with process("sleep", "60") as started:
        found, why = stall.stacks(str(spy), started.pid, time.monotonic() + 10, ())
        assert (found, why) == ({}, "py-spy got no answer: the process does not let itself be stopped")
        end = time.monotonic() + 5
        while stall.is_stopped(started.pid):
            assert time.monotonic() < end
        os.kill(started.pid, 19)  # SIGSTOP, by another: it stays so
        while not stall.is_stopped(started.pid):
            assert time.monotonic() < end
        stall.stacks(str(spy), started.pid, time.monotonic() + 10, ())
        assert stall.is_stopped(started.pid)


def test_a_launcher_stands_for_its_ranks_and_the_processes_of_a_rank_are_one() -> None:
    """A shell as the launcher, which starts one rank; that has started another process."""
    rank = "RANK=0 WORLD_SIZE=1 MASTER_PORT=4 sh -c 'sleep 60 & echo; wait'"
    with process("sh", "-c", f"{rank}; true", ready=True) as launcher:
        (found,) = stall.document(order([launcher.pid]))["ranks"]
        pids = [each["pid"] for each in found["processes"]]
        assert len(pids) == 2
        assert found["processes"][1]["parent"] == pids[0]
        for pid in pids:
            os.kill(pid, 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_batch_shell_and_a_launcher_are_no_ranks() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
    ranks = "; ".join(f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 sleep 60 & echo $!" for rank in (0, 1))
    with process("sh", "-c", f"sh -c '{ranks}; wait'", **slurm) as shell:
        assert shell.stdout is not None
        pids = sorted(int(shell.stdout.readline()) for _ in (0, 1))
        while not all(stall.content(f"/proc/{pid}/cmdline").startswith(b"sleep") for pid in pids):
            time.sleep(0.001)  # a shell's copy has not yet become it
        found = stall.document(order([shell.pid]))["ranks"]
        for pid in pids:
            os.kill(pid, 9)
    assert [(each["rank"], each["ranks"]) for each in found] == [(0, 2), (1, 2)]


def test_another_users_process_is_refused() -> None:
    script = f"import json, sys; sys.path.insert(0, '.'); exec(sys.stdin.read()); print(document({order([os.getpid()])}))"
    # The system's Python in another folder than this user's own: that user cannot read what is in it.
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", script],
        input=resources.script("stall.py").partition('if __name__ == "__main__"')[0],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert f"'refused': [{os.getpid()}]" in done.stdout, done.stderr


def test_no_argument_variable_or_local_is_in_the_answer() -> None:
    """With the real py-spy."""
    program = "import time\ndef load(secret='hunter2-local'):\n    print(flush=True)\n    time.sleep(60)\nload()"
    variables = {**OWN, "TOKEN": "hunter2-variable"}
    with process(sys.executable, "-c", program, "hunter2-argument", ready=True, **variables) as started:
        answer = stall.document(json.loads(examination._order([started.pid], None)))
    frames = answer["ranks"][0]["processes"][0]["threads"][0]["frames"]
    assert {"name": "load", "file": "<string>", "line": 4} in frames
    assert "hunter2" not in json.dumps(answer)


SPY = """#!/bin/sh
{body}
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1", "ptrace is refused: it takes root"),
        ("echo '[{'", "py-spy printed nothing that can be read"),
        ('echo \'[{"os_thread_id": 1, "frames": [{"name": null, "filename": 7, "line": "x"}]}]\'', "py-spy printed nothing"),
        ("echo 'Error: Failed to find a Python' >&2; exit 1", "Error: Failed to find a Python"),
        ("head -c 20000000 /dev/zero", "py-spy printed nothing that can be read"),
    ],
)
def test_without_stacks_it_says_why(tmp_path: Path, body: str, why: str) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(SPY.format(body=body))
    spy.chmod(0o700)
    assert stall.stacks(str(spy), 1, time.monotonic() + 9, ())[1].startswith(why)
    spy.chmod(0o600)
    assert stall.stacks(str(spy), 1, time.monotonic() + 9, ())[1] == "py-spy cannot be started: Permission denied"
    assert stall.stacks(str(spy), 1, time.monotonic(), ()) == ({}, "there was no time left")


def test_stacks_are_read_within_bounds(tmp_path: Path) -> None:
    frame = '{"name": "a' + "b" * 9999 + '\\u001b", "filename": "\\ud800.py", "line": -7}'
    spy = tmp_path / "py-spy"
    spy.write_text(SPY.format(body=f"cat {tmp_path}/answer"))
    spy.chmod(0o700)
    (tmp_path / "answer").write_text('[{"os_thread_id": 1, "frames": [' + ",".join([frame] * 500) + "]}]")
    found, why = stall.stacks(str(spy), 1, time.monotonic() + 9, ())
    assert why == ""
    assert len(found[1]) == stall.MAX_FRAMES
    assert {(len(each["name"]), each["file"], each["line"]) for each in found[1]} == {(stall.LONGEST, "?.py", 0)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_examination_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    """By the sweep of the guard, where the job ends meanwhile. In py-spy's place is what does not answer, so that the examination lasts."""
    spy, temporary = tmp_path / "bin/py-spy", tmp_path / "tmp"
    spy.parent.mkdir()
    temporary.mkdir()
    spy.write_text("#!/bin/sh\nexec sleep 2\n")
    spy.chmod(0o700)
    environment = {"PATH": f"{spy.parent}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    with (
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", resources.script("stall.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        ) as examining,
        process("sleep", "60", **OWN) as rank,
    ):
        assert examining.stdin is not None
        examining.stdin.write(json.dumps({**order([rank.pid]), "seconds": 60}).encode())
        examining.stdin.close()
        end = time.monotonic() + 20
        while not list(temporary.glob("provision-stall-*")) and time.monotonic() < end:  # Python writes a file of its own first, to try
            time.sleep(0.005)
        assert list(temporary.glob("provision-stall-*"))
        examining.send_signal(number)
        assert examining.wait(20) == 1
    assert list(temporary.iterdir()) == []


def test_what_fails_apart_says_nothing_and_goes_no_further() -> None:
    assert stall.apart(lambda: str(1 / 0)) == ""
    assert stall.apart(str.upper, "fine") == "FINE"
