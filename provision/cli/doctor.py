"""`provision doctor …` on the command line: parse, call one function, print."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from provision.base import terminal
from provision.base.errors import UsageError, as_provision_error
from provision.base.text import counted, few, joined
from provision.catalog import overlay
from provision.cli import doctor_job
from provision.cli.help import App, Group
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.diagnosis import logs, signatures
from provision.diagnosis.findings import Finding, document
from provision.doctor import checks, show, support_bundle
from provision.doctor.health.collect import HealthRequest
from provision.doctor.health.verdict import Verdict, write_quarantine
from provision.doctor.host_checks import (
    THIS_MACHINE,
    Examination,
    examine_gpus_of_this_machine,
    examine_hosts,
    examine_this_machine,
    with_logs,
)
from provision.inventory import Inventory, listed
from provision.remote import progress
from provision.remote.session import Session

if TYPE_CHECKING:
    from typer._click import Context

# Endings of files that are logs and no inventories: Slurm and LSF name theirs so.
_LOG_ENDINGS = (".log", ".out", ".err")


class _CheckByDefault(Group):
    """``provision doctor [HOSTS] [--log FILE]`` is ``provision doctor check …``, and with ``--job`` ``provision doctor job …``."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if "--job" in args and args[0] not in self.commands:
            args = ["--job", "job", *(word for word in args if word != "--job")]
        elif not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["check", *args]
        return super().parse_args(ctx, args)


