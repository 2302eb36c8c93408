"""When a job is examined, what is said of it, and what follows. The examination is a function here, and time is told by hand;
`tests/integration/test_stalled_runs.py` has real jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loading import load_script

from provision.base.errors import ProvisionError, UsageError
from provision.cli.run_options import run_options
from provision.launch import stall_watch
from provision.launch.stall_watch import Action, Finding, StallOptions, StallWatch
from provision.remote.session import Session
from provision.report import runs

STALLED = Finding(True, "rank 1 waits in openat", ("ls -l",), {"job": "x"})
WORKS = Finding(False, "rank 1 is at work", (), {})
RUN = "20261130-001122-abc1234"


class Clock:
    """Of the watch alone: hosts that are quiet say so every five seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(stall_watch, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))

    def quiet(self, watch: StallWatch, until: int, since: int = 0) -> None:
        for seconds in range(since + 5, until + 1, 5):
            self.now += 5
            watch.quiet(seconds)
            self.attend(watch)

    def busy(self, watch: StallWatch, seconds: int) -> None:
        """Hosts say that the job goes on, and then nothing."""
        watch.quiet(0)
        for _ in range(0, seconds, 5):
            self.now += 5
            self.attend(watch)

    def attend(self, watch: StallWatch) -> None:
        for _ in range(2):  # an examination begins, and its end is seen
            watch.attend()
            if watch._examination is not None:
                watch._examination.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Examined:
    """What each examination finds, the last one again and again, and when they were."""

    def __init__(self, clock: Clock, *found: Finding | ProvisionError) -> None:
        self.clock, self.found, self.at = clock, list(found), list[float]()

    def __call__(self, _session: Session, _stopped: threading.Event) -> Finding:
        self.at.append(self.clock.now)
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, ProvisionError):
            raise found
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., tuple[StallWatch, list[str]]]]:
    def made(examine: Examined, action: Action = "report", after: float = 60.0) -> tuple[StallWatch, list[str]]:
        lines: list[str] = []

        def write(name: str, data: object) -> None:
            (folder / name).write_text(json.dumps(data))

        folder = tmp_path / "runs" / RUN
        folder.mkdir(parents=True)
        progress = SimpleNamespace(line=lambda text, _style="": lines.append(text))
        session = cast(Session, SimpleNamespace(folder=folder, run_id=RUN, progress=progress, write=write))
        return StallWatch(session, StallOptions(after, action, examine, restarts=1)), lines

    return made


