"""What one host did in a run: its tasks with their results, and what its ranks printed. Read from the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from provision.base.errors import UsageError
from provision.base.text import few
from provision.launch import rank_output
from provision.remote import ansible, progress
from provision.remote.session import RECORD, Record
from provision.report import runs
from provision.report.model import Report
from provision.report.runs import Run

LOGS = ("smoke.log", "run.log")
_STYLE = {"changed": "yellow", "failed": "red", "unreachable": "red", "tolerated": "magenta"}
_CHOICES = 12  # hosts that an error names


class Line(NamedTuple):
    """A text, perhaps of several lines, and its style."""

    text: str
    style: str = ""


def lines(run: Run, host: str) -> Iterator[Line]:
    """What the host did, in order.

    Raises:
        UsageError: the run has nothing about such a host; it names those that it has.
    """
    ranks = _ranks(run.folder)
    report = runs.load(run.folder / runs.REPORT, Report)
    known = dict.fromkeys([*(line.host for line in (report.hosts if report else ())), *ranks])
    found = False
    for workdir in _playbooks(run.folder):
        title = f"== {workdir.name}"
        for event in ansible.recorded(workdir, host):
            if event.kind in ("started", "skipped", "waiting", "task"):
                continue
            if title:
                yield Line(title, "bold")
            title, found = "", True
            yield Line(progress.outcome(event, event.text, 0.1), _STYLE.get(event.kind, ""))
    for name in LOGS if host in ranks else ():
        if (run.folder / name).is_file():
            yield Line(f"== {name}: rank {', '.join(map(str, ranks[host]))}", "bold")
            found = True
            with (run.folder / name).open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if text := rank_output.of_ranks(line.rstrip("\n"), ranks[host]):
                        yield Line(text)
    if report is not None:
        for failure in report.failures:
            if failure.host == host:
                found = True
                yield Line(f"failed: {failure.where}: {failure.what}" + (f"\n→ {failure.hint}" if failure.hint else ""), "red")
    if not found and host not in known:
        names = list(known)
        hint = f"name one of its hosts: {few(names, _CHOICES)}" if names else "name another run: provision runs lists them"
        raise UsageError(f"run {run.id} has nothing about a host {host}", hint=hint)
    if not found:
        yield Line("nothing is recorded of what it did")


def _playbooks(folder: Path) -> list[Path]:
    """The folders of the run's playbooks, in the order in which they were started."""
    found = [path.parent for path in folder.glob("*/vars.json") if (path.parent / "artifacts").is_dir()]
    return sorted(found, key=lambda path: (path / "vars.json").stat().st_mtime_ns)


def _ranks(folder: Path) -> dict[str, Sequence[int]]:
    """Host → its ranks in the job of the run, which both launchers number in the order of the hosts."""
    record = runs.load(folder / RECORD, Record)
    ranks: dict[str, Sequence[int]] = {}
    first = 0
    for name, count in (record.ranks if record else {}).items():
        ranks[name] = range(first, first + count)
        first += count
    return ranks
