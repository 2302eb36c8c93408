"""How long a run will take, from the timelines of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provision.remote import timeline
from provision.remote.forecast import Forecast, forecast

STAGES = {"survey", "install"}


@pytest.fixture
def runs(tmp_path: Path):
    """Adds a run: ``add(seconds of the step openmpi, …)``."""

    def add(
        seconds: float, state: str = "changed", *, inventory: str = "hosts.ini", host: str = "a", steps: list[str] | None = None
    ) -> Path:
        folder = tmp_path / f"2026112{len(list(tmp_path.iterdir()))}-120000-abc"
        folder.mkdir()
        taken = [{"stage": "survey", "host": host, "step": "survey", "began": 0, "seconds": 2, "state": "ok"}]
        for step in steps or ["openmpi"]:
            taken.append({"stage": "install", "host": host, "step": step, "began": 5, "seconds": seconds, "state": state})
        (folder / timeline.NAME).write_text(json.dumps({"schema": 1, "inventory": inventory, "steps": taken}))
        return folder

    add.folder = tmp_path
    return add


def expected(runs, installs_much: bool = True, stages: set[str] = STAGES, hosts: tuple[str, ...] = ("a",), **more: Path) -> Forecast | None:
    return forecast(runs.folder, "hosts.ini", hosts, stages, installs_much=installs_much, **more)


def test_it_is_the_median_of_the_newest_runs_that_did_the_same(runs) -> None:
    for seconds in (1000, 40, 10, 20, 30, 60):
        runs(seconds)
    runs(1, "ok")  # a second run, which found everything installed
    runs(1, "failed")
    found = expected(runs)
    assert found is not None
    assert (found.runs, found.seconds) == (5, 35)
    assert found.of("install") == {("a", "openmpi"): 30}
    again = expected(runs, installs_much=False)
    assert again is not None
    assert again.seconds == 6


def test_runs_of_other_hosts_or_with_other_stages_tell_nothing_nor_does_the_run_itself(runs) -> None:
    runs(10, inventory="other.ini", host="b")
    assert expected(runs) is None
    own = runs(10)
    assert expected(runs, own=own) is None
    assert expected(runs, stages={*STAGES, "training"}) is None
    assert expected(runs, installs_much=False) is None
    (own / timeline.NAME).write_text("{}")
    assert expected(runs) is None


def test_the_same_hosts_under_another_name_count_and_a_new_host_takes_what_others_took(runs) -> None:
    runs(10, inventory="a,")
    assert expected(runs) is not None
    runs(20)
    found = expected(runs, hosts=("a", "c"))
    assert found is not None
    assert found.of("install") == {("a", "openmpi"): 20, ("c", "openmpi"): 20}
