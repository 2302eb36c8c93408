"""Detached jobs, claims of hosts, and files that are fetched. Real processes on this machine; ssh itself is tested with real hosts."""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load_script

from provision.base import resources
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.inventory import Host
from provision.launch import detached
from provision.launch.detached import DetachedJob
from provision.launch.jobs import Job, JobResult
from provision.remote.session import new_run_id

HERE = Host(name="here", address="localhost", connection="local")


def session() -> Any:
    """One on this machine, of a run of its own."""
    inventory = SimpleNamespace(host=lambda _name: HERE, hosts=[HERE], argument="localhost")
    progress = SimpleNamespace(stage=lambda _title: None, line=lambda *_: None, waiting=lambda *_: None)
    run_id = new_run_id(time.time())
    return SimpleNamespace(run_id=run_id, passwords={}, inventory=inventory, progress=progress, step="", take=lambda *_, **__: None)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own, and at the end the death of what a failed test has left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    for folder in (tmp_path / "provision-run/.jobs").glob("2*"):
        for pid in marked(f"{folder.name}-keeper") + marked(folder.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(name: str) -> list[int]:
    """The processes of a job, and its keeper."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PROVISION_RUN_ID={name}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def start(script: str, ours: Any = None, **more: Any) -> DetachedJob:
    about = {"program": "train.py", "user": "ann", "workdir": "work", "placed": [["localhost", 1]], "names": {"localhost": "here"}}
    return detached.start(ours or session(), Job(["sh", "-c", script], host="here", python=sys.executable, **more), about)


def listed() -> dict[str, DetachedJob]:
    found, failed = detached.look(session(), ["here"])
    assert failed == {}
    return {each.job: each for each in found if each.state != "attached"}


def until(condition: Any, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def output(found: DetachedJob, tmp_path: Path, *, wait: bool = True) -> tuple[JobResult | None, list[str]]:
    lines: list[str] = []
    result = detached.attach(session(), found.as_job, "", tmp_path / "log", lines.append, name=found.job, wait=wait)
    assert (tmp_path / "log").read_bytes() == "".join(f"{line}\n" for line in lines).encode()
    return result, lines


def test_a_job_goes_on_alone_and_is_followed_to_its_end(home: Path) -> None:
    last = "printf 'a\\rb\\n'; echo ===PROVISION-ANSWER=== = 1; exit 3"
    script = f"echo begun; until [ -e {home}/go ]; do sleep 0.1; done; {last}"
    found = start(script)
    assert (found.state, found.host, found.hosts) == ("running", "here", ["here"])
    (keeper,) = marked(f"{found.job}-keeper")
    assert os.getsid(keeper) != os.getsid(0), "no terminal of ours ends it"
    until(lambda: output(found, home, wait=False) == (None, ["begun"]))
    threading.Timer(0.5, (home / "go").touch).start()
    result, lines = output(found, home)
    assert result is not None
    assert (result.code, lines) == (3, ["begun", "a\rb", "===PROVISION-ANSWER=== = 1"])
    until(lambda: marked(found.job) == [])
    ended = listed()[found.job]
    assert (ended.shown, ended.outcome and ended.outcome.code) == ("failed, exit code 3", 3)
    assert (home / "provision-run/.jobs" / found.job).stat().st_mode & 0o777 == 0o700


def test_a_start_whose_connection_is_lost_starts_one_job(home: Path) -> None:
    ours = session()
    first, second = (start(f"echo begun >> {home}/begun; exec sleep 600", ours) for _ in range(2))
    assert first.job == second.job
    assert (home / "begun").read_text() == "begun\n"
    assert detached.cancel(session(), "here", first.job, ["here"]) == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_job_ends_when_its_keeper_is_killed(home: Path, number: signal.Signals) -> None:
    found = start("sleep 600 & wait")
    (keeper,) = marked(f"{found.job}-keeper")
    os.kill(keeper, number)
    until(lambda: marked(found.job) == [])
    assert listed()[found.job].state == "killed"
    with pytest.raises(ProvisionError, match="keeper was killed"):
        output(found, home)


def test_cancel_ends_all_that_ignores_signals(home: Path) -> None:
    found = start("trap '' TERM INT HUP; echo begun; while true; do sleep 600; done")
    until(lambda: output(found, home, wait=False)[1] == ["begun"])
    assert detached.cancel(session(), "here", found.job, ["here"]) == {}
    assert marked(found.job) == []
    assert listed()[found.job].shown == "cancelled"
    with pytest.raises(Interrupted, match="was cancelled"):
        output(found, home)


def test_a_full_log_costs_output_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = resources.script
    monkeypatch.setattr(
        resources, "script", lambda name: script(name).replace("MAX_LOG, LOG_IS_FULL = 1 << 28", "MAX_LOG, LOG_IS_FULL = 20")
    )
    result, lines = output(start("for i in 1 2 3 4 5 6; do echo line $i; done; exit 4"), home)
    assert result is not None
    assert (result.code, lines) == (4, ["line 1", "line 2", "provision: the log is full: what the job prints from here on is not kept"])


def test_a_reader_that_is_cut_off_goes_on_where_it_was(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ssh's place: every connection lasts for three lines."""
    stream = detached.ssh.stream

    def short(session: Any, name: str, command: str, feed: Any, on_line: Any, stopping: Any) -> int:
        heard: list[str] = []
        return stream(session, name, command, feed, lambda line: (heard.append(line), len(heard) <= 3 and on_line(line)), stopping)

    monkeypatch.setattr(detached.ssh, "stream", short)
    monkeypatch.setattr(detached, "_PAUSE_S", 0)
    assert output(start("seq 10"), home)[1] == [str(number) for number in range(1, 11)]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of claims and locks, of this test alone."""
    (tmp_path / "shm").mkdir()
    script = resources.script
    monkeypatch.setattr(resources, "script", lambda name: script(name).replace('SHARED = "/dev/shm"', f'SHARED = "{tmp_path}/shm"'))
    return tmp_path / "shm"


def test_the_second_job_on_a_host_is_refused_or_waits(home: Path, shared: Path) -> None:
    first = start(f"until [ -e {home}/go ]; do sleep 0.1; done", shared=False)
    with pytest.raises(ProvisionError, match=f"^here is busy: in use by job {first.job} of {getpass.getuser()}\n"):
        start("true", shared=False)
    waits = start(f"echo ran > {home}/ran", shared=False, wait=True)
    assert waits.shown.startswith("waiting: here is busy: in use by job ")
    assert start("sleep 0.1", shared=True).state == "running"
    assert not (home / "ran").exists()
    (home / "go").touch()
    until((home / "ran").exists)
    until(lambda: listed()[waits.job].shown == "done")
    assert listed()[first.job].shown == "done"
    assert list(shared.iterdir()) == []


def test_a_claim_counts_while_its_lock_is_held(shared: Path) -> None:
    script = load_script("claims.py")
    assert str(shared) == script.SHARED
    held, other = (str(shared / f"{script.PREFIX}{name}{script.CLAIM}") for name in ("a", "b"))
    lock = script.make_locked(held)
    (shared / f"{script.PREFIX}c{script.CLAIM}").symlink_to(held)
    os.mkfifo(other)
    assert script.claims() == [("a", getpass.getuser())]
    assert script.claims(held) == []
    os.close(lock)
    assert script.claims() == []


def test_what_a_host_says_of_its_jobs_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"job": "20261130-135905-bf9b327", "state": "running", "program": "a", "user": "b", "since": 1.0, "host": "elsewhere"}
    bad = [{**good, "job": "../../etc"}, {**good, "state": "odd"}, {**good, "placed": [["a", 10**9]]}, {}, [], "x"]
    body = "\n".join(map(json.dumps, (*bad, good)))
    answer = detached.ssh.Answer(0, f"{detached.ssh.ANSWER}\n{body}\n{{", "")
    monkeypatch.setattr(detached.ssh, "look", lambda *_: {"here": answer})
    ((job, found),) = listed().items()
    assert (job, found.host) == (good["job"], "here"), "by which host it was found, it does not say itself"


def archive(*members: tuple[str, str]) -> bytes:
    """A tar archive of (name, target of a link; empty for a file)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            tar.addfile(member)
    return made.getvalue()


def test_files_are_fetched_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "run's/deep").mkdir(parents=True)
    (home / "run's/deep/a").write_text("content")
    (home / "run's/latest").symlink_to("/etc/passwd")
    os.mkfifo(home / "run's/pipe")
    (home / "to").mkdir()
    monkeypatch.chdir(home / "to")
    assert detached.fetch(session(), "here", "./run's/") == "run's"
    assert [str(path.relative_to(home / "to")) for path in sorted((home / "to").rglob("*"))] == ["run's", "run's/deep", "run's/deep/a"]
    assert (home / "to/run's/deep/a").read_text() == "content"
    for path in ("run's", "", "..", "/"):
        with pytest.raises(UsageError, match="expected the path of a file or folder whose name is not here yet"):
            detached.fetch(session(), "here", path)
    with pytest.raises(ProvisionError, match="run's/missing cannot be read completely"):
        detached.fetch(session(), "here", "run's/missing")
    assert len(list((home / "to").iterdir())) == 1


