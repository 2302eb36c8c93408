"""How long a run will take, from the timelines of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from provision.remote import timeline
from provision.remote.forecast import Forecast, forecast
from provision.remote.timeline import NewHosts

STAGES = {"survey", "install"}


@pytest.fixture
def runs(tmp_path: Path):
    """Adds a run: ``add(seconds of the step openmpi, …)``."""

    def add(seconds: float, state: str = "changed", *, new: NewHosts | None = "all", hosts: Sequence[str] = ("a",)) -> Path:
        folder = tmp_path / f"2026112{len(list(tmp_path.iterdir()))}-120000-abc"
        folder.mkdir()
        taken = [{"stage": "survey", "host": host, "step": "survey", "began": 0, "seconds": 2, "state": "ok"} for host in hosts]
        for host in hosts:
            taken.append({"stage": "install", "host": host, "step": "openmpi", "began": 5, "seconds": seconds, "state": state})
        (folder / timeline.NAME).write_text(json.dumps({"schema": 1, "new_hosts": new, "steps": taken}))
        return folder

    add.folder = tmp_path
    return add


def expected(
    runs, new: NewHosts | None = "all", stages: set[str] = STAGES, hosts: Sequence[str] = ("a",), own: Path | None = None
) -> Forecast | None:
    return forecast(runs.folder, hosts, stages, new, own)


def test_it_is_the_median_of_the_newest_runs_that_did_the_same(runs) -> None:
    for seconds in (1000, 40, 10, 20, 30, 60):
        runs(seconds)
    runs(1, "ok", new="none")  # a second run, which found everything installed
    runs(1, "failed")
    found = expected(runs)
    assert found is not None
    assert (found.runs, found.seconds) == (5, 35)
    assert found.of("install") == {("a", "openmpi"): 30}
    again = expected(runs, "none")
    assert again is not None
    assert again.seconds == 6


def test_runs_of_other_hosts_or_with_other_stages_tell_nothing_nor_does_the_run_itself(runs) -> None:
    runs(10, hosts="b")
    assert expected(runs) is None
    own = runs(10)
    assert expected(runs, own=own) is None
    assert expected(runs, stages={*STAGES, "training"}) is None
    assert expected(runs, "none") is None
    (own / timeline.NAME).write_text("{}")
    assert expected(runs) is None


def test_some_of_the_hosts_tell_nothing_of_all_of_them(runs) -> None:
    runs(600, hosts="abc", new="none")
    runs(50, hosts="a", new="none")  # --limit a
    runs(50, hosts="a", new="none")
    found = expected(runs, "none", hosts="abc")
    assert found is not None
    assert (found.runs, found.seconds) == (1, 605)


def test_a_run_that_installed_one_more_host_is_not_like_one_with_nothing_to_install(runs) -> None:
    runs(25, "ok", hosts="abc", new="none")
    runs(600, "ok", hosts="abc", new="some")  # few steps of all hosts changed something
    found = expected(runs, "none", hosts="abc")
    assert found is not None
    assert found.seconds == 30
    recorder = timeline.Recorder(runs.folder)
    for new, kind in (([], "none"), (["c"], "some"), (["a", "b", "c"], "all")):
        recorder.installs_on("abc", new)
        assert recorder.new_hosts == kind
