"""Launches a program of the user's on hosts that `provision up` made ready, from the first of them: under mpirun or without MPI.

The program runs in a folder that stays on the hosts, so that what it writes is not lost: ``~/provision-run/NAME``, to which the
program's file and what was named besides are brought each time; or wherever the user says, and then nothing is brought.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from provision import at_once, installed, launch, mpirun
from provision.errors import ProvisionError, UsageError
from provision.inventory import Host, Inventory
from provision.progress import Progress
from provision.rank_output import RankOutput
from provision.remote import Job
from provision.session import Session

#: Never brought along: histories, environments and what Python makes anew.
_LEFT_OUT = {
    ".git",
    ".hg",
    "__pycache__",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
}
_PLACE = "provision-run"  # in the login's home, on every host
_BRING_S = 600.0  # a guard against what hangs; programs may bring folders with them


@dataclass(frozen=True)
class RunOptions:
    """What to launch. ``np``: None starts one rank per slot. ``environment`` reaches every rank and stands on no command line.

    ``workdir``: a folder that is there on every host; None brings ``bring``, and the program's file, to one of ours. ``launcher``: one of
    `launch.LAUNCHERS`. ``python``: an interpreter with the engine, there on every host; then nothing of ours need be installed.
    ``networks``: interfaces or CIDRs instead of the plan's. ``start_timeout``: seconds for hosts to answer and ranks to meet.
    ``elastic``: ranks may come and go; the launcher is ``own`` then.
    """

    command: tuple[str, ...]
    np: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    bring: tuple[Path, ...] = ()
    output: Path | None = None
    quiet: bool = False
    launcher: str = "mpi"
    python: str | None = None
    networks: tuple[str, ...] = ()
    start_timeout: float | None = None
    verbose: bool = False
    elastic: launch.Elastic | None = None


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
        more = {"elastic": options.elastic} if options.elastic else {}
        job = launch.LAUNCHERS[options.launcher](
            where, placed, command, environment=options.environment, workdir=workdir, start_timeout=options.start_timeout, **more
        )
        if options.verbose:
            _tell_job(progress, seats, placed, job)
        return follow(session, seats[0].host.name, job, where.interpreter, placed, options)
    finally:
        session.close()


def follow(
    session: Session, first: str, job: Job, python: str, placed: Sequence[tuple[str, int]], options: RunOptions, *, inside: str = ""
) -> int:
    """Start a job on its first host, show what its ranks print and which failed first, and return its exit code.

    Raises:
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    ranks = sum(count for _, count in placed)
    output = RankOutput(session.progress.line, options.output, quiet=options.quiet, ranks=ranks)
    log = session.folder / "run.log"
    title = f"Run on {len(placed)} host(s), {ranks} rank(s)"
    try:
        result = launch.run(session, first, job, python, title, log, output, inside)
    finally:
        output.close()
    if result.interrupted:
        session.abort()
    if result.code:
        _tell_first_failure(output, result.code, session.progress, log)
    return result.code


def _look(session: Session, options: RunOptions) -> tuple[launch.Environment, list[_Seat], list[tuple[str, int]]]:
    """What a launcher must know, the hosts that take part, and (address, ranks) for each of them."""
    hosts, patience = session.inventory.hosts, options.start_timeout or at_once.PATIENCE_S
    plan = None
    if options.python is not None:
        installed.check(session, options.python, patience)
        free = options.np if options.np and len(hosts) == 1 else 1
        seats = [_Seat(host, host.address, host.slots or free, host.user or "") for host in hosts]
    else:
        plan = installed.look(session, patience)
        seats = [_Seat(session.inventory.host(name), host.network.address, host.slots, host.login) for name, host in plan.hosts.items()]
    # An elastic job may use every host that is there; its launcher starts as many ranks as are wanted.
    placed = mpirun.fill([(seat.address, seat.slots) for seat in seats], None if options.elastic else options.np)
    seats = seats[: len(placed)]
    if plan is None:
        where = launch.Environment(str(options.python))
    else:
        where = launch.Environment.of(replace(plan, hosts={seat.host.name: plan.hosts[seat.host.name] for seat in seats}))
    return (replace(where, networks=options.networks) if options.networks else where), seats, placed