@pytest.mark.parametrize(
    "members", [[("data", ""), ("../evil", "")], [("data", "/etc")], [("data/../../evil", "")], [("/tmp/evil", "")], [("other", "")], []]
)
def test_what_a_host_sends_stays_in_its_folder(home: Path, monkeypatch: pytest.MonkeyPatch, members: Any) -> None:
    (home / "data").touch()
    (home / "bin").mkdir()
    (home / "bin/archive").write_bytes(archive(*members) if members else b"nonsense" * 999)
    (home / "bin/tar").write_text(f"#!/bin/sh\ncat {home}/bin/archive\n")
    (home / "bin/tar").chmod(0o700)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    (home / "to").mkdir()
    monkeypatch.chdir(home / "to")
    with pytest.raises(ProvisionError):
        detached.fetch(session(), "here", "data")
    assert [path.name for path in (home / "to").iterdir()] in ([], ["data"])
    assert not [path for path in home.rglob("*evil*") if path.parent != home / "to/data"]


def test_a_process_that_got_away_does_not_keep_the_job(home: Path) -> None:
    """It carries no mark, and holds the output of job.py open."""
    found = start(f"env -i setsid sleep 300 & echo $! > {home}/pid; echo last; exit 3")
    try:
        result, lines = output(found, home)
        assert result is not None
        assert (result.code, lines) == (3, ["last"])
    finally:
        os.kill(int((home / "pid").read_text()), signal.SIGKILL)


def test_an_interrupted_start_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, run = session(), detached.ssh.run

    def interrupted(*each: Any, **named: Any) -> Any:
        run(*each, **named)
        raise Interrupted("interrupted")

    monkeypatch.setattr(detached.ssh, "run", interrupted)
    with pytest.raises(Interrupted):
        start("sleep 600", ours)
    assert marked(ours.run_id) == marked(f"{ours.run_id}-keeper") == []
    assert listed()[ours.run_id].shown == "cancelled"


def test_a_job_that_fails_at_once_is_an_error() -> None:
    with pytest.raises(ProvisionError, match=r"the job cannot be left to its first host: .*No such file"):
        detached.start(session(), Job(["true"], host="here", python="/no/such/python"), {"user": "ann"})
