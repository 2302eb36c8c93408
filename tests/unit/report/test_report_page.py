"""The page of a run, as a reader of it finds it: what it says, that it is one whole and harmless document, and that it stays short."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from documents import REPORT

from provision import inventory
from provision.base import paths
from provision.base.problems import Problem
from provision.catalog import OURS
from provision.cli import main
from provision.commands import run
from provision.plan.requirements import Requirements
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.remote.timeline import StepTime
from provision.report import drawings, page, runs
from provision.report.model import Environment, HostReport, Report
from provision.resolve import resolve
from provision.survey.document import load_file

EVIL = '<script>alert(1)</script>" onload="x\'\u202egnp\x1b[31m{{ 7 * 7 }}'
# As rank 0 of the training job has written it on two hosts of one machine, shortened.
SMOKE: dict[str, Any] = {
    "schema": 1, "dataset": "digits (UCI)", "np": 4, "hosts": {"gpu000": [0, 1], "gpu001": [2, 3]}, "bar_percent": 90.0,
    "participants": [{"rank": rank, "host": f"gpu00{rank // 2}", "local_rank": rank % 2, "parameter_digest": "89ce"} for rank in range(4)],
    "epochs": [
        {"epoch": 1, "loss": 2.3031, "test_loss": 2.2703, "test_accuracy_percent": 25.07},
        {"epoch": 2, "loss": 0.3103, "test_loss": 0.1318, "test_accuracy_percent": 96.06},
    ],
    "images_per_second": 1943.5, "one_rank_images_per_second": 1499.1, "speedup": 1.296, "efficiency": 0.324,
    "without_communication_images_per_second": 2206.7, "efficiency_of_communication": 0.881, "notes": ["they share one machine"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))


class Page(HTMLParser):
    """What a browser would read: elements that are open, their number, attributes, and the text of each."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def _note(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts.setdefault(tag, []).append(data)

    def said(self, tag: str = "body") -> str:
        return " ".join(" ".join(self.texts.get(tag, [])).split())


def read(run: Path) -> Page:
    """The run's page, of which every test expects the same: one document, offline, without scripts, and readable by a screen reader."""
    html = page.write(run).read_text(encoding="utf-8")
    made = Page(html)
    assert html.startswith("<!doctype html>")
    assert "default-src 'none'" in html
    assert not made.elements.keys() & {"script", "iframe", "img", "link", "object", "form"}
    assert [name for _, name, _ in made.attributes if name.startswith("on")] == []
    assert [value for _, name, value in made.attributes if name in ("href", "src") and ":" in value] == []
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert made.elements["h1"] == 1
    assert made.elements["table"] == made.elements["caption"]
    hidden_or_named = [tag for tag, name, _ in made.attributes if tag == "svg" and name in ("aria-label", "aria-hidden")]
    assert len(hidden_or_named) == made.elements["svg"]
    return made


