"""The report of a run: a table for people, JSON for programs, and every failure with its error and what to do next."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, computed_field

from provision import __version__
from provision.base import paths
from provision.base.documents import Document
from provision.base.problems import Problem
from provision.base.terminal import Console, styled, table
from provision.base.text import counted, duration, folded, grouped, shortened
from provision.install.removal import HostRemoval
from provision.inventory import last_run
from provision.launch.smoke.evaluation import TrainingReport

State = Literal["ready", "installed", "unchanged", "would change", "failed", "unreachable", "blocked", "not finished"]
Prospect = Literal["will change", "will not change", "cannot know yet"]
_STYLE = {"ready": "green", "installed": "green", "unchanged": "green", "would change": "yellow", "failed": "red", "unreachable": "red"}
_VERSIONS = ("Open MPI", "cmake", "Python", "PyTorch", "NCCL", "engine")  # columns of the closing table
_Problem = Annotated[Problem, PlainSerializer(Problem.as_dict, return_type=dict[str, str | None])]
_MAX_PROBLEMS = 20  # of preflight that are shown
_MAX_ROWS = 24  # of the closing table, one per host
_MAX_NAMES = 60  # characters of hosts' names at a problem
OPEN_PAGE = "provision runs report --open"
ERROR_LINES = 12  # of the real error, at the end of the run


class _Document(BaseModel):
    """Filled in while a run goes on. Other versions may write more keys, or fewer."""

    model_config = ConfigDict(defer_build=True)


class HostReport(_Document):
    """One line of the closing table.

    Attributes:
        changed: how many tasks changed something.
        seconds: the time that the host's tasks took.
        steps: step → what a dry run says about it.
    """

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
    steps: dict[str, Prospect] = Field(default_factory=dict)


class Environment(_Document):
    """What a run ran with on the controller; ``system`` is its distribution, and ``kernel`` also says the architecture."""

    provision: str = ""
    python: str = ""
    ansible: str = ""
    system: str = ""
    kernel: str = ""

    @classmethod
    def here(cls) -> Environment:
        """That of this process."""
        try:
            system = platform.freedesktop_os_release()["PRETTY_NAME"]
        except (OSError, KeyError):
            system = platform.system()
        return cls(
            provision=__version__,
            python=platform.python_version(),
            ansible=metadata.version("ansible-core"),
            system=system,
            kernel=f"{platform.release()} {platform.machine()}",
        )


class Report(_Document):
    """The whole run.

    Attributes:
        command: as it was typed, without HOSTS and most options.
        inventory: its file, or the hosts as they were typed.
        failures: problems with their host and, as ``where``, the step.
        np: how many ranks the training job had; None when it did not run.
        smoke: the training job's own report; None when it did not run.
        smoke_faults: why the training job does not count as passed.
        simulated: hosts with simulated GPUs, on which nothing can run.
    """

    schema_number: Literal[1] = Field(1, alias="schema")
    run_id: str
    folder: str
    inventory: str
    command: str = ""
    began: AwareDatetime | None = None
    environment: Environment | None = None
    hosts: list[HostReport] = Field(default_factory=list)
    failures: list[_Problem] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    np: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    smoke: Mapping[str, Any] | None = None
    smoke_summary: str | None = None
    smoke_faults: list[_Problem] = Field(default_factory=list)
    simulated: list[str] = Field(default_factory=list)
    seconds: float = 0.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether every listed host is as planned, and the training job, if it ran, passed."""
        return not self.failures and not self.smoke_faults

    @property
    def verdict(self) -> Literal["ready", "done", "not ready", "installed; GPU not verified: simulated"]:
        """In a word or two; only a run whose training job passed says that hosts are ready, and none with simulated GPUs."""
        if not self.ok or not self.smoke:
            return "done" if self.ok else "not ready"
        return "installed; GPU not verified: simulated" if self.simulated else "ready"

    def as_dict(self) -> Document:
        """Plain data for JSON: ``{"schema": 1, "ok": …, "hosts": [...], "failures": [...], "smoke": …}``."""
        found = self.model_dump(by_alias=True)
        found["began"] = self.began and self.began.isoformat()
        return {"schema": found["schema"], "ok": found["ok"], **found}


