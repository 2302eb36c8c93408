"""Whether hangs get a name, the rank and the line, or what the kernel says, and healthy jobs no alarm: the jobs of `hang_seeds.py`.

``PROVISION_HANGS=REGEX`` chooses those whose ``shape framework ranks hosts`` it finds. A table of all is printed (``pytest -s``).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import SandboxFactory, missing
from hang_seeds import MARK, Seed, by_another_author, healthy_seeds, seeds
from hosts import as_machine, init, provision, root

from provision.sandbox import Sandbox, names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".venv-engine"
PYTHON = ENGINE / "bin/python"
AFTER_S, HEALTHY_AFTER_S = 3, 60  # --stall-after; what is healthy of another author pauses for up to 40 s
READY_S, ALARM_S, HEALTHY_S = 400.0, 150.0, 25.0  # a step may take 20 s where there are more ranks than cores
OTHER_AUTHOR_S = 130.0  # until a program of another author hangs, and is examined
AT_ONCE = os.cpu_count() or 1  # more only wait for one another until they train
MEMORY = Path("/sys/fs/cgroup/memory")
_NUMBERS = itertools.count()  # of all seeds: their folders are next to each other
_WANTED = re.compile(os.environ.get("PROVISION_HANGS", ""))


@dataclass
class Row:
    """What was said of one job. ``seconds``: from when it is known to be quiet to the answer."""

    seed: Seed
    is_right_rank: bool = False
    is_right_place: bool = False
    seconds: float = 0.0
    said: str = ""

    @property
    def is_right(self) -> bool:
        return self.is_right_rank and self.is_right_place

    def __str__(self) -> str:
        seed, marks = self.seed, ["right" if each else "WRONG" for each in (self.is_right_rank, self.is_right_place)]
        place = f"rank {marks[0]}  place {marks[1]}  {self.seconds:4.1f} s"
        head = f"{seed.file or seed.shape:18} {seed.framework:14} {seed.ranks} {seed.hosts}  {place}"
        return head if self.is_right else f"{head}  rank {seed.victim}: {self.said[:400]}"


@dataclass
class Place:
    """Where jobs run: this machine, or the hosts of a sandbox. ``ports``: of a server that never answers, and of one that takes nobody."""

    folder: Path
    cluster: Sandbox | None = None
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def hosts(self) -> str:
        return str(self.cluster.inventory) if self.cluster else "localhost"


class Job:
    """A started job: its launcher, and what all have said."""

    def __init__(self, seed: Seed, place: Place, folder: Path, program: Path) -> None:
        self.seed, self.place, self.folder, self.program = seed, place, folder, program
        # Those of another author were written for the default of a minute: their pauses are no steps of a second.
        self.after = HEALTHY_AFTER_S if seed.file and not seed.guilty else AFTER_S
        words = self._mpirun() if seed.is_under_mpi else self._run()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
            "OPAL_PREFIX": str(ENGINE),
        }
        self.process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _run(self) -> list[str]:
        options = ["--hosts", self.place.hosts, "--python", str(PYTHON), "--launcher", "own", "-x", "TF_CPP_MIN_LOG_LEVEL=2"]
        options += ["-x", f"OPAL_PREFIX={ENGINE}"]  # of MPI, which Lightning looks for
        options += ["--nproc-per-node", str(self.seed.ranks // self.seed.hosts), "--stall-after", str(self.after)]
        return [sys.executable, "-m", "provision", "run", *options, self.program.name]

    def _mpirun(self) -> list[str]:
        words = [str(ENGINE / "bin/mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(self.seed.ranks)]
        if self.place.cluster is not None:
            each = -(-self.seed.ranks // len(self.place.cluster.hosts))
            hosts = ",".join(f"{host.address}:{each}" for host in self.place.cluster.hosts)
            words += [
                "--host",
                hosts,
                "--prefix",
                str(ENGINE),
                "--mca",
                "plm_rsh_agent",
                str(self.place.folder / "ssh"),
                "-x",
                "OPAL_PREFIX",
                "--wdir",
                "/tmp",
            ]
            words += ["--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include", "eth0"]
        return [*words, str(PYTHON), str(self.program if self.place.cluster is None else Path("/tmp") / self.program.name)]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    @property
    def said(self) -> str:
        return "".join(line for _at, line in list(self.lines))

    def when(self, text: str) -> float | None:
        return next((at for at, line in list(self.lines) if text in line), None)

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Until it holds; False where it does not in that time, or the job has ended."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                return bool(condition())
            time.sleep(0.1)
        return True

    def ready(self) -> None:
        """Until all ranks have trained."""
        expected = self.seed.ranks if self.seed.shape != "missing" and not self.seed.file else 0
        assert self.wait(lambda: len(re.findall("(?<!al)ready", self.said)) >= expected, READY_S), f"not ready: {self.said[-1500:]}"

    @property
    def group(self) -> Path:
        """The control group of a rank that has little memory."""
        return MEMORY / f"hang-{self.program.stem}"

    def rank(self, number: int) -> int:
        """The process of a rank, as this machine numbers it."""
        return min(self.ranks(number))

    def ranks(self, number: int) -> list[int]:
        wanted, found = {f"RANK={number}".encode(), f"OMPI_COMM_WORLD_RANK={number}".encode()}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                is_it = b"python" in words[0] and any(word.endswith(self.program.name.encode()) for word in words[1:3])
                if is_it and wanted & set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def examined(self) -> tuple[dict[str, Any], float]:
        """(what `provision doctor --job` says, seconds)"""
        began = time.time()
        # The run is named by its launcher here; on hosts, which have one job at a time, by these.
        done = provision("doctor", "--job", self.place.hosts if self.place.cluster else str(self.process.pid), "--json", timeout=120)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
        return jobs[0], time.time() - began

    def alarm(self) -> tuple[dict[str, Any], float]:
        """(what the run's watch has written, seconds)"""
        assert self.when("  the evidence: "), f"no alarm: {self.said[-300:]}"
        found = re.search(r"the evidence: (\S+stalls\.json)", self.said)
        assert found is not None
        stall = json.loads(Path(found.group(1)).read_text())["stalls"][-1]
        since = datetime.fromisoformat(stall["since"].replace("Z", "+00:00")).timestamp()
        return stall["verdict"], (self.when("has stalled since") or 0) - since - self.after

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def disturbed(job: Job) -> Iterator[None]:
    """Does what the shape's ``act`` says, and undoes it."""
    act, number = job.seed.what.act, job.seed.victim
    with contextlib.ExitStack() as stack:
        if act == "stop":
            os.kill(job.rank(number), signal.SIGSTOP)
        elif act == "memory":
            limit = job.group / "memory.limit_in_bytes"
            stack.callback(limit.write_text, "-1")
            for _ in range(100):  # what is more is written to the swap first, which takes several turns
                with contextlib.suppress(OSError):
                    limit.write_text(str(96 << 20))
                    break
                time.sleep(0.2)
            else:
                raise AssertionError("the rank's memory could not be limited")
        elif act.startswith("cut"):
            assert job.place.cluster is not None
            first, second = job.place.cluster.hosts
            # All but ssh: where that is cut, too, the launcher itself says so and ends the job. What comes is lost: of what the host
            # itself may not send the kernel knows, and has sent nothing.
            rules = [f"INPUT -s {first.address} -p tcp ! --dport 22", f"OUTPUT -d {first.address} -p tcp ! --sport 22"]
            for rule in rules[: 1 if "one way" in act else 2]:
                as_machine(second, "net", f"iptables -w -A {rule} -j DROP")
                stack.callback(as_machine, second, "net", f"iptables -w -D {rule} -j DROP")
        yield


@contextlib.contextmanager
def surroundings(seed: Seed, folder: Path) -> Iterator[None]:
    """What a program needs around it: a FIFO, a full disk, a file system of which the server does not answer."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.mkfifo(folder / "shard")
    with contextlib.ExitStack() as stack:
        if seed.shape == "full disk":
            (folder / "full").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder / "full")], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder / "full")], check=True)
        if seed.shape == "fuse":
            (folder / "fs").mkdir()
            server = os.open("/dev/fuse", os.O_RDWR)
            options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
            assert libc.mount(b"shards", str(folder / "fs").encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
            stack.callback(subprocess.run, ["umount", "-l", str(folder / "fs")], check=True)
            stack.callback(os.close, server)  # what waits for it fails
        yield


@contextlib.contextmanager
def started(seed: Seed, place: Place, number: int) -> Iterator[tuple[Job, str]]:
    """(its job, the line at which the rank has to be found)"""
    folder = place.folder / f"seed{number}"
    folder.mkdir()
    program = folder / f"train_{number}.py"
    program.write_text(seed.program(**place.ports))
    marked = [at for at, line in enumerate(program.read_text().splitlines(), 1) if line.endswith(MARK)]
    if place.cluster is not None and seed.is_under_mpi:
        for host in place.cluster.hosts:
            subprocess.run(["docker", "cp", "-q", str(program), f"{host.container}:/tmp/"], check=True)
    with surroundings(seed, folder):
        job = Job(seed, place, folder, program)
        try:
            if seed.what.act == "memory":  # from its start: what it has already taken would not count
                job.group.mkdir()
                job.wait(lambda: job.ranks(seed.victim), READY_S)
                (job.group / "cgroup.procs").write_text(str(job.rank(seed.victim)))
            yield job, f"{program.name}:{marked[0]}" if marked else ""
        finally:
            job.end()
            with contextlib.suppress(FileNotFoundError):
                job.group.rmdir()


def hang(seed: Seed, place: Place, number: int) -> Row:
    row = Row(seed)
    shape = seed.what
    try:
        with started(seed, place, number) as (job, line):
            job.ready()
            with disturbed(job):
                if shape.alarms and not seed.is_under_mpi:
                    job.wait(lambda: job.when("  the evidence: "), OTHER_AUTHOR_S if seed.file else ALARM_S)
                else:
                    time.sleep(OTHER_AUTHOR_S / 2 if seed.file else AFTER_S)
                # What is at work raises no alarm, and is named only where somebody asks.
                is_asked = not shape.alarms or (seed.file and not job.when("  the evidence: "))
                verdict, row.seconds = job.examined() if is_asked or seed.is_under_mpi else job.alarm()
            row.said, suspects = verdict["said"], verdict["suspects"]
            those = [each for each in verdict["places"] if each["rank"] == seed.victim]
            if shape.kind == "network":  # which end is at fault cannot be known
                row.is_right_rank = row.is_right_place = verdict["state"] == "stalled" and "not acknowledged" in row.said
            elif shape.kind == "missing":
                row.is_right_rank = row.is_right_place = verdict["missing"] == suspects == [seed.victim]
            else:
                # Of two ranks that wait in different operations each may be the one that is wrong.
                is_open = seed.ranks == 2 and all(each["kind"] in ("collective", "hidden") for each in verdict["places"])
                row.is_right_rank = suspects == ([0, 1] if is_open else list(seed.guilty or [seed.victim]))
                row.is_right_place = any(
                    line == each["line"] or f"({line})" in each["doing"] or (line == each["caller"] and f"called at {line}" in row.said)
                    if line
                    else each["kind"] == shape.kind
                    for each in those
                )
                row.said += f" {those}" if not row.is_right else ""
    except AssertionError as error:
        row.said = re.sub(r"\s*\n\s*", " | ", str(error))
    return row


def healthy(seed: Seed, place: Place, number: int) -> Row:
    row = Row(seed)
    try:
        with started(seed, place, number) as (job, _line):
            job.ready()
            is_there = not seed.is_under_mpi or job.wait(lambda: re.search("ready|step|rank", job.said), READY_S)
            assert is_there, f"not ready: {job.said[-1500:]}"
            end, alarms = time.monotonic() + (OTHER_AUTHOR_S if seed.file else HEALTHY_S), []
            moved = time.monotonic()  # that it stands still at one moment says nothing
            while seed.is_under_mpi and time.monotonic() < end and job.process.poll() is None and not alarms:
                time.sleep(5)
                verdict, _seconds = job.examined() if job.process.poll() is None else ({"state": "moves"}, 0.0)
                moved = moved if (is_stalled := verdict["state"] == "stalled") else time.monotonic()
                lasts = is_stalled and time.monotonic() - moved > (HEALTHY_AFTER_S if seed.file else 0)
                alarms += [verdict["said"]] if lasts else []
            job.wait(lambda: "provision: " in job.said, max(0.0, end - time.monotonic()))
            alarms += [line for _at, line in job.lines if "provision: " in line]
            row.said = " | ".join(alarms) or job.said[-400:]
            row.is_right_rank = row.is_right_place = not job.process.poll() and not alarms
    except AssertionError as error:
        row.said = str(error)
    return row


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """SILENT takes connections and says nothing; BLACK takes none, as its queue is full: it drops packets."""
    with contextlib.ExitStack() as stack:
        silent, black = (stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=size)) for size in (100, 0))
        for _ in range(2):
            stack.enter_context(contextlib.closing(knocking := socket.socket())).setblocking(False)
            knocking.connect_ex(black.getsockname())
        yield {"SILENT": silent.getsockname()[1], "BLACK": black.getsockname()[1]}


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("swap") / "file"
    subprocess.run(["fallocate", "-l", "3G", str(file)], check=True)
    file.chmod(0o600)
    for command in ("mkswap", "swapon"):
        subprocess.run([command, str(file)], check=True, capture_output=True)
    yield
    subprocess.run(["swapoff", str(file)], check=True)


_MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for path in sys.argv[2:]:
    tree = libc.syscall(428, -100, path.encode(), 1)  # open_tree, a copy of the mount
    if os.fork() == 0:
        assert libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY), 0) == 0
        os.makedirs(path, exist_ok=True)
        os.chmod("/root", 0o711)
        os._exit(libc.syscall(429, tree, b"", -100, path.encode(), 4) and ctypes.get_errno())  # move_mount
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def places(sandbox_factory: SandboxFactory, tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> dict[int, list[Place]]:
    """Number of hosts → places. Both hosts of a sandbox see this machine's engine and frameworks."""
    found = {1: [Place(tmp_path_factory.mktemp("local"), ports=ports)], 2: []}
    count = sum(
        seed.hosts == 2
        for seed in chosen([*seeds(), *healthy_seeds(), *by_another_author(is_healthy=False), *by_another_author(is_healthy=True)])
    )
    for sandbox in ("hangs1", "hangs2")[: (count > 0) + (count > 9)]:
        cluster = sandbox_factory(2, "debian:12", name=sandbox, slots=4)
        folder = tmp_path_factory.mktemp("hosts")
        for host in cluster.hosts:
            base = subprocess.check_output([PYTHON, "-c", "import sys; print(sys.base_prefix)"], text=True).strip()
            subprocess.run([sys.executable, "-c", _MOUNT, str(init(host)), str(ENGINE), base], check=True)
            for name, file in (("id_ed25519", cluster.key), ("known_hosts", cluster.known_hosts)):  # ranks are started from the first host
                text = base64.b64encode(file.read_bytes()).decode()
                root(host, f"su {names.USER} -c 'umask 77; echo {text} | base64 -d > ~/.ssh/{name}; {PYTHON} -c \"import numpy\"'")
        ssh = f"exec ssh -F /dev/null -i {cluster.key} -l {cluster.user} -o UserKnownHostsFile={cluster.known_hosts} -o BatchMode=yes"
        (folder / "ssh").write_text(f'#!/bin/sh\n{ssh} "$@"\n')
        (folder / "ssh").chmod(0o755)
        for host in cluster.hosts:  # mpirun's daemons want it, too
            root(host, f"mkdir -p {folder} && cp /bin/false {folder}/ssh && chmod 755 {folder}/ssh")
        found[2].append(Place(folder, cluster, ports))
    return found


def chosen(of: Sequence[Seed]) -> list[Seed]:
    return [each for each in of if _WANTED.search(f"{each.shape} {each.framework} {each.ranks} {each.hosts} {each.file}")]


def table(of: Sequence[Seed], places: dict[int, list[Place]], look: Callable[[Seed, Place, int], Row]) -> list[Row]:
    """Those on this machine several at once, those on hosts one after the other on each sandbox."""
    rows: list[Row] = []

    def one(number: int, seed: Seed, place: Place) -> None:
        row = look(seed, place, number)
        print(row, flush=True)
        rows.append(row)

    with contextlib.ExitStack() as stack:
        pools = {
            place.hosts: stack.enter_context(ThreadPoolExecutor(1 if place.cluster else AT_ONCE))
            for each in places.values()
            for place in each
        }
        waiting = []
        for number, seed in zip(_NUMBERS, random.Random(46).sample(those := chosen(of), len(those)), strict=False):
            place = places[seed.hosts][number % len(places[seed.hosts])]
            waiting.append(pools[place.hosts].submit(one, number, seed, place))
        for each in waiting:
            each.result()
    return rows


def test_hangs_get_their_name(places: dict[int, list[Place]], swap: None) -> None:
    if not PYTHON.exists():
        missing("no frameworks in .venv-engine: make .venv-engine/.frameworks")
    rows = table([*seeds(), *by_another_author(is_healthy=False)], places, hang)
    right, slow = sum(row.is_right for row in rows), [row for row in rows if row.seconds > 30]
    print(f"{right} of {len(rows)} named; {len(slow)} took longer than 30 s, the longest {max(row.seconds for row in rows):.1f} s")
    assert right >= 0.95 * len(rows), "\n".join(str(row) for row in rows if not row.is_right)


def test_healthy_jobs_raise_no_alarm(places: dict[int, list[Place]]) -> None:
    rows = table([*healthy_seeds(), *by_another_author(is_healthy=True)], places, healthy)
    assert all(row.is_right for row in rows), "\n".join(str(row) for row in rows if not row.is_right)
