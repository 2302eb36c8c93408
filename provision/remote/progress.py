"""The progress of a run: a live view of its hosts on a terminal; elsewhere a plain line for each host and step that changed something.

Both write to standard error: standard output has results and the output of users' programs only. What happened to every single task goes to
a file in the run folder. Events come from Ansible's loop and must be handled fast.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from provision.base.terminal import Console, Live, RenderableType, Table, err, live, neutral, styled
from provision.base.text import about, clock, counted, duration, joined, shortened
from provision.remote.ansible import Event, headline
from provision.remote.stage import FOLD_FROM, Series, Stage, builds, waits
from provision.remote.stage_view import TrainingProgress, series_view, stage_view, training_view

NAME = "progress.log"
_WORDS = {"ok": "ok", "changed": "changed", "tolerated": "failed, continues without", "failed": "FAILED", "unreachable": "UNREACHABLE"}
_WAITS_S = 30.0  # without an event, until it is said who is waited for; then after twice as long, again and again
_FOLD_S, _MAX_FAILED = 10.0, 5  # of many hosts: what has changed is said so often; failures that are shown at once, before the report
_STYLE = {"tolerated": "yellow", "failed": "red", "unreachable": "red", "waiting": "yellow"}


class Progress:
    """Plain lines: for pipes, logs, CI and screen readers."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or err()
        self._out = Console()
        self._log: Path | None = None
        self._stage: Stage | None = None
        self._series: Series | None = None
        self._waits: dict[str, str] = {}
        self._changing: dict[str, tuple[str, float]] = {}  # host → its step and when that began, once a task has changed something
        self._task, self._heard, self._speaks = "", 0.0, 0.0  # begun last; when something was heard; when it is said who is waited for
        self._epoch = 0
        self._done: dict[str, dict[str, float]] = {}  # step → hosts where it is over, and how long it took, as far as that is not said yet
        self._folded = 0.0  # when it was
        self._lock = threading.Lock()  # a live view is drawn in a thread of its own, which must never wait for one that prints

    def keep(self, folder: Path) -> None:
        """Write what happens to every task into a file of that folder from now on."""
        self._log = folder / NAME

    def stage(self, title: str, hosts: Sequence[str] = (), *, steps: Sequence[str] = ()) -> None:
        """Show that a new part of the run begins.

        Args:
            hosts: where; without them the user's program, or a training job, runs.
            steps: the names of its steps in their order, where they are known.
        """
        self.close()
        self._stage = Stage.of(title, hosts, time.monotonic(), steps)
        self._epoch = 0
        heading = f"== {title}" + (f" ({counted(len(hosts), 'host')})" if hosts else "")
        if self._series is not None:
            now = time.monotonic()
            self._series.next_part(now)
            left = self._series.left(now)
            heading = f"== {self._series.number} of {self._series.count}"
            heading += f": {title}" if left is None else f", about {about(left)} left: {title}"
        self.detail(heading)
        self._begin(heading)

    def _begin(self, heading: str) -> None:
        self._console.say(heading)

    @contextmanager
    def series(self, title: str, count: int) -> Iterator[None]:
        """The stages that begin in this context are the parts of one piece of work; they have no hosts. ``count``: of all of them."""
        self._series = series = Series(title, count, time.monotonic())
        try:
            yield
            self.close()
            self._series_over(series)
        finally:  # an error has its own line
            self.close()
            self._series = None

    def _series_over(self, series: Series) -> None:
        """The lines of its parts tell it."""

    def line(self, text: str, style: str | None = None) -> None:
        """Show a remark, or a line of a job of ours."""
        self._console.say(text, style or "")

    def doing(self, text: str) -> None:
        """Show what is done on this machine, until something else is."""
        self.detail(text)
        self.line(text)

    def plan(self, title: str, entries: Sequence[tuple[str, str]], command: tuple[str, str]) -> None:
        """Show what the run is going to do: texts, each with what it is about, and last a command, which can be copied whole."""
        self.line(title, "bold")
        for topic, text in (*entries, command):
            self.line(f"{topic}: {text}")

    def output(self, stream: str, tag: str, text: str, style: str) -> None:
        """Print a line of a program's ``stdout`` or ``stderr`` there, with a tag; into a file or pipe as it is."""
        (self._out if stream == "stdout" else self._console).program(text, style, tag=tag)

    def starting(self, started: int, ranks: int) -> None:
        """Show how many of a job's ranks have started, where that takes seconds."""
        if started < ranks and self._stage is not None:
            self.line(f"{started} of {counted(ranks, 'rank')} started ({duration(int(time.monotonic() - self._stage.began))})")

    def training(self, now: TrainingProgress) -> None:
        """Show how far a training job of ours is."""
        if now.accuracy is not None and now.epoch != self._epoch:
            self._epoch = now.epoch
            self.line(f"    {now}")

    def event(self, event: Event, *, quiet: bool = False) -> None:
        """Show what happened to a task on a host; with ``quiet`` only in a live view, because the caller says what failed."""
        if not event.host:
            return
        now = time.monotonic()
        if not builds(event):
            self._heard, self._speaks = now, now + _WAITS_S
        self._task = event.task if event.kind == "started" else self._task
        if self._stage is not None:
            with self._lock:
                self._stage.event(event, now)
        if event.kind in ("skipped", "task"):
            return
        self._close_step(event, now)
        if event.kind == "started":
            return
        if event.kind in ("failed", "unreachable"):
            self._changing.pop(event.host, None)  # its step does not count as done
        text = _sentence(event)
        if event.kind == "waiting":
            if self._waits.get(event.host) == text:
                return
            self._waits[event.host] = text
        self.detail(text)
        host = self._stage.hosts.get(event.host) if self._stage else None
        has_failed = host is not None and host.state in ("failed", "unreachable")  # what follows there cleans up
        if event.kind == "changed" and not quiet and event.host not in self._changing and not has_failed:
            self._changing[event.host] = (event.role or event.task, host.began if host else now)
        if not quiet and self._is_shown(event):
            self.line(text, _STYLE.get(event.kind))

    def waiting(self, hosts: Iterable[str] = (), since: float = 0.0) -> None:
        """Say which hosts are waited for where nothing has happened for long: those of the stage that are at work, else ``hosts``, of which
        something was asked at ``since``. To be called again and again."""
        now, heard = time.monotonic(), max(self._heard, since)
        if now < max(self._speaks, since + _WAITS_S):
            return
        of_stage = self._stage.hosts.values() if self._stage is not None else ()
        running = {host.name: host.remark for host in of_stage if host.state == "running"}
        what = ", ".join(filter(None, (self._task, next(iter(running.values()))))) if running else ""
        if names := list(running or hosts):
            self.line(f"waiting for {joined(names)}{': ' * bool(what)}{what} ({duration(int(now - heard))})")
            self._speaks = now + max(_WAITS_S, now - heard)

    def _close_step(self, event: Event, now: float) -> None:
        """Show that the step of an event's host is over, if it changed something and the event is of another one."""
        step, began = self._changing.get(event.host, ("", 0.0))
        if step and step != (event.role or event.task):
            del self._changing[event.host]
            self._over(event.host, step, now - began)

    def _over(self, host: str, step: str, seconds: float) -> None:
        self._done.setdefault(step, {})[host] = seconds
        if not self._stage or len(self._stage.hosts) < FOLD_FROM or time.monotonic() > self._folded + _FOLD_S:
            self._say_done()

    def _say_done(self) -> None:
        for step, hosts in self._done.items():
            self.line(f"{shortened(list(hosts), 60)}: {step}: changed ({duration(int(max(hosts.values())))})")
        self._done, self._folded = {}, time.monotonic()

    def _is_shown(self, event: Event) -> bool:
        if event.kind in ("failed", "unreachable") and self._stage and len(self._stage.failed) > _MAX_FAILED:
            return False
        return event.kind in ("tolerated", "failed", "unreachable") or bool(waits(event) or event.report)

    def detail(self, text: str) -> None:
        """Write a remark into the log alone."""
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {neutral(text)}\n")

    def close(self) -> None:
        """End a stage."""
        for host, (step, began) in self._changing.items():
            self._over(host, step, time.monotonic() - began)
        self._say_done()
        self._changing.clear()
        self._waits.clear()
        self._stage = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sentence(event: Event) -> str:
    if event.kind == "waiting" and (held := waits(event)):
        return f"{event.host}: {event.task}: waiting: {held}"
    return f"{event.host}: {outcome(event, headline(event.text))}"


