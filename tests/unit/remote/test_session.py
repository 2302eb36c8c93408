"""A run's context: what is left where the run ends early."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import write_record
from invented_hosts import stated
from loading import run_ansible_module

from provision import inventory
from provision.base import resources
from provision.base.errors import Interrupted, ProvisionError
from provision.commands.remove import remove_installations
from provision.install import removal
from provision.remote.ansible import Event, Play
from provision.remote.progress import Progress
from provision.remote.session import Session, new_run_id
from provision.survey.collect import Survey


def test_runs_of_one_second_sort_by_when_they_began() -> None:
    began = [1_795_744_800.0 + part for part in (0.0, 0.001, 0.5, 0.999, 1.0)]
    ids = [new_run_id(now) for now in began]
    assert ids == sorted(ids)


def _marked(run_id: str) -> list[str]:
    """The processes of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PROVISION_RUN_ID={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_playbook_ends_when_its_events_cannot_be_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    tasks = [{"name": "Take long", "ansible.builtin.command": "sleep 600"}]
    book = tmp_path / "long.yml"
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    session = Session(inventory.load("localhost"), Progress())
    ran: list[bool] = []

    def handle(event: Event) -> None:
        if event.kind == "started":
            ran.append(bool(_marked(session.run_id)))
            raise SystemExit(1)  # what printing into a closed pipe comes to

    with pytest.raises(SystemExit) as ended:
        session.play(Play(book), "Test", on_event=handle)
    assert ran == [True]
    assert _marked(session.run_id) == [], ended  # which keeps the terminal that Ansible runs on open, as a run that is ending does


def test_what_is_interrupted_is_ended_on_hosts_also_where_nobody_reads_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends both in ``provision up hosts.ini 2>&1 | tee log``."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    session, swept = Session(inventory.load("localhost"), Progress()), []
    monkeypatch.setattr(session, "_sweep", lambda: swept.append(session.run_id))
    monkeypatch.setattr(session.progress, "line", lambda *_: sys.exit(1))
    with pytest.raises(SystemExit):
        session.abort()
    assert swept == [session.run_id]


def test_ansible_that_cannot_begin_is_told_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    book = tmp_path / "broken.yml"
    book.write_text("- name: Test\n  hosts: all\n  role: []\n")
    session = Session(inventory.load("localhost"), Progress())
    with pytest.raises(ProvisionError, match=r"Ansible ended before its first task: .*'role' is not a valid attribute for a Play") as told:
        session.play(Play(book), "Test")
    assert str(session.folder) in str(told.value)


@pytest.mark.parametrize("setting", ["C", "en_XX.UTF-8", "de_DE.ISO-8859-1"])
def test_ansible_runs_whatever_the_locale_is(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LC_ALL", setting)
    book = tmp_path / "book.yml"
    tasks = [{"name": "Say", "ansible.builtin.debug": {"msg": "ä"}}]
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    assert Session(inventory.load("localhost"), Progress()).play(Play(book), "Test").rc == 0


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "file"))
    with pytest.raises(ProvisionError, match="PROVISION_HOME=DIR"):
        Session(inventory.load("localhost"), Progress())


def test_interrupted_removal_is_recorded_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    hosts = inventory.load("a,b")

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("provision.survey.collect.survey_hosts", lambda *_, **__: Survey())
    monkeypatch.setattr("provision.install.removal.remove", ended)
    with pytest.raises(Interrupted, match="interrupted"):
        remove_installations(hosts, Progress(), {}, lambda _: True)
    (folder,) = (tmp_path / "runs").glob("2*")
    assert Session(hosts, Progress()).dead_runs() == [folder.name]


def test_a_run_that_is_just_starting_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    hosts = inventory.load("a,b")
    with Session(hosts, Progress()) as ended:
        pass
    (tmp_path / "runs" / f"{ended.run_id}-next").mkdir()  # and its record comes at once
    assert Session(hosts, Progress()).dead_runs() == [ended.run_id]


def _commands(run_id: str) -> dict[int, bytes]:
    """The processes of a run with their command lines; those that end meanwhile have none."""
    found = {}
    for pid in map(int, _marked(run_id)):
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _long_play(folder: Path) -> Path:
    """A playbook whose module runs until it is ended, with its folder in ``folder/tmp``."""
    tasks = [{"name": "Take long", "ansible.builtin.command": "sleep 600"}]
    (folder / "tmp").mkdir()
    book = folder / "long.yml"
    play = {"name": "Test", "hosts": "all", "gather_facts": False, "environment": {"TMPDIR": str(folder / "tmp")}, "tasks": tasks}
    book.write_text(json.dumps([play]))
    return book


