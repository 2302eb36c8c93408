"""`provision status`: hosts in every state, drift from the lock, jobs, and answers of hosts that mean harm."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pexpect
import pytest
from rollouts import host_plan, lint_plan, manifest
from status_of import ACTIVITY, GPU, INSTALLED, JOB, Hosts, end_of
from survey_module import machine, survey

from provision import inventory
from provision.base import paths
from provision.base.terminal import Console
from provision.cli import status as status_command
from provision.install import drift
from provision.plan import lock_file
from provision.plan.lock import Lock, environments
from provision.plan.model import Plan
from provision.report.status import observer, show
from provision.report.status.model import Job, Status
from provision.report.status.observer import Observer, Poller
from provision.survey.model import Drift

DATA = Path(__file__).parents[2] / "data"
FILE = {"version": "2.0.2", "url": "https://example.org/numpy.whl", "sha256": "a" * 64}
CHANGED = {"kind": "file-changed", "subject": "/etc/x"}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return lint_plan()


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, "node1", "gpu1")


def look(hosts: Hosts) -> Status:
    return Observer(inventory.load(str(hosts)), {}).look(threading.Event())


def held(plan: Plan, name: str) -> dict[str, Any]:
    """The section `installed` of a host that holds the plan."""
    return {**INSTALLED, "manifest": manifest(plan, name), "files": {"venv": {"numpy": FILE}}}


def lock(hosts: Hosts, plan: Plan) -> None:
    found = inventory.load(str(hosts))
    lock_file.record(found, plan, {name: {"venv": {"numpy": FILE}} for name in plan.hosts})


# -------------------------------------------------------------------------------------------------------- states


def test_hosts_that_hold_what_the_lock_says_are_installed(hosts: Hosts, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    lock(hosts, plan)
    for name in ("node1", "gpu1"):
        hosts.answer(name, installed=held(plan, name), drift=[], gpu_load={"gpus": [GPU, {**GPU, "index": 1}], "error": None})
    failed = paths.runs() / "20261126-180000-aaaaaa"
    failed.mkdir(parents=True)
    report = {
        "run_id": failed.name,
        "folder": str(failed),
        "inventory": str(hosts),
        "smoke_faults": [{"severity": "error", "what": "accuracy is 11 %"}],
    }
    (failed / "report.json").write_text(json.dumps({"schema": 1, **report}), encoding="utf-8")
    assert end_of("status", str(hosts)) == 0
    said = capsys.readouterr().out
    assert "2 installed" in said
    assert "last run: unknown, not ready" in said
    assert said.count("ready") == 1, "only a training job that passed says so"
    assert not list((hosts.folder / "home").rglob("controller.json")), "looking is no run"


def test_every_trouble_is_a_row_with_what_helps(hosts: Hosts, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """One host is down, the other one is in each state in turn."""
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("not installed", {}, f"provision up {hosts} --limit node1"),
        ("drifted", {"installed": held(plan, "node1"), "drift": [CHANGED]}, f"provision up {hosts} --limit node1"),
        ("drifted", {"installed": {**INSTALLED, "manifest": {"host": {}}}, "drift": []}, f"provision up {hosts} --limit node1"),
        ("busy", {"activity": {**ACTIVITY, "locked": {"owner": "ann on box", "since": "19:02"}}}, "wait until that run has ended"),
        (
            "GPU error",
            {"installed": held(plan, "node1"), "drift": [], "gpu_load": {"gpus": [], "error": "GPU is lost"}},
            f"provision doctor {hosts} --gpu --limit node1",
        ),
        ("unknown", {"errors": {"drift": "no answer within 30 s"}, "installed": held(plan, "node1")}, ""),
        ("unknown", {"activity": None, "errors": {"activity": "OSError: no"}}, "provision ssh node1"),
    ]
    for state, sections, helps in cases:
        hosts.answer("node1", **sections)
        assert end_of("status", str(hosts), "--json") == 1
        found = json.loads(capsys.readouterr().out)
        one, other = found["hosts"]
        assert (one["state"], other["state"]) == (state, "unreachable")
        assert helps in (one["remedy"] or "")
        assert end_of("status", str(hosts)) == 1
        shown = capsys.readouterr().out
        assert f"node1: {state}" in shown
        assert helps in shown
        assert "No route to host" in shown


def test_the_document_matches_its_schema(hosts: Hosts, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.answer(
        "node1", installed=held(plan, "node1"), drift=[], activity={**ACTIVITY, "jobs": [JOB]}, gpu_load={"gpus": [GPU], "error": None}
    )
    end_of("status", str(hosts), "--json")
    document = json.loads(capsys.readouterr().out)
    end_of("schema", "status")
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema)
    assert document["schema"] == 1
    assert document["hosts"][0]["gpus"][0]["utilization"] == 97.0
    for broken in ({**document, "schema": 2}, {**document, "hosts": [{"host": "a", "state": "fine"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_installations_are_read_now_and_then_only(hosts: Hosts, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.answer("node1", installed=held(plan, "node1"), drift=[CHANGED])
    watching = Observer(inventory.load(str(hosts)), {})
    first = watching.look(threading.Event())
    assert '"drift"' in hosts.script("node1")
    hosts.answer("node1", {"installed": None, "drift": None})  # as the script answers that is asked for the rest alone
    second = watching.look(threading.Event())
    assert '"drift"' not in hosts.script("node1")
    assert '"prefix": "/opt/provision"' in hosts.script("node1"), "known: nobody has to ask sudo"
    assert (second.hosts[0].drift, second.hosts[0].checked) == (first.hosts[0].drift, first.hosts[0].checked)
    monkeypatch.setattr(observer, "CHECK_EVERY_S", 0.0)
    watching.look(threading.Event())
    assert '"drift"' in hosts.script("node1")


def test_an_old_comparison_is_named_and_not_asked_for_in_every_look(hosts: Hosts, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.answer("node1", installed=held(plan, "node1"), drift=[])
    watching = Observer(inventory.load(str(hosts)), {})
    first = watching.look(threading.Event()).hosts[0]
    hosts.answer("node1", installed=held(plan, "node1"), errors={"drift": "no answer within 50 s"})
    monkeypatch.setattr(observer, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(observer, "_LONGEST_UNCHECKED", float("inf"))
    with monkeypatch.context() as days:
        days.setattr(observer, "_LONGEST_UNCHECKED", 0)
        found = watching.look(threading.Event())
        assert found.hosts[0].state == "unknown"
        assert found.hosts[0].load is not None, "it answers"
    found = watching.look(threading.Event())
    (again, _) = found.hosts
    assert (again.state, again.checked) == ("installed", first.checked)
    lines = Console(width=200)
    with lines.capture() as captured:
        show.show(found, lines)
    assert f"node1: installed: not compared since {show.moment(first.checked or 0)}: no answer within 50 s" in captured.get()
    monkeypatch.setattr(observer, "CHECK_EVERY_S", 120.0)
    watching.look(threading.Event())
    assert '"drift"' not in hosts.script("node1"), "it struggles"


def test_one_that_is_late_is_asked_for_little(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.answer("node1")
    os.mkfifo(hosts.folder / "gpu1.example")
    monkeypatch.setattr(observer, "_CHECK_S", 0.5)
    monkeypatch.setattr(observer, "_NOW_S", 0.5)
    watching = Observer(inventory.load(str(hosts)), {})
    for sections in ('"drift"', '"gpu_load"]'):
        assert [host.state for host in watching.look(threading.Event()).hosts] == ["not installed", "unknown"]
        assert sections in hosts.script("gpu1")


def test_a_host_that_lets_one_wait_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.answer("node1")
    os.mkfifo(hosts.folder / "gpu1.example")
    monkeypatch.setattr(observer, "_CHECK_S", 14.0)
    monkeypatch.setattr(status_command, "_PATIENCE_S", 10.0)
    assert end_of("status", str(hosts)) == 1
    said = capsys.readouterr()
    assert said.err == "waiting for gpu1 …\n"
    assert "gpu1: unknown: it did not answer in time" in said.out
    (hosts.folder / "gpu1.example").unlink()
    hosts.answer("gpu1")
    monkeypatch.setattr(status_command, "_PATIENCE_S", 60.0)
    assert end_of("status", str(hosts)) == 1
    assert capsys.readouterr().err == ""


def test_looking_goes_on_after_one_look_that_failed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.answer("node1")
    hosts.answer("gpu1")
    stopped, looks = threading.Event(), list[Status | None]()
    watching = Observer(inventory.load(str(hosts)), {})
    one = watching.look(stopped)

    def looked(_stopped: threading.Event) -> Status:
        looks.append(poller.latest)
        if len(looks) == 2:
            raise OSError("too many open files")
        if len(looks) == 4:
            stopped.set()
        return one

    monkeypatch.setattr(watching, "look", looked)
    poller = Poller(watching, 0.0, stopped)
    poller.start()
    assert stopped.wait(30)
    poller.check()
    assert [status and status.problem for status in looks] == [None, None, "a later look failed: too many open files", None]


def test_a_job_is_one_line_for_all_its_hosts(hosts: Hosts) -> None:
    hosts.answer("node1", activity={**ACTIVITY, "jobs": [JOB]})
    hosts.answer("gpu1", activity={**ACTIVITY, "jobs": [{**JOB, "ranks": 4, "age": 60.0}]})
    found = look(hosts)
    (job,) = found.jobs
    assert (job.ranks, job.hosts, job.program) == (12, {"node1": 8, "gpu1": 4}, "train.py")
    assert found.when - job.began == pytest.approx(7500)
    lines = Console(width=200)
    with lines.capture() as captured:
        show.show(found, lines)
    assert "train.py, 12 ranks on node1 (8), gpu1 (4), since " in captured.get()
    assert "(2 h 5 min)" in captured.get()


def test_a_job_that_has_stalled_says_since_when(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    run = "20261130-001122-abc1234"
    hosts.answer("node1", activity={**ACTIVITY, "jobs": [{**JOB, "run": run}]})
    (paths.runs() / run).mkdir(parents=True)
    stall = {"since": "2026-11-30T00:11:22Z", "seconds": None, "said": "rank 1 waits", "verdict": {}}
    for stalls, since in (([stall], 1795997482.0), ([stall, {**stall, "seconds": 7}], None), ([{"since": "x"}], None)):
        (paths.runs() / run / "stalls.json").write_text(json.dumps({"schema": 1, "stalls": stalls}))
        found = look(hosts)
        assert found.jobs[0].stalled_since == since
        show.show(found, Console(width=200))
        assert ("  stalled since " in capsys.readouterr().out) == (since is not None)


def test_a_straggler_is_shown_below_its_job_while_it_is_one(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    run = "20261130-001122-abc1234"
    hosts.answer("node1", activity={**ACTIVITY, "jobs": [{**JOB, "run": run}]})
    (paths.runs() / run).mkdir(parents=True)
    window = {"rank": 1, "signs": {"cpu": 0.4}}
    when = {"since": "2026-11-30T00:11:22Z", "seconds": None, "rank": 1, "host": "node1"}
    late = {**when, "behind": 0.4, "by": "itself", "cause": "ready", "said": "rank 1 is late", "own": window, "others": window}
    for stragglers, said in (([late, {**late, "seconds": 7, "said": "rank 2"}], ("rank 1 is late",)), ([], ())):
        (paths.runs() / run / "stalls.json").write_text(json.dumps({"schema": 1, "stalls": [], "stragglers": stragglers}))
        found = look(hosts)
        assert found.jobs[0].stragglers == said
        show.show(found, Console(width=200))
        assert ("\n  rank 1 is late\n" in capsys.readouterr().out) == bool(said)


def test_an_invalid_lock_is_named_and_hosts_are_shown(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.answer("node1")
    (hosts.folder / "provision.lock").write_text("schema: 1\ninventories: [\n")
    assert end_of("status", str(hosts)) == 1
    shown = capsys.readouterr().out
    assert "provision.lock" in shown
    assert "node1" in shown


def test_wrong_usage_is_named(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in (
        (("--json", "--watch"), "exclude each other"),
        (("--interval", "3"), "--interval needs"),
        (("--watch",), "needs a terminal"),
        (("--serve", "99999"), "65535"),
    ):
        assert end_of("status", str(hosts), *words) == 2
        assert what in capsys.readouterr().err
    assert end_of("status") == 2
    assert "name HOSTS" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- drift


def locked(plan: Plan) -> Lock:
    files = {name: {"venv": {"numpy": FILE}} for name in plan.hosts}
    return Lock.from_plan(plan, files, None, inventory.load(str(DATA / "lint.ini")))


def test_an_installed_host_is_held_against_the_lock(plan: Plan) -> None:
    host, known = plan.hosts["node1"], locked(plan)
    assert list(drift.from_lock(known, host, {"venv": {"numpy": FILE}})) == []
    (package,) = drift.from_lock(known, host, {"venv": {"numpy": {**FILE, "version": "2.1.0"}}})
    assert str(package) == f"numpy in {host.prefix}/venv is 2.1.0, provision.lock says 2.0.2"
    (missing,) = drift.from_lock(known, host, {})
    assert (missing.subject, missing.found) == (f"numpy in {host.prefix}/venv", "not installed")
    document = json.loads(json.dumps(host.as_dict()))
    document["cmake"]["version"], document["cmake"]["package"] = "3.30.0", "cmake==3.30.0"
    (component,) = drift.from_lock(known, host_plan(document), {"venv": {"numpy": FILE}})
    assert (component.kind, component.subject, component.found) == ("differs-from-lock", "CMake", "3.30.0 (wheel)")
    assert host.cmake.version in component.wanted
    document = json.loads(json.dumps(host.as_dict()))
    document["numpy"]["index"] = "https://example.org/simple"
    (hidden,) = drift.from_lock(known, host_plan(document), {"venv": {"numpy": FILE}})
    assert (hidden.kind, hidden.wanted) == ("differs-in-fields", "index")
    (stranger,) = drift.from_lock(known, host_plan({**host.as_dict(), "name": "new"}), {})
    assert str(stranger) == "provision.lock does not know this host"
    assert environments(host)["venv"] in known.environments


# ------------------------------------------------------------------------------------------ hosts that mean harm

HOSTILE: list[dict[str, Any] | str] = [
    "{half",
    "[]",
    "9" * 5000,
    '{"activity": ' + "[" * 5000 + "]" * 5000 + "}",
    {"activity": {**ACTIVITY, "load": float("nan")}},
    {"activity": {**ACTIVITY, "load": 1e300}},
    {"activity": {**ACTIVITY, "memory": {"total": 10**400, "available": 1}}},
    {"activity": {**ACTIVITY, "memory": {"total": -1, "available": 1}}},
    {"activity": {**ACTIVITY, "jobs": [JOB] * 51}},
    {"activity": {**ACTIVITY, "jobs": [{**JOB, "program": "x" * 10_000}]}},
    {"activity": {**ACTIVITY, "jobs": [{**JOB, "ranks": 0}]}},
    {"gpu_load": {"gpus": [GPU] * 65, "error": None}},
    {"gpu_load": {"gpus": [{**GPU, "utilization": 1e9}], "error": None}},
    {"gpu_load": {"gpus": [{**GPU, "name": ["a"]}], "error": None}},
    {"drift": [{"kind": "file-missing", "subject": "x" * 5000}]},
    {"drift": [{"kind": "unheard-of", "subject": "x"}]},
    {"installed": {"prefix": 7}},
]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: str(answer)[:40])
def test_an_answer_that_is_none_is_a_row(hosts: Hosts, answer: dict[str, Any] | str) -> None:
    hosts.answer("node1", answer)
    hosts.answer("gpu1")
    node, other = look(hosts).hosts
    assert node.state == "unknown"
    assert node.problem
    assert len(node.problem) < 200
    assert other.state == "not installed"


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("numpy", "version", "9.9.9"), ("python", "version", ""), ("openmpi", "url", "http://[bad"), ("numpy", "source", {"a": [1]})],
)
def test_a_manifest_that_is_none_is_a_difference_of_its_host_alone(hosts: Hosts, plan: Plan, part: str, field: str, value: Any) -> None:
    lock(hosts, plan)
    harmful = held(plan, "node1")
    harmful["manifest"]["host"][part][field] = value
    hosts.answer("node1", installed=harmful, drift=[])
    hosts.answer("gpu1", installed=held(plan, "gpu1"), drift=[])
    node, other = look(hosts).hosts
    assert (node.state, other.state) == ("drifted", "installed")
    assert list(map(str, node.drift)) == ["its manifest was written by another version or is damaged"]


def test_whatever_is_wrong_with_one_answer_the_other_hosts_are_shown(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.answer("node1")
    parse = observer._parse
    monkeypatch.setattr(observer, "_parse", lambda host, answer: parse(host, answer) if host.name == "node1" else 1 / 0)
    hosts.answer("gpu1")
    assert [host.state for host in look(hosts).hosts] == ["not installed", "unknown"]


def test_text_of_hosts_stays_text(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\ud800{{ 1 }}\nnode9: ready\u202e"
    activity = {**ACTIVITY, "jobs": [{**JOB, "program": evil, "run": evil}], "locked": {"owner": evil, "since": evil}}
    hosts.answer("node1", activity=activity, gpu_load={"gpus": [{**GPU, "name": evil}], "error": evil})
    end_of("status", str(hosts))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert not any(line.startswith("node9") for line in shown.splitlines())


def test_a_host_that_prints_without_end_is_cut_off(hosts: Hosts) -> None:
    (hosts.folder / "node1.example").unlink(missing_ok=True)
    os.symlink("/dev/zero", hosts.folder / "node1.example")
    assert look(hosts).hosts[0].state == "unknown"


def test_the_command_for_the_only_host_is_the_same_for_people_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    only = Hosts(tmp_path, "node1")
    only.answer("node1")
    assert end_of("status", str(only), "--json") == 1
    remedy = json.loads(capsys.readouterr().out)["hosts"][0]["remedy"]
    assert remedy == f"provision up {only}"
    assert end_of("status", str(only)) == 1
    assert f"→ {remedy}\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ terminal


def test_names_are_whole_in_eighty_columns(hosts: Hosts) -> None:
    names = [f"gpu-node-{number:04d}.cluster.example.org" for number in range(16)]
    hosts.answer("node1", activity={**ACTIVITY, "jobs": [JOB]}, gpu_load={"gpus": [GPU] * 8, "error": None})
    one = look(hosts).hosts[0]
    status = Status(when=0.0, seconds=1.0, inventory="hosts.ini", hosts=tuple(one.model_copy(update={"host": name}) for name in names))
    console = Console(width=80)
    with console.capture() as captured:
        show.show(status, console)
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines[1:17]] == names
    assert "on a wider terminal also: GPU GiB" in captured.get()
    with console.capture() as captured:
        console.print(show.view(status, Console(width=80, height=13)))
    assert "and 12 more: not installed" in captured.get()
    assert "→ provision up hosts.ini " in captured.get()
    assert len(captured.get().splitlines()) == 12


@pytest.mark.parametrize(("length", "gpus"), [(63, 0), (120, 0), (253, 0), (63, 8), (253, 8)])
def test_a_long_name_is_folded_and_never_cut(hosts: Hosts, length: int, gpus: int) -> None:
    hosts.answer("node1", gpu_load={"gpus": [GPU] * gpus, "error": None})
    host = look(hosts).hosts[0]
    name = f"gpu-node-0001.{'x' * (length - 18)}.org"
    status = Status(when=0.0, seconds=1.0, inventory="hosts.ini", hosts=(host.model_copy(update={"host": name, "state": "not installed"}),))
    console = Console(width=80)
    with console.capture() as captured:
        show.show(status, console)
    lines = captured.get().splitlines()
    name_width = lines[0].index("state") - 2
    folded = [line for line in lines[1:] if line.strip()]
    rows = -(-length // name_width)
    assert "".join(line[:name_width].strip() for line in folded[:rows]) == name
    assert folded[0][name_width + 2 :].startswith("not installed ")
    assert all(not line[name_width + 2 :].strip() for line in folded[1:rows])
    assert "…" not in captured.get()
    if not gpus:
        assert lines[0].split() == ["host", "state", "load", "mem", "GiB", "disk", "GiB", "ranks"]


def test_a_live_view_of_long_names_is_not_higher_than_the_terminal(hosts: Hosts) -> None:
    hosts.answer("node1")
    one = look(hosts).hosts[0]
    many = tuple(one.model_copy(update={"host": f"{'x' * 60}{number:03}"}) for number in range(20))
    for height in (10, 24, 50):
        console = Console(width=80, height=height)
        with console.capture() as captured:
            console.print(show.view(Status(when=0.0, seconds=1.0, inventory="hosts.ini", hosts=many), console))
        assert len(captured.get().splitlines()) < height


def test_gpus_have_their_hosts_name_in_eighty_columns(hosts: Hosts) -> None:
    gpus = [{**GPU, "index": index, "name": "NVIDIA RTX PRO 6000 Blackwell"} for index in range(8)]
    hosts.answer("node1", gpu_load={"gpus": gpus, "error": None})
    name = "gpu-node-0001.cluster.example.org"
    status = look(hosts)
    console = Console(width=80)
    with console.capture() as captured:
        show.show(status.model_copy(update={"hosts": (status.hosts[0].model_copy(update={"host": name}),)}), console)
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines[4:12]] == [name] * 8
    assert all(f"{index} NVIDIA RTX PRO 6000 Blackwell" in line for index, line in enumerate(lines[4:12]))
    assert "on a wider terminal also: power" in captured.get()


def test_many_hosts_are_in_a_live_view_however_much_is_wrong_with_them(hosts: Hosts) -> None:
    hosts.answer("node1")
    one = look(hosts).hosts[0]
    many = tuple(
        one.model_copy(
            update={
                "host": f"n{number}",
                "state": "drifted",
                "drift": tuple(Drift(kind="file-missing", subject=f"{number}.{of}") for of in range(5)),
            }
        )
        for number in range(16)
    )
    console = Console(width=80, height=24)
    with console.capture() as captured:
        console.print(show.view(Status(when=0.0, seconds=1.0, inventory="hosts.ini", hosts=many), console))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert [line.split()[0] for line in lines[2:10]] == [f"n{number}" for number in range(8)]
    assert lines[10:13] == ["and 8 more: drifted", "n0: drifted", "    0.0 is gone"]
    assert lines[-1] == "… provision status prints all"
    assert len(lines) == 23


def test_a_live_view_is_not_higher_than_the_terminal(hosts: Hosts) -> None:
    hosts.answer("node1")
    one = look(hosts).hosts[0]
    drift = tuple(Drift(kind="file-missing", subject=f"/opt/provision/venv/{'site-packages/' * 150}{number}") for number in range(5))
    many = [one.model_copy(update={"host": f"{letter}{number}", "drift": drift}) for letter in "abcd" for number in range(10)]
    began = {"ranks": 8, "hosts": {"a1": 8}, "began": 0.0}
    running = tuple(Job(run=f"20261126-170000-{number:06}", program="train.py " * 20, **began) for number in range(30))
    cases = ((many, running), (many[:1], running), (many, ()), (many[:1], ()))
    for (shown, jobs), width, height in product(cases, (80, 120), (10, 24, 50)):
        console = Console(width=width, height=height)
        with console.capture() as captured:
            console.print(show.view(Status(when=0.0, seconds=1.0, inventory="hosts.ini", hosts=tuple(shown), jobs=jobs), console))
        lines = captured.get().splitlines()
        assert len(lines) < height
        assert lines[0].startswith(f"{len(shown)} host")
        assert lines[2].startswith("a0 ")


@pytest.fixture
def watching(hosts: Hosts) -> Iterator[Any]:
    hosts.answer("node1")
    terminal = pexpect.spawn(
        sys.executable, ["-m", "provision", "status", str(hosts), "--watch", "--interval", "1"], timeout=60, encoding="utf-8"
    )
    yield terminal
    terminal.close(force=True)


def test_watching_refreshes_and_ends_with_ctrl_c(hosts: Hosts, watching: Any) -> None:
    watching.expect("node1 +.*not installed")
    hosts.answer("gpu1")
    watching.expect("2 not installed")
    watching.sendintr()
    watching.expect(pexpect.EOF)
    assert "Traceback" not in watching.before
    watching.wait()
    assert watching.exitstatus == 0


# ------------------------------------------------------------------------------------------- the script on hosts


def process(root: Path, pid: int, started: int, *words: str, state: str = "S", **environment: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    fields = [state, "1", *["0"] * 17, str(started), "0"]
    (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
    (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in environment.items()))
    (folder / "cmdline").write_text("".join(f"{word}\0" for word in words))


def test_ranks_are_counted_once_and_named_without_arguments(tmp_path: Path) -> None:
    run, ticks = "20261126-170000-abc123", os.sysconf("SC_CLK_TCK")
    there = machine(tmp_path, {"/proc/uptime": "1000.0 1.0\n"})
    python = "/opt/provision/venv/bin/python3.11"
    for rank in (0, 1):
        process(
            tmp_path,
            10 + rank,
            900 * ticks,
            python,
            "-u",
            "-X",
            "dev",
            "/home/a/train.py",
            "--key=secret",
            PROVISION_RUN_ID=run,
            PROVISION_RANK=str(rank),
        )
        process(tmp_path, 20 + rank, 950 * ticks, "/usr/bin/worker", PROVISION_RUN_ID=run, PROVISION_RANK=str(rank))  # it started this
    process(tmp_path, 30, 800 * ticks, python, "guard.py", PROVISION_RUN_ID=run)
    process(tmp_path, 31, 800 * ticks, "bash", HOME="/root")
    process(tmp_path, 32, 100 * ticks, "dead", state="Z", PROVISION_RUN_ID=run, PROVISION_RANK="2")
    process(tmp_path, 33, 100 * ticks, "odd", PROVISION_RUN_ID="x", PROVISION_RANK="many")
    assert survey.jobs(there) == [{"run": run, "ranks": 2, "age": 100.0, "program": "train.py"}]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3", "train.py"], "train.py"),
        (["python", "-m", "package.train", "--x"], "package.train"),
        (["python3.11", "-c", "secret = 1"], "python3.11"),
        (["python3.11", "-W", "ignore", "-O"], "python3.11"),
        (["/opt/a.out", "--token=1"], "a.out"),
        ([], ""),
    ],
)
def test_a_program_is_named(words: list[str], name: str) -> None:
    assert survey.program_name(words) == name


# As drivers 550 (wilicc/gpu-burn#114, its figures) and 470 print it, a GB10, and what is printed of a GPU that is lost.
NVIDIA_SMI = """\
0, GPU-1, NVIDIA H100 80GB HBM3, 4, 72790, 81559, 39, 145.30
1, GPU-2, NVIDIA GB10, 0, [N/A], [N/A], 48, [Not Supported]
Unable to determine the device handle for GPU0000:01:00.0: GPU has fallen off the bus.
"""


def test_what_a_gpu_does_not_measure_is_not_zero() -> None:
    first, second = survey.read_gpu_load(NVIDIA_SMI)
    assert (first["utilization"], first["memory_used"], first["power"]) == (4.0, 72790 << 20, 145.3)
    assert (second["utilization"], second["memory_used"], second["memory_total"], second["power"]) == (0.0, None, None, None)


def test_a_real_look_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself, with a fake nvidia-smi that loses a GPU; the survey runs none of these sections."""
    fake = tmp_path / "bin/nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\ncat <<'end'\n{NVIDIA_SMI}end\nexit 15\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    file = tmp_path / "hosts.ini"
    file.write_text(f"here ansible_connection=local provision_prefix={tmp_path}/prefix ansible_python_interpreter={sys.executable}\n")
    (host,) = Observer(inventory.load(str(file)), {}).look(threading.Event()).hosts
    assert host.state == "not installed"
    assert host.problem is not None
    assert "fallen off the bus" in host.problem
    assert [gpu.name for gpu in host.gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA GB10"]
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.disk is not None
    assert host.disk.total > 0
    assert "activity" not in survey.survey(machine(tmp_path / "empty"))
