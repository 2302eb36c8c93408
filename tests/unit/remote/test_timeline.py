"""The record of a run's steps, and reading one back as the untrusted file that it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import host, plan_for

from provision import inventory
from provision.base import run_folders
from provision.launch import jobs
from provision.launch.jobs import Job, JobResult
from provision.launch.smoke import training_job
from provision.plan.options import SmokeOptions
from provision.remote import timeline
from provision.remote.ansible import Event, Kind, Play
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.remote.timeline import Recorder
from provision.report import runs


def event(kind: Kind, role: str = "openmpi", host: str = "a") -> Event:
    return Event(kind, host, role, "Install something", {})


def test_a_step_has_its_worst_tasks_state_and_skipped_tasks_are_no_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for kind in ("started", "ok", "started", "changed", "started", "tolerated"):
        recorder.event("install", "site", event(kind))
    recorder.event("install", "site", event("skipped", "hwloc"))
    recorder.event("install", "site", event("failed", "engine"))
    recorder.event("install", "site", event("ok", ""))
    recorder.event("install", "site", event("task", "", ""))
    recorder.save()
    found = runs.load(tmp_path / timeline.NAME, timeline.Timeline)
    assert found is not None
    assert [(one.stage, one.host, one.step, one.state) for one in found.steps] == [
        ("install", "a", "openmpi", "changed"),
        ("install", "a", "engine", "failed"),
        ("install", "a", "site", "ok"),
    ]
    assert json.loads((tmp_path / timeline.NAME).read_text())["schema"] == 1


def test_what_is_done_outside_of_playbooks_is_a_step_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(RuntimeError), recorder.timed("training", "job", ["a", "b"]):
        raise RuntimeError
    found = runs.load(tmp_path / timeline.NAME, timeline.Timeline)
    assert found is not None
    assert [(one.host, one.step, one.state) for one in found.steps] == [("a", "job", "failed"), ("b", "job", "failed")]


def test_a_playbook_leaves_its_timeline_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    tasks = [{"name": "Wait", "ansible.builtin.command": "sleep 2"}]
    book = tmp_path / "short.yml"
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}]))
    with Session(inventory.load("localhost"), Progress()) as session:
        session.play(Play(book), "Test")
    found = runs.load(session.folder / timeline.NAME, timeline.Timeline)
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
    assert runs.load(tmp_path / timeline.NAME, timeline.Timeline) is None


def test_no_file_and_too_large_a_file_are_none(tmp_path: Path) -> None:
    assert runs.load(tmp_path / timeline.NAME, timeline.Timeline) is None
    (tmp_path / timeline.NAME).write_text('{"schema": 1, "steps": []}' + " " * run_folders.LARGEST_FILE)
    assert runs.load(tmp_path / timeline.NAME, timeline.Timeline) is None


@pytest.mark.parametrize(
    ("code", "failures", "state"), [(0, [], "ok"), (1, [], "failed"), (0, ["allreduce is wrong"], "failed"), (1, None, "failed")]
)
def test_a_training_job_has_failed_without_its_report_with_a_fault_and_with_an_exit_code(
    code: int, failures: list[str] | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the job itself is stated; the plan has no PyTorch, so it is the engine's check."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    plan = plan_for({"a": host(), "b": host("10.0.0.2")})
    plan = replace(plan, hosts={name: replace(each, torch=None) for name, each in plan.hosts.items()})
    hosts = [{"host": each.hostname, "ranks": 1} for each in plan.hosts.values()]
    report = {"size": 2, "transport": "tcp", "hosts": hosts, "failures": failures} if failures is not None else None

    def ended(_: Session, __: Job, ___: str, log: Path, *____: object, **_____: object) -> JobResult:
        log.write_text("the last line\n")
        return JobResult(code, report, interrupted=False)

    monkeypatch.setattr(jobs, "run", ended)
    with Session(inventory.load("a,b"), Progress()) as session:
        session.step = "training"
        result = training_job.run(session, plan, SmokeOptions())
    found = runs.load(session.folder / timeline.NAME, timeline.Timeline)
    assert found is not None
    assert [(one.stage, one.host, one.step, one.state) for one in found.steps] == [("training", name, "job", state) for name in "ab"]
    assert bool(result.faults) is (state == "failed"), result.faults