def folder(name: str = "20261126-180000-aaaaaa", **files: Any) -> Path:
    made = paths.runs() / name
    made.mkdir(parents=True)
    for stem, content in files.items():
        (made / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return made


def cluster(count: int, smoke: Mapping[str, Any] | None = None, failed: Sequence[str] = ()) -> Path:
    """The folder of a run on hosts with GPUs of two kinds; those that failed did so in the engine's build."""
    kinds = (("NVIDIA H100 80GB HBM3", "550.54.15", "12.4", "9.0", 4), ("Tesla V100-SXM2-32GB", "535.104.05", "12.2", "7.0", 0))
    described = {}
    for number in range(count):
        name, driver, cuda, capability, switches = kinds[number % 5 == 1]
        described[f"gpu{number:03}"] = {
            "os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", "driver": {"version": driver, "cuda": cuda},
            "gpus": [{"name": name, "compute_capability": capability}] * 8, "nvidia": {"pci_switches": switches},
            "network": {"interfaces": [{"name": "eth0", "addresses": [f"10.0.0.{number + 1}/16"]}], "default_route_interface": "eth0"},
        }  # fmt: skip
    made = folder(facts={"schema": 1, "hosts": described, "problems": []})
    plan = resolve(load_file(made / "facts.json", OURS), Requirements(engine_version="0.1.0"), {})
    (made / "plan.json").write_text("".join(plan.json()), encoding="utf-8")
    steps = []
    report = Report(
        run_id=made.name, folder=str(made), inventory="/home/me/big.ini", command="provision up", environment=Environment.here(),
        began="2026-11-26T18:00:00+00:00", seconds=125.0, smoke=smoke, smoke_summary="digits: 4 ranks\nand more" if smoke else None,
    )  # fmt: skip
    for number, name in enumerate(described):
        bad = name in failed
        steps.append({"stage": "survey", "host": name, "step": "survey", "began": 0.0, "seconds": 2.0, "state": "ok"})
        steps.append({"stage": "install", "host": name, "step": "python", "began": 2.0, "seconds": 30.0 + number, "state": "changed"})
        state = "failed" if bad else "changed"
        steps.append({"stage": "install", "host": name, "step": "engine", "began": 60.0, "seconds": 60.0, "state": state})
        report.hosts.append(HostReport(host=name, state="failed" if bad else "ready" if smoke else "installed", seconds=92.0 + number))
        if bad:
            what = "cc1plus: fatal error: error writing to /tmp/x.s: No space left on device"
            report.failures.append(Problem("error", what, "free space, then run it again", host=name, where="engine / Build"))
    (made / "timeline.json").write_text(json.dumps({"schema": 1, "steps": steps}), encoding="utf-8")
    (made / "report.json").write_text(json.dumps(report.as_dict()), encoding="utf-8")
    return made


def test_a_run_that_made_hosts_ready() -> None:
    made = read(cluster(2, SMOKE))
    assert made.said("h1") == "ready: both hosts have what was planned, and the training job passed on them"
    text = made.said()
    assert "provision up, 26 November 2026, 18:00 UTC" in text
    assert "digits: 4 ranks and more" not in text  # the rest of the summary is in the section about the training
    labels = [value for tag, name, value in made.attributes if (tag, name) == ("svg", "aria-label")]
    assert "Loss: loss by epoch; training from 2.3 to 0.31; test from 2.27 to 0.132" in labels
    assert "Accuracy on the test set: % by epoch; test from 25.1 to 96.1" in labels
    assert "gpu001: 3 steps in 1 min 33 s, the longest engine with 1 min" in labels
    assert "4 × H100 80GB" not in text
    assert "8 × H100 80GB HBM3 behind NVSwitches" in text
    assert "the same ranks at the same time, not communicating 2,207 communication leaves 88 % of it" in text
    assert "the driver's CUDA is 12.4" in text
    assert f"Python, Ansible {Environment.here().python}, ansible-core" in text
    assert "What failed" not in text


def test_speeds_that_contradict_each_other_are_told_as_such() -> None:
    text = read(cluster(2, {**SMOKE, "efficiency": 1.21, "efficiency_limit": 0.5, "efficiency_of_communication": 1.69})).said()
    assert "2,207 what communication leaves cannot be told from this run: a measurement was disturbed" in text
    assert "one rank alone 1,499 the speed-up cannot be told from this run: a measurement was disturbed" in text
    assert "121 %" not in text
    assert "169 %" not in text


def test_a_run_that_failed_says_what_where_and_what_the_doctor_knows() -> None:
    made = read(cluster(3, failed=["gpu001", "gpu002"]))
    assert made.said("h1") == "not ready: gpu001 and gpu002 failed"
    text = made.said()
    assert text.count("No space left on device (/tmp, root disk or container storage)") == 1  # the two failures are one entry
    assert "gpu001 and gpu002: engine / Build" in text
    assert "→ free space, then run it again" in text
    assert "provision doctor explain disk-full" in text
    assert any("engine failed" in value for _, name, value in made.attributes if name == "aria-label")


def test_a_training_job_that_failed_is_explained_from_its_log() -> None:
    run = cluster(2)
    document = json.loads((run / "report.json").read_text(encoding="utf-8"))
    (run / "report.json").write_text(
        json.dumps({**document, "smoke_faults": [{"severity": "error", "what": "the job ended with exit code 1"}]}), encoding="utf-8"
    )
    (run / "smoke.log").write_text("[1,3]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n", encoding="utf-8")
    made = read(run)
    assert made.said("h1") == "not ready: the training job failed"
    assert "nvidia-smi" in made.said("code")  # steps that are commands
    (run / "report.json").write_text(
        json.dumps({**document, "smoke": SMOKE, "smoke_faults": [{"severity": "error", "what": "the bar is 97 %"}]}), encoding="utf-8"
    )
    assert read(run).said("h1") == "not ready: the training job does not count as passed"
    assert "What the doctor finds in smoke.log Known error: CUDA out of memory." in made.said()
    assert "rank 3: torch.OutOfMemoryError" in made.said("pre")


def test_what_a_failed_host_does_not_hold_is_planned_for_it() -> None:
    text = read(cluster(2, failed=["gpu001"])).said()
    assert "What is installed on gpu000, and why" in text
    assert "What is planned for gpu001, and why" in text
    assert "planned for all 2 hosts" in text


def test_a_wheel_in_a_folder_of_the_host_is_not_installed_yet() -> None:
    run = cluster(1)
    document = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    document["hosts"]["gpu000"]["torch"].update(source="host", index=None)
    (run / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    text = read(run).said()
    assert "wheel in a folder on the host: torch==" in text
    assert "already on the host: torch" not in text
    assert "already on the host: /usr/bin/python3" in text


def test_charts_name_their_axes() -> None:
    made = read(cluster(2, SMOKE))
    assert made.texts["svg"].count("epoch") == 2
    assert {"100", "%"} <= set(made.texts["text"])


def test_steps_that_change_nothing_by_nature_have_a_colour_of_their_own_and_hosts_their_order() -> None:
    run = cluster(2)
    kinds = (("gpu001", "survey", "ok"), ("gpu000", "survey", "ok"), ("gpu000", "python", "ok"), ("gpu000", "pytorch", "failed"))
    steps = [
        {"stage": "s", "host": host, "step": step, "began": at, "seconds": 1, "state": state}
        for at, (host, step, state) in enumerate(kinds)
    ]
    (run / "timeline.json").write_text(json.dumps({"schema": 1, "steps": steps}), encoding="utf-8")
    made = read(run)
    bars = [value for tag, name, value in made.attributes if tag == "g" and name == "class" and value.startswith("bar")]
    assert bars == ["bar ran", "bar ok", "bar failed", "bar ran"]
    assert "s: survey 2 0 1 s gpu001 ran" in made.said("tr")


def test_a_dry_run_says_that_nothing_was_changed() -> None:
    hosts = [
        HostReport(host="a", state="would change", steps={"python": "will change", "engine": "cannot know yet"}),
        HostReport(host="b", state="unchanged", steps={"python": "will not change"}),
    ]
    report = Report(run_id="r", folder="/f", inventory="hosts.ini", command="provision up --check", hosts=hosts)
    made = read(folder(report=report.as_dict()))
    assert made.said("h1") == "dry run: nothing was changed; 1 of 2 hosts would change"
    assert "a will change: python; cannot know yet: engine" in made.said()


def test_folders_of_programs_and_with_anything_in_them_have_a_page() -> None:
    assert read(folder("20261121-101500-a", report=REPORT)).said("h1") == "not ready: a failed"
    assert "its folder does not say how it ended" in read(folder("20261122-000000-b")).said("h1")
    odd = folder("20261123-000000-c", report="{", plan={"hosts": {"a": 1}}, facts="[]", timeline={"schema": 1, "steps": [{"host": 1}]})
    assert "its report cannot be read" in read(odd).said("h1")
    program = {
        "schema": 1,
        "command": "provision run",
        "inventory": "hosts.ini",
        "began": "2026-11-26T18:00:00Z",
        "seconds": 3,
        "exit_code": 1,
    }
    run = folder("20261124-000000-d", run=program)
    (run / "run.log").write_text("[1,0]<stdout>:hello\n", encoding="utf-8")
    made = read(run)
    assert made.said("h1") == "failed: the command failed"
    assert "hello" in made.said("pre")


def test_nothing_that_hosts_have_said_gets_into_the_document() -> None:
    report = Report(
        run_id=EVIL, folder=EVIL, inventory=EVIL, command=EVIL, seconds=1e300, notes=[EVIL] * 500, smoke_summary=EVIL,
        smoke_faults=[Problem("error", EVIL)],
        environment=Environment(provision=EVIL, python=EVIL, ansible=EVIL, system=EVIL, kernel=EVIL),
        hosts=[HostReport(host=EVIL, state="failed", torch=EVIL, seconds=-1e300, steps={EVIL: "will change"})],
        failures=[Problem("error", f"{EVIL}\n{'y' * 100_000}\n" + "z\n" * 10_000, EVIL, host=EVIL, where=EVIL)],
        smoke={**SMOKE, "dataset": EVIL, "notes": [EVIL], "epochs": [{"epoch": 1, "loss": 1e308, "test_accuracy_percent": -5}]},
    )  # fmt: skip
    step = {"stage": EVIL, "host": EVIL, "step": EVIL, "began": 0, "seconds": 9e8, "state": "unreachable"}
    run = folder(report=report.as_dict(), timeline={"schema": 1, "steps": [step]})
    (run / "smoke.log").write_text(f"[1,0]<stderr>:{EVIL}\n" * 200, encoding="utf-8")
    made = read(run)
    assert made.said().count("<script>alert(1)</script>") > 60
    assert "{{ 7 * 7 }}" in made.said()
    assert len((run / page.NAME).read_bytes()) < 150_000


def test_the_page_of_many_hosts_is_as_short_as_that_of_the_kinds_of_hosts() -> None:
    made = read(cluster(120, failed=["gpu007", "gpu011"]))
    assert made.elements["tr"] < 60
    text = made.said()
    assert "gpu000, gpu001 and 116 more" in text
    assert "gpu119" in text  # in the list that unfolds
    assert "8 × Tesla V100-SXM2-32GB" in text


@pytest.mark.parametrize(("loss", "curves"), [(5e-324, 3), (1e-13, 3), (0.0, 3), (1e11, 3), (1.7e308, 2), (float("nan"), 2)])
def test_any_loss_that_hosts_report_has_its_page(loss: float, curves: int) -> None:
    epochs = [{**epoch, "loss": loss} for epoch in SMOKE["epochs"]]
    made = read(cluster(2, {**SMOKE, "epochs": epochs}))
    assert sum(tag == "polyline" and name == "points" for tag, name, _ in made.attributes) == curves
    assert not [value for tag, _, value in made.attributes if tag in ("polyline", "line", "text") and ("nan" in value or "inf" in value)]


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (["gpu000"], "gpu000 failed"),
        (["gpu000", "controller"], "gpu000 failed"),
        (["gpu001", "gpu000"], "both hosts failed"),
        (["controller"], "the run ended early, in the step engine"),
        ([None], "the run ended early, in the step engine"),
    ],
)
def test_the_headline_blames_hosts_of_the_run_alone(failed: Sequence[str | None], said: str) -> None:
    lines = [HostReport(host=name, state="not finished") for name in ("gpu000", "gpu001")]
    report = Report(run_id="r", folder="/f", inventory="h.ini", hosts=lines)
    report.failures = [Problem("error", "it failed", host=name, where="engine") for name in failed]
    assert f": {said}" in read(folder(report=report.as_dict())).said()


