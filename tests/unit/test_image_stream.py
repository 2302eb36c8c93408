"""What the engine says while it builds, as events. The samples are what a 20.10 engine really said."""

from __future__ import annotations

import io

from provision.base.terminal import Console
from provision.image.stream import Cached, Failed, Layer, Line, Made, Step, events
from provision.image.view import View

SAID = [
    {"stream": "Step 1/3 : FROM base:1"},
    {"stream": "\n"},
    {"stream": " ---> 038a8878dcd1\n"},
    {"stream": "Step 2/3 : RUN a     && b"},
    {"stream": "\n"},
    {"stream": " ---> Running in 78424086df40\n"},
    {"stream": "Reading "},
    {"stream": "lists...\nDone\n"},
    {"stream": "\x1b[91mE\x1b[0m"},
    {"stream": "\x1b[91m: it broke\n\x1b[0m"},
    {"stream": "Removing intermediate container 78424086df40\n"},
    {"stream": " ---> Using cache\n"},
    {"stream": " ---> 406f09074a09\n"},
    {"aux": {"ID": "sha256:abc"}},
    {"stream": "Successfully built fb3c0e3f8093\n"},
]


def test_fragments_become_steps_and_lines() -> None:
    assert list(events(SAID)) == [
        Step(1, 3, "FROM base:1"),
        Step(2, 3, "RUN a && b"),
        Line("Reading lists..."),
        Line("Done"),
        Line("E: it broke"),
        Cached(),
        Made("sha256:abc"),
    ]


def test_a_failure_comes_after_the_line_that_was_not_ended() -> None:
    said = [{"stream": "no end"}, {"errorDetail": {"code": 1, "message": "returned 1"}, "error": "returned 1"}]
    assert list(events(said)) == [Line("no end"), Failed("returned 1")]


def test_layers_have_their_bytes() -> None:
    said = [
        {"status": "Downloading", "id": "aa", "progressDetail": {"current": 5, "total": 10}},
        {"status": "Pull complete", "id": "aa", "progressDetail": {}},
        {"status": "Digest: sha256:1"},
    ]
    assert list(events(said)) == [Layer("aa", "Downloading", 5, 10), Layer("aa", "Pull complete", 0, 0), Line("Digest: sha256:1")]


def test_without_a_terminal_each_step_is_one_line_and_the_log_has_everything() -> None:
    shown, log = io.StringIO(), io.StringIO()
    with View(log, Console(file=shown, width=100)) as view:
        for event in events(SAID):
            view.note(event)
    assert shown.getvalue().splitlines() == ["Step 1/3: FROM base:1", "Step 2/3: RUN a && b"]
    assert view.step == "Step 2/3: RUN a && b"
    assert view.tail == ["Reading lists...", "Done", "E: it broke"]
    assert "E: it broke\n" in log.getvalue()
    assert log.getvalue().startswith("\nStep 1/3: FROM base:1\n(0 s)\n\nStep 2/3: RUN a && b\nReading lists...\n")
    assert "(from the cache)" in log.getvalue()


def test_on_a_terminal_finished_steps_stay_and_layers_move() -> None:
    shown = io.StringIO()
    with View(None, Console(file=shown, width=100, force_terminal=True, color_system=None)) as view:
        for event in events(
            [*SAID[:8], {"status": "Downloading", "id": "aa", "progressDetail": {"current": 5_000_000, "total": 10_000_000}}]
        ):
            view.note(event)
        table = Console(file=io.StringIO(), width=100, record=True)
        table.print(view._table())
    said = table.export_text()
    assert "Step 2/3: RUN a && b" in said
    assert "Reading lists..." in said
    assert "aa  Downloading ████████████░░░░░░░░░░░░ 5 of 10 MB" in said
    assert "Step 1/3: FROM base:1 (" in shown.getvalue()