def outcome(event: Event, error: str, least: float = 1.0) -> str:
    """What a task has come to on a host: its step, its state, its time from ``least`` seconds on, and its report or ``error``."""
    took = f" ({duration(event.seconds)})" if event.seconds >= least and event.kind in _WORDS else ""
    message = event.report if event.kind in ("ok", "changed") else error if event.kind in _WORDS else ""
    step = ": ".join(filter(None, (event.role, event.task)))
    return f"{step}: {_WORDS.get(event.kind, 'running in the background')}{took}{f': {message}' if message else ''}"


class LiveProgress(Progress):
    """One live table of the stage's hosts, which leaves one line behind; warnings scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._training: TrainingProgress | None = None
        self._doing = ""

    def stage(self, title: str, hosts: Sequence[str] = (), *, steps: Sequence[str] = ()) -> None:
        super().stage(title, hosts, steps=steps)
        self._show()

    def _begin(self, heading: str) -> None:
        if self._stage is not None and not self._stage.hosts and self._series is None:
            self._console.print(styled(heading.removeprefix("== "), "bold"))

    def _series_over(self, series: Series) -> None:
        took = duration(int(time.monotonic() - series.began))
        self._console.print(styled(f"{series.title}  {series.count} of {series.count}  {took}", "dim"))

    def plan(self, title: str, entries: Sequence[tuple[str, str]], command: tuple[str, str]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        width = max(len(topic) for topic, _ in (*entries, command))
        table.add_column(min_width=width)
        before = ""
        for topic, text in entries:
            table.add_row(styled(topic if topic != before else "", "dim"), styled(text))
            before = topic
        self._console.print(styled(title, "bold"))
        self._console.print(table)
        topic, text = command
        self._console.print(styled(f"{topic:{width}}  ", "dim") + styled(text), soft_wrap=True)

    def output(self, stream: str, tag: str, text: str, style: str) -> None:
        self._hide()
        super().output(stream, tag, text, style)

    def _hide(self) -> None:
        """End the view before a program's first line, which may not be a whole one, or go elsewhere."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _over(self, host: str, step: str, seconds: float) -> None:
        """The table shows it."""

    def waiting(self, hosts: Iterable[str] = (), since: float = 0.0) -> None:
        if self._stage is None or not self._stage.hosts:  # else the table shows it
            super().waiting(hosts, since)

    def _is_shown(self, event: Event) -> bool:
        return event.kind == "tolerated" or bool(event.report)  # the table has what failed or waits

    def doing(self, text: str) -> None:
        self.detail(text)
        with self._lock:
            self._doing = text
            if self._stage is None:
                self._stage = Stage.of("Prepare", (), time.monotonic())
        if self._live is None:
            self._show()

    def starting(self, started: int, ranks: int) -> None:
        with self._lock:  # the view has ended where the program has printed something
            self._doing = f"{started} of {counted(ranks, 'rank')} started" if self._training is None else self._doing

    def training(self, now: TrainingProgress) -> None:
        with self._lock:
            self._training, self._doing = now, ""
        if self._live is None:
            self._show()

    def close(self) -> None:
        if self._live is not None:
            self._hide()
            if self._training is not None or (self._stage is not None and self._stage.hosts):
                self._console.print(self._left_behind(), soft_wrap=True)
        self._training, self._doing = None, ""
        super().close()

    def _show(self) -> None:
        self._live = live(self._console, self.view)
        self._live.start()

    def view(self) -> RenderableType:
        """What the terminal shows now."""
        now, width, height = time.monotonic(), self._console.width, self._console.height
        with self._lock:
            if self._stage is None:
                return ""
            if self._doing:
                return styled(f"{clock(now - self._stage.began)}  {self._doing}", "dim")
            if self._series is not None:
                return series_view(self._series, self._stage.title, now, width)
            if self._training is not None:
                return training_view("training", self._training, now - self._stage.began, width)
            if not self._stage.hosts:
                return styled(clock(now - self._stage.began), "dim")
            return stage_view(self._stage, now, width, height)

    def _left_behind(self) -> RenderableType:
        stage = self._stage
        if stage is None:
            return ""
        seconds = duration(int(time.monotonic() - stage.began))
        if self._training is not None:
            return styled(f"{self._training}  {seconds}", "dim")
        count = len(stage.hosts)
        parts = [f"{stage.title}  {counted(count, 'host')}  {seconds}"]
        if stage.changed:
            parts.append(f"{len(stage.changed)} changed")
        if stage.failed:
            parts.append(f"failed: {joined(stage.failed)}")
        return styled("  ".join(parts), "red" if stage.failed else "dim")


def make() -> Progress:
    """Live on a terminal that can show it, plain lines elsewhere (also with ``TERM=dumb``). ``NO_COLOR`` is honoured by the console."""
    return LiveProgress() if err().file.isatty() and os.environ.get("TERM", "") != "dumb" else Progress()
