"""Launches a user's program on hosts that `provision up` made ready, from the first of them.

The program runs in ``~/provision-run/NAME`` on the hosts, to which its files are copied each time; the folder stays, so that what the
program writes is not lost. With the user's own folder (``--workdir``) nothing is copied.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from provision.base import paths, resources, terminal
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.base.text import counted
from provision.base.validation import max_here
from provision.inventory import Host, Inventory
from provision.launch import detached, jobs, known_error, launchers, placement, program_files, root_cause, stall_watch, tuning
from provision.launch.jobs import Job, JobResult
from provision.launch.launchers import Environment, RunOptions
from provision.launch.rank_output import RankOutput, shortened
from provision.launch.root_cause import RootCause
from provision.launch.stall_watch import StallWatch
from provision.plan.model import Plan
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import gpu_code, installed

_PASSING_S = 3.0  # for longer than a job that waits has a host


class _Seat(NamedTuple):
    """A host that may take part.

    Attributes:
        address: at which the first host reaches it.
        has_gpus: None where nothing is known of it.
        inside: words of the shell that run a command in its container; empty without one.
    """

    host: Host
    address: str
    slots: int
    login: str
    has_gpus: bool | None = None
    inside: str = ""

    def command(self, script: str) -> str:
        """What runs a shell script there."""
        return f"{self.inside} sh -c {shlex.quote(script)}" if self.inside else script


@dataclass(frozen=True)
class Containers:
    """Containers in which ranks run, one on each host of ``plan``.

    Attributes:
        plan: what they hold.
        inside: host → words of the shell that run a command in its container.
    """

    plan: Plan
    inside: Mapping[str, str]


def run(
    inventory: Inventory,
    options: RunOptions,
    progress: Progress,
    passwords: Mapping[str, str],
    *,
    gpu_check: bool = True,
    environment: Callable[[Session, Plan], str] | None = None,
    containers: Callable[[Session], contextlib.AbstractContextManager[Containers]] | None = None,
) -> int:
    """Launch, show what the ranks print, and return the exit code: of the rank that failed first, or 0.

    Args:
        environment: creates another environment than ours on the hosts of a plan, where it is missing, and returns its Python's path.
        containers: starts containers on the hosts, in which the ranks run.

    Raises:
        ProvisionError: a host cannot be used, or with ``gpu_check`` a library has no code for one of its GPUs; nothing was started.
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    with Session(inventory, progress, passwords, command="provision run") as session, contextlib.ExitStack() as stack:
        started = stack.enter_context(containers(session)) if containers else None
        where, seats, placed = _place(session, options, environment, started)
        _check_syntax(session, where, seats[0], options)
        if gpu_check and started is None:
            _check_gpu_code(session, where, seats)
        shared = options.oversubscribe if started is None and seats[0].has_gpus is not None else None
        if options.wait and shared is None:
            hint = f"provision up {inventory.argument}; or leave it out"
            raise UsageError("--wait: nothing is known of the jobs on these hosts", hint=hint)
        if shared is False and not options.wait:
            _check_free(session, seats)
        workdir, command, here = _copy(session, seats, options)
        _check_restart(session, seats[0], workdir, options)
        job = make_job(where, placed, replace(options, command=tuple(command), workdir=workdir))
        if options.verbose:
            _show_job(progress, seats, placed, job)
        job = replace(job, inside=seats[0].inside, shared=shared, tuned=_tune(session, seats, placed, options))
        if options.detach:
            return _detach(session, job, placed, replace(options, workdir=workdir), seats[0].login)
        return follow(session, job, placed, options, here=here)


def make_job(where: Environment, placed: Sequence[tuple[str, int]], options: RunOptions) -> Job:
    """The command as a job on the hosts ``placed``, by the launcher of the options, else the one that is installed.

    Raises:
        UsageError: the launcher does not take an option.
    """
    if options.launcher == "mpi" or (options.launcher is None and where.mpirun):
        return launchers.mpi_job(where, placed, options)
    if options.binding or options.mpi_args:
        raise UsageError("--mpi-args and --binding-args: no mpirun is installed here", hint="leave them out")
    return launchers.own_job(where, placed, options)


