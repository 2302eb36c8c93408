"""Hosts that run something else than our script: a forced command, a menu instead of a shell."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from invented_hosts import stated

from provision import inventory
from provision.catalog import OURS
from provision.doctor.checks import examine
from provision.install import removal
from provision.inventory import Host
from provision.remote import progress, ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect
from provision.survey.collect import Survey
from provision.survey.document import END

NOTHING = '{"nothing": true, "removed": [], "left": [], "error": null}'
MENU = "welcome\nthis login is for backups: No space left on device"


def test_the_survey_quotes_the_host_and_the_doctor_explains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    monkeypatch.setattr(ssh, "login", lambda *_: (["printf", "%s", MENU], {}))
    with Session(inventory.load("a,"), Progress()) as session:
        found = collect.survey_hosts(session)
    assert [problem.what for problem in found.problems] == [f"the survey did not run; the host said: {MENU.splitlines()[-1]}"]
    assert [each.id for each in examine({}, found.problems, catalog=OURS)] == ["disk-full"]


def test_a_removal_that_ran_half_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    half = f"{removal.BEGIN}\n{NOTHING}\n{END}\n"
    monkeypatch.setattr(ssh, "login", lambda *_: (["printf", "%s", f"{MENU}\n{half}"], {}))
    with Session(inventory.load("a,"), Progress()) as session:
        found = removal.remove(session, Survey(hosts={"a": stated({})}), dry_run=False)
    assert [(one.state, one.problem and one.problem.what) for one in found] == [
        ("failed", f"the removal did not run; the host said: {MENU.splitlines()[-1]}")
    ]


def test_hosts_that_hang_or_flood_are_named_and_the_others_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(collect, "ANSWER_S", 25)
    monkeypatch.setattr(progress, "_WAITS_S", 3.0)
    pythons = {"good": sys.executable}
    for name, text in {"hangs": "echo $$ > {}; exec sleep 600", "floods": "yes 0123456789"}.items():
        python = tmp_path / name
        python.write_text("#!/bin/sh\n" + text.format(tmp_path / "pid") + "\n")
        python.chmod(0o755)
        pythons[name] = str(python)
    hosts = tuple(
        Host(name, "localhost", connection="local", python=python, variables={"ansible_connection": "local", "provision_python": python})
        for name, python in pythons.items()
    )
    with Session(replace(inventory.load("localhost"), hosts=hosts), Progress()) as session:
        survey = collect.survey_hosts(session)
    assert list(survey.hosts) == ["good"]
    said = {problem.host: problem.what for problem in survey.problems if problem.host in ("hangs", "floods")}
    assert said["hangs"].startswith("it let us in, and then did not answer in time")
    assert said["floods"].startswith("its answer was too large and was cut off")
    assert "waiting for hangs: Collect facts" in capsys.readouterr().err
    waited_for = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    assert not waited_for.exists() or b"sleep" not in waited_for.read_bytes(), "what was waited for is ended"
