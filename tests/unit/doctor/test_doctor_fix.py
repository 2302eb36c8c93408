"""The results of `doctor --fix`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from provision.base import resources
from provision.diagnosis.signatures import all_signatures
from provision.doctor.fixes import FixResult, results_on
from provision.remote import ansible
from provision.remote.ansible import Event


def test_every_file_of_tasks_belongs_to_an_entry() -> None:
    files = {path.stem for path in (resources.folder("playbooks") / "fix").glob("*.yml")}
    assert files == {name for name, entry in all_signatures().items() if entry.fixed_by in ("root", "user")}


def test_a_fix_that_fails_does_not_prevent_the_others(tmp_path: Path) -> None:
    """Under the real Ansible: the second of three fails."""
    source = resources.folder("playbooks")
    (tmp_path / "fix").mkdir()
    for name in ("fix.yml", "fix_one.yml"):
        (tmp_path / name).write_text((source / name).read_text())
    for name, command in (("one", "true"), ("two", "echo broken >&2; false"), ("three", f"touch {tmp_path}/reached")):
        (tmp_path / "fix" / f"{name}.yml").write_text(json.dumps([{"name": "Do it", "ansible.builtin.shell": {"cmd": command}}]))
    (tmp_path / "hosts").write_text("here ansible_connection=local\n")
    events: list[Event] = []
    names = ["one", "two", "three"]
    extra = {
        "provision_privileged": [],
        "provision_interpreters": {"here": sys.executable},
        "provision_fix": {"here": {"ids": names}},
    }
    play = ansible.Play(tmp_path / "fix.yml", extra_vars=extra)
    ansible.run(play, str(tmp_path / "hosts"), workdir=tmp_path / "work", run_id="x", on_event=events.append)
    assert (tmp_path / "reached").exists()
    assert results_on("here", names, events) == [
        FixResult("here", "one", "done"),
        FixResult("here", "two", "failed", "broken\nnon-zero return code"),
        FixResult("here", "three", "done"),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "why"), [("unreachable", "the connection ended"), ("failed", "no room")])
def test_a_fix_that_never_started_is_not_tried(kind: str, why: str) -> None:
    def event(kind: str, name: str, text: str = "") -> Event:
        return Event(kind, "a", "", "t", {"msg": text}, path=f"/p/fix/{name}.yml:2")  # type: ignore[arg-type]

    events = [event("started", "one"), event("changed", "one"), event("started", "two"), event(kind, "two", why)]
    assert results_on("a", ["one", "two", "three"], events) == [
        FixResult("a", "one", "done"), FixResult("a", "two", "failed", why), FixResult("a", "three", "not tried", why)
    ]  # fmt: skip