def _bring(session: Session, seats: Sequence[_Seat], options: RunOptions) -> tuple[str, list[str]]:
    """(the folder in which the ranks run, their command), after the files are there."""
    if options.workdir is not None:
        return options.workdir, list(options.command)
    if [seat.host.connection for seat in seats] == ["local"]:
        return str(Path.cwd()), list(options.command)
    packed = pack(options)
    logins = {seat.login for seat in seats}
    if len(logins) > 1:
        raise UsageError(
            f"the hosts have different logins ({', '.join(sorted(logins))}), so no folder is the same on all", todo="name one: --workdir"
        )
    ship(session, packed, {seat.host.name: packed.unpack for seat in seats})
    return f"{{home}}/{packed.place}", packed.command


class Packed(NamedTuple):
    """A program and what goes with it. ``place``: its folder in a home; ``unpack``: the script there that takes ``archive``."""

    names: list[str]
    place: str
    command: list[str]
    archive: bytes

    @property
    def unpack(self) -> str:
        """A script of /bin/sh."""
        return f"cd && mkdir -p {self.place} && tar -x -f - --no-same-owner -C {self.place}"


def pack(options: RunOptions) -> Packed:
    """The program's file and what was named besides, and the command as it is there. Raises UsageError where two have one name."""
    command, files = list(options.command), list(options.bring)
    at = next((number for number, word in enumerate(command) if Path(word).is_file()), None)
    if at is not None:
        program = Path(command[at])
        command[at] = program.name if at else f"./{program.name}"
        files.append(program)
    names = [file.resolve().name for file in files]
    if len(set(names)) < len(names):
        raise UsageError("two of the files to bring have the same name", todo="put them into a folder, and bring that")
    name = re.sub(r"[^\w.-]", "_", Path.cwd().name) or "job"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        for file in files:
            packed.add(file.resolve(), file.resolve().name, filter=_wanted)
    return Packed(names, f"{_PLACE}/{name}", command, archive.getvalue())


def ship(session: Session, packed: Packed, scripts: Mapping[str, str]) -> None:
    """Bring it to the hosts, on each by its script. Raises ProvisionError where one of them fails."""
    session.progress.stage(f"Bring {', '.join(packed.names) or 'nothing'} to ~/{packed.place}", list(scripts))
    answers = at_once.ask(session, scripts, stdin=packed.archive, patience=_BRING_S)
    for host, answer in answers.items():
        if answer.code != 0:
            said = answer.err.strip() or f"exit code {answer.code}"
            raise ProvisionError("not done in time" if answer.code is None else said, where=f"{host}, bringing the program")


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _tell_job(progress: Progress, seats: Sequence[_Seat], placed: Sequence[tuple[str, int]], job: Job) -> None:
    for seat, (address, count) in zip(seats, placed, strict=True):
        progress.line(f"{seat.host.name} ({address}): {count} rank(s)")
    progress.line(f"on {seats[0].host.name}: {shlex.join(job.argv)}")
    progress.line(f"variables of every rank: {', '.join(sorted(job.environment))}")  # values may be secret


def _tell_first_failure(output: RankOutput, code: int, progress: Progress, log: Path) -> None:
    """What failed first is what is read last."""
    failure = output.first_failure()
    progress.line("")
    if failure is None:
        said = f": {output.verdict}" if output.verdict else ""
        progress.line(f"the job ended with exit code {code} and no traceback (all it printed: {log}){said}", "bold red")
        return
    rank, lines = failure
    progress.line(f"rank {rank} failed first (exit code {code}; all that was printed: {log}):", "bold red")
    for line in lines:
        progress.line(line)
