"""The reader of run folders, and `provision runs`: folders of this and other versions, running, killed, and with anything in them."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from documents import REPORT

from provision import cli, inventory
from provision.base import paths, run_folders
from provision.base.errors import Interrupted, UsageError
from provision.base.problems import Problem
from provision.catalog import OURS
from provision.cli import doctor, main
from provision.commands.run import started
from provision.diagnosis import signatures
from provision.diagnosis.findings import Finding
from provision.doctor.host_checks import Examination
from provision.inventory import last_run
from provision.remote import timeline
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.report import page, runs
from provision.survey import collect
from provision.survey.collect import Survey
from provision.survey.document import load_file

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))


def folder(name: str, **files: object) -> Path:
    made = paths.runs() / name
    made.mkdir(parents=True)
    for stem, content in files.items():
        (made / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return made


def session(command: str) -> Session:
    return Session(inventory.load("localhost"), Progress(), command=command)


def test_a_run_says_what_it_is_while_it_goes_on_and_how_it_ended() -> None:
    with session("provision run") as one:
        found = runs.find(one.run_id)
        assert (found.command, found.inventory, found.verdict, found.seconds) == ("provision run", "localhost", "running", None)
        one.record.exit_code = 3
    ended = runs.find(one.run_id)
    assert ended.verdict == "failed"
    assert ended.seconds is not None
    assert ended.began == found.began
    with session("provision survey") as another:
        pass
    assert runs.find(another.run_id).verdict == "done"
    with pytest.raises(Interrupted), session("provision bench") as third:
        raise KeyboardInterrupt
    assert runs.find(third.run_id).verdict == "interrupted"
    with session("provision run") as own:
        own.record.exit_code = 130
    assert runs.find(own.run_id).verdict == "failed"
    assert "interrupted: the run was interrupted" in page.render(runs.find(third.run_id))
    with (
        pytest.raises(Interrupted),
        started(inventory.load("localhost"), "provision up", Progress(), {}, OURS) as begun,
    ):
        raise KeyboardInterrupt
    assert "interrupted: the run ended early" in (begun.session.folder / page.NAME).read_text()
    with pytest.raises(UsageError), session("provision run") as fourth:
        raise UsageError("no such <script>", hint="name another")
    failed = page.render(runs.find(fourth.run_id))
    assert "failed: the command failed" in failed
    assert "no such &lt;script&gt;\n  → name another" in failed
    assert sorted(run.id for run in runs.every()) == sorted(each.run_id for each in (one, another, third, own, begun.session, fourth))


def test_every_run_is_closed_with_the_error_that_ended_it() -> None:
    for path in Path(cli.__file__).parents[1].rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        managed = {id(item.context_expr) for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items}
        opened = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Session"]
        assert [f"{path}:{call.lineno}" for call in opened if id(call) not in managed] == []


def test_a_command_that_exits_with_1_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The host is a recorded one.
    fit = load_file(DATA / "lint-facts.json", OURS)["gpu1"]
    assert fit.driver is not None
    old = fit.model_copy(update={"driver": fit.driver.model_copy(update={"version": "390.157"})})
    survey = Survey({"gpu1": old}, [Problem("error", "a full disk", host="gpu1")])
    finding = Finding.of(signatures.known_error("nouveau-loaded"), host="gpu1")
    monkeypatch.setattr(collect, "survey_hosts", lambda *_, **__: survey)
    monkeypatch.setattr(doctor, "examine_hosts", lambda *_: Examination(survey.hosts, [finding], ["gpu1"]))
    monkeypatch.chdir(tmp_path)

    def exits_with(*words: str) -> int:
        return main.guarded(lambda: main.app(list(words)), debug=False)

    assert exits_with("survey", "gpu1") == exits_with("plan", "gpu1") == exits_with("doctor", "gpu1") == 1
    assert exits_with("bundle", "gpu1", "--out", "x.tar") == 1
    assert {run.command: run.verdict for run in runs.every()} == dict.fromkeys(
        ("provision survey", "provision plan", "provision doctor", "provision bundle"), "failed"
    )
    survey.hosts["gpu1"] = fit
    assert exits_with("plan", "gpu1") == 0
    assert sorted(run.verdict for run in runs.every() if run.command == "provision plan") == ["done", "failed"]


def test_a_run_that_was_killed_is_called_so() -> None:
    killed = session("provision up")
    killed._lock.close()  # as the kernel does it when the process dies
    assert runs.find(killed.run_id).verdict == "killed"


def test_folders_with_anything_in_them_are_listed() -> None:
    folder("20261121-101500-abcd", report=REPORT)
    folder("20261122-000000-empty")
    folder("20261123-000000-text", report="{", run="[]")
    folder("20261124-000000-other", report={**REPORT, "hosts": 3}, run={"schema": 9, "command": ["x"]})
    (folder("20261125-000000-odd") / "report.json").mkdir()
    os.mkfifo(folder("20261126-000000-fifo") / "run.json")
    folder("29", run={"schema": 1, "command": "x", "inventory": "y", "began": "1e999"})
    (paths.runs() / "latest").symlink_to("20261121-101500-abcd")
    (paths.runs() / "20270000-000000-link").symlink_to("20261121-101500-abcd")
    (paths.runs() / "notes.txt").touch()
    found = {run.id: run for run in runs.every()}
    assert list(found) == sorted(found, reverse=True)
    assert {name: run.verdict for name, run in found.items()} == {
        "20261121-101500-abcd": "not ready",
        "20261122-000000-empty": "unknown",
        "20261123-000000-text": "unreadable",
        "20261124-000000-other": "unreadable",
        "20261125-000000-odd": "unreadable",
        "20261126-000000-fifo": "unknown",
        "29": "unknown",
    }
    old = found["20261121-101500-abcd"]
    assert (old.command, old.inventory, old.seconds) == ("", "/home/me/hosts.ini", 61.25)
    assert old.began is not None
    assert (old.began.year, old.began.minute) == (2026, 15)
    assert found["29"].began is None


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    report = folder("20261121-101500-abcd", report=REPORT) / "report.json"
    size = report.stat().st_size
    assert run_folders.content(report, size) is not None
    assert run_folders.content(report, size - 1) is None
    monkeypatch.setattr(run_folders, "LARGEST_FILE", size - 1)
    assert [run.verdict for run in runs.every()] == ["unreadable"]
    assert last_run.newest_failed_inventory() is None


def test_no_file_of_a_run_keeps_a_command_waiting() -> None:
    made = folder("20261121-101500-abcd")
    for name in ("controller.json", "timeline.json", "report.json", "run.json"):
        os.mkfifo(made / name)
    assert [run.verdict for run in runs.every()] == ["unreadable"]
    (made / "report.json").unlink()
    assert [run.verdict for run in runs.every()] == ["unknown"]
    assert runs.load(made / timeline.NAME, timeline.Timeline) is None
    assert last_run.newest_inventory() is None
    with session("provision up") as one:
        assert one.dead_runs() == []


def test_every_command_means_the_same_run_by_the_last_one_also_after_the_clock_went_back() -> None:
    older = folder("20261121-101500-aaaa", report={**REPORT, "inventory": "older"})
    newer = folder("20261122-101500-bbbb", report={**REPORT, "inventory": "newer"})
    os.utime(older / "report.json", (2e9, 2e9))
    os.utime(newer / "report.json", (1e9, 1e9))
    assert runs.find(having=[runs.REPORT]).id == newer.name
    assert last_run.newest_failed_inventory() == "newer"


def test_a_run_is_found_by_its_id_or_a_prefix_and_errors_name_the_choices() -> None:
    with pytest.raises(UsageError, match="no run yet"):
        runs.find()
    assert list(runs.every()) == []
    for name in ("20261121-101500-a", "20261121-101500-ab", "20261122-000000-c"):
        folder(name)
    with pytest.raises(UsageError, match="no run has a report yet"):
        runs.find(having=[runs.REPORT])
    folder("20261120-000000-d", report=REPORT)
    assert runs.find().id == "20261122-000000-c"
    assert runs.find(having=[runs.REPORT]).id == "20261120-000000-d"
    assert runs.find("20261122").id == "20261122-000000-c"
    assert runs.find("20261121-101500-a").id == "20261121-101500-a"
    with pytest.raises(UsageError, match="2 runs begin with 20261121") as several:
        runs.find("20261121")
    assert "20261121-101500-ab, 20261121-101500-a" in str(several.value)
    for unknown in ("../../etc", "2030", ""):
        with pytest.raises(UsageError, match="there is no run") as none:
            runs.find(unknown)
        assert "20261120-000000-d" in str(none.value)