app = App(
    cls=_CheckByDefault,
    help="Find known errors on hosts and in logs, and show how to fix them: `provision doctor [HOSTS] [--log FILE] [--fix]`; "
    "all its options: `provision doctor check --help`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class _GpuOptions:
    """``request``: None where the health of GPUs is not asked for."""

    request: HealthRequest | None
    quarantine: Path | None
    prolog: bool


def gpu_options(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check the health of GPUs and RDMA ports, too; loads no GPU.")] = False,
    dcgm: Annotated[int | None, typer.Option("--dcgm", min=1, max=3, help="With --gpu: run DCGM's diagnostics of this level.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --gpu: DCGM (level 2), nvbandwidth and nccl-tests; they load the GPUs.")
    ] = False,
    quarantine: Annotated[
        Path | None,
        typer.Option("--quarantine", help="With --gpu: list the unfit hosts in this file, for `--limit '!@FILE'`.", dir_okay=False),
    ] = None,
    prolog: Annotated[
        bool, typer.Option("--prolog", help="As Slurm's Prolog: this machine's GPUs only; silent, and 1 if they are unfit.")
    ] = False,
) -> _GpuOptions:
    """What to check of GPUs. Raises UsageError for options without --gpu."""
    alone = [name for name, on in (("--dcgm", dcgm), ("--full", full), ("--quarantine", quarantine)) if on]
    if prolog and alone:
        raise UsageError(f"--prolog and {alone[0]} exclude each other", hint="a prolog has to be quick and changes no file")
    if alone and not gpu:
        raise UsageError(f"{alone[0]} needs --gpu", hint=f"provision doctor HOSTS --gpu {alone[0]} …")
    if quarantine is not None and quarantine.exists():
        listed(quarantine)  # a file of something else is an error before hosts are examined
    return _GpuOptions(HealthRequest.of(dcgm, full=full) if gpu else None, quarantine, prolog)


class _Fixing(NamedTuple):
    only: Sequence[str]
    fix: bool
    yes: bool


def fix_options(
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this known error; may be repeated.", metavar="ID")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Show what can be fixed, ask, fix it and check again.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> _Fixing:
    """Which errors, and whether to fix them."""
    return _Fixing(only or (), fix, yes)


@app.callback()
def of_job(
    job: Annotated[bool, typer.Option("--job", help="Say which rank keeps a job waiting: all of `provision doctor job`.")] = False,
) -> None:
    """`_CheckByDefault` has acted on it."""


@app.command()
@with_options(fixing=fix_options, gpu=gpu_options, passwords=passwords)
def check(
    hosts: Annotated[list[str] | None, typer.Argument(metavar="HOSTS", help="As for `up`; this machine by default.")] = None,
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to read, `-` for standard input; may be repeated.")] = None,
    limit: Limit = None,
    json_: Json = False,
    *,
    fixing: _Fixing,
    gpu: _GpuOptions,
    passwords: Mapping[str, str],
) -> None:
    """Check hosts (this machine by default), or read logs, or both. `check` itself may be left out."""
    if gpu.prolog:
        if hosts or log or any(fixing) or json_:
            raise UsageError("--prolog checks this machine alone and takes no other options", hint="provision doctor --prolog")
        _prolog()
        return
    catalog = overlay.own()
    if hosts and all(word.endswith(_LOG_ENDINGS) for word in hosts):
        terminal.say(f"{joined(hosts)}: read as with --log")
        log, hosts = [*hosts, *(log or ())], None
    fix, wanted = fixing.fix, {signatures.known_error(name).id for name in fixing.only}
    if gpu.request and fix:
        raise UsageError("--gpu and --fix exclude each other", hint="what --gpu finds is not fixed automatically")
    if not hosts and fix:
        raise UsageError("--fix needs HOSTS", hint="provision doctor localhost --fix")
    reading = logs.read(log, catalog) if log else None
    if reading and not reading.is_complete:
        terminal.say("so many lines might be errors that not all of them were examined: try a part of the log alone")
    if not hosts:
        if reading and log and not gpu.request:
            findings = _chosen(reading.findings, wanted)
            names = ["standard input" if name == "-" else name for name in log]
            _print(findings, json_, examined=f"in {few(names, 3)}", hosts=False, reading=reading)
        else:
            examination = examine_this_machine(gpu.request)
            findings = _chosen(with_logs(examination, reading), wanted)
            made = _verdicts(examination, gpu)
            _print(findings, json_, examined="on this machine", hosts=True, reading=reading, verdicts=made)
        if _is_bad(findings):
            raise typer.Exit(1)
        return
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown, Session(inventory, shown, passwords, command="provision doctor", catalog=catalog) as session:
        fixed = True
        examination = examine_hosts(session, gpu.request)
        if fix:
            examination.findings[:] = _chosen(examination.findings, wanted)
            examination, fixed = _fix(inventory, session, examination, passwords, fixing.yes)
        findings = _chosen(with_logs(examination, reading), wanted)
        answered = len(examination.facts)
        code = 2 if not answered else 1 if _is_bad(findings) or not fixed else 0
        session.record.exit_code = code
    if not json_:
        show.overview(findings, examination.hosts, terminal.out())
    made = _verdicts(examination, gpu)
    silent = "" if answered == len(examination.hosts) else f", of which {answered} answered"
    examined = f"on {counted(len(examination.hosts), 'host')}{silent}"
    _print(findings, json_, examined=examined, hosts=True, reading=reading, verdicts=made)
    if code:
        raise typer.Exit(code)


app.command()(doctor_job.job)


@app.command()
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="As `provision doctor list` names it.")]) -> None:
    """Print everything that is known about one error."""
    show.entry(signatures.known_error(identifier), terminal.out(), checked=identifier in checks.CHECKED)


