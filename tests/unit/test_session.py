"""A run's context: what is left where the run ends early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provision import inventory
from provision.base.errors import Interrupted, ProvisionError
from provision.commands import lifecycle
from provision.remote.ansible import Event
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
        session.play(book, "Test", on_event=handle)
    assert ran == [True]
    assert _marked(session.run_id) == [], ended  # which keeps the terminal that Ansible runs on open, as a run that is ending does


def test_ansible_that_cannot_begin_is_told_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    book = tmp_path / "broken.yml"
    book.write_text("- name: Test\n  hosts: all\n  role: []\n")
    session = Session(inventory.load("localhost"), Progress())
    with pytest.raises(ProvisionError, match=r"Ansible ended before its first task: .*'role' is not a valid attribute for a Play") as told:
        session.play(book, "Test")
    assert str(session.folder) in str(told.value)


@pytest.mark.parametrize("setting", ["C", "en_XX.UTF-8", "de_DE.ISO-8859-1"])
def test_ansible_runs_whatever_the_locale_is(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LC_ALL", setting)
    book = tmp_path / "book.yml"
    tasks = [{"name": "Say", "ansible.builtin.debug": {"msg": "ä"}}]
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    assert Session(inventory.load("localhost"), Progress()).play(book, "Test").rc == 0


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
        lifecycle.remove(hosts, Progress(), {}, lambda _: True)
    (folder,) = (tmp_path / "runs").glob("2*")
    assert Session(hosts, Progress()).dead_runs() == [folder.name]