def follow(
    session: Session,
    job: Job,
    placed: Sequence[tuple[str, int]],
    options: RunOptions,
    *,
    here: Callable[[str], str] = str,
    run: Callable[..., JobResult | None] | None = None,
) -> int:
    """Run a job, show what its ranks print and which failed first, and return its exit code: that rank's, where it is known.

    Args:
        here: the name on this machine of a file on the hosts.
        run: follows a job that runs already, and returns None where that goes on.

    Raises:
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    ranks = sum(count for _, count in placed)
    output = RankOutput(session.progress, ranks, options.output, quiet=options.quiet, timestamps=options.timestamps)
    log = session.folder / "run.log"
    # Else an elastic job's ranks move, and the user's words for mpirun may place them elsewhere.
    if options.elastic is None and not options.binding and not options.mpi_args:
        session.record.ranks = {job.names.get(address, address): count for address, count in placed}
    with contextlib.ExitStack() as stack:
        stack.callback(output.close)
        watch = stack.enter_context(StallWatch(session, options.stall)) if options.stall else None
        result = (run or jobs.run)(
            session, job, f"Run on {counted(len(placed), 'host')}, {counted(ranks, 'rank')}", log, output, watch=watch
        )
    if result is None:
        return 0
    found = root_cause.of(output, result)
    was_killed = watch is not None and watch.has_ended_it(result.code) and not result.interrupted
    session.record.exit_code = code = stall_watch.EXIT_CODE if was_killed else found.code or result.code
    if result.interrupted:
        raise Interrupted(f"interrupted; nothing of this run is left running{_end_leftovers(session)}")
    if watch is not None and was_killed:
        session.progress.line(f"{watch.last_words}{_end_leftovers(session)}", "bold red")
        session.progress.line(paths.short(f"  exit code {code}; the job's whole output: {log}"))
    elif code:
        host = _host_of(found.failure.rank, result, job, session.record.ranks) if found.failure else ""
        for line in _failure(found, output, result, job, log, host, here):
            session.progress.line(*line)
        for step in known_error.explained(found.failure, log, session, options):
            session.progress.line(f"  {step}")
        if result.verdict is not None and result.verdict.kind == "busy":
            session.progress.line(f"  → {jobs.BUSY}")
    return code


def _detach(session: Session, job: Job, placed: Sequence[tuple[str, int]], options: RunOptions, login: str) -> int:
    """Leave a job to its first host, and print its id."""
    session.progress.stage(f"Start on {counted(len(placed), 'host')}, {counted(sum(count for _, count in placed), 'rank')}")
    about: dict[str, JsonValue] = {"program": shlex.join(options.command), "user": login, "workdir": options.workdir}
    about |= {"placed": [list(each) for each in placed], "names": dict(job.names)}
    found = detached.start(session, job, about)
    session.progress.close()  # the id below has a line of its own
    session.progress.line(f"job {found.job}: {found.shown}; it goes on without this machine")
    for command in (f"logs -f {found.job}", f"cancel {found.job}", "jobs"):
        session.progress.line(f"  → provision {command}")
    terminal.out().say(found.job)
    return 0


def _check_free(session: Session, seats: Sequence[_Seat]) -> None:
    """Raise ProvisionError where another job has a host: what would be copied may be the files that it runs."""
    for is_last in (False, True):  # a job that waits for another host has this one for a moment, again and again
        for job in detached.look(session, [seat.host.name for seat in seats])[0]:
            if job.state in ("running", "attached") and is_last:
                raise ProvisionError(f"in use by job {job.job} of {job.user}", where=job.host, hint=jobs.BUSY)
            if job.state in ("running", "attached"):
                time.sleep(_PASSING_S)
                break
        else:
            return


def _end_leftovers(session: Session) -> str:
    """The job has ended itself on every host that it could reach; end what it could not, and say where that is unknown."""
    sweep = resources.inline_command("guard.py", session.run_id)
    answers = ssh.run_cleanup(session, {host.name: sweep for host in session.inventory.hosts})
    # A guard of the job that lives ends it there, and may kill this with it.
    unknown = sorted(name for name, answer in answers.items() if answer.code not in (0, 128 + signal.SIGKILL))
    return f"; {', '.join(unknown)} cannot be reached, and ends the job there when it hears nothing any more" if unknown else ""


def _place(
    session: Session, options: RunOptions, environment: Callable[[Session, Plan], str] | None, containers: Containers | None
) -> tuple[Environment, list[_Seat], list[tuple[str, int]]]:
    """What a launcher must know, the hosts that take part, and (address, ranks) for each of them."""
    hosts, timeout = session.inventory.hosts, options.start_timeout or ssh.TIMEOUT_S
    found = containers.plan if containers else installed.find(session, options.python, timeout)
    if isinstance(found, str):
        if environment is not None:
            hint = f"provision up {session.inventory.argument}"
            raise UsageError("--env: nothing is installed here that the environment would build on", hint=hint)
        if options.launcher == "mpi":
            hint = f"provision up {session.inventory.argument}; or use the engine's launcher: --launcher own"
            raise UsageError(f"--mpi: no mpirun is known that belongs to {found}", hint=hint)
        if options.python is None:
            session.progress.line(f"nothing is installed here by `provision up`: the ranks run with {found}")
        slots = options.per_node or (options.np if options.np and len(hosts) == 1 else 1)
        slots = min(slots, max_here()) if hosts[0].connection == "local" else slots
        seats = [_Seat(host, host.address, host.slots or slots, host.user or "") for host in hosts]
    else:
        seats = [
            _Seat(
                *(session.inventory.host(name), host.network.address, host.slots, host.login, host.nccl is not None),
                inside=containers.inside[name] if containers else "",
            )
            for name, host in found.hosts.items()
        ]
    placed = placement.of_program([(seat.address, seat.slots) for seat in seats], options)
    seats = seats[: len(placed)]
    if isinstance(found, str):
        where = Environment(found, names={seat.address: seat.host.name for seat in seats})
    else:
        taken = replace(found, hosts={seat.host.name: found.hosts[seat.host.name] for seat in seats})
        where = Environment.of(taken)
        if environment is not None:
            where = replace(where, interpreter=environment(session, taken), programs=where.interpreter.rpartition("/")[0])
    return (replace(where, networks=options.networks) if options.networks else where), seats, placed


def _check_syntax(session: Session, where: Environment, first: _Seat, options: RunOptions) -> None:
    """Raise UsageError for a script that Python cannot compile, before anything is copied. The hosts' Python has the last word."""
    wrong = None if options.workdir is not None else program_files.syntax_error(options.command)
    if wrong is None:
        return
    script, why = wrong
    compiling = "import sys; compile(sys.stdin.buffer.read(), 'script', 'exec')"
    python = f"{shlex.quote(where.interpreter)} -I -c {shlex.quote(compiling)}"
    answer = ssh.run(session, {first.host.name: first.command(python)}, stdin=script.read_bytes())[first.host.name]
    if answer.code == 1:
        raise UsageError(f"a syntax error: {why}", where=str(script), hint="correct it; nothing was copied or started")