def test_steps_of_hosts_that_differ_are_not_folded_and_the_failed_ones_come_first_where_there_are_too_many() -> None:
    steps = [StepTime(stage="install", host=f"h{number}", step=f"s{number}", began=0, seconds=number) for number in range(60)]
    steps[3].state = "failed"
    made = drawings.gantt(steps)
    assert made is not None
    assert len(made.rows) == drawings.MAX_ROWS
    assert made.left_out == 20
    assert [row.slowest for row in made.rows[:2]] == ["h3", "h59"]
    assert drawings.gantt([]) is None


def test_a_page_that_cannot_be_written_does_not_break_the_run() -> None:
    said: list[str] = []

    class Shown(Progress):
        def line(self, text: str, style: str | None = None) -> None:
            said.append(f"{style}{text}")

    with Session(inventory.load("localhost"), Shown()) as session:
        (session.folder / page.NAME).mkdir()
        run._write_page(session)
    assert said
    assert "page" in said[0]


def provision(*words: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main.guarded(lambda: main.app(args=list(words), prog_name="provision"), debug=False)
    return code, out.getvalue(), err.getvalue()


def test_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = provision("runs", "report")
    assert (code, out) == (2, "")
    assert "there is no run yet" in err
    run = cluster(2, SMOKE)
    folder("20261127-000000-bbbbbb")
    assert provision("runs", "report") == (0, f"{run / 'report.html'}\n", "")
    assert provision("runs", "report", "20261127")[1].endswith("20261127-000000-bbbbbb/report.html\n")
    code, _, err = provision("runs", "report", "2026")
    assert code == 2
    assert "2 runs begin with 2026" in err
    out = provision("runs")[1]
    assert out.splitlines()[1].split()[:2] == ["20261127-000000-bbbbbb", "unknown"]
    assert out.splitlines()[2].split()[:4] == [run.name, "ready", "provision", "up"]
    assert [each["verdict"] for each in json.loads(provision("runs", "--json", "-n", "1")[1])["runs"]] == ["unknown"]


@pytest.mark.parametrize(
    ("failed", "commands"),
    [
        ([], r"<pre>provision run /home/me/big\.ini [^<]*train\.py[^<]*</pre>\s*"),
        (["gpu001"], r"<pre>provision doctor [^<]*</pre>\s*"),
    ],
)
def test_a_page_ends_with_the_next_commands(failed: list[str], commands: str) -> None:
    text = page.write(cluster(2, None if failed else SMOKE, failed=failed)).read_text()
    assert re.search(rf"<h2>Next</h2>\s*{commands}<p><small>", text)


def test_the_log_of_a_host_is_what_it_did_and_what_its_ranks_printed() -> None:
    run = cluster(2, failed=["gpu001"])
    events = run / "site" / "artifacts" / "ansible" / "job_events"
    events.mkdir(parents=True)
    (run / "site" / "vars.json").touch()
    results_of = (
        ("runner_on_ok", "gpu000", {"changed": True}),
        ("runner_on_skipped", "gpu000", {}),
        ("runner_on_failed", "gpu001", {"msg": "it failed \x1b[2Jbadly\nprovision: ready", "rc": 1}),
        ("runner_on_ok", "gpu000", {"changed": False, "msg": EVIL}),
    )
    for number, (kind, host, result) in enumerate(results_of, 9):
        data = {"host": host, "task": f"Task {number}", "role": "engine", "duration": 2.5, "res": result, "task_action": "command"}
        (events / f"{number}-a.json").write_text(json.dumps({"event": kind, "event_data": data}), encoding="utf-8")
    for name, content in (
        ("1-b.json", "{ gpu001"),
        ("2-b.json", '["gpu001"]'),
        ("3-b.json", '{"event_data": "gpu001"}'),
        ("x.json", "gpu001"),
    ):
        (events / name).write_text(content, encoding="utf-8")
    record = {"schema": 1, "command": "", "inventory": "", "began": "2026-11-26T18:00:00Z", "ranks": {"gpu000": 2, "gpu001": 1}}
    (run / runs.RECORD).write_text(json.dumps(record), encoding="utf-8")
    (run / "smoke.log").write_text("[1,0]<stdout>:first[1,2]<stdout>:third\nof nobody\n[1,2]<stderr>:\x1b[2Jmore\n", encoding="utf-8")
    assert provision("logs", "gpu000")[1].splitlines()[1:] == [
        "== site",
        "engine: Task 9: changed (2.5 s)",
        "engine: Task 12: ok (2.5 s)",
        "== smoke.log: rank 0, 1",
        "rank 0: first",
    ]
    code, out, err = provision("logs", "gpu001", run.name)
    assert (code, err) == (0, ""), err
    assert "\x1b" not in out
    assert out.splitlines()[1:7] == [
        "== site",
        "engine: Task 11: FAILED (2.5 s): it failed \\x1b[2Jbadly",
        "    provision: ready",
        "== smoke.log: rank 2",
        "rank 2: third",
        "rank 2: \\x1b[2Jmore",
    ]
    assert "failed: engine / Build: cc1plus" in out
    later = folder("20261127-000000-bbbbbb", run={**record, "command": "provision run", "ranks": {"gpu000": 1}})
    folder("20261128-000000-cccccc", run={**record, "command": "provision survey", "ranks": {}})
    (later / "run.log").write_text("[1,0]<stdout>:of the program\n", encoding="utf-8")
    assert provision("logs", "gpu000")[1].splitlines()[2:] == ["rank 0: of the program"]
    code, _, err = provision("logs", "gpu002", run.name)
    assert code == 2
    assert "name one of its hosts: gpu000, gpu001" in err


def test_ranks_that_were_late_have_a_row_with_where_their_time_went() -> None:
    own, others = {"rank": 3, "signs": {"cpu": 0.3, "ready": 0.5}}, {"rank": 0, "signs": {"cpu": 0.3}}
    late = {
        "since": "2026-11-30T00:11:22Z",
        "rank": 3,
        "host": "node<2>",
        "behind": 0.5,
        "by": "itself",
        "cause": "ready",
        "own": own,
        "others": others,
    }
    ended = {**late, "rank": 1, "seconds": 75, "said": "rank 1 waits for a disk"}
    made = read(folder(stalls={"schema": 1, "stragglers": [{**late, "said": "rank 3 waits for its core"}, ended]}))
    text = made.said()
    assert "3 on node<2>" in text
    assert re.search(r"rank 3 waits for its core noticed at \S+, and until the end", text)
    assert re.search(r"rank 1 waits for a disk noticed at \S+, for 1 min 15 s", text)
    assert ("svg", "aria-label", "cpu 30 % ready 50 % disk 0 % ") in made.attributes
    assert [value for tag, name, value in made.attributes if (tag, name) == ("rect", "width")][:4] == ["160", "128.0", "128.0", "48.0"]
    assert "Ranks that were late" not in read(folder("20261126-180000-bbbbbb")).said()


def test_a_stall_is_drawn_as_ranks_over_time_with_where_each_stood() -> None:
    places = [{"rank": rank, "host": "node<2>", "doing": doing, "line": "train.py:7"} for rank, doing in enumerate(("waits", "sleeps"))]
    stall = {"since": "2026-11-26T18:00:25Z", "seconds": 50, "said": "rank 1 sleeps", "verdict": {"suspects": [1], "places": places}}
    record = {
        "schema": 1,
        "command": "provision run",
        "inventory": "hosts.ini",
        "began": "2026-11-26T18:00:00Z",
        "seconds": 100,
        "exit_code": 1,
    }
    made = read(folder(stalls={"schema": 1, "stalls": [stall]}, run=record))
    assert re.search(r"rank 1 sleeps. Since \S+, for 50 s", made.said())
    assert "1 on node<2> sleeps at train.py:7" in made.said()
    assert ("svg", "aria-label", "others waited for it") in made.attributes
    drawn = [(name, value) for tag, name, value in made.attributes if tag == "rect" and name in ("x", "width")]
    assert drawn == [("width", "160"), ("x", "40.0"), ("width", "80.0")] * 2
