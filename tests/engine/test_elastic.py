"""Elastic jobs: ranks are killed, hosts come and go, and no committed step is lost; what decides it, without processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from collective_core.elastic import control_channel
from collective_core.elastic import worker as elastic_worker
from collective_core.elastic.failure_policy import FORGIVEN, Cooldown, FailurePolicy
from collective_core.elastic.generations import ElasticMembership, RankAssignment
from collective_core.elastic.rendezvous_server import RendezvousServer
from collective_core.errors import CollectiveError
from collective_core.launch import timeouts, tracebacks
from collective_core.launch.elastic_driver import UNLIMITED, cooldown_of, failure_policy, limits_of
from collective_core.launch.hosts import Host, ask
from collective_core.observe import recorder
from collective_core.observe.flight_recorder import path_of
from collective_core.runtime import handshake
from conftest import WORKERS
from eavesdropper import Eavesdropper, play
from processes import IMPATIENT, children_of, parent_of, processes_with, signal_all, wait_until_gone

from collective_core import RankFailedError, Runner, _native, flight

SCRIPT = WORKERS / "elastic_training.py"
#: Seconds for what takes a few: importing PyTorch several times on two busy processors is most of it.
PATIENCE = 90.0
ENDLESS = 1_000_000
#: One process that does so many steps.
ALONE = """
import sys
from elastic_training import learn, make, values

model, optimizer = make()
for step in range(int(sys.argv[1])):
    learn(model, optimizer, step)