def _check_restart(session: Session, first: _Seat, workdir: str, options: RunOptions) -> None:
    """Raise UsageError where the folder of ``--restart-from`` is missing: a program that reads no checkpoint would begin at its start."""
    folder = options.environment.get("COLLECTIVE_RESTART_FROM")
    look = f"cd; cd {shlex.quote(workdir.removeprefix('{home}/'))}; [ -d {shlex.quote(folder or '')} ]"
    if folder and ssh.run(session, {first.host.name: first.command(look)})[first.host.name].code == 1:
        raise UsageError(
            f"--restart-from {folder}: no such folder", where=first.host.name, hint="name one with checkpoints, or leave it out"
        )


def _check_gpu_code(session: Session, where: Environment, seats: Sequence[_Seat]) -> None:
    """Raise ProvisionError where a library has no code for a GPU: the job would fail with "no kernel image", or not before it needs it."""
    problems = gpu_code.check(session, {seat.host.name: where.interpreter for seat in seats if seat.has_gpus is not False})
    for problem in problems:
        if problem.severity != "error":
            session.progress.line(f"{problem.severity}: {problem}")
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        for problem in errors[1:]:
            session.progress.line(str(problem))
        raise ProvisionError(errors[0].what, where=errors[0].host, hint=f"{errors[0].hint}; --no-gpu-check starts it all the same")


def _copy(session: Session, seats: Sequence[_Seat], options: RunOptions) -> tuple[str, list[str], Callable[[str], str]]:
    """(the folder in which the ranks run, their command, what a file there is called here), after the program's files are on the hosts."""
    if options.workdir is not None:
        return options.workdir, list(options.command), str
    if [(seat.host.connection, seat.inside) for seat in seats] == [("local", "")]:
        if options.files:
            session.progress.line("--copy has no effect: the program runs on this machine, in this folder")
        prefix = "./" if program_files.program_at(options.command)[0] == 0 and "/" not in options.command[0] else ""
        return str(Path.cwd()), [prefix + options.command[0], *options.command[1:]], str
    logins = {seat.login for seat in seats}
    if len(logins) > 1:
        what = f"the hosts have different logins ({', '.join(sorted(logins))}), so no folder is the same on all"
        raise UsageError(what, hint="name one: --workdir")
    archive = program_files.pack(options.command, options.files, modules=options.modules)
    if options.wait:  # the job that is waited for may be of the same folder, and start ranks again
        archive = archive._replace(folder=f"{archive.folder}-{session.run_id}")
    unpack = {seat.host.name: seat.command(archive.unpack) for seat in seats}
    program_files.copy(session, archive, unpack, on_hosts=not any(seat.inside for seat in seats))
    return f"{{home}}/{archive.folder}", archive.command, archive.here