@app.command()
@with_options(passwords=passwords)
def bundle(
    hosts: Hosts,
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive to write (.tar.gz).", dir_okay=False)],
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to add; may be repeated.")] = None,
    limit: Limit = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Collect facts, findings and logs of the hosts for a colleague, without secrets, keys, tokens and user names."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown, Session(inventory, shown, passwords, command="provision doctor bundle") as session:
        examination = examine_hosts(session)
        support_bundle.write(out, examination, [Path(name) for name in log or ()])
    terminal.out().say(str(out))


@app.command("list")
def list_(
    layer: Annotated[
        str | None, typer.Option("--layer", help=f"Only of this layer: {', '.join(signatures.LAYERS)}.", metavar="LAYER")
    ] = None,
) -> None:
    """Print the known errors, by layer."""
    if layer is not None and layer not in signatures.LAYERS:
        raise UsageError(f"invalid --layer {layer}: expected one of {', '.join(signatures.LAYERS)}")
    show.known_errors(terminal.out(), layer)


def _prolog() -> None:
    """Exit as Slurm wants: 0, or 1 and one line on standard error, with which slurmd drains the node.

    What is wrong with provision or its files says nothing about the GPUs, and must not drain all nodes that share it.
    """
    name = socket.gethostname() or THIS_MACHINE
    try:
        (verdict,) = examine_gpus_of_this_machine(name).verdicts
    except Exception as error:  # noqa: BLE001  see above
        said = " ".join(str(as_provision_error(error).what).split())
        terminal.err().say(f"provision: {name}: the GPUs were not checked: {said[:300]}")
        return
    if verdict.reasons:
        worst = verdict.reasons[0]
        more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
        terminal.err().say(f"provision: {name}: GPUs {verdict.word}: {worst.observed.splitlines()[0]} [{worst.id}]{more}")
    if verdict.word == "unfit":
        raise typer.Exit(1)


def _verdicts(examination: Examination, gpu: _GpuOptions) -> list[Verdict]:
    """The verdicts on all hosts, where GPUs were checked; the unfit ones are listed where ``--quarantine`` says."""
    if gpu.request is None:
        return []
    made = examination.verdicts
    if gpu.quarantine is not None:
        terminal.say(write_quarantine(gpu.quarantine, {verdict.host: verdict.word == "unfit" for verdict in made}))
    return made


def _print(
    found: list[Finding], as_json: bool, *, examined: str, hosts: bool, reading: logs.Reading | None, verdicts: Sequence[Verdict] = ()
) -> None:
    """Print the findings.

    Args:
        examined: in which logs, or on which hosts.
        hosts: whether hosts were checked.
        reading: of logs, where there are any.
    """
    if as_json:
        in_logs = {"logs": {"lines": reading.lines, "complete": reading.is_complete}} if reading else {}
        of_gpus = {"verdicts": {verdict.host: verdict.as_dict() for verdict in verdicts}} if verdicts else {}
        terminal.print_json({**document(found), **in_logs, **of_gpus})
    else:
        show.findings(found, terminal.out(), examined=examined, searched=_searched(reading, hosts=hosts))
        show.verdicts(verdicts, terminal.out())


def _is_bad(found: Sequence[Finding]) -> bool:
    """Whether one of them is an error, or a warning in a log."""
    return any(finding.severity == "error" or (finding.host is None and finding.severity == "warning") for finding in found)


def _searched(reading: logs.Reading | None, *, hosts: bool) -> str:
    """What was looked for: how much it means that nothing was found."""
    said = (
        [f"{counted(reading.lines, 'line')} read", f"{sum(bool(each.patterns) for each in show.listed())} known errors"] if reading else []
    )
    return ", ".join([*said, *([f"{len(checks.CHECKS)} checks"] if hosts else [])])


def _fix(
    inventory: Inventory, session: Session, examination: Examination, passwords: Mapping[str, str], yes: bool
) -> tuple[Examination, bool]:
    """Ask, fix, check again: what is left, and whether everything that was begun was done."""
    from provision.doctor import fixes  # it needs much that logs and checks do not

    planned = fixes.plan(examination)
    for finding in planned.manual:
        terminal.say(f"by hand: {finding.host}: {finding.what} [{finding.id}]")
    lines = planned.lines()
    if not lines:
        terminal.say("nothing of this can be fixed automatically")
        return examination, True
    terminal.say("this will run:")
    for line in lines:
        terminal.say(f"  {line}")
    if not yes and not terminal.confirm("Run it?"):
        return examination, True
    results = fixes.apply(planned, examination, inventory, session, passwords)
    for result in results:
        terminal.say(f"{result.state}: {result.host or 'all hosts'}: {result.id}" + (f": {result.reason}" if result.reason else ""))
    # With new connections: limits and PATH are set at login.
    with Session(inventory, session.progress, passwords, command=session.command, catalog=session.catalog) as fresh:
        again = examine_hosts(fresh)
    before, after = ({(finding.id, finding.host) for finding in each.findings} for each in (examination, again))
    for name, host in sorted(before - after, key=str):
        terminal.say(f"fixed: {host}: {name}")
    return again, all(result.state == "done" for result in results)


def _chosen(found: list[Finding], wanted: set[str]) -> list[Finding]:
    return [finding for finding in found if not wanted or finding.id in wanted]
