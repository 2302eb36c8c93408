"""Steps that run on the hosts themselves. Here hosts are folders of this machine, behind an ssh that is a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed, stated
from rollouts import rollout

from provision import inventory
from provision.base import resources
from provision.install import installer, on_host
from provision.plan.requirements import Requirements
from provision.remote import ansible, ssh
from provision.remote.ansible import Event, Outcome, Play
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.resolve import resolve

script_of = resources.script
KEY = "ssh-ed25519 " + "A" * 68
EXCHANGE = "cd {{ provision_told | quote }} && echo " + KEY + "{{ inventory_hostname }} >said && cat told"


def run(tmp_path: Path, tasks: list[dict[str, Any]], hosts: Sequence[str] = "ab", **python: str) -> tuple[Outcome, list[Event]]:
    """Run tasks on hosts whose home is ``tmp_path``; ``python``: of a host, else ours."""
    book = tmp_path / "book"
    installer.copy_modules(book, "roles")
    (book / "supplies").mkdir()
    (book / "supplies/uv").write_text("the new one")
    shell = tmp_path / "ssh"
    shell.write_text(f'#!/bin/sh\nfor command; do :; done\nexport HOME={tmp_path}\nexec sh -c "$command"\n')
    shell.chmod(0o755)
    lines = [f"{name} ansible_host=192.0.2.{at} ansible_ssh_executable={shell}" for at, name in enumerate(hosts, 1)]
    (tmp_path / "hosts.ini").write_text("\n".join(lines) + "\n")
    play = {"name": "Test", "hosts": "all", "gather_facts": False, "vars": {"ansible_python_interpreter": sys.executable}, "tasks": tasks}
    (book / "site.yml").write_text(json.dumps([play]))
    shares: dict[str, Any] = {"folder": "", "build_of": {}, "builds": {}}
    variables = {"provision_plan": {"hosts": {}}, "provision_engine_builds": shares, "provision_from_source": {}}
    events: list[Event] = []
    with Session(inventory.load(str(tmp_path / "hosts.ini")), Progress()) as session:
        given = {**variables, "where": str(tmp_path), "uv": str(book / "supplies/uv")}
        way = on_host.OnHosts(session, {name: python.get(name, sys.executable) for name in hosts}, book)
        outcome = session.play(Play(book / "site.yml", hosts, given), "Test", on_event=events.append, run=way)
    assert not [path for path in Path("/tmp").glob("provision-job-*") if session.run_id in path.name]
    return outcome, events


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))


def test_each_host_runs_its_steps_gets_files_and_hears_the_others(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "Copy", "ansible.builtin.copy": {"src": "{{ uv }}", "dest": "{{ where }}/uv-{{ inventory_hostname }}", "mode": "0644"}},
        {"name": "Hear", "ansible.builtin.shell": EXCHANGE},
        {"name": "Fail", "ansible.builtin.command": "false", "when": "inventory_hostname == 'b'"},
    ]
    (tmp_path / "uv-a").write_text("the new one")
    outcome, events = run(tmp_path, tasks)
    assert outcome.failed == ["b"], [event.text for event in events]
    assert [(tmp_path / f"uv-{name}").read_text() for name in "ab"] == ["the new one"] * 2
    ended = {(event.host, event.task): event for event in events if event.kind in ("ok", "changed", "failed")}
    assert [ended[name, "Copy"].kind for name in "ab"] == ["ok", "changed"]
    assert set(json.loads(ended["a", "Hear"].result["stdout"])) == {"a", "b"}
    assert [event.host for event in ansible.recorded(outcome.log.parents[2], "a")] == ["a"] * 6


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such thing >&2; exit 3", "no such thing"),
        ("cat >/dev/null & exec sleep 600", "nothing has come for 3 s"),
        (f"while :; do echo '{ssh.ANSWER} {{}} {'x' * 60_000}'; done", "it sent "),
        (f"echo '{ssh.ANSWER} [1]'; exec sleep 600", "it sent what is not an event of Ansible's"),
        (
            f"""echo '{ssh.ANSWER} {{"event": {{"event": "x", "event_data": {{"duration": 1{"0" * 400}}}}}}}'; exec sleep 600""",
            "it sent what",
        ),
        ("while :; do echo; done", "it sent too much"),
        pytest.param(f"""echo '{ssh.ANSWER} {{"want": 7}}'; exec sleep 600""", "it sent what is not an event", marks=pytest.mark.slow),
        pytest.param(
            f"""echo '{ssh.ANSWER} {{"event": {{"event": "runner_on_ok", "event_data": 5}}}}'; exec sleep 600""",
            "it sent what is not an event",
            marks=pytest.mark.slow,
        ),
        pytest.param("exit 255", "exit code 255", marks=pytest.mark.slow),
        (
            f"""echo '{ssh.ANSWER} {{"event": {{"event": "runner_on_start", "event_data": {{"role": "x", "task": "Unpack"}}}}}}'; exit 3""",
            "exit code 3",
        ),
    ],
)
def test_a_host_that_does_something_else_is_given_up_and_the_others_go_on(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_silent := "nothing" in why:
        monkeypatch.setattr(on_host, "SILENT_S", 3.0)
    monkeypatch.setattr(on_host, "_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(resources, "script", lambda name: script_of(name).replace("ALIVE_S = 10.0", "ALIVE_S = 0.3"))
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    outcome, _ = run(
        tmp_path, [{"name": "Hear", "ansible.builtin.shell": EXCHANGE}], hosts="b" if is_silent else "ab", b=str(tmp_path / "python")
    )
    assert outcome.failed == ["b"]
    failure = outcome.hosts["b"].failure
    assert failure is not None
    assert failure.text.startswith(why)
    assert failure.task == ("Unpack" if "Unpack" in script else "Run the steps"), "not where it stood"
    assert failure.kind == ("unreachable" if "255" in script else "failed")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"check": True}, "a dry run changes nothing"),
        ({"python": "3.9.2"}, "no Python on 1 host can run Ansible"),
        ({"lines": "ansible_become_method=su"}, "or the inventory or the user's settings say"),
        ({"lines": "ansible_connection=local"}, "a host is this machine"),
        ({"settings": "ANSIBLE_REMOTE_TMP"}, "or the inventory or the user's settings say"),
        ({"root": False}, "without root the lock is in the home"),
        ({"engine": ""}, "what one host builds for others"),
    ],
)
def test_why_a_playbook_runs_from_here_is_one_sentence(
    changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"check": False, "python": "3.14.0", "lines": "", "settings": "UNUSED", "root": True, "engine": "a" * 64, **changes}
    lines, python, engine, check, root = (case[key] for key in ("lines", "python", "engine", "check", "root"))
    monkeypatch.setenv(case["settings"], "/elsewhere")
    (tmp_path / "hosts.ini").write_text(f"a ansible_host=192.0.2.1 {lines}\nb ansible_host=192.0.2.2\n")
    sections = {"python": {"executable": "/usr/bin/python3", "version": "3.14.0"}, "user": {"name": "ann", "can_become": root}}
    facts = {name: stated(sections) for name in "ab"}
    facts["a"] = changed(facts["a"], {"python": {"executable": "/usr/bin/python3", "version": python}})
    found = rollout(resolve(facts, Requirements(), {}), inventory.load(str(tmp_path / "hosts.ini")), facts)
    builds = {"builds": {"key": {"hosts": ["a", "b"], "sha256": engine}}}
    variables = {"provision_from_source": {}, "provision_engine_builds": builds, "provision_nccl_local": "", "provision_torch_wheels": {}}
    said = on_host.why_not(found, variables, check=check)
    assert (why in said) if why else (said == "")


@pytest.mark.parametrize(
    ("sound", "fails", "small", "pushed", "whole"),
    [
        ("", "", False, "abc", True),
        ("a", "", False, "bc", True),
        ("abc", "", False, "", True),
        ("ab", "", False, "", False),  # one host: it is sent them from here
        ("", "b", False, "ac", False),  # another controller is at work there
        ("", "", True, "", False),
    ],
)
def test_hosts_that_lack_files_of_a_bundle_take_them_from_another(
    sound: str, fails: str, small: bool, pushed: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell := tmp_path / "ssh").write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    shell.chmod(0o755)
    lines = [f"{name} ansible_host=192.0.2.{at} ansible_ssh_executable={shell}" for at, name in enumerate("abc", 1)]
    (tmp_path / "hosts.ini").write_text("\n".join(lines) + "\n")
    facts = {name: stated({"user": {"name": "ann", "can_become": True}}) for name in "abc"}
    listed = inventory.load(str(tmp_path / "hosts.ini"))
    plan = resolve(facts, Requirements(), {})
    hosts = {name: replace(host, prefix=str(tmp_path / name), interpreter=sys.executable) for name, host in plan.hosts.items()}
    for name in hosts:
        (there := tmp_path / name / "bundle").mkdir(parents=True)
        (there / "one.whl").write_text("")
        files = ["one.whl"] if name in sound else ["one.whl", "lost.whl"]
        (there / ".provision-archive.json").write_text(json.dumps({"key": "f" * 64, "files": files}))
    (archive := tmp_path / "bundle-0.tar").write_bytes(b"x" * 100)
    monkeypatch.setattr(installer, "MAX_NEIGHBOURS", 100 if small else 99)
    failed = ansible.HostResult(failure=Event("failed", fails, "guard", "Acquire the host lock"))
    monkeypatch.setattr(Session, "play", lambda *_, **__: Outcome(2, dict.fromkeys(fails, failed), tmp_path, False))
    monkeypatch.setattr(installer, "hand_on", lambda _session, _file, _key, names: dict.fromkeys(names if len(names) > 1 else (), "there"))
    variables = {"provision_bundle": {"archives": {name: {"archive": str(archive), "sha256": "f" * 64} for name in hosts}}}
    with Session(listed, Progress()) as session:
        made = rollout(replace(plan, hosts=hosts), listed, facts)
        found = installer._pushed(session, made, Play(tmp_path / "connect.yml", [*hosts], variables), ansible.run)
    assert found == (dict.fromkeys(pushed, "there"), whole)
