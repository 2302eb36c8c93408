"""`provision doctor --job` on real jobs of torch.distributed over Gloo that stall in many ways, and on some that do not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import missing
from hosts import provision

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine/bin/python"
#: Shape → the kind of place where rank 1 is; of a disagreement ``order``.
STALLS = {
    "fifo": "file",
    "full_pipe": "file",
    "stopped": "stopped",
    "two_locks": "lock",
    "file_lock": "lock",
    "loader": "loader",
    "order": "order",
    "backward": "sleep",
    "never_joins": "missing",
}
MORE_STALLS = {
    "pipe": "file",
    "native_lock": "file",
    "lock": "lock",
    "empty_queue": "lock",
    "thread_join": "lock",
    "sleeps": "sleep",
    "child": "child",
    "swallowed": "order",
    "uneven_data": "order",
    "two_groups": "order",
}
#: Rank 1 is at work, which may be a loop without end: it is named without an alarm.
AT_WORK = ("endless", "evaluation", "long_steps")
HEALTHY = ("quick", "seconds", "uneven", "with_loader")


def free_ports(count: int) -> int:
    """The first of some free ports in a row, of those that the system does not give to connections."""
    for first in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return first
    raise AssertionError("no free ports")


class Jobs:
    """Started jobs, of all of which one process is the launcher."""

    def __init__(self, folder: Path, ranks: int, shapes: Sequence[str]) -> None:
        self.folder, self.ranks = folder, ranks
        os.mkfifo(folder / "fifo")
        port = free_ports(len(shapes))
        self.ports = {shape: port + at for at, shape in enumerate(shapes)}
        variables = {"RANK": "_", "WORLD_SIZE": "_", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "00000", "OMP_NUM_THREADS": "1"}
        command = [str(PYTHON), str(ROOT / "tests/integration/stalled_job.py"), str(folder), str(ranks), str(port), *shapes]
        self.process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)

    def said(self, shape: str, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{shape}.{rank}").read_text()
        return ""

    def wait(self) -> None:
        """Until all ranks are where they stay."""
        waited = [(shape, rank) for shape in self.ports for rank in range(self.ranks) if (shape, rank) != ("never_joins", 1)]
        end = time.monotonic() + 240
        while not all("ready" in self.said(shape, rank) for shape, rank in waited):
            assert not [said for each in waited if "Traceback" in (said := self.said(*each))]
            assert time.monotonic() < end, [each for each in waited if "ready" not in self.said(*each)]
            assert self.process.poll() is None
            time.sleep(0.1)
        time.sleep(2)

    def stands(self, shape: str, rank: int) -> str:
        """The line at which a rank says that it will be."""
        return [line.split()[2] for line in self.said(shape, rank).splitlines() if line.startswith("stands")][-1]

    def examined(self) -> Mapping[str, dict[str, Any]]:
        """Shape → verdict."""
        done = provision("doctor", "--job", str(self.process.pid), "--json")
        jobs = {each["job"].split()[-1]: each for each in json.loads(done.stdout)["jobs"]}
        assert done.returncode == int(any(each["state"] == "stalled" for each in jobs.values()))
        return {shape: jobs[str(port)] for shape, port in self.ports.items()}


@contextlib.contextmanager
def started(folder: Path, ranks: int, *shapes: str) -> Iterator[Jobs]:
    if not PYTHON.exists():
        missing("no PyTorch in .venv-engine: make setup")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() != 0 and scope.exists() and scope.read_text().strip() != "0":
        missing("ptrace of one's own processes takes root here")
    jobs = Jobs(folder, ranks, shapes)
    try:
        jobs.wait()
        yield jobs
    finally:
        os.killpg(jobs.process.pid, signal.SIGKILL)
        jobs.process.wait()


def wrong(jobs: Jobs, found: Mapping[str, dict[str, Any]], shape: str, kind: str) -> list[str]:
    """What a verdict on a stalled job gets wrong: its state, rank, kind of place, or lines."""
    verdict, said = found[shape], []
    places = {place["rank"]: place for place in verdict["places"]}
    if verdict["state"] != "stalled":
        said.append(f"state {verdict['state']}")
    # Of two ranks that disagree each may be the one that is wrong.
    if verdict["suspects"] != ([0, 1] if kind == "order" and jobs.ranks == 2 else [1]):
        said.append(f"suspects {verdict['suspects']}")
    if kind != "missing" and places[1]["kind"] != ("collective" if kind == "order" else kind):
        said.append(f"kind {places[1]['kind']}")
    said += [f"rank {rank} at {place['line']}" for rank, place in places.items() if place["line"] != jobs.stands(shape, rank)]
    return [f"{shape}: {each}: {verdict['said']} {[place['evidence'] for place in verdict['places']]}" for each in said]


def is_unsure(verdict: dict[str, Any]) -> bool:
    """Whether it says that it has not seen all, or not a stall: on a busy machine a stack may not be read in time, and a rank may only just
    have got to where it stays. What is called a stall must be right at once."""
    return verdict["state"] != "stalled" or any("no stack: " in line for place in verdict["places"] for line in place["evidence"])


def check(folder: Path, ranks: int, stalls: Mapping[str, str], others: Sequence[str]) -> None:
    # Neither is an alarm; on a busy machine a quick job may look as if one of its ranks was at work for long.
    wanted = {shape: ("works",) if shape in AT_WORK else ("works", "moves") for shape in others}
    with started(folder, ranks, *stalls, *others) as jobs:
        found: dict[str, dict[str, Any]] = {}
        for _ in range(5):
            seen = jobs.examined()
            found.update((shape, seen[shape]) for shape in stalls if shape not in found or is_unsure(found[shape]))
            alarms = {shape: seen[shape] for shape in others if seen[shape]["state"] not in wanted[shape]}
            assert not alarms, json.dumps(alarms, indent=1)
            assert all(1 in seen[shape]["suspects"] for shape in others if shape in AT_WORK)
            if not any(map(is_unsure, found.values())):
                break
        wrongs = [line for shape, kind in stalls.items() for line in wrong(jobs, found, shape, kind)]
        assert not wrongs, "\n".join(wrongs)


def test_stalls_are_named_and_healthy_jobs_are_left_alone(tmp_path: Path) -> None:
    check(tmp_path, 2, STALLS, ("endless", "quick", "uneven"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_further_stalls_and_healthy_jobs(tmp_path: Path, ranks: int) -> None:
    for name, stalls, others in (("first", STALLS, AT_WORK), ("second", MORE_STALLS, HEALTHY)):
        (tmp_path / name).mkdir()
        check(tmp_path / name, ranks, stalls, others)


@pytest.mark.slow
def test_an_examination_changes_nothing_in_a_job(tmp_path: Path) -> None:
    """Every rank goes on, and a write that waits is not cut short: it would end with fewer bytes than it was to write."""
    with started(tmp_path, 2, "quick", "full_pipe") as jobs:
        for _ in range(3):
            found = jobs.examined()
        assert (found["quick"]["state"], found["full_pipe"]["state"]) == ("moves", "stalled")
        assert found["full_pipe"]["places"][1]["line"] == jobs.stands("full_pipe", 1)
        tasks = [Path(f"/proc/{place['pid']}/status") for each in found.values() for place in each["places"]]
        assert not [task for task in tasks if "\nState:\tT" in task.read_text() or "\nTracerPid:\t0\n" not in task.read_text()]
