"""What a user sees while something runs: one plain line per event, and the line that says most of an error."""

from __future__ import annotations

import io

import pytest

from provision.base.terminal import Console
from provision.remote.ansible import Event, Kind
from provision.remote.progress import LiveProgress, Progress


def shown(*events: Event, live: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=live, no_color=True, soft_wrap=True)
    progress = LiveProgress(console) if live else Progress(console)
    with progress:
        progress.stage("Install", ["a", "b"])
        for event in events:
            progress.event(event)
    return stream.getvalue()


def event(kind: Kind, seconds: float = 0.0, **result: object) -> Event:
    return Event(kind, "a", "openmpi", "Install Open MPI", result, seconds)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (event("ok"), "a: openmpi: Install Open MPI: ok"),
        (event("changed", 3.24), "a: openmpi: Install Open MPI: changed (3.2 s)"),
        (
            event("failed", msg="pip could not install it:\nERROR: no matching distribution\nhint: see above"),
            "FAILED: ERROR: no matching distribution",
        ),
        (event("unreachable", msg="Failed to connect\nConnection timed out"), "UNREACHABLE: Connection timed out"),
        (event("waiting", stdout="apt-get (pid 7)\n"), "waiting: the package manager is held by apt-get (pid 7)"),
    ],
)
def test_one_line_per_event(given: Event, line: str) -> None:
    assert line in shown(given)


@pytest.mark.parametrize("kind", ["ok", "changed"])
def test_what_a_role_reports_is_shown_and_what_modules_say_of_themselves_is_not(kind: Kind) -> None:
    said = Event(kind, "a", "driver", "Report packages", {"msg": "would install x,\ny"}, action="ansible.builtin.debug")
    assert f"a: driver: Report packages: {kind}: would install x, y" in shown(said, live=True)
    said = Event(kind, "a", "", "Check", {"msg": "All assertions passed"}, action="ansible.builtin.assert")
    assert "All assertions passed" not in shown(said) + shown(said, live=True)


def test_nothing_for_what_is_skipped_and_one_line_for_a_long_wait() -> None:
    wait = event("waiting", stdout="apt-get (pid 7)\n")
    lines = shown(event("skipped"), event("started"), wait, wait, wait).splitlines()
    assert len([line for line in lines if line.startswith("a:")]) == 1


def test_live_keeps_what_changed_and_drops_what_did_not() -> None:
    text = shown(event("ok"), event("changed"), live=True)
    assert "Install Open MPI: changed" in text
    assert "Install Open MPI: ok" not in text
