"""What a user sees while something runs: one plain line per event, and the line that says most of an error."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from provision.base.terminal import Console, RenderableType
from provision.remote.ansible import Event, Kind
from provision.remote.progress import NAME, LiveProgress, Progress, make
from provision.remote.stage import Series
from provision.remote.stage_view import TrainingProgress


def shown(*events: Event, live: bool = False, folder: Path | None = None) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=live, no_color=True, soft_wrap=True)
    progress = LiveProgress(console) if live else Progress(console)
    if folder is not None:
        progress.keep(folder)
    with progress:
        progress.stage("Install", ["a", "b"], steps=["guard", "openmpi", "engine"])
        for event in events:
            progress.event(event)
    return stream.getvalue()


def event(kind: Kind, seconds: float = 0.0, role: str = "openmpi", path: str = "", **result: object) -> Event:
    return Event(kind, "a", role, "Install Open MPI", result, seconds, path)


FAILED = event("failed", msg="pip could not install it:\nERROR: no matching distribution\nhint: see above")
HELD = event("waiting", stdout="apt-get (pid 7)\n")
BUILD = event("waiting", path="/run/roles/from_source/tasks/build.yml:45", stdout="4 of 9 files\n")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (event("ok"), "a: openmpi: Install Open MPI: ok"),
        (event("changed", 3.24), "a: openmpi: Install Open MPI: changed (3.2 s)"),
        (FAILED, "a: openmpi: Install Open MPI: FAILED: ERROR: no matching distribution"),
        (event("unreachable", msg="Failed to connect\nConnection timed out"), "UNREACHABLE: Connection timed out"),
        (HELD, "waiting: the package manager is held by apt-get (pid 7)"),
        (BUILD, "a: openmpi: Install Open MPI: running in the background"),
    ],
)
def test_the_log_has_every_task(given: Event, line: str, tmp_path: Path) -> None:
    shown(given, folder=tmp_path)
    assert line in (tmp_path / NAME).read_text()


def test_what_changed_on_many_hosts_is_a_line_and_of_many_failures_the_first_are_shown() -> None:
    stream, names = io.StringIO(), [f"node{number}" for number in range(1, 31)]
    with Progress(Console(file=stream, width=200, no_color=True, soft_wrap=True)) as progress:
        progress.stage("Install", names, steps=["openmpi", "engine"])
        for kind in ("changed", "failed"):
            for name in names:
                progress.event(Event(kind, name, "openmpi" if kind == "changed" else "engine", "Do it", {"msg": "no"}))  # type: ignore[arg-type]
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "changed" in line] == ["node[1-30]: openmpi: changed (0 s)"]
    assert len([line for line in lines if "FAILED" in line]) == 5


def test_a_clock_goes_on_until_a_program_prints() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, no_color=True, soft_wrap=True)
    with LiveProgress(console) as progress:
        progress.stage("Run on 2 hosts, 4 ranks")
        assert shown_by_console(progress.view()).strip() == "0:00"
        progress.starting(1, 4)
        assert shown_by_console(progress.view()).strip() == "0:00  1 of 4 ranks started"
        progress.output("stderr", "[0] ", "first\n", "cyan")
    assert "0:0" not in stream.getvalue().partition("first")[2]


def test_ranks_that_are_late_are_counted_in_plain_lines() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=200)) as progress:
        progress.stage("Run on 2 hosts, 4 ranks")
        progress.starting(2, 4)
        progress.starting(4, 4)
    assert stream.getvalue().splitlines()[1:] == ["2 of 4 ranks started (0 s)"]


def test_plain_lines_are_one_for_each_step_that_changed_something() -> None:
    tasks = [event("started"), event("changed"), event("started"), event("changed"), event("ok")]
    others = [event("started", role="engine"), event("ok", role="engine"), event("started", role="")]
    assert shown(*tasks, *others).splitlines() == ["== Install (2 hosts)", "a: openmpi: changed (0 s)"]
    assert shown(event("changed")).splitlines()[1:] == ["a: openmpi: changed (0 s)"], "the last step, too"


def test_failures_and_waits_are_shown_at_once_and_a_wait_only_once() -> None:
    lines = shown(event("skipped"), event("started"), HELD, HELD, HELD, FAILED).splitlines()
    assert lines[1:] == [
        "a: Install Open MPI: waiting: the package manager is held by apt-get (pid 7)",
        "a: openmpi: Install Open MPI: FAILED: ERROR: no matching distribution",
    ]


def test_it_is_said_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provision.remote.progress._WAITS_S", 0.0)
    stream = io.StringIO()
    with Progress(Console(file=stream, width=200)) as progress:
        progress.waiting()
        progress.stage("Install", ["a", "b"])
        progress.waiting()
        progress.event(event("started"))
        progress.waiting()
        monkeypatch.setattr("provision.remote.progress._WAITS_S", 60.0)
        progress.event(BUILD)
        progress.waiting()
        progress.event(event("ok"))
        progress.waiting()
    assert stream.getvalue().splitlines() == [
        "== Install (2 hosts)",
        "waiting for a: Install Open MPI (0 s)",
        "waiting for a: Install Open MPI, 4 of 9 files (0 s)",
    ]


@pytest.mark.parametrize("kind", ["failed", "unreachable"])
def test_a_step_that_changed_something_and_failed_is_not_said_to_have_changed_it(kind: Kind) -> None:
    lines = shown(event("changed"), event(kind, msg="no space left"), event("changed", role="")).splitlines()
    assert lines[1:] == [f"a: openmpi: Install Open MPI: {kind.upper()}: no space left"]


@pytest.mark.parametrize("kind", ["ok", "changed"])
def test_what_a_role_reports_is_shown_and_what_modules_say_of_themselves_is_not(kind: Kind) -> None:
    said = Event(kind, "a", "driver", "Report packages", {"msg": "would install x,\ny"}, action="ansible.builtin.debug")
    assert f"a: driver: Report packages: {kind}: would install x, y" in shown(said, live=True)
    said = Event(kind, "a", "", "Check", {"msg": "All assertions passed"}, action="ansible.builtin.assert")
    assert "All assertions passed" not in shown(said) + shown(said, live=True)


def test_a_live_view_leaves_one_line_behind() -> None:
    text = shown(event("ok"), event("changed"), live=True)
    assert "Install  2 hosts  0 s  1 changed" in text.splitlines()[-1]
    assert "Install Open MPI" not in text, "that is in the log"
    assert "Install  2 hosts  0 s  failed: a" in shown(FAILED, live=True).splitlines()[-1]


def test_plain_training_is_a_line_per_epoch() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=200)) as progress:
        progress.stage("Train on 2 hosts, 4 ranks")
        for part, accuracy in ((0.1, None), (0.5, 91.0), (0.6, None), (1.0, 95.5)):
            progress.training(TrainingProgress(epoch=1 + (part > 0.5), epochs=2, part=part, loss=0.5, accuracy=accuracy))
    assert stream.getvalue().splitlines() == [
        "== Train on 2 hosts, 4 ranks",
        "    epoch 1 of 2: loss 0.5000, test accuracy 91.00 %",
        "    epoch 2 of 2: loss 0.5000, test accuracy 95.50 %",
    ]


@pytest.mark.parametrize("live", [False, True])
def test_the_parts_of_a_series_are_counted(live: bool, tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=live, no_color=True, soft_wrap=True)
    progress = LiveProgress(console) if live else Progress(console)
    progress.keep(tmp_path)
    views = []
    with progress, progress.series("Measure", 2):
        for part in ("node1 and node2", "training steps of 2 ranks on 2 hosts"):
            progress.stage(part)
            if isinstance(progress, LiveProgress):
                views.append(shown_by_console(progress.view()))
    lines = [line[9:] for line in (tmp_path / NAME).read_text().splitlines()]
    assert lines[0] == "== 1 of 2: node1 and node2"
    assert re.fullmatch(r"== 2 of 2, about \d+ s left: training steps of 2 ranks on 2 hosts", lines[1])
    if not live:
        assert stream.getvalue().splitlines() == lines
        return
    assert re.search(r"Measure  2 of 2  \d s", stream.getvalue().splitlines()[-1])
    assert [view.split("\n")[1].strip() for view in views] == [line.partition(": ")[2] for line in lines]
    assert views[0].startswith("Measure  1/2  ")
    assert "left" not in views[0]
    assert re.match(r"Measure  2/2  ━+ +\d:\d\d  about \d+ s left", views[1])


def test_the_end_of_a_series_is_told_from_the_pace_of_its_finished_parts() -> None:
    series = Series("Measure", 4, 100.0)
    series.next_part(100.0)
    assert series.left(105.0) is None
    series.next_part(110.0)
    assert [series.left(at) for at in (110.0, 115.0, 150.0)] == [30.0, 25.0, 0.0]


def test_a_series_that_failed_is_not_said_to_have_ended() -> None:
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, width=80, force_terminal=True, no_color=True))

    def fails() -> None:
        with progress, progress.series("Measure", 3):
            progress.stage("node1 and node2")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fails()
    assert "of 3" not in stream.getvalue()
    assert progress.view() == ""


def shown_by_console(view: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(view)
    return stream.getvalue()


def test_what_is_done_here_is_a_line_in_a_pipe_and_passes_on_a_terminal(tmp_path: Path) -> None:
    said = {}
    for kind in (Progress, LiveProgress):
        stream = io.StringIO()
        progress = kind(Console(file=stream, width=80, force_terminal=kind is LiveProgress, color_system=None))
        progress.keep(tmp_path)
        with progress:
            progress.stage("Build x")
            progress.doing("fetching y")
        said[kind] = stream.getvalue()
    assert said[Progress].splitlines() == ["== Build x", "fetching y"]
    assert "fetching y" in said[LiveProgress]
    assert said[LiveProgress].endswith("\x1b[2K"), "its line is erased, and nothing comes after it"
    assert (tmp_path / NAME).read_text().count("fetching y") == 2


@pytest.mark.parametrize("kind", [Progress, LiveProgress])
def test_the_command_of_a_plan_is_whole(kind: type[Progress]) -> None:
    stream = io.StringIO()
    progress = kind(Console(file=stream, width=80, force_terminal=kind is LiveProgress, color_system=None))
    command = f"provision plan /tmp/{'a' * 100}/cluster.ini: the reasons for each version"
    progress.plan("Plan for 1 host", [("where", "node1: " + "here " * 20)], ("more", command))
    assert stream.getvalue().splitlines()[-1] == (f"more   {command}" if kind is LiveProgress else f"more: {command}")


@pytest.mark.parametrize(
    ("is_terminal", "kind", "expected"), [(True, "xterm", LiveProgress), (True, "dumb", Progress), (False, "xterm", Progress)]
)
def test_only_a_terminal_that_can_show_it_gets_a_live_view(
    is_terminal: bool, kind: str, expected: type[Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", kind)
    assert type(make()) is expected