def test_a_killed_ansible_is_said_in_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    book = _long_play(tmp_path)
    killed: list[int] = []

    def kill(run_id: str) -> None:
        until(lambda: any((tmp_path / "tmp").iterdir()) and b"sleep" in b"".join(_commands(run_id).values()))
        killed.extend(pid for pid in _commands(run_id) if _parent(pid) == os.getpid())
        os.kill(killed[0], signal.SIGKILL)

    with Session(inventory.load("localhost"), Progress(), locks_hosts=True) as session:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(kill, session.run_id)
            with pytest.raises(
                ProvisionError, match=r"^Test: ansible-playbook was ended by SIGKILL.*\n.*run the same command again"
            ) as said:
                session.play(Play(book), "Test")
            done.result()
        assert len(str(said.value).splitlines()) == 2
        assert _marked(session.run_id) == []
        assert list((tmp_path / "tmp").iterdir()) == [], "the module's folder"
    assert session.run_id in Session(inventory.load("localhost"), Progress()).dead_runs(), "where it was not swept it is taken over"


def test_the_lock_of_an_ended_run_is_taken_once_its_tasks_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    with Session(inventory.load("localhost"), Progress(), locks_hosts=True) as ended:
        pass
    session = Session(inventory.load("localhost"), Progress())
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"run": ended.run_id, "owner": "us", "since": "an hour"}))
    # What it has left at work still writes while it is being ended.
    script = "trap 'rm " + str(tmp_path / "working") + "; exit' TERM; while :; do sleep 0.1; done"
    (tmp_path / "working").touch()
    left = subprocess.Popen(["sh", "-c", script], env={**os.environ, "PROVISION_RUN_ID": ended.run_id})
    told = {name.removeprefix("provision_"): value for name, value in session.of_locks.items()}
    arguments = {"state": "held", "run": session.run_id, "path": str(lock), "dead": told["dead_runs"], "guard": told["guard"]}
    others = run_ansible_module("controller_lock", {**arguments, "dead": []})
    assert "has been working on this host" in others["msg"], "the run of another machine is left alone"
    assert left.poll() is None
    assert not run_ansible_module("controller_lock", arguments).get("failed")
    assert json.loads(lock.read_text())["run"] == session.run_id
    assert not (tmp_path / "working").exists()
    left.wait(60)
    assert session.run_id not in Session(inventory.load("localhost"), Progress()).dead_runs(), "it goes on"


@pytest.mark.parametrize("is_down", [False, True])
def test_a_released_host_has_neither_lock_nor_process_of_the_run(is_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    session = Session(inventory.load("localhost"), Progress())
    session.interpreters = {"localhost": "/bin/false" if is_down else sys.executable}
    lock, locks = tmp_path / ".provision.lock", [session.run_id, "another"]
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, "PROVISION_RUN_ID": session.run_id})
    try:
        for run in locks:
            lock.write_text(json.dumps({"run": run, "owner": "us", "since": "an hour"}))
            assert session.release(["localhost"]) == ["localhost"] * is_down
            assert lock.exists() == (is_down or run == "another")
        assert (left.poll() is None) == is_down
        assert session.locks_left
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize("holder", ["", "ended", "another"])
def test_a_removal_holds_the_lock_and_leaves_a_host_of_another_run_alone(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with Session(inventory.load("localhost"), Progress(), locks_hosts=True) as ended:
        pass
    session, lock = Session(inventory.load("localhost"), Progress()), tmp_path / ".provision.lock"
    if holder:
        run = ended.run_id if holder == "ended" else "20260101-120000-abcdef0"
        lock.write_text(json.dumps({"run": run, "owner": "ann on laptop", "since": "noon"}))
    claimed = tmp_path / "claimed"
    claimed.touch()
    write_record(tmp_path, {"claimed": [str(claimed)]}).rename(tmp_path / ".provision-record.json")
    facts = stated({"user": {"name": "ann", "sudo": "unwanted", "can_become": False, "home": str(tmp_path)}})
    (found,) = removal.remove(session, Survey(hosts={"localhost": facts}), dry_run=False)
    assert (found.state, lock.exists(), claimed.exists()) == (("failed", True, True) if holder == "another" else ("removed", False, False))
    if found.problem:
        assert found.problem.what.startswith(
            "locked: ann on laptop has been working on this host since noon (run 20260101-120000-abcdef0)."
        )


def test_every_play_that_runs_modules_names_the_python_of_the_survey() -> None:
    folder = resources.folder("playbooks")
    for book in [*folder.glob("*.yml"), *folder.glob("*.yml.j2")]:
        for play in re.split(r"(?m)^- name: ", book.read_text())[1:]:
            is_play = re.search(r"(?m)^  hosts: ", play)
            of_host = set(re.findall(r"(?m)^      (?!name|register|when|vars|loop|changed_when|become)([\w.]+):", play))
            if is_play and (of_host - {"ansible.builtin.raw", "ansible.builtin.meta"} or "  roles:" in play):
                assert "ansible_python_interpreter:" in play or "*driver_vars" in play, f"{book.name}: {play.splitlines()[0]}"
