"""Hosts that run something else than our script: a forced command, a menu instead of a shell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from invented_hosts import stated

from provision import facts
from provision.doctor.checks import examine
from provision.install import removal
from provision.inventory import Host, Inventory
from provision.remote.ansible import Event
from provision.remote.session import Session
from provision.survey import collect
from provision.survey.collect import Survey

NOTHING = '{"nothing": true, "removed": [], "left": [], "error": null}'
MENU = "welcome\nthis login is for backups: No space left on device"


def session_in_which(*answers: str) -> Session:
    """One in whose playbooks the host ``a`` prints this, a task each."""

    def play(*_: Any, on_event: Any, **__: Any) -> None:
        for number, said in enumerate(answers):
            on_event(Event("ok", "a", "", f"task {number}", {"stdout": said}))

    ignore = SimpleNamespace(event=lambda _: None)
    inventory = Inventory("a", None, "a,", [Host("a", "a")])
    made = SimpleNamespace(passwords={}, inventory=inventory, play=play, progress=ignore, write=lambda *_: None, of_locks={})
    return cast(Session, made)


def test_the_survey_quotes_the_host_and_the_doctor_explains_it() -> None:
    found = collect.survey_hosts(session_in_which(MENU, "0"))
    assert [problem.what for problem in found.problems] == [f"the survey did not run; the host said: {MENU.splitlines()[-1]}"]
    assert [each.id for each in examine({}, found.problems)] == ["disk-full"]


def test_a_removal_that_ran_half_has_failed() -> None:
    half = f"{removal.BEGIN}\n{NOTHING}\n{facts.END}\n"
    found = removal.remove(session_in_which(MENU, half), Survey(hosts={"a": stated({})}), dry_run=False)
    assert [(one.state, one.error) for one in found] == [("failed", f"the removal did not run; the host said: {MENU.splitlines()[-1]}")]