def show(report: Report, console: Console, following: Sequence[str] = ()) -> None:
    """Print the verdict, the closing table, the training job's result, the failures and the commands that follow."""
    verdict = f"{report.verdict}: {counted(len(report.hosts), 'host')}, {_accuracy(report)}{duration(report.seconds)}"
    console.say(verdict, "bold green" if report.ok else "bold red")
    listed, everywhere = _fitting(list(rows(report.hosts)), console.width)
    console.print(table(listed, _STYLE))
    if everywhere:
        console.print(styled(f"on all hosts: {everywhere}"))
    for steps, hosts in grouped((tuple(host.steps.items()), host.host) for host in report.hosts).items():
        for prospect in dict.fromkeys(dict(steps).values()):
            console.say(f"{shortened(hosts)}: {prospect}: {', '.join(step for step, each in steps if each == prospect)}")
    if report.smoke_summary:
        console.prose(report.smoke_summary)
    for note in report.notes:
        console.prose(f"note: {note}", "cyan")
    for fault in report.smoke_faults:
        console.say(f"training: {fault.what}", "red")
    for names, failure in _alike(report.failures):
        lines = failure.what.strip().splitlines()[-ERROR_LINES:]
        if len(lines) == 1 and len(report.hosts) > _MAX_ROWS:
            console.say(f"{names}: {failure.where}: {lines[0]}", "red", hint=failure.hint)
        else:
            console.say("\n".join([f"\n{names}: {failure.where}", *lines]), "bold red", hint=failure.hint)
    console.print(styled(paths.short(f"all about this run: {report.folder}"), "dim"), soft_wrap=True)
    for number, command in enumerate(following):
        console.say(paths.short(f"{'      ' if number else 'Next: '}{command}"))


def _accuracy(report: Report) -> str:
    """``95.21 %, ``; empty where no training job has reported it."""
    try:
        return f"{TrainingReport.model_validate(report.smoke).epochs[-1].test_accuracy_percent:.2f} %, "
    except (ValidationError, IndexError):
        return ""


def commands_after(report: Report, hosts: str, typed: Sequence[str], *, limit: str | None = None, check: bool = False) -> list[str]:
    """The two commands that follow a run on ``hosts``, each with what it is for.

    Args:
        typed: the words of the command that was typed, after ``provision``.
        limit: the value of its ``--limit``.
    """
    if limit and last_run.FAILED in limit:  # from now on that means others
        names = ",".join(line.host for line in report.hosts)
        typed = [names if word == limit else f"--limit={names}" if word == f"--limit={limit}" else word for word in typed]
        limit = names
    where = [hosts, "--limit", limit] if limit else [hosts]
    if not report.ok:
        some = not limit and not report.smoke_faults and _has_failed_hosts(report)
        again = ["provision", *typed, *(["--limit", last_run.FAILED] if some else [])]
        return [f"{shlex.join(['provision', 'doctor', *where])}  (looks for known causes)", f"{shlex.join(again)}  (once they are fixed)"]
    if check:
        without = ["provision", *(word for word in typed if word != "--check")]
        return [f"{OPEN_PAGE}  (this run as a page, with the reasons for each version)", f"{shlex.join(without)}  (does it)"]
    np = ["-np", str(report.np)] if report.np else []
    run = f"{shlex.join(['provision', 'run', *where, *np, 'train.py'])}  (your own program)"
    if not report.smoke:
        return [f"{shlex.join(['provision', 'smoke', *where])}  (the training job)", run]
    return [run, f"{OPEN_PAGE}  (this run as a page)"]


def _has_failed_hosts(report: Report) -> bool:
    """Whether ``--limit @failed`` means any host of this run: a failure may be the controller's."""
    names = {line.host for line in report.hosts}
    return any(line.state in last_run.FAILED_STATES for line in report.hosts) or any(each.host in names for each in report.failures)


