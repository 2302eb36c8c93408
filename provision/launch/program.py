"""Launches a program of the user's on hosts that `provision up` made ready, from the first of them: under mpirun or without MPI.

The program runs in a folder that stays on the hosts, so that what it writes is not lost: ``~/provision-run/NAME``, to which the
program's file, the modules next to it and what was named besides are brought each time (program_files.py); or wherever the user says, and
then nothing is brought.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from provision.base import resources
from provision.base.errors import UsageError
from provision.inventory import Host, Inventory
from provision.launch import jobs, mpirun, program_files
from provision.launch.rank_output import RankOutput
from provision.remote import shell
from provision.remote.progress import Progress
from provision.remote.session import Interrupted, Session
from provision.remote.ssh import Job, JobResult
from provision.survey import installed


@dataclass(frozen=True)
class RunOptions:
    """What to launch. ``np``: None starts one rank per slot. ``environment`` reaches every rank and stands on no command line.

    ``workdir``: a folder that is there on every host; None brings ``bring``, the program's file, and with ``modules`` what it can import
    from next to it, to one of ours. ``launcher``: one of `launch.jobs.LAUNCHERS`, None for mpirun where it is installed. ``python``: an
    interpreter with the engine, there on every host; then nothing of ours need be installed. ``networks``: interfaces or CIDRs instead of
    the plan's. ``start_timeout``: seconds for hosts to answer and ranks to meet. ``elastic``: ranks may come and go; the launcher is
    ``own`` then. ``timestamps``: before each line of the ranks. ``mpi_args``, ``binding``: words for mpirun. ``oversubscribe``: more
    ranks than slots are meant.
    """

    command: tuple[str, ...]
    np: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    bring: tuple[Path, ...] = ()
    modules: bool = True
    output: Path | None = None
    quiet: bool = False
    launcher: str | None = None
    python: str | None = None
    networks: tuple[str, ...] = ()
    start_timeout: float | None = None
    verbose: bool = False
    elastic: jobs.Elastic | None = None
    timestamps: bool = False
    mpi_args: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    oversubscribe: bool = False


class _Seat(NamedTuple):
    """A host that may take part. ``address``: at which the first host reaches it."""

    host: Host
    address: str
    slots: int
    login: str


def run(inventory: Inventory, options: RunOptions, progress: Progress, passwords: Mapping[str, str]) -> int:
    """Launch, show what the ranks print, and return the exit code: of the rank that failed first, or 0.

    Raises:
        ProvisionError: a host cannot be used; nothing was started.
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    session = Session(inventory, progress, passwords)
    try:
        where, seats, placed = _look(session, options)
        workdir, command = _bring(session, seats, options)
        job = job_of(where, placed, command, workdir, options)
        if options.verbose:
            _tell_job(progress, seats, placed, job)
        return follow(session, seats[0].host.name, job, where.interpreter, placed, options)
    except Interrupted as error:
        raise JobInterrupted(error.what) from None
    except KeyboardInterrupt:
        raise JobInterrupted("interrupted") from None
    finally:
        session.close()


def job_of(where: jobs.Environment, placed: Sequence[tuple[str, int]], command: Sequence[str], workdir: str, options: RunOptions) -> Job:
    """The command as a job on the hosts ``placed``, in ``workdir``, by the launcher that was asked for, else the one there is.

    Raises:
        UsageError: it has no use for what was asked for.
    """
    given: dict[str, Any] = {"environment": options.environment, "workdir": workdir, "start_timeout": options.start_timeout}
    if options.launcher == "mpi" or (options.launcher is None and where.mpirun):
        return jobs.mpi_job(where, placed, command, **given, binding=options.binding, more=options.mpi_args)
    if options.binding or options.mpi_args:
        raise UsageError("--mpi-args and --binding-args: no mpirun is installed here", hint="leave them out")
    return jobs.own_job(where, placed, command, **given, elastic=options.elastic)


