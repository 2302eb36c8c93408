"""The progress of a run: a live line per host on a terminal, one plain line per event elsewhere.

Both write to standard error: standard output has results and the output of users' programs only. Events come from Ansible's loop and must
be handled fast.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from provision.base.terminal import Console, Live, Table, err, live, styled
from provision.remote.ansible import Event, headline

_STYLE = {"changed": "yellow", "tolerated": "yellow", "failed": "red", "unreachable": "red", "waiting": "cyan", "ok": "green"}


class Progress:
    """One plain line per event: for pipes, logs and CI."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or err()
        self._out = Console()
        self._waits: dict[tuple[str, str], str] = {}

    def stage(self, title: str, hosts: Sequence[str] = ()) -> None:
        """Show that a new part of the run begins, on ``hosts``."""
        self.line(f"== {title}" + (f" ({len(hosts)} host{'s' * (len(hosts) != 1)})" if hosts else ""))

    def line(self, text: str, style: str | None = None) -> None:
        """Show a remark, or a line of a job of ours."""
        self._console.say(text, style or "")

    def output(self, tag: str, text: str, style: str) -> None:
        """Print a line of a program's standard output there, with a tag; into a file or pipe as it is."""
        self._out.program(text, style, tag=tag)

    def errors(self, tag: str, text: str, style: str) -> None:
        """Print a line of a program's standard error there, in the same way."""
        self._console.program(text, style, tag=tag)

    def event(self, event: Event) -> None:
        """Show what happened to a task on a host."""
        if event.host and event.kind not in ("started", "skipped", "task"):
            text = _sentence(event)
            if event.kind == "waiting":
                if self._waits.get((event.host, event.task)) == text:
                    return
                self._waits[(event.host, event.task)] = text
            self.line(text, _STYLE.get(event.kind))

    def close(self) -> None:
        """End; what was shown live stays."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sentence(event: Event) -> str:
    step = ": ".join(part for part in (event.role, event.task) if part)
    if event.kind == "waiting" and "ansible_job_id" in event.result:
        return f"{event.host}: {step}: running in the background"
    if event.kind == "waiting":
        holder = str(event.result.get("stdout", "")).strip() or "something else"
        return f"{event.host}: {event.task}: waiting: the package manager is held by {holder}"
    words = {"ok": "ok", "changed": "changed", "tolerated": "failed, continues without", "failed": "FAILED", "unreachable": "UNREACHABLE"}
    took = f" ({event.seconds:.1f} s)" if event.seconds >= 1 else ""
    message = event.report if event.kind in ("ok", "changed") else headline(event.text)
    remark = f": {message}" if message else ""
    return f"{event.host}: {step}: {words[event.kind]}{took}{remark}"


class LiveProgress(Progress):
    """One live line per host; what changed, failed or waits scrolls by above."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._now: dict[str, tuple[str, str, float]] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def stage(self, title: str, hosts: Sequence[str] = ()) -> None:
        self.close()
        self._console.rule(styled(title, "bold"), align="left", style="dim")
        self._now = {host: ("", "", time.monotonic()) for host in hosts}
        if hosts:
            self._live = live(self._console, self._table)
            self._live.start()

    def event(self, event: Event) -> None:
        if event.host:
            with self._lock:
                step = ": ".join(part for part in (event.role, event.task) if part)
                self._now[event.host] = ("" if event.kind == "started" else event.kind, step, time.monotonic())
        if event.kind in ("changed", "tolerated", "failed", "unreachable", "waiting") or (event.kind == "ok" and event.report):
            super().event(event)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            shown = list(self._now.items())
        for host, (kind, task, since) in shown[: max(4, self._console.height - 4)]:
            seconds = time.monotonic() - since
            state = styled(kind or "…", _STYLE.get(kind, "dim"))
            table.add_row(styled(host, "bold"), state, styled(task), styled(f"{seconds:4.0f} s", "dim"))
        return table


def make() -> Progress:
    """Live on a terminal that can show it, plain lines elsewhere (also with ``TERM=dumb``). ``NO_COLOR`` is honoured by the console."""
    return LiveProgress() if err().file.isatty() and os.environ.get("TERM", "") != "dumb" else Progress()