print(values(model))
"""


class Job:
    """A training that runs, and what its ranks note."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        steps: int = ENDLESS,
        ssh: tuple[str, ...] = (),
        failing: int = -1,
        launcher: tuple[str, ...] = (sys.executable, "-m", "collective_core.launch"),
    ) -> None:
        self.folder = folder
        options = ["--ssh-config", ssh[2]] if ssh else []
        command = [*launcher, *options, *words, sys.executable, str(SCRIPT)]
        self.process = subprocess.Popen(
            [*command, str(folder), str(steps), str(failing)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def notes(self, key: str = "step") -> list[dict]:
        """All that was noted with this key, in order."""
        lines = [line for path in self.folder.glob("log.*") for line in path.read_text().splitlines() if line.endswith("}")]
        return sorted((note for note in map(json.loads, lines) if key in note), key=lambda note: note["time"])

    def wait_for_size(self, size: int, without: frozenset[int] = frozenset(), since: int | None = None) -> dict[int, int]:
        """The process of each rank, once so many ranks have done a step together and none of them is one of ``without``.

        The last step counts, or any after the step ``since``: other ranks may come before this looks again.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            notes = self.notes()
            last = notes[-1]["step"] if notes else 0
            for step in [last] if since is None else range(last, since, -1):
                ranks = {note["rank"]: note["pid"] for note in notes if note["step"] == step and note["size"] == size}
                if len(ranks) == size and not without.intersection(ranks.values()):
                    return ranks
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"{size} ranks did not come together:\n{self.process.communicate()[0][-3000:]}\n{self.notes()[-5:]}")

    def port_of(self, pid: int) -> int:
        """At which this worker asks for its rank: the one door of a job that works."""
        found = next(each for each in _read(Path(f"/proc/{pid}/environ")).split(b"\0") if each.startswith(b"COLLECTIVE_ELASTIC="))
        return int(found.rsplit(b":", 1)[1])

    def finish(self) -> str:
        """Has the training end; what was printed."""
        (self.folder / "stop").touch()
        out, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, out[-3000:]
        return out

    def must_have_lost_nothing(self) -> None:
        """The result is that of one process that did every step once, on all ranks alike."""
        best, own = 0, {}
        for note in self.notes():
            assert note["step"] >= best, f"{note} after step {best} was committed"
            assert note["step"] > own.get(note["pid"], 0), f"{note}: done twice"
            best = own[note["pid"]] = note["step"]
        ends = self.notes("end")
        assert {note["end"] for note in ends} <= {best, best + 1}, "ranks that change after a commit note nothing"
        best = ends[0]["end"]
        assert {note["end"] for note in ends} == {best}
        expected = subprocess.run(
            [sys.executable, "-c", ALONE, str(best)],
            cwd=WORKERS,
            env={**os.environ, "PYTHONPATH": str(WORKERS)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert expected.returncode == 0, expected.stderr
        for note in ends:
            assert note["values"] == ends[0]["values"]
            assert note["values"] == pytest.approx(json.loads(expected.stdout), rel=1e-9)


class Siege:
    """Ten thousand strangers at a door: of three, one hangs up at once, one says nothing, one says a byte a second. The last ones stay."""

    CALLERS, STAYING = 10_000, 400

    def __init__(self, port: int) -> None:
        self._port, self._over, self._all_there = port, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        silent: deque[socket.socket] = deque(maxlen=self.STAYING // 2)  # one that falls out is closed
        slow: deque[socket.socket] = deque(maxlen=self.STAYING // 2)
        for number in range(self.CALLERS):
            stranger = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)
            if number % 3:
                (silent, slow)[number % 3 - 1].append(stranger)
            else:
                stranger.close()
        self._all_there.set()
        while not self._over.wait(1.0):
            for stranger in slow:
                with contextlib.suppress(OSError):  # it was shown the door
                    stranger.send(b"c")

    def wait_until_all_have_come(self) -> None:
        assert self._all_there.wait(PATIENCE)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def job(tmp_path):
    made: list[Job] = []

    def start(*words: str, **more) -> Job:
        made.append(Job(tmp_path, *words, **more))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


# --- jobs ---------------------------------------------------------------------------------------------------------------------------


def test_killed_ranks_are_replaced_and_no_committed_step_is_lost(job, tmp_path, capsys):
    records = tmp_path / "records"
    running = job("-np", "3", "--min-np", "2", "-x", f"COLLECTIVE_FLIGHT_RECORDER={records}")
    before = running.wait_for_size(3)
    siege = Siege(running.port_of(before[0]))
    steps = running.notes()[-1]["step"]
    siege.wait_until_all_have_come()
    assert running.wait_for_size(3) == before, "strangers disturb no rank"
    assert running.notes()[-1]["step"] > steps
    steps = running.notes()[-1]["step"]
    os.kill(before[2], signal.SIGKILL)  # while some of them still hold their connections
    running.wait_for_size(2, since=steps)
    after = running.wait_for_size(3)
    assert {rank: after[rank] for rank in (0, 1)} == {rank: before[rank] for rank in (0, 1)}
    os.kill(after[0], signal.SIGKILL)  # the second failure of the host: a new one comes a little later
    running.wait_for_size(3, without=frozenset({after[0]}))
    out = running.finish()
    assert "Traceback" not in out
    running.must_have_lost_nothing()
    assert max(len(note["resets"]) for note in running.notes("end")) >= 3
    assert recorder.read_file(path_of(str(records), 2, 1)).pid == before[2], "what the killed rank did last is not overwritten"
    assert flight.main([str(records), "--last", "1"]) == 0
    assert f"generation 1, rank 2 of 3 (host {socket.gethostname()}, pid {before[2]})" in capsys.readouterr().out
    siege.end()
    assert wait_until_gone(str(running.folder)) == []


@pytest.mark.slow
def test_ranks_with_gpus_that_are_killed_lose_no_committed_step_either(job):
    running = job("-np", "3", "--min-np", "2", "-x", "TEST_GPUS=1")
    before = running.wait_for_size(3)
    os.kill(before[1], signal.SIGKILL)
    running.wait_for_size(3, without=frozenset({before[1]}))
    out = running.finish()
    assert "Traceback" not in out
    assert "through host memory" not in out, "the communicators of every generation could be made"
    running.must_have_lost_nothing()


def list_hosts(file, text):
    """At once: what is being written is not all there for a moment."""
    file.with_suffix(".new").write_text(text + "\n")
    file.with_suffix(".new").replace(file)


@pytest.mark.slow
def test_hosts_come_and_go_as_a_script_says(job, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    list_hosts(hosts, "localhost:1")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    # New ranks make their optimizer when the others make their second or third.
    running = job("--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script), "-x", "TEST_WRAP=inside")
    running.wait_for_size(1)
    list_hosts(hosts, "localhost:4")
    three = running.wait_for_size(3)
    list_hosts(hosts, "")
    time.sleep(0.8)  # not so long that the script is asked twice
    list_hosts(hosts, "localhost:2")
    two = running.wait_for_size(2)
    assert two == {rank: three[rank] for rank in (0, 1)}, "the last slot is given back"
    list_hosts(hosts, "this is no list")
    time.sleep(1.5)
    list_hosts(hosts, "localhost:3")
    running.wait_for_size(3)
    out = running.finish()
    assert "the hosts cannot be asked for, those of before stay" in out
    running.must_have_lost_nothing()


@pytest.mark.slow
def test_a_lost_host_is_waited_for_when_too_few_are_left(job, ssh):
    running = job("-H", "other:1,third:1", "-np", "2", "--min-np", "2", "--wdir", "/", ssh=ssh)
    before = running.wait_for_size(2)
    done = running.notes()[-1]["step"]
    (client,) = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if b"\0third\0" in _read(path) and b"ssh" in _read(path)
    ]
    os.kill(client, signal.SIGKILL)  # the way to the host is gone; its agent then ends its rank
    after = running.wait_for_size(2, without=frozenset({before[1]}))
    assert after[0] == before[0]
    assert running.notes()[-1]["step"] > done
    running.finish()
    running.must_have_lost_nothing()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_replaced(job):
    running = job("-np", "2", "--min-np", "1", launcher=IMPATIENT)
    before = running.wait_for_size(2)
    os.kill(before[1], signal.SIGSTOP)
    after = running.wait_for_size(2, without=frozenset({before[1]}))
    assert after[0] == before[0]
    out = running.finish()
    reason = f"process {before[1]} has been stopped for 1 s (kill -CONT would have continued it)"
    assert f"host localhost: {reason}; another worker is started in its place" in out
    running.must_have_lost_nothing()


@pytest.mark.slow
def test_a_host_whose_ranks_are_all_stopped_gets_others(job, ssh):
    """Its system answers, and so does the agent there, which ends them after 45 s."""
    running = job("-H", "other:1,third:1", "-np", "2", "--min-np", "1", "--wdir", "/", ssh=ssh)
    before = running.wait_for_size(2)
    os.kill(before[1], signal.SIGSTOP)
    after = running.wait_for_size(2, without=frozenset({before[1]}))
    assert after[0] == before[0]
    out = running.finish()
    assert "has been stopped for 45 s (kill -CONT would have continued it); another worker is started in its place" in out
    running.must_have_lost_nothing()


@pytest.mark.parametrize("n", [2])
def test_a_rank_that_is_given_up_while_the_others_still_join_is_not_waited_for(launch, n):
    reports = launch("given_up.py", n, keep_going=True).reports()
    assert reports[0]["kind"] == "peer_lost"
    assert reports[0]["ranks"] == [1]
    assert "the launcher has given it up" in reports[0]["text"]


def test_ranks_that_were_given_up_are_those_of_the_generation(monkeypatch):
    told, known = [], []
    monkeypatch.setattr(_native, "library", lambda: SimpleNamespace(cc_give_up=lambda rank: told.append(rank) or 0))
    monkeypatch.setattr(_native, "_given_up", set())
    said = deque([{"kind": "lost", "rank": 1}, {"kind": "rank"}, {"kind": "lost", "rank": 2}, None])

    def receive():
        known.append(set(_native._given_up))
        return said.popleft()

    monkeypatch.setattr(elastic_worker, "_answers", queue.SimpleQueue())
    elastic_worker._listen(SimpleNamespace(receive=receive))
    assert told == [1, 2]
    assert known == [set(), {1}, set(), {2}]


def test_ranks_of_a_host_that_stands_still_are_given_up_and_the_others_go_on(job, ssh):
    """It is paused: its system still holds the connections, and nobody reads them."""
    running = job("-H", "other:1,third:1", "-np", "2", "--min-np", "1", "--wdir", "/", ssh=ssh, launcher=IMPATIENT)
    before = running.wait_for_size(2)
    sshd = parent_of(parent_of(before[1]))
    paused = [sshd, *children_of(sshd)]
    signal_all(paused, signal.SIGSTOP)
    try:
        after = running.wait_for_size(2, without=frozenset({before[1]}))
        assert after[0] == before[0]
        out = running.finish()
    finally:
        signal_all(paused, signal.SIGCONT)
    assert re.search("host third: the connection ended: Timeout, server .* not responding.*; another worker is started in its place", out)
    running.must_have_lost_nothing()
    assert wait_until_gone(str(running.folder)) == [], "what was paused finds that it is over"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_job_whose_ranks_may_not_change_ends_when_they_do(job):
    running = job("-np", "2", "--min-np", "1", "--reset-limit", "0")
    os.kill(running.wait_for_size(2)[1], signal.SIGKILL)
    out, _ = running.process.communicate(timeout=PATIENCE)
    assert running.process.returncode == 1
    assert out.rstrip().splitlines()[-1] == "collective_core.launch: the ranks of the job have changed more than 0 times (reset-limit)"


@pytest.mark.slow
def test_a_job_begins_with_all_that_are_there_and_new_slots_of_a_host_cost_one_reset(job, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    list_hosts(hosts, "localhost:2")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    running = job("-np", "1", "--max-np", "4", "--host-discovery-script", str(script))
    running.wait_for_size(2)
    list_hosts(hosts, "localhost:4")
    running.wait_for_size(4)
    running.finish()
    assert list(dict.fromkeys(note["size"] for note in running.notes())) == [2, 4]
    running.must_have_lost_nothing()


@pytest.mark.slow
def test_a_worker_that_ends_with_an_exception_is_replaced(job):
    running = job("-np", "2", "--min-np", "1", failing=5)
    last = running.wait_for_size(2)
    (first,) = {note["pid"] for note in running.notes() if note["rank"] == 1 and note["step"] < 5}
    running.wait_for_size(2, without=frozenset({first}))
    out = running.finish()
    assert "[1] ValueError: the data of this step are broken" in out
    assert "host localhost: its worker ended with exit code 1; another worker is started in its place" in out
    assert last[0] == running.notes()[-1]["pid"] or last[0] in {note["pid"] for note in running.notes("end")}
    running.must_have_lost_nothing()


@pytest.mark.slow
def test_what_a_function_raised_is_shown_when_its_worker_is_replaced(tmp_path, capfd):
    def train(mark):
        import os

        import collective_core.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def go(state):
            while state.step < 40 or hvd.size() < 2:
                if hvd.rank() == 1 and not os.path.exists(mark):
                    open(mark, "x").close()
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                state.step += 1
                hvd.barrier()
                state.commit()
            return hvd.size()

        return go(hvd.elastic.ObjectState(step=0))

    assert Runner(np=2, min_np=1).run(train, str(tmp_path / "mark")) == [2, 2]
    said = capfd.readouterr().err
    assert "[1] RuntimeError: CUDA error: an illegal memory access was encountered\n" in said
    assert "host localhost: its worker raised RuntimeError: CUDA error" in said


@pytest.mark.slow
def test_ctrl_c_in_a_waiting_call_is_answered_within_a_second_and_not_taken_for_a_lost_rank(tmp_path, capfd):
    def train(mark):
        import os
        import signal
        import threading
        import time

        import collective_core.torch as hvd
        import torch

        from collective_core import _native

        hvd.init()

        def interrupt():
            with open(mark, "x") as file:
                file.write(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT)

        @hvd.elastic.run
        def go(state):
            while state.step < 10 or hvd.size() < 2:
                if state.step == 5 and not os.path.exists(mark):
                    if hvd.rank() == 1:
                        while True:  # until the other is gone
                            _native.check_peers(0)
                            time.sleep(0.02)
                    else:
                        threading.Timer(0.2, interrupt).start()
                try:
                    hvd.allreduce(torch.ones(5), name="waits")
                except KeyboardInterrupt:
                    with open(mark) as file:
                        took = time.monotonic() - float(file.read())
                    print(f"answered in time: {took < 1.0}", flush=True)
                    raise
                state.step += 1
                state.commit()

        go(hvd.elastic.ObjectState(step=0))

    Runner(np=2, min_np=2).run(train, str(tmp_path / "mark"))
    said = capfd.readouterr()
    assert "[0] answered in time: True\n" in said.out
    assert "collective_core.launch: host localhost: its worker raised KeyboardInterrupt; another worker is started in its place" in said.err


def test_a_mistake_that_every_worker_makes_ends_the_job_at_once():
    def train():
        import collective_core.torch as hvd

        hvd.init()
        raise ValueError(f"there is no such layer on rank {hvd.rank()}")

    with pytest.raises(RankFailedError, match="raised ValueError: there is no such layer") as caught:
        Runner(np=2, min_np=1).run(train)
    assert "raise ValueError(f" in caught.value.remote_traceback


@pytest.mark.slow
def test_a_program_that_fails_again_ends_the_job_and_is_named(job):
    running = job("-np", "2", "--min-np", "1", "-x", "TEST_FAILS=again", failing=5)
    out, _ = running.process.communicate(timeout=2 * PATIENCE)  # two starts of a worker, one after the other
    assert running.process.returncode == 1
    assert "ValueError: the data of this step are broken" in out
    assert out.rstrip().splitlines()[-1] == "collective_core.launch: rank 1 on localhost ended with exit code 1"
    assert processes_with(str(running.folder)) == []


@pytest.mark.slow
def test_under_another_launcher_it_trains_with_the_ranks_that_are_there(launch, tmp_path):
    launch("elastic_training.py", 2, 1, (str(tmp_path), "8")).must_succeed()
    notes = [json.loads(text) for path in tmp_path.glob("log.*") for text in path.read_text().splitlines()]
    assert sorted(note["step"] for note in notes if "step" in note) == sorted([*range(1, 9)] * 2)


def test_a_function_returns_what_its_last_ranks_returned():
    def train():
        import collective_core.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def go(state):
            while state.step < 3:
                state.step += 1
                state.commit()
            return hvd.rank(), state.step

        return go(hvd.elastic.ObjectState(step=0))

    assert Runner(np=2, min_np=1).run(train) == [(0, 3), (1, 3)]


def test_hosts_that_can_never_be_enough_are_an_error_at_once(ssh):
    with pytest.raises(CollectiveError, match=r"host no\.such\.host\.invalid cannot be used: .+"):
        Runner(np=2, min_np=1, hosts="no.such.host.invalid:2", ssh=ssh, start_timeout=20).run(int)


@pytest.mark.slow
def test_a_rank_that_dies_before_the_others_have_met_it_costs_no_job(tmp_path):
    def train(mark):
        import os
        import signal

        from collective_core.runtime import launchers

        if not os.path.exists(mark):  # the first of them, between its assignment and the meeting
            open(mark, "x").close()
            launchers.find_launcher = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        import collective_core.torch as hvd

        hvd.init()
        return hvd.elastic.run(lambda _: hvd.size())(hvd.elastic.ObjectState(step=0))

    assert set(Runner(np=3, min_np=2).run(train, str(tmp_path / "mark"))) <= {2, 3}


def test_too_few_slots_are_an_error_at_once():
    with pytest.raises(CollectiveError, match="3 ranks do not fit into the 1 slots"):
        Runner(min_np=3, hosts="localhost:1").run(int)


def test_a_job_without_a_rank_that_knows_its_state_is_over(job):
    running = job("-np", "1", "--min-np", "1")
    os.kill(running.wait_for_size(1)[0], signal.SIGKILL)
    out, _ = running.process.communicate(timeout=PATIENCE)
    assert running.process.returncode == 1
    assert "begin again from a checkpoint" in out


def test_what_a_state_holds():
    from collective_core.torch import elastic

    state = elastic.TorchState(best=None, step=1, commits=0, newest="a")
    assert (state.model, state.best) == (None, None)
    state.best = 7
    state.save()
    state.best, state.step = 8, 2
    state.restore()
    assert (state.best, state.step) == (7, 1)
    assert (state.commits, state.newest) == (0, "a"), "values of the program, whatever their names"
    plain = elastic.ObjectState(bcast_object=print, get_rank=print, step=3)
    assert plain._names == ["step"]


def test_a_program_may_keep_parts_in_its_own_way():
    from collective_core.torch import elastic

    class Counter:
        count = 0

    class Handler(elastic.state.StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

    before = elastic.state.get_handler_registry()
    elastic.state.set_handler_registry([*before, (Counter, Handler)])
    state = elastic.TorchState(counter=Counter())
    elastic.state.set_handler_registry(before)
    state.counter.count = 5
    state.save()
    state.counter.count = 6
    state.restore()
    assert state.counter.count == 5
    other = Counter()
    other.count = 9
    state.counter = other
    other.count = 10
    state.restore()
    assert state.counter is other
    assert other.count == 9, "another object is kept as it was when it came"


def test_no_sample_is_lost_or_done_twice_when_the_ranks_change(monkeypatch):
    """Three ranks do two batches each, then two ranks do the rest; the sampler's state is one number."""
    from collective_core.runtime import membership
    from collective_core.torch import elastic

    def samplers(size: int, state: dict[str, object] | None = None) -> list[elastic.ElasticSampler]:
        made = []
        for rank in range(size):
            monkeypatch.setattr(membership, "is_initialized", lambda: True)
            monkeypatch.setattr(membership, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(membership, "size", lambda: size)
            sampler = elastic.ElasticSampler(range(40), seed=3)
            sampler.load_state_dict(state or {"epoch": 1, "processed_num": 0})
            made.append(sampler)
        return made

    first, done = samplers(3), []
    for sampler in first:
        done += list(sampler)[:8]
        for batch in (0, 1):
            sampler.record_batch(batch, 4)
    state = first[0].state_dict()
    assert state == {"epoch": 1, "processed_num": 24} == first[2].state_dict()
    rest = samplers(2, state)
    assert [len(sampler) for sampler in rest] == [8, 8]
    assert sorted(done + [index for sampler in rest for index in sampler]) == list(range(40))
    rest[0].record_batch(0, 8)
    rest[0].reset()
    assert list(rest[0]) == [], "the epoch is done"
    old = samplers(2, {"epoch": 1, "processed_indices": set(range(30))})
    assert sorted(index for sampler in old for index in sampler) == list(range(30, 40)), "a state of Horovod before 0.22"
    old[0].record_batch(0, 3)
    again = samplers(1, old[0].state_dict())[0]
    assert len(set(again) | set(old[0].remaining_indices[:6])) == 10
    assert again.total_size == again.num_samples == 4


@pytest.mark.parametrize("commits", [False, True])
def test_a_function_that_fails_again_and_again_without_a_commit_is_given_up(monkeypatch, commits):
    """That all ranks have the same state again is no progress."""
    from collective_core.common import elastic_states as elastic

    from collective_core import job

    monkeypatch.setattr(elastic.launchers, "is_elastic", lambda: True)
    monkeypatch.setattr(job, "rejoin", lambda _: None)
    monkeypatch.setattr(job, "init", lambda: None)
    monkeypatch.setattr(elastic, "allgather_object", lambda value, *_: [value])
    monkeypatch.setattr(elastic, "broadcast_object", lambda value, *_: value)
    monkeypatch.setattr(elastic.State, "check_host_updates", lambda _: None)
    calls = []

    @elastic.run
    def train(state):
        calls.append(state)
        if len(calls) == 3 * elastic.MAX_FAILURES:
            return "done"
        if commits:
            state.commit()
        raise CollectiveError("rank 1 is gone", "peer_lost", [1])

    state = elastic.ObjectState(epoch=0)
    if commits:
        assert train(state) == "done"
    else:
        with pytest.raises(CollectiveError, match="rank 1 is gone"):
            train(state)
        assert len(calls) == elastic.MAX_FAILURES + 1


@pytest.mark.parametrize("failure", [CollectiveError("rank 1 is gone", "peer_lost", [1]), ValueError("of the program's own")])
def test_a_rank_that_is_lost_while_the_others_set_themselves_up_again_is_survived(monkeypatch, failure):
    from collective_core.common import elastic_states as elastic

    from collective_core import job

    monkeypatch.setattr(elastic.launchers, "is_elastic", lambda: True)
    monkeypatch.setattr(job, "init", lambda: None)
    monkeypatch.setattr(elastic, "allgather_object", lambda value, *_: [value])
    monkeypatch.setattr(elastic, "broadcast_object", lambda value, *_: value)
    lost, failures = [], [failure]
    monkeypatch.setattr(job, "rejoin", lambda ranks: lost.append(tuple(ranks)))

    def reset():  # a callback of the program's that runs a collective, say
        if failures:
            raise failures.pop()

    @elastic.run
    def train(state):
        if not lost:
            raise CollectiveError("rank 0 is gone", "peer_lost", [0])
        return state.epoch

    state = elastic.ObjectState(epoch=7)
    state.register_reset_callbacks([reset])
    if isinstance(failure, ValueError):
        with pytest.raises(ValueError, match="of the program's own"):
            train(state)
        assert lost == [(0,)]
    else:
        assert train(state) == 7
        assert lost == [(0,), (1,)]


# --- what decides --------------------------------------------------------------------------------------------------------------------


def membership_of(fewest: int, *hosts: str) -> ElasticMembership:
    membership = ElasticMembership(fewest, patience=10.0, suspicion=3.0)
    for worker, host in enumerate(hosts):
        membership.start(worker, host, now=0.0, slot=worker)
    return membership


def come(membership: ElasticMembership, *workers: int, now: float = 1.0, lost: tuple[int, ...] = ()) -> list[RankAssignment]:
    for worker in workers:
        membership.come(worker, now, lost)
    return membership.form(now)


def test_the_first_generation_waits_for_all_that_were_started_and_then_for_enough():
    membership = membership_of(2, "a", "b", "a")
    assert come(membership, 0, 1) == []
    assert [each.worker for each in come(membership, 2)] == [0, 2, 1], "hosts stand together"
    late = membership_of(2, "a", "b", "a")
    assert come(late, 0, now=9.0) == []
    assert come(late, now=11.0) == []
    assert [each.size for each in come(late, 1, now=11.0)] == [2, 2]


def test_the_first_generation_waits_for_as_many_as_it_needs_to_begin():
    membership = ElasticMembership(1, patience=10.0, begin=2)
    membership.start(0, "a", now=0.0)
    assert come(membership, 0) == [], "another host may be found"
    membership.start(1, "b", now=5.0)
    assert [each.size for each in come(membership, 1, now=6.0)] == [2, 2]
    alone = ElasticMembership(1, patience=10.0, begin=2)
    alone.start(0, "a", now=0.0)
    assert come(alone, 0) == []
    assert [each.size for each in alone.form(10.5)] == [1]


def test_newcomers_wait_for_those_that_were_started_with_them_but_not_for_long():
    membership = membership_of(1, "a")
    come(membership, 0)
    membership.start(1, "b", now=2.0, slot=0)
    membership.start(2, "b", now=2.0, slot=1)
    assert come(membership, 1, now=3.0) == []
    assert not membership.should_change(3.0)
    assert membership.should_change(33.5), "the other one hangs"
    come(membership, 2, now=4.0)
    assert membership.should_change(4.0)
    assert [each.size for each in come(membership, 0, now=5.0)] == [3, 3, 3]
    membership.start(3, "c", now=6.0)
    membership.send_away(2)
    assert membership.should_change(6.0), "who has to leave does not wait for who is to come"


def test_a_generation_ends_when_all_its_members_have_come_or_gone():
    membership = membership_of(1, "a", "a", "b")
    come(membership, 0, 1, 2)
    assert come(membership, 0, lost=(2,)) == []
    assert come(membership, 1, lost=(2,)) == []
    assert membership.overdue(now=1.0) == []
    assert membership.overdue(now=9.0) == [2], "its host may be gone: nobody has told us"
    membership.go(2)
    assert [(each.worker, each.rank, each.size) for each in membership.form(9.0)] == [(0, 0, 2), (1, 1, 2)]


def test_hosts_that_have_been_there_for_longest_come_first():
    membership = membership_of(1, "b", "a")
    come(membership, 0, 1)
    membership.go(0)
    membership.start(2, "a", now=2.0, slot=2)
    membership.start(3, "c", now=2.0)
    membership.come(3, 3.0)
    assert [each.worker for each in come(membership, 1, now=3.0)] == [1, 3]
    membership.come(2, 4.0)
    assert membership.should_change(4.0)
    assert [each.worker for each in come(membership, 1, 3, now=5.0)] == [1, 2, 3]


def test_a_workers_place_on_its_host_stays():
    membership = membership_of(1, "a", "a", "a")
    come(membership, 0, 1, 2)
    membership.go(0)
    membership.start(3, "a", now=2.0, slot=0)
    assert [each.worker for each in come(membership, 3, 1, 2)] == [3, 1, 2], "who had the second GPU has it still"


def test_a_worker_whose_channel_is_gone_has_no_rank_and_is_ended_if_it_does_not_end():
    membership = membership_of(1, "a", "b")
    come(membership, 0, 1)
    membership.come(1, 2.0)
    membership.lose(1, now=2.0)
    assert come(membership, 0, now=3.0) == []
    assert membership.overdue(now=8.0) == [1]
    membership.go(1)
    assert [each.worker for each in membership.form(8.0)] == [0]


def test_nobody_new_joins_a_job_of_which_some_have_finished():
    membership = membership_of(1, "a", "a")
    come(membership, 0, 1)
    membership.closed = True
    membership.go(0)
    membership.start(2, "a", now=2.0)
    assert come(membership, 2, now=3.0) == []
    assert [each.worker for each in come(membership, 1, now=4.0)] == [1]
    membership.go(1)
    assert come(membership, 2, now=5.0) == [], "it would begin the work again"


def test_who_waits_is_not_at_work():
    membership = membership_of(2, "a", "b")
    come(membership, 0, 1)
    assert membership.is_working
    membership.go(1)
    come(membership, 0)
    assert not membership.is_working


def test_a_worker_that_is_sent_away_is_dismissed_when_it_comes():
    membership = membership_of(1, "a", "a")
    come(membership, 0, 1)
    membership.send_away(1)
    assert membership.should_change(1.0)
    membership.come(1, 2.0)
    assert [each.worker for each in come(membership, 0)] == [0]
    assert membership.dismissed() == [1]
    assert membership.dismissed() == []


def test_too_few_are_waited_for():
    membership = membership_of(2, "a", "b")
    come(membership, 0, 1)
    membership.go(1)
    assert come(membership, 0) == []
    assert membership.waits_for() == 1
    membership.start(2, "b", now=5.0)
    assert [each.worker for each in come(membership, 2)] == [0, 2]


def test_a_host_that_fails_again_and_again_is_set_aside_for_longer_and_longer():
    cooldown = Cooldown()
    waits = []
    for number in range(9):
        cooldown.note("a", now=100.0 + number)
        waits.append(max(0.0, cooldown.until("a") - (100.0 + number)))
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0]
    horovods = cooldown_of((5, 15))
    for number in range(4):
        horovods.note("a", now=100.0)
        assert horovods.until("a") == (0.0, 105.0, 110.0, 115.0)[number]
    with pytest.raises(CollectiveError, match="two numbers of seconds that rise"):
        cooldown_of((5, 1))
    assert cooldown.until("b") == 0.0
    cooldown.note("a", now=109.0 + FORGIVEN)
    assert cooldown.until("a") == 0.0


def test_exceptions_of_a_host_are_tolerated_and_those_of_a_program_are_not():
    found = FailurePolicy()
    for host, generation in (("a", 1), ("a", 1), ("b", 1)):
        found.note(host, generation, now=float(generation))
    assert not found.is_blacklisted("a", 1.0), "several GPUs of one host fail with their driver"
    assert not found.are_too_many(["a", "b"], 1.0)
    found.note("a", 2, now=50.0)
    assert found.is_blacklisted("a", 50.0)
    assert not found.is_blacklisted("b", 50.0)
    assert (found.are_too_many(["a"], 50.0), found.are_too_many(["a", "b"], 50.0)) == (True, False)
    for generation, host in enumerate("cd", 3):
        assert not found.are_too_many("abcd", 50.0)
        found.note(host, generation, now=60.0)
    assert found.are_too_many("abcd", 60.0), "in four generations, on three hosts"
    assert not found.is_blacklisted("a", 51.0 + FORGIVEN)
    found.note("a", 5, now=61.0 + FORGIVEN)
    assert not found.are_too_many("a", 61.0 + FORGIVEN), "all before is forgiven"


@pytest.mark.parametrize(("restarts", "is_only_host", "survived"), [(5, True, 5), (5, False, 1), (0, True, 0), (None, True, 1)])
def test_the_users_number_of_failures_counts_for_the_only_host(restarts, is_only_host, survived):
    found = failure_policy(restarts, is_only_host)
    for generation in range(1, survived + 1):
        found.note("a", generation, now=50.0)
        assert not found.is_blacklisted("a", 50.0)
        assert not found.are_too_many(["a"], 50.0)
    found.note("a", survived + 1, now=50.0)
    assert found.are_too_many(["a"], 50.0)


def test_the_same_traceback_on_two_hosts_is_the_programs():
    raised = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    loss.backward()
RuntimeError: CUDA error: an illegal memory access, on rank {}
"""
    elsewhere = raised.replace("line 7", "line 9")
    place, other = (tracebacks.place_of(text.format(1).encode().splitlines()) for text in (raised, elsewhere))
    assert place == tracebacks.place_of(b"a line before\n".splitlines() + raised.format(2).encode().splitlines() + [b"one after"])
    assert place.endswith("loss.backward()\nRuntimeError")
    assert place != other
    consequence = raised.replace("RuntimeError", "collective_core.errors.PeerLostError").replace("CUDA error", "rank 1 (host a) died")
    assert tracebacks.place_of(consequence.encode().splitlines()) == tracebacks.place_of([b"no traceback"]) == ""
    found = FailurePolicy()
    found.note("a", 1, 1.0, place)
    found.note("a", 1, 1.0, place)
    found.note("b", 2, 2.0, other)
    found.note("c", 2, 2.0)
    found.note("d", 2, 2.0)
    assert not found.are_too_many("abcd", 2.0)
    found.note("c", 3, 3.0, place)
    assert found.are_too_many("abcd", 3.0)


@pytest.mark.parametrize(("np", "least", "most"), [(2, 3, None), (5, None, 4), (None, 0, None), (None, 4, 3)])
def test_numbers_that_make_no_sense(np, least, most):
    with pytest.raises(CollectiveError, match="1 <= min-np <= np <= max-np"):
        limits_of(np, least, most, 60.0)


def test_how_many_ranks_a_job_needs_to_begin_and_how_many_it_may_have():
    assert limits_of(2, 1, 4, 60.0)[:3] == (1, 4, 2)
    assert limits_of(3, 2, None, 60.0)[:3] == (2, 3, 3)
    assert limits_of(None, 2, 5, 60.0)[:3] == (2, 5, 2)
    assert limits_of(4, None, None, 60.0) is None
    # As Horovod has it: at least np where nothing else is said, and with a script no limit.
    assert limits_of(2, None, 4, 60.0)[:3] == (2, 4, 2)
    assert limits_of(2, None, None, 60.0, unlimited=True)[:3] == (2, UNLIMITED, 2)
    assert limits_of(None, None, None, 60.0, unlimited=True)[:3] == (1, UNLIMITED, 1)
    assert limits_of(2, 1, 4, 60.0, waiting=5.0, resets=3, restarts=1)[4:] == (5.0, 3, 1)


def test_horovods_timeouts_are_the_launchers(monkeypatch):
    assert (timeouts.start(), timeouts.elastic()) == (60.0, 600.0)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "30")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "50")
    assert (timeouts.start(), limits_of(2, 1, 4, 60.0).waiting) == (30.0, 50.0)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(CollectiveError, match="HOROVOD_START_TIMEOUT='soon' is not a positive number of seconds"):
        timeouts.start()


def test_a_script_that_lists_the_hosts(tmp_path):
    script = tmp_path / "discover"
    for text, expected in (("echo a:2; echo; echo b", [Host("a", 2), Host("b", 1)]), ("true", [])):
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        assert ask(str(script)) == expected
    script.write_text("#!/bin/sh\necho no such cloud >&2\nexit 3\n")
    with pytest.raises(CollectiveError, match="no such cloud"):
        ask(str(script))


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_so()


def test_strangers_learn_nothing_and_disturb_nobody():
    membership = membership_of(1, "here", "here")
    settled: list[int] = []
    server = RendezvousServer(membership, "the job's own secret", lambda: settled.append(1), only_here=True)
    address = ("127.0.0.1", server.port)
    try:
        strangers = [socket.create_connection(address) for _ in range(300)]
        for stranger in strangers[::3]:
            stranger.sendall(os.urandom(200))
        with pytest.raises((OSError, EOFError, CollectiveError)):
            control_channel.connect(address, 0, b"another secret, as long", 5.0)
        mine = control_channel.connect(address, 0, b"the job's own secret", 5.0)
        mine.send(kind="ready", port=1234, master_port=1235, lost=[])
        wait_until(lambda: settled)
        membership._opened -= 20.0  # nobody is waited for any more
        assert [each.worker for each in server.settle()[0]] == [0]
        answer = mine.receive()
        assert answer is not None
        assert (answer["kind"], answer["rank"], answer["size"]) == ("rank", 0, 1)
        # The same worker a second time, and one that nobody has started: proven, and still turned away.
        for number in (0, 7):
            again = control_channel.connect(address, number, b"the job's own secret", 5.0)
            assert again.receive() is None
        for stranger in strangers:
            stranger.close()
        # What a worker said before, word for word, when it is not there any more.
        middle = Eavesdropper(server.port)
        other = control_channel.connect(("127.0.0.1", middle.port), 1, b"the job's own secret", 5.0)
        other.send(kind="ready", port=1234, master_port=1235, lost=[])
        wait_until(lambda: 1 in membership._ready)
        other.close()
        wait_until(lambda: 1 not in membership._ready)
        (said,) = middle.said
        assert b'"ready"' in said
        assert len(play(server.port, said)) == handshake.CHALLENGE_BYTES + handshake.PROOF_BYTES, "not a word after its own proof"
        assert 1 not in membership._ready
    finally:
        server.close()
    assert mine.receive() is None