def test_a_stall_is_said_once_recorded_and_its_end_too(watched: Any, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    examine = Examined(clock, STALLED)
    watch, lines = watched(examine)
    began = clock.now
    clock.quiet(watch, 55)
    assert not examine.at
    clock.quiet(watch, 600, since=55)
    assert examine.at == [began + 60], "once, however long it lasts"
    assert re.fullmatch(r"provision: the job has stalled since \d\d:\d\d:\d\d: rank 1 waits in openat", lines[0])
    assert lines[1] == "  → ls -l"
    record = tmp_path / "runs" / RUN / stall_watch.RECORD
    assert record.stat().st_mode & 0o777 == 0o600
    (stall,) = runs.stalls(RUN).stalls
    assert (stall.since.timestamp(), stall.seconds) == (began, None)
    clock.busy(watch, 20)
    assert lines[-1].startswith("provision: the job goes on, after 10 min")
    assert json.loads(record.read_text())["stalls"][0]["seconds"] >= 600
    assert watch.last_words == ""


def test_a_job_that_went_on_may_be_quiet_for_as_long_again(watched: Any, clock: Clock) -> None:
    """A checkpoint of ten minutes, which waits for a disk like a stall."""
    examine = Examined(clock, STALLED)
    watch, lines = watched(examine)
    clock.quiet(watch, 600)
    clock.busy(watch, 60)
    clock.quiet(watch, 600)
    clock.busy(watch, 60)
    assert len(examine.at) == 1
    clock.quiet(watch, 1000)
    assert len(examine.at) == 2
    assert sum("has stalled since" in line for line in lines) == 2


def test_a_job_at_work_raises_no_alarm_and_is_examined_less_and_less_often(watched: Any, clock: Clock) -> None:
    examine = Examined(clock, WORKS)
    watch, lines = watched(examine)
    began = clock.now
    clock.quiet(watch, 2400)
    assert [at - began for at in examine.at] == [60, 120, 240, 480, 960, 1560, 2160]
    assert lines == []
    examine.found = [STALLED]
    clock.busy(watch, 20)
    clock.quiet(watch, 305)
    assert len(lines) == 3, "it has not been taken for its rhythm"


def test_what_a_rank_prints_is_a_sign_of_progress_but_not_its_warnings(watched: Any, clock: Clock) -> None:
    examine = Examined(clock, STALLED)
    watch, lines = watched(examine)
    clock.quiet(watch, 55)
    watch.line("[1,0]<stdout>:step 7")
    clock.quiet(watch, 95, since=55)
    watch.line("[1,1]<stderr>:x[1,0]<stdout>:[2026-01-01 10:00] [INFO] step 8")
    clock.quiet(watch, 120, since=95)
    assert examine.at == []
    for line in ("[1,0]<stderr>:allreduce waits for rank 1", "[1,0]<stdout>:", "[1,0]<stdout>:[1,1]<stderr>:x", "a message"):
        watch.line(line)
    clock.quiet(watch, 160, since=120)
    assert len(examine.at) == 1
    assert "has stalled since" in lines[0]


def test_what_went_on_while_it_was_examined_has_not_stalled(watched: Any, clock: Clock) -> None:
    watch, lines = watched(Examined(clock, STALLED))
    real, watch.options = watch.options.examine, StallOptions(60, "report", lambda *_: (watch.line("[1,0]<stdout>:step"), STALLED)[1])
    clock.quiet(watch, 65)
    assert (lines, real is not None) == ([], True)


def test_an_examination_that_fails_is_said_once_and_ends_nothing(watched: Any, clock: Clock) -> None:
    watch, lines = watched(Examined(clock, ProvisionError("no route", where="b")), "kill")
    clock.quiet(watch, 1000)
    assert lines == ["provision: the job is quiet for 1 min, and cannot be examined: b: no route"]
    assert (watch.action, watch.last_words) == (None, "")


@pytest.mark.parametrize("action", ["kill", "restart"])
def test_what_follows_a_stall(watched: Any, clock: Clock, action: Action) -> None:
    watch, _lines = watched(Examined(clock, STALLED), action)
    for expected in ("kill",) if action == "kill" else ("restart", "kill"):
        clock.busy(watch, 20)
        assert not watch.has_ended_it(137)
        clock.quiet(watch, 100)
        assert watch.action == expected
        assert watch.last_words.startswith(f"the job has stalled, and was ended (--on-stall {action})")
        assert watch.has_ended_it(1) == (expected == "kill")
        assert (watch.has_ended_it(137), watch.has_ended_it(0)) == (True, False), "crashes may have used up the launcher's restarts"


def test_a_finding_counts_only_where_the_job_is_still_quiet_after_it(watched: Any, clock: Clock) -> None:
    watch, lines = watched(Examined(clock, STALLED), "kill")
    clock.quiet(watch, 60)
    assert (watch.action, lines) == (None, []), "nothing has been heard since the examination"
    clock.now += 5
    watch.quiet(0)
    clock.attend(watch)
    clock.quiet(watch, 55)
    assert (watch.action, lines) == (None, [])
    clock.quiet(watch, 65, since=55)
    assert watch.action == "kill"


def test_silence_of_the_hosts_is_no_sign_of_progress(watched: Any, clock: Clock) -> None:
    watch, lines = watched(Examined(clock, STALLED))
    clock.quiet(watch, 100)
    clock.now += 300
    clock.attend(watch)
    assert ["has stalled" in line for line in lines[:1]] == [True]
    assert not any("goes on" in line for line in lines)


def test_ranks_that_do_not_die_of_a_restart_end_the_job(watched: Any, clock: Clock) -> None:
    watch, _lines = watched(Examined(clock, STALLED), "restart")
    clock.quiet(watch, 65)
    assert watch.action == "restart"
    clock.quiet(watch, 125, since=65)
    assert watch.action == "restart"
    clock.quiet(watch, 130, since=125)
    assert (watch.action, watch.has_ended_it(1)) == ("kill", True)


def test_a_rhythm_that_examinations_found_healthy_is_not_examined_again(watched: Any, clock: Clock) -> None:
    examine = Examined(clock, WORKS)
    watch, _lines = watched(examine)
    for _ in range(5):
        clock.quiet(watch, 100)
        clock.busy(watch, 20)
    assert len(examine.at) == 1
    clock.quiet(watch, 600)
    clock.busy(watch, 20)
    before = len(examine.at)
    clock.quiet(watch, 300)
    assert len(examine.at) == before + 1, "a stall is found within five minutes all the same"


def test_a_record_that_cannot_be_written_is_said_once_and_ends_nothing(watched: Any, clock: Clock, tmp_path: Path) -> None:
    watch, lines = watched(Examined(clock, STALLED))
    (tmp_path / "runs" / RUN).rmdir()
    clock.quiet(watch, 65)
    clock.busy(watch, 20)
    said = [line for line in lines if "cannot be written" in line]
    assert said == [f"provision: {tmp_path}/runs/{RUN}/stalls.json cannot be written: No such file or directory"]
    assert lines[-1].startswith("provision: the job goes on")


def test_an_examination_is_cut_off_where_the_job_ends(watched: Any, clock: Clock) -> None:
    watch, lines = watched(Examined(clock, STALLED))
    watch.options = StallOptions(60, "report", lambda _session, stopped: Finding(not stopped.wait(30), "", (), {}))
    with watch:
        watch._quiet, watch._heard = 100.0, clock.now
        watch.attend()
        assert watch._examination is not None
    assert lines == []


@pytest.mark.parametrize("value", ["-1", "soon", "0.5", "1e3", "nan", "99999999999", ""])
def test_an_invalid_time_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=f"invalid --stall-after {value}: expected seconds"):
        run_options(["train"], stall_after=value)