def follow(
    session: Session, first: str, job: Job, python: str, placed: Sequence[tuple[str, int]], options: RunOptions, *, inside: str = ""
) -> int:
    """Start a job on its first host, show what its ranks print and which failed first, and return its exit code.

    Raises:
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    ranks = sum(count for _, count in placed)
    shown = session.progress
    output = RankOutput(
        shown.line, shown.output, shown.errors, options.output, quiet=options.quiet, ranks=ranks, timestamps=options.timestamps
    )
    log = session.folder / "run.log"
    title = f"Run on {len(placed)} host(s), {ranks} rank(s)"
    try:
        result = jobs.run(session, first, job, python, title, log, output, inside)
    finally:
        output.close()
    if result.interrupted:
        _end_what_is_left(session)
    if result.code:
        _tell_first_failure(output, result, job, session.progress, log)
    return result.code


class JobInterrupted(Interrupted):
    """The user pressed Ctrl-C (or the run got SIGTERM) while a program of theirs ran."""

    exit_code = 130


def _end_what_is_left(session: Session) -> NoReturn:
    """The job has ended itself on every host that could be reached; what it could not end is looked for."""
    answers = shell.tidy(session, {host.name: resources.inline_command("guard.py", session.run_id) for host in session.inventory.hosts})
    unknown = sorted(name for name, answer in answers.items() if answer.code != 0)
    where = f"; {', '.join(unknown)} cannot be reached, and ends the job there when it hears nothing any more" if unknown else ""
    raise JobInterrupted(f"interrupted; nothing of this run is left running{where}")


def _look(session: Session, options: RunOptions) -> tuple[jobs.Environment, list[_Seat], list[tuple[str, int]]]:
    """What a launcher must know, the hosts that take part, and (address, ranks) for each of them."""
    hosts, timeout = session.inventory.hosts, options.start_timeout or shell.TIMEOUT_S
    found = installed.find(session, options.python, timeout)
    if isinstance(found, str):
        if options.launcher == "mpi":
            hint = f"provision up {session.inventory.argument}; or use our own launcher: --gloo"
            raise UsageError(f"--mpi: {found} has no mpirun that is known", hint=hint)
        if options.python is None:
            session.progress.line(f"nothing is installed here by `provision up`: the ranks run with {found}")
        free = options.np if options.np and len(hosts) == 1 else 1
        seats = [_Seat(host, host.address, host.slots or free, host.user or "") for host in hosts]
    else:
        seats = [_Seat(session.inventory.host(name), host.network.address, host.slots, host.login) for name, host in found.hosts.items()]
    # An elastic job may use every host that is there; its launcher starts as many ranks as are wanted.
    slots = [(seat.address, seat.slots) for seat in seats]
    placed = mpirun.fill(slots, None if options.elastic else options.np, oversubscribe=options.oversubscribe)
    seats = seats[: len(placed)]
    if isinstance(found, str):
        where = jobs.Environment(found, names={seat.address: seat.host.name for seat in seats})
    else:
        where = jobs.Environment.of(replace(found, hosts={seat.host.name: found.hosts[seat.host.name] for seat in seats}))
    return (replace(where, networks=options.networks) if options.networks else where), seats, placed


def _bring(session: Session, seats: Sequence[_Seat], options: RunOptions) -> tuple[str, list[str]]:
    """(the folder in which the ranks run, their command), after the files are there."""
    if options.workdir is not None:
        return options.workdir, list(options.command)
    if [seat.host.connection for seat in seats] == ["local"]:
        return str(Path.cwd()), list(options.command)
    packed = program_files.pack(options.command, options.bring, modules=options.modules)
    logins = {seat.login for seat in seats}
    if len(logins) > 1:
        raise UsageError(
            f"the hosts have different logins ({', '.join(sorted(logins))}), so no folder is the same on all", hint="name one: --workdir"
        )
    program_files.ship(session, packed, {seat.host.name: packed.unpack for seat in seats})
    return f"{{home}}/{packed.place}", packed.command


def _tell_job(progress: Progress, seats: Sequence[_Seat], placed: Sequence[tuple[str, int]], job: Job) -> None:
    for seat, (address, count) in zip(seats, placed, strict=True):
        progress.line(f"{seat.host.name} ({address}): {count} rank(s)")
    progress.line(f"on {seats[0].host.name}: {shlex.join(job.argv)}")
    if job.program:
        progress.line(f"each rank: {shlex.join(job.program)}")
    progress.line(f"variables of every rank: {', '.join(sorted(job.environment))}")  # values may be secret


def _tell_first_failure(output: RankOutput, result: JobResult, job: Job, progress: Progress, log: Path) -> None:
    """What failed first is what is read last. Only a rank that ended by itself has said why."""
    verdict = result.verdict
    failure = None
    if verdict is None or (verdict.kind == "ended" and verdict.code > 0):
        failure = output.first_failure(verdict.rank if verdict else None)
    progress.line("")
    if failure is None:
        said = jobs.told(verdict, job) if verdict else output.verdict or ""
        progress.line(f"the job ended with exit code {result.code} (all it printed: {log}){said and f': {said}'}", "bold red")
        return
    rank, lines = failure
    progress.line(f"rank {rank} failed first (exit code {result.code}; all that was printed: {log}):", "bold red")
    for line in lines:
        progress.line(f"    {line}")
