"""What a run comes to: the closing table for people, JSON for programs, every failure with its real error and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from provision.facts import Problem
from provision.remove import HostRemoval

State = Literal["ready", "installed", "unchanged", "would change", "failed", "unreachable", "blocked", "not finished"]
Prospect = Literal["will change", "will not change", "cannot know yet"]
_STYLE = {"ready": "green", "installed": "green", "unchanged": "green", "would change": "yellow", "failed": "red", "unreachable": "red"}
ERROR_LINES = 12  # of the real error, at the end of the run


@dataclass(frozen=True)
class Failure:
    """What ended a host's run: the step, the last lines of the real error, and the next thing to type."""

    host: str
    step: str
    error: str
    todo: str | None = None


@dataclass
class HostReport:
    """One line of the closing table. ``changed`` counts tasks; ``seconds`` is the time that its tasks took; ``steps``: step → what a dry
    run says of it."""

    host: str
    state: State
    openmpi: str = "-"
    cmake: str = "-"
    python: str = "-"
    torch: str = "-"
    nccl: str = "-"
    engine: str = "-"
    changed: int = 0
    seconds: float = 0.0
    steps: Mapping[str, Prospect] = field(default_factory=dict)


@dataclass
class Report:
    """The whole run. ``inventory`` is its file, or what was typed.

    ``smoke`` is the training job's own report, None when it did not run, ``smoke_faults`` why it does not count.
    """

    run_id: str
    folder: str
    inventory: str
    hosts: list[HostReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    smoke: Mapping[str, Any] | None = None
    smoke_summary: str | None = None
    smoke_faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every listed host is what it should be, and the training job, if it ran, proved it."""
        return not self.failures and not self.smoke_faults

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``{"schema": 1, "ok": …, "hosts": [...], "failures": [...], "smoke": …}``."""
        return {"schema": 1, "ok": self.ok, **asdict(self)}


def _line(console: Console, *parts: Text) -> None:
    """Print a line that is never folded: words that a user copies or searches for stay whole."""
    console.print(*parts, soft_wrap=True)


def show(report: Report, console: Console) -> None:
    """Print the closing table, the training job's result, and the failures."""
    console.print(table(rows(report.hosts), states=True))
    for host in report.hosts:
        for prospect in dict.fromkeys(host.steps.values()):
            _line(console, Text(f"{host.host}: {prospect}: {', '.join(step for step, said in host.steps.items() if said == prospect)}"))
    if report.smoke_summary:
        _line(console, Text(report.smoke_summary))
    for note in report.notes:
        _line(console, Text(f"note: {note}", style="cyan"))
    for fault in report.smoke_faults:
        _line(console, Text(f"training: {fault}", style="red"))
    for failure in report.failures:
        _line(console, Text(f"\n{failure.host}: {failure.step}", style="bold red"))
        for line in failure.error.strip().splitlines()[-ERROR_LINES:]:
            _line(console, Text(f"    {line}"))
        if failure.todo:
            _line(console, Text(f"  → {failure.todo}", style="bold"))
    verdict = Text(
        "ready" if report.ok and report.smoke else "done" if report.ok else "not ready", style="bold green" if report.ok else "bold red"
    )
    _line(console, verdict.append(f" in {report.seconds:.0f} s; everything about this run: {report.folder}", style="not bold default"))


def show_removals(removals: Sequence[HostRemoval], console: Console) -> None:
    """Print per host what went or would go, what stays and why, and what went wrong."""
    for one in removals:
        _line(console, Text(f"{one.host}: {one.state}", style="bold red" if one.bad else "bold"))
        for what in one.removed:
            _line(console, Text(f"    {what}"))
        for kept in one.left:
            _line(console, Text(f"  stays: {kept['what']}: {kept['why']}", style="yellow"))
        if one.error:
            _line(console, Text(f"  {one.error}", style="red"))
        if one.todo:
            _line(console, Text(f"  → {one.todo}", style="bold"))


def show_problems(problems: Sequence[Problem], console: Console) -> None:
    """Print what stands in the way of using hosts, each with the way out."""
    for problem in problems:
        style = "red" if problem.level == "error" else "yellow"
        _line(console, Text(f"{problem.host}: {problem.level}: {problem.what}", style=style))
        if problem.todo:
            _line(console, Text(f"  → {problem.todo}"))


def rows(hosts: Sequence[HostReport]) -> Iterator[dict[str, str]]:
    """The closing table's rows."""
    for host in hosts:
        yield {
            "host": host.host,
            "state": host.state,
            "Open MPI": host.openmpi,
            "cmake": host.cmake,
            "Python": host.python,
            "PyTorch": host.torch,
            "NCCL": host.nccl,
            "engine": host.engine,
            "changed": str(host.changed),
            "time": f"{host.seconds:.0f} s",
        }


def table(entries: Iterator[dict[str, str]] | Sequence[Mapping[str, str]], *, states: bool = False) -> Table:
    """A plain table; its columns are the keys of the first row."""
    listed = list(entries)
    built = Table(box=None, pad_edge=False, header_style="bold")
    for column in listed[0] if listed else ():
        built.add_column(column, overflow="fold")
    for entry in listed:
        built.add_row(
            *(Text(value, style=_STYLE.get(value, "") if states and column == "state" else "") for column, value in entry.items())
        )
    return built
