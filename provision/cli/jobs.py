"""`provision jobs`, `logs`, `cancel` and `fetch` on the command line: detached jobs, and what they have left on hosts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated

import typer

from provision.base import paths, terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import joined, shortened
from provision.base.validation import did_you_mean
from provision.cli.options import Json, Limit, inventory_of, passwords, with_options
from provision.cli.status import OptionalHosts, hosts_or_last
from provision.inventory import Inventory
from provision.launch import detached, program
from provision.launch.detached import DetachedJob
from provision.launch.launchers import RunOptions
from provision.remote import progress
from provision.remote.session import RECORD, RUN_ID, Record, Session
from provision.remote.ssh import Visitor
from provision.report import host_log, runs

_Hosts = Annotated[
    str | None, typer.Option("--hosts", metavar="HOSTS", help="Where it is; by default where this machine started it, else the last run's.")
]
_JOB = "A job's id, or how it begins; provision jobs lists them."


@with_options(passwords=passwords)
def jobs(hosts: OptionalHosts = None, limit: Limit = None, json_: Json = False, *, passwords: Mapping[str, str]) -> None:
    """List the jobs on hosts, the newest first: detached ones (`provision run --detach`), also those that are over, and others that run.

    The exit code is 1 where a host does not answer.
    """
    inventory = inventory_of(hosts_or_last(hosts), limit)
    found, failed = detached.look(Visitor(inventory, passwords), [host.name for host in inventory.hosts])
    if json_:
        terminal.print_json({"schema": 1, "jobs": [{**job.model_dump(mode="json"), "hosts": job.hosts} for job in found], "failed": failed})
    elif found:
        since = [f"{datetime.fromtimestamp(job.since or 0).astimezone():%m-%d %H:%M}" if job.since else "-" for job in found]
        rows = [
            {"job": job.job, "state": job.shown, "program": job.program, "hosts": shortened(job.hosts), "since": when, "user": job.user}
            for job, when in zip(found, since, strict=True)
        ]
        terminal.out().print(terminal.table(rows, {"running": "cyan", "done": "green", "killed": "red"}))
    else:
        terminal.out().say(f"no jobs on {inventory.where}: provision run --detach starts one")
    for host, why in failed.items():
        terminal.err().say(f"{host}: {why}", "bold yellow")
    if failed:
        raise typer.Exit(1)


def _is_job(word: str) -> bool:
    """Whether a word is a job's id, or how one begins, and not a host's name."""
    return re.fullmatch(r"\d{8}(-[0-9a-f-]*)?", word) is not None


def _find(word: str, hosts: str | None, passwords: Mapping[str, str]) -> tuple[Inventory, DetachedJob]:
    """The detached job of that id. Raises UsageError where there is none, or several, on these hosts."""
    record = runs.load(paths.runs() / word / RECORD, Record) if hosts is None and RUN_ID.fullmatch(word) else None
    inventory = inventory_of(hosts or (record.inventory if record else hosts_or_last(None)))
    found, failed = detached.look(Visitor(inventory, passwords), [host.name for host in inventory.hosts])
    matching = [each for each in found if each.job.startswith(word) and each.state != "attached"]
    if len(matching) == 1 and (not failed or matching[0].job == word):  # a host that is silent may have another
        return inventory, matching[0]
    what = f"{joined([each.job for each in matching])}: expected one job, by its whole id" if matching else f"no detached job {word}"
    silent = f" ({joined(list(failed))} did not answer)" if failed else ""
    raise ProvisionError(what + silent, where=inventory.where, hint="provision jobs lists them; of other hosts: --hosts HOSTS")


@with_options(passwords=passwords)
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB|HOST", help=f"{_JOB} Or a host of a run of this machine.")],
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default=False, help="Of HOST; by default the newest with a report or a program.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job's end; Ctrl-C leaves it running.")] = False,
    hosts: _Hosts = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Show what a detached job has printed, and how it ended; or what a host did in a run: its tasks, and what its ranks printed.

    The exit code is that of a job that has ended, and 130 of one that was cancelled.
    """
    if _is_job(job):
        inventory, found = _find(job, hosts, passwords)
        with progress.make() as shown, Session(inventory, shown, passwords, command="provision logs") as session:
            attach = partial(detached.attach, name=found.job, wait=follow)
            options = RunOptions((found.program,))
            raise typer.Exit(program.follow(session, found.as_job, found.placed, options, run=lambda *each, watch: attach(*each)))  # noqa: ARG005
    if follow or hosts:
        raise UsageError(f"invalid job {job}: expected its id", hint="provision jobs lists them")
    of_run = runs.find(run, (runs.REPORT, *host_log.LOGS))
    terminal.out().say(f"{of_run.id}: {of_run.command or 'provision'}, {of_run.verdict}", "bold")
    for line in host_log.lines(of_run, job):
        terminal.out().say(line.text, line.style)


@with_options(passwords=passwords)
def cancel(job: Annotated[str, typer.Argument(metavar="JOB", help=_JOB)], hosts: _Hosts = None, *, passwords: Mapping[str, str]) -> None:
    """End a detached job on all its hosts. Its log stays: provision logs JOB."""
    inventory, found = _find(job, hosts, passwords)
    names = [host.name for host in inventory.hosts if host.name in found.names.values() or host.name == found.host]
    terminal.say(f"ending {found.job} on {joined(names)} …")
    for host, why in detached.cancel(Visitor(inventory, passwords), found.host, found.job, names).items():
        raise ProvisionError(f"it is not known that nothing is left there: {why}", where=host, hint=f"again: provision cancel {found.job}")
    terminal.say("it has ended, and nothing of it is left there")


@with_options(passwords=passwords)
def fetch(
    source: Annotated[str, typer.Argument(metavar="JOB|HOST", help=f"{_JOB} Or a host's name in the inventory.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file or folder there: of a job, in its folder; of a host, in the home.")],
    hosts: _Hosts = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Copy a file or folder to here: of a job from its first host, where rank 0 is, or of a host."""
    if _is_job(source):
        inventory, job = _find(source, hosts, passwords)
        if posixpath.basename(posixpath.normpath(path)) in ("", ".", ".."):  # its name here would be the host's choice
            raise UsageError(f"invalid path {path}: expected a file or folder in the job's folder")
        source, path = job.host, posixpath.join(job.workdir.removeprefix("{home}/"), path)
    else:
        inventory = inventory_of(hosts_or_last(hosts))
        if source not in (names := [host.name for host in inventory.hosts]):
            raise UsageError(f"no host {source}{did_you_mean(source, names)}", where=inventory.where)
    terminal.out().say(detached.fetch(Visitor(inventory, passwords), source, path))
