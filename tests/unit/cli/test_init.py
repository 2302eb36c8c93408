"""`provision init`: what it asks, and the inventory that it writes, which the other commands read. The hosts' answers are invented."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from provision import inventory
from provision.base import terminal
from provision.base.problems import Problem
from provision.cli import main
from provision.survey import collect


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["init", *words], prog_name="provision"), debug=False)


def found(monkeypatch: pytest.MonkeyPatch, *problems: Problem) -> None:
    monkeypatch.setattr(collect, "survey_hosts", lambda *_, **__: collect.Survey({}, list(problems)))


def test_what_is_asked_becomes_an_inventory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["10.0.0.1, root@10.0.0.2:2222 node[1:2] fe80::1", "admin"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(terminal, "ask", lambda *_, **__: next(answers))
    found(monkeypatch)
    assert init() == 0
    assert capsys.readouterr().out == "hosts.ini: 5 hosts\nNext: provision up hosts.ini\n"
    read = inventory.load("hosts.ini").hosts
    assert [(host.name, host.user, host.port) for host in read] == [
        ("10.0.0.1", "admin", None),
        ("10.0.0.2", "root", 2222),
        ("node1", "admin", None),
        ("node2", "admin", None),
        ("fe80::1", "admin", None),
    ]


def test_hosts_that_cannot_be_used_are_named_and_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, Problem("error", "sudo asks for a password", "use -K", host="b", id="sudo-password"))
    assert init("a", "b", "-o", "two.ini") == 1
    what = "b: error: sudo asks for a password\n  → use -K\n"
    assert capsys.readouterr().out == f"{what}two.ini: 2 hosts, of which b cannot be used yet\nNext: provision survey two.ini\n"
    assert Path("two.ini").read_text() == "[hosts]\na\nb\n"
    assert init("CORP\\ann@h1", "-o", "windows.ini") == 1
    assert inventory.load("windows.ini").hosts[0].user == "CORP\\ann"


def test_this_machine_is_a_host_without_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    assert init("localhost") == 0
    assert inventory.load("hosts.ini").hosts[0].connection == "local"


def test_nothing_is_overwritten_and_no_wrong_host_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(collect, "survey_hosts", lambda *_, **__: pytest.fail("it was surveyed"))
    Path("hosts.ini").write_text("mine\n")
    assert init("a") == 2
    assert "hosts.ini is there already\n  → use it: provision hosts.ini, or write another: -o FILE" in capsys.readouterr().err
    assert Path("hosts.ini").read_text() == "mine\n"
    assert init("hosts.ini", "-o", "x.ini") == 2
    assert init("a;b", "-o", "x.ini") == 2
    assert not Path("x.ini").exists()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert init("-o", "x.ini") == 2
    assert "no terminal to ask for the hosts on" in capsys.readouterr().err
