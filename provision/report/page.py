"""A run as one page that opens from disk: the verdict, what failed and what helps, training, hosts, versions, times, environment.

It is made of the files in the run's folder. They hold what hosts have said, and may be of another version: each is validated and bounded,
what cannot be read is left out, and all text is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from provision.base import downloads, pages, run_folders
from provision.base.text import counted, grouped, joined
from provision.catalog import OURS
from provision.diagnosis import logs, signatures
from provision.diagnosis.findings import UNKNOWN, Finding
from provision.launch import rank_output, stall_watch
from provision.remote import timeline
from provision.remote.session import RECORD, Record
from provision.report import drawings, runs, training, versions
from provision.report.model import OPEN_PAGE, HostReport, Report, commands_after, general
from provision.report.runs import Run
from provision.survey import Facts
from provision.survey.document import FactsFile

NAME = "report.html"
_MAX_FAILURES = 25  # that are shown; failures of several hosts with the same words are one
_MAX_LINES, _MAX_LETTERS = 40, 400  # of an error: its last lines, and of each so many letters
_LOG_LINES = 60  # of a program's log
_LARGEST_LOG = 64 << 20  # bytes of a log that is examined
_MAX_NOTES = 60
#: Files and folders of a run that the page names, and what they are.
FILES = {
    "report.json": "this report, for programs",
    "plan.json": "the plan",
    "facts.json": "what the survey found on each host",
    "timeline.json": "times of the steps",
    "progress.log": "every task as it ended",
    "smoke.log": "output of the training job",
    "run.log": "output of the program",
    "stalls.json": "when its job stood still, and which ranks were late",
    "site/artifacts/ansible/stdout": "Ansible's output of the installation",
    "survey/artifacts/ansible/stdout": "Ansible's output of the survey",
}


def write(folder: Path) -> Path:
    """Write the page of the run with this folder into it, and return its path. Raises OSError where it cannot be written."""
    path = folder / NAME
    downloads.store(path, render(runs.read(folder)).encode("utf-8", errors="replace"))
    return path


def render(run: Run) -> str:
    """The page's HTML."""
    report = runs.load(run.folder / runs.REPORT, Report)
    record = runs.load(run.folder / RECORD, Record)
    plan = versions.read(run.folder)
    facts = _facts(run.folder)
    steps = runs.load(run.folder / timeline.NAME, timeline.Timeline)
    smoke = training.read(report)
    watched = runs.load(run.folder / stall_watch.RECORD, stall_watch.Stalls)
    bad = run.verdict in runs.BAD
    log = next((run.folder / name for name in ("smoke.log", "run.log") if (run.folder / name).is_file()), None)
    return pages.template("provision.report").render(
        run=run,
        report=report,
        headline=_headline(run, report),
        bad=bad,
        good=run.verdict in runs.GOOD,
        dry=_is_dry(report),
        failures=_failures(report) if report else [],
        faults=[_lines(fault.what) for fault in report.smoke_faults] if report else [],
        error=_lines(record.error) if record and record.error and report is None else [],
        log_findings=_log_findings(log) if bad and log is not None else [],
        log_tail=_tail(log) if bad and log is not None else [],
        log_name=log.name if log is not None else "",
        notes=report.notes[:_MAX_NOTES] if report else [],
        # The rest of it is in the section about the training, where there is one.
        summary=(report.smoke_summary or "").splitlines()[: 1 if smoke else None] if report else [],
        stalls=watched.stalls if watched else [],
        stragglers=watched.stragglers if watched else [],
        training=smoke,
        charts=training.curves(smoke) if smoke else [],
        speeds=training.speeds(smoke) if smoke else [],
        hosts=_host_rows(report.hosts) if report else [],
        versions=list(versions.groups(plan, report, facts)),
        knowledge=plan.knowledge if plan else None,
        following=_following(report) if report else [],
        gantt=drawings.gantt(steps.steps, [line.host for line in report.hosts] if report else ()) if steps else None,
        files=[(name, what) for name, what in FILES.items() if (run.folder / name).is_file()],
        drawings=drawings,
        joined=joined,
        halves=signatures.halves,
    )


class _Failure(NamedTuple):
    """A failure of one host or of several that say the same."""

    hosts: Sequence[str]
    step: str
    lines: Sequence[str]
    hint: str
    findings: Sequence[Finding]


class _HostRow(NamedTuple):
    """A line of the table of hosts: one host, or several that are alike. ``steps``: what a dry run says, prospect → steps."""

    hosts: Sequence[str]
    line: HostReport
    seconds: float
    changed: int
    steps: Mapping[str, Sequence[str]]