def test_options() -> None:
    assert run_options(["train"], stall_after="off").stall is None
    assert run_options(["train"], stall_after="0").stall is None
    for values, (after, action, sample) in (({}, (60, "report", 5)), ({"stall_after": "2.5", "on_stall": "kill"}, (2.5, "kill", 0.625))):
        found = run_options(["train"], **values).stall
        assert found is not None
        assert (found.after, found.action, found.sample) == (after, action, sample)
    for values in ({}, {"max_restarts": 0}, {"max_restarts": 2, "min_np": 1}):
        with pytest.raises(UsageError, match="--on-stall restart: all ranks are started again by --max-restarts N alone"):
            run_options(["train"], on_stall="restart", **values)
    assert run_options(["train"], on_stall="restart", max_restarts=1).launcher == "own"
    with pytest.raises(UsageError, match="--on-stall kill and --stall-after off exclude each other"):
        run_options(["train"], on_stall="kill", stall_after="off")
    with pytest.raises(UsageError, match="--on-stall"):
        run_options(["train"], on_stall="panic")


def test_a_run_of_another_machine_or_with_an_odd_name_is_not_looked_for() -> None:
    for name in (RUN, "../../etc", "", "x\0"):
        assert runs.stalls(name).stalls == []


#: What a rank does, and whether that shows that it goes on.
RANKS = {
    "spins": ("while True: pass", False),
    "sleeps": ("import time; time.sleep(99)", False),
    "looks again and again": ("import time\nwhile True: time.sleep(0.01)", False),
    "steps": ("import time\nwhile True:\n sum(range(99999))\n time.sleep(0.001)", True),
    "a thread steps": (
        "import threading, time\ndef step():\n while True: sum(range(99999)), time.sleep(0.001)\nthreading.Thread(target=step).start()",
        True,
    ),
    "reads": ("import time\nf = open('/dev/zero', 'rb')\nwhile True:\n f.read(99999)\n time.sleep(0.01)", True),
}


def test_signs_of_progress_of_processes() -> None:
    guard = load_script("guard.py")
    run_id = f"unit-stall-{os.getpid()}"
    ranks = {
        name: subprocess.Popen([sys.executable, "-S", "-c", program], env={"PROVISION_RUN_ID": f"{run_id}-{at}", "PROVISION_RANK": "0"})
        for at, (name, (program, _)) in enumerate(RANKS.items())
    }
    try:
        time.sleep(0.15)  # they have begun
        rhythms = {name: guard.Rhythm() for name in RANKS}
        assert [each.look(guard.of_run(f"{run_id}-{at}")) for at, each in enumerate(rhythms.values())] == [0.0] * len(RANKS)
        for at, (name, rhythm) in enumerate(rhythms.items()):
            for _ in range(50 if RANKS[name][1] else 1):  # on a busy machine a step comes late
                time.sleep(0.2)
                if goes_on := rhythm.look(guard.of_run(f"{run_id}-{at}")) == 0.0:
                    break
            assert goes_on == RANKS[name][1], name
        assert guard.Rhythm().look(guard.of_run("no such run")) is None
    finally:
        for rank in ranks.values():
            rank.kill()
            rank.wait()
