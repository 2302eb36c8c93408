"""The record of a run's steps, and reading one back as the untrusted file that it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provision import inventory
from provision.remote import timeline
from provision.remote.ansible import Event, Kind
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.remote.timeline import Recorder


def event(kind: Kind, role: str = "openmpi", host: str = "a") -> Event:
    return Event(kind, host, role, "Install something", {})


def test_a_step_has_its_worst_tasks_state_and_skipped_tasks_are_no_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "hosts.ini")
    for kind in ("started", "ok", "started", "changed", "started", "tolerated"):
        recorder.event("install", "site", event(kind))
    recorder.event("install", "site", event("skipped", "hwloc"))
    recorder.event("install", "site", event("failed", "engine"))
    recorder.event("install", "site", event("ok", ""))
    recorder.event("install", "site", event("task", "", ""))
    recorder.save()
    found = timeline.read(tmp_path)
    assert found is not None
    assert found.inventory == "hosts.ini"
    assert [(one.stage, one.host, one.step, one.state) for one in found.steps] == [
        ("install", "a", "openmpi", "changed"),
        ("install", "a", "engine", "failed"),
        ("install", "a", "site", "ok"),
    ]
    assert json.loads((tmp_path / timeline.NAME).read_text())["schema"] == 1


def test_what_is_done_outside_of_playbooks_is_a_step_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "")
    with pytest.raises(RuntimeError), recorder.timed("training", "job", ["a", "b"]):
        raise RuntimeError
    found = timeline.read(tmp_path)
    assert found is not None
    assert [(one.host, one.step, one.state) for one in found.steps] == [("a", "job", "failed"), ("b", "job", "failed")]


def test_a_playbook_leaves_its_timeline_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    tasks = [{"name": "Wait", "ansible.builtin.command": "sleep 0.3"}]
    book = tmp_path / "short.yml"
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    with Session(inventory.load("localhost"), Progress()) as session:
        session.play(book, "Test")
    found = timeline.read(session.folder)
    assert found is not None
    (step,) = found.steps
    assert (step.stage, step.host, step.step, step.state) == ("survey", "localhost", "short", "changed")
    assert step.began > 0
    assert step.seconds >= 0.3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{" * 5000,
        {"schema": 2, "steps": []},
        {"schema": 1, "steps": [{"stage": "install", "host": "a", "step": "x", "began": -1}]},
        {"schema": 1, "steps": [{"stage": "install", "host": "a" * 1000, "step": "x", "began": 1}]},
        '{"schema": 1, "steps": [{"stage": "install", "host": "a", "step": "x", "began": 1e999}]}',
    ],
)
def test_what_is_no_timeline_is_none(tmp_path: Path, content: Any) -> None:
    (tmp_path / timeline.NAME).write_text(content if isinstance(content, str) else json.dumps(content))
    assert timeline.read(tmp_path) is None


def test_no_file_and_too_large_a_file_are_none(tmp_path: Path) -> None:
    assert timeline.read(tmp_path) is None
    (tmp_path / timeline.NAME).write_text('{"schema": 1, "steps": []}' + " " * 20_000_000)
    assert timeline.read(tmp_path) is None