def _headline(run: Run, report: Report | None) -> str:
    """The verdict as a sentence."""
    count = len(report.hosts) if report else 0
    hosts = f"all {count} hosts" if count > 2 else "both hosts" if count == 2 else "the host"
    if report is None:
        return {
            "done": "the command ended without an error",
            "failed": "the command failed",
            "interrupted": "the run was interrupted",
            "running": "the run still goes on",
            "killed": "the run ended without a word: it was killed, or this machine went down",
            "unreadable": "its report cannot be read: it is of another version, or damaged",
        }.get(run.verdict, "its folder does not say how it ended")
    if not report.ok:
        causing = {failure.host for failure in report.failures}
        failed = [line.host for line in report.hosts if line.host in causing]
        if failed:
            return f"{hosts if len(failed) == count > 1 else joined(failed)} failed"
        steps = list(dict.fromkeys(failure.where for failure in report.failures if failure.where))
        if report.failures:  # of the controller, or of no host alone: a plan that does not fit, Ctrl-C
            return "the run ended early" + (f", in the step {joined(steps)}" if steps else "")
        return "the training job does not count as passed" if report.smoke else "the training job failed"
    if _is_dry(report):
        would = sum(line.state == "would change" for line in report.hosts)
        return f"nothing was changed; {would} of {counted(count, 'host')} would change"
    return f"{hosts} {'have' if count > 1 else 'has'} what was planned, and " + (
        "the training job passed on " + ("them" if count > 1 else "it") if report.smoke else "no training job was run"
    )


def _following(report: Report) -> list[str]:
    """The commands that follow, as the terminal has them; not the run's own again, whose options are not known."""
    hosts = report.inventory
    if not hosts or _is_dry(report):
        return []
    found = commands_after(report, hosts, [])
    return [command for command in found if not command.startswith(OPEN_PAGE)] if report.ok else found[:1]


def _is_dry(report: Report | None) -> bool:
    return report is not None and any(line.steps or line.state == "would change" for line in report.hosts)


def _lines(text: str) -> list[str]:
    lines = text.strip().splitlines()
    cut = [line if len(line) <= _MAX_LETTERS else line[:_MAX_LETTERS] + " …" for line in lines[-_MAX_LINES:]]
    return [f"… {len(lines) - _MAX_LINES} lines before", *cut] if len(lines) > _MAX_LINES else cut


def _failures(report: Report) -> list[_Failure]:
    listed = list(grouped((general(each), each) for each in report.failures).items())
    shown = []
    for same, group in listed[:_MAX_FAILURES]:
        one, step = same if len(group) > 1 else group[0], same.where or ""
        # What the survey says comes with a hint for it.
        findings = logs.known_errors(one.what, step, OURS) if step != "survey" else []
        shown.append(_Failure([each.host or "controller" for each in group], step, _lines(one.what), one.hint or "", findings))
    if more := [each.host or "controller" for _, group in listed[_MAX_FAILURES:] for each in group]:
        shown.append(_Failure(more, "", [f"{len(more)} more failures are in report.json"], "", ()))
    return shown


def _log_findings(log: Path) -> list[Finding]:
    if log.stat().st_size > _LARGEST_LOG:
        return []
    return [finding for finding in logs.read([str(log)], OURS).findings if finding.id != UNKNOWN]


def _tail(log: Path) -> list[str]:
    lines = run_folders.tail(log, _LOG_LINES * _MAX_LETTERS)[-_LOG_LINES:]
    return [rank_output.readable(line)[:_MAX_LETTERS] for line in lines]


def _host_rows(lines: Sequence[HostReport]) -> list[_HostRow]:
    def alike(line: HostReport) -> tuple[object, ...]:
        versions = (line.openmpi, line.cmake, line.python, line.torch, line.nccl, line.engine)
        return (line.state, versions, tuple(line.steps.items()))

    rows = []
    for group in drawings.folded(lines, alike, len(lines)):
        steps: dict[str, list[str]] = grouped((prospect, step) for step, prospect in group[0].steps.items())
        seconds, changed = max(line.seconds for line in group), max(line.changed for line in group)
        rows.append(_HostRow([line.host for line in group], group[0], seconds, changed, steps))
    bad = ("failed", "unreachable", "blocked", "not finished")
    return sorted(rows, key=lambda row: row.line.state not in bad) if len(lines) >= drawings.FOLD_FROM else rows


def _facts(folder: Path) -> Mapping[str, Facts]:
    read = runs.load(folder / "facts.json", FactsFile)
    return {name: facts for name, facts in read.hosts.items() if isinstance(facts, Facts)} if read else {}