def _tune(session: Session, seats: Sequence[_Seat], placed: Sequence[tuple[str, int]], options: RunOptions) -> dict[str, dict[str, str]]:
    """`Job.tuned`; says what it is and why. Hosts with GPUs are not asked; an elastic job's hosts change, and are left as they are."""
    if options.tune == tuning.OFF or options.elastic is not None:
        return {}
    asked = {seat.host.name: seat.command(tuning.PROBE) for seat in seats if not seat.has_gpus}
    answers = ssh.run(session, asked) if asked else {}
    found = {name: tuning.Processors.of(answer.body) for name, answer in answers.items() if answer.code == 0}
    level, why_not = tuning.common_level(options.tune, {seat.host.name: found.get(seat.host.name) for seat in seats})
    if why_not:
        session.progress.line(why_not)
    ranks = {seat.host.name: count for seat, (_, count) in zip(seats, placed, strict=True)}
    chosen = {name: tuning.choose(each, ranks[name], level, options.environment) for name, each in found.items()}
    for line in tuning.sentences(chosen):
        session.progress.line(line)
    addresses = {seat.host.name: "" if seat is seats[0] else seat.address for seat in seats}
    return {addresses[name]: each.variables for name, each in chosen.items()}


def _show_job(progress: Progress, seats: Sequence[_Seat], placed: Sequence[tuple[str, int]], job: Job) -> None:
    for seat, (address, count) in zip(seats, placed, strict=True):
        progress.line(f"{seat.host.name} ({address}): {counted(count, 'rank')}")
    progress.line(f"on {seats[0].host.name}: {shlex.join(job.argv)}")
    if job.program:
        progress.line(f"each rank: {shlex.join(job.program)}")
    progress.line(f"variables of every rank: {', '.join(sorted({*job.environment, *job.free_ports}))}")  # values may be secret


def _failure(
    found: RootCause, output: RankOutput, result: JobResult, job: Job, log: Path, host: str, here: Callable[[str], str]
) -> Iterator[tuple[str, ...]]:
    """(line, style) …: what failed first, on ``host``, and then, a line each, what that did to other ranks.

    Only a rank that ended by itself has printed why.
    """
    yield ("",)
    failure, ended, whole = found.failure, found.ended, f"the job's whole output: {log}"
    code = f"exit code {found.code or result.code}"
    if failure is not None:
        where = f" ({here(failure.place)})" if failure.place else ""
        # The traceback has the whole text; that of an error of all ranks is as long as their list.
        yield f"rank {failure.rank}{host} failed first: {shortened(failure.exception)}{where}", "bold red"
        yield from ((f"    {line}",) for line in (() if output.is_on_screen(failure) else failure.lines))
        yield (f"  {code}; {whole}",)
    elif ended is not None:
        said = f": {found.words}" if found.words else ""
        names_code = not found.was_awaited and not said and ended.code > 0
        if found.was_awaited:
            how = f"ended{'' if ended.code else ' with exit code 0'} while others waited for it"
        else:
            how = "failed first" if said else jobs.how_it_ended(ended.code)
        yield f"rank {ended.rank} on {jobs.name_of(ended.host, job)} {how}{said}", "bold red"
        yield (f"  {whole}" if names_code else f"  {code}; {whole}",)
    elif result.verdict is not None:
        names_code = result.verdict.code == result.code  # of what has ended, which is the job's
        yield f"{jobs.describe(result.verdict, job)} ({whole if names_code else f'{code}; {whole}'})", "bold red"
    elif output.verdict:
        yield f"{output.verdict} ({whole})", "bold red"
    else:
        yield f"the job failed ({code}; {whole})", "bold red"
    yield from ((f"  {line}",) for line in (*root_cause.alike(found, output, result), *output.consequences(failure)))


def _host_of(rank: int, result: JobResult, job: Job, ranks: Mapping[str, int]) -> str:
    """`` on node1``; empty where it is not known. ``ranks``: as in the run's record."""
    recorded = [jobs.name_of(one.host, job) for one in result.ended if one.rank == rank]
    if recorded:
        return f" on {recorded[0]}"
    hosts = [host for host, count in ranks.items() for _ in range(count)]  # both launchers number ranks in the order of the hosts
    return f" on {hosts[rank]}" if rank < len(hosts) else " on an unknown host" if hosts else ""