def _fitting(listed: list[dict[str, str]], width: int) -> tuple[list[dict[str, str]], str]:
    """The rows without what no host has; and where they are wider than the terminal, without what all have, which is returned in words."""
    absent = [column for column in _VERSIONS if all(row[column] == "-" for row in listed)]
    listed = [{column: value for column, value in row.items() if column not in absent} for row in listed]
    columns = list(listed[0]) if listed else []
    if sum(max(len(column), *(len(row[column]) for row in listed)) + 2 for column in columns) - 2 <= width:
        return listed, ""
    same = [column for column in columns if column in _VERSIONS and len({row[column] for row in listed}) == 1]
    everywhere = ", ".join(f"{column} {listed[0][column]}" for column in same)
    return [{column: value for column, value in row.items() if column not in same} for row in listed], everywhere


def show_removals(removals: Sequence[HostRemoval], console: Console) -> None:
    """Print what was or would be removed, what is kept and why, and what failed: once for hosts where all that is the same."""
    alike = grouped((repr(replace(each, host="", problem=each.problem and replace(each.problem, host=None))), each) for each in removals)
    for group in alike.values():
        one = group[0]
        console.say(f"{folded([each.host for each in group])}: {one.state}", "bold red" if one.bad else "bold")
        for what in one.removed:
            console.prose(f"    {what}")
        for kept in one.left:
            console.prose(f"  stays: {kept['what']}: {kept['why']}", "yellow")
        if one.problem:
            console.say(f"  {one.problem.what}", "red", hint=one.problem.hint)


def show_problems(problems: Sequence[Problem], console: Console) -> None:
    """Print preflight problems with their hints, what is the same on several hosts once; of many the first, errors before warnings."""
    alike = list(_alike(sorted(problems, key=lambda each: each.severity != "error")))
    for names, problem in alike[:_MAX_PROBLEMS]:
        console.say(f"{names}: {problem.severity}: {problem.what}", "red" if problem.severity == "error" else "yellow", hint=problem.hint)
    if len(alike) > _MAX_PROBLEMS:
        console.say(f"and {len(alike) - _MAX_PROBLEMS} more problems: all with provision survey --json", "yellow")


def _alike(problems: Iterable[Problem]) -> Iterator[tuple[str, Problem]]:
    """(hosts, problem), once for what is the same on several hosts."""
    for each, alike in grouped((general(each), each) for each in problems).items():
        yield shortened([str(one.host) for one in alike], _MAX_NAMES), each if len(alike) > 1 else alike[0]


def general(each: Problem) -> Problem:
    """A problem without its host, which ssh's messages name."""
    address = r"(?<=connect to host )\S+(?: port \d+)?|(?<=Connection to )\S+(?: port \d+)?|(?:(?<=@)|(?<=ssh ))[\d.]{7,}\b"
    own = rf"(?<![\w.-]){re.escape(str(each.host))}(?![\w-])|{address}" if each.id == "unreachable" else "(?!)"
    what, hint = (re.sub(own, "HOST", text or "") for text in (each.what, each.hint))
    return replace(each, id="", host=None, message="", what=what, hint=hint or None)


def rows(hosts: Sequence[HostReport]) -> Iterator[dict[str, str]]:
    """The closing table's rows: of many hosts one for those that are alike, with their largest numbers."""

    def alike(host: HostReport) -> object:
        return repr(host.model_copy(update={"host": "", "changed": 0, "seconds": 0.0})) if len(hosts) > _MAX_ROWS else host.host

    for group in grouped((alike(host), host) for host in hosts).values():
        host, changed = group[0], max(each.changed for each in group)
        yield {
            "host": shortened([each.host for each in group], _MAX_NAMES),
            "state": host.state,
            "Open MPI": host.openmpi,
            "cmake": host.cmake,
            "Python": host.python,
            "PyTorch": host.torch,
            "NCCL": host.nccl,
            "engine": host.engine,
            "changed": str(changed),
            "time": duration(max(each.seconds for each in group)),
        }
