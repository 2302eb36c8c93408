"""Launches a program of the user's on hosts that `provision up` made ready, under mpirun, from the first of them.

The program runs in a folder that stays on the hosts, so that what it writes is not lost: ``~/provision-run/NAME``, to which the
program's file and what was named besides are brought each time; or wherever the user says, and then nothing is brought.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from provision import installed, last_run, launch, mpirun, resources
from provision import inventory as inventories
from provision import survey as surveying
from provision.errors import ProvisionError, UsageError
from provision.inventory import Inventory
from provision.plan import Plan
from provision.progress import Progress
from provision.rank_output import RankOutput
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


@dataclass(frozen=True)
class RunOptions:
    """What to launch. ``np``: None starts one rank per slot. ``environment`` reaches every rank and stands on no command line.

    ``workdir``: a folder that is there on every host; None brings ``bring``, and the program's file, to one of ours.
    """

    command: tuple[str, ...]
    np: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    bring: tuple[Path, ...] = ()
    output: Path | None = None
    quiet: bool = False


def choose_hosts(hosts: str | None, entries: Sequence[tuple[str, int]]) -> Inventory:
    """The inventory to run on: ``hosts``, else the last run's, else the entries themselves; of it what ``entries`` (``-H``) name.

    Raises:
        UsageError: nothing says where to run, or ``entries`` are not in the inventory that was named.
    """
    argument = hosts or last_run.newest_inventory()
    if argument is None and not entries:
        raise UsageError("no hosts to run on: no earlier run is known", todo="name them: --hosts hosts.ini, or -H a:2,b:2")
    known = inventories.load(argument) if argument is not None else None
    if known is None or not entries:
        return known if known is not None else _of_entries(entries)
    by_name = {each: host for host in known.hosts for each in (host.name, host.address)}
    unknown = [name for name, _ in entries if name not in by_name]
    if unknown and not hosts:
        return _of_entries(entries)
    if unknown:
        there = ", ".join(host.name for host in known.hosts)
        raise UsageError(f"-H {','.join(unknown)}: not in {hosts}", todo=f"its hosts are {there}")
    return replace(known, hosts=tuple(replace(by_name[name], slots=slots) for name, slots in entries))


def _of_entries(entries: Sequence[tuple[str, int]]) -> Inventory:
    found = inventories.load(",".join(name for name, _ in entries))
    return replace(found, hosts=tuple(replace(host, slots=slots) for host, (_, slots) in zip(found.hosts, entries, strict=True)))


def host_entries(text: str) -> list[tuple[str, int]]:
    """``a:2,b:4`` → [("a", 2), ("b", 4)]; a host without a number has one slot. Raises UsageError for what cannot be meant."""
    return [_entry(f"-H {text}", *(word.rpartition(":")[::2] if ":" in word else (word, "1"))) for word in text.split(",")]


def hostfile_entries(path: Path) -> list[tuple[str, int]]:
    """Lines ``host slots=N`` as of mpirun and horovodrun; ``#`` begins a remark. Raises UsageError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=f"--hostfile {path}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            match = re.fullmatch(r"slots=(\d+)", words[1]) if len(words) == 2 else None
            if len(words) > 2 or (len(words) == 2 and not match):
                raise UsageError(f"{line.strip()!r} is not `host slots=N`", where=f"{path}:{number}")
            found.append(_entry(f"{path}:{number}", words[0], match.group(1) if match else "1"))
    if not found:
        raise UsageError("it names no host", where=str(path))
    return found


def _entry(where: str, name: str, slots: str) -> tuple[str, int]:
    if not name or not slots.isdigit() or int(slots) < 1:
        raise UsageError(f"{name}:{slots} is not HOST:SLOTS", where=where, todo="write it like a:2,b:2")
    return name, int(slots)


def run(inventory: Inventory, options: RunOptions, progress: Progress, passwords: Mapping[str, str]) -> int:
    """Launch, show what the ranks print, and return the exit code: of the rank that failed first, or 0.

    Raises:
        ProvisionError: a host cannot be used; nothing was started.
        Interrupted: after Ctrl-C, when the job has been ended everywhere.
    """
    session = Session(inventory, progress, passwords)
    try:
        plan = _ready_hosts(session)
        placed = mpirun.fill([(host.network.address, host.slots) for host in plan.hosts.values()], options.np)
        taking_part = list(plan.hosts.values())[: len(placed)]
        plan = replace(plan, hosts={host.name: host for host in taking_part})
        workdir, command = _bring(session, plan, options)
        job = launch.mpi_job(plan, placed, command, environment=options.environment, workdir=workdir)
        ranks = sum(count for _, count in placed)
        output = RankOutput(progress.line, options.output, quiet=options.quiet)
        log = session.folder / "run.log"
        try:
            result = launch.run(session, taking_part[0], job, f"Run on {len(placed)} host(s), {ranks} rank(s)", log, output)
        finally:
            output.close()
        if result.interrupted:
            session.abort()
        if result.code:
            _tell_first_failure(output, result.code, progress, log)
        return result.code
    finally:
        session.close()


def _ready_hosts(session: Session) -> Plan:
    survey = surveying.look(session)
    for problem in survey.problems:
        if problem.level == "error":
            raise ProvisionError(problem.what, where=problem.host, todo=problem.todo)
    bare = installed.without_manifest(survey.hosts)
    if bare:
        raise ProvisionError("nothing is installed here yet", where=", ".join(bare), todo=f"provision up {session.inventory.argument}")
    return installed.plan(session.inventory, survey.hosts)


def _bring(session: Session, plan: Plan, options: RunOptions) -> tuple[str, list[str]]:
    """(the folder in which the ranks run, their command), after the files are there."""
    command = list(options.command)
    if options.workdir is not None:
        return options.workdir, command
    if [host.connection for host in session.inventory.hosts] == ["local"]:
        return str(Path.cwd()), command
    files = list(options.bring)
    at = next((number for number, word in enumerate(command) if Path(word).is_file()), None)
    if at is not None:
        program = Path(command[at])
        command[at] = program.name if at else f"./{program.name}"
        files.append(program)
    names = [file.resolve().name for file in files]
    if len(set(names)) < len(names):
        raise UsageError("two of the files to bring have the same name", todo="put them into a folder, and bring that")
    logins = {host.login for host in plan.hosts.values()}
    if len(logins) > 1:
        raise UsageError(
            f"the hosts have different logins ({', '.join(sorted(logins))}), so no folder is the same on all", todo="name one: --workdir"
        )
    name = re.sub(r"[^\w.-]", "_", Path.cwd().name) or "job"
    archive = session.folder / "program.tar"
    with tarfile.open(archive, "w") as packed:
        for file in files:
            packed.add(file.resolve(), file.resolve().name, filter=_wanted)
    outcome = session.play(
        resources.folder("playbooks") / "run.yml",
        f"Bring {', '.join(names) or 'nothing'} to ~/{_PLACE}/{name}",
        hosts=list(plan.hosts),
        extra_vars={"provision_run_folder": f"~/{_PLACE}/{name}", "provision_run_archive": str(archive)},
    )
    for host in outcome.failed:
        failure = outcome.hosts[host].failure
        raise ProvisionError(failure.text if failure else "failed", where=f"{host}, bringing the program")
    if outcome.rc != 0:
        raise ProvisionError("the program could not be brought to the hosts", todo=f"read {outcome.log}")
    return f"{{home}}/{_PLACE}/{name}", command


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _tell_first_failure(output: RankOutput, code: int, progress: Progress, log: Path) -> None:
    """What failed first is what is read last."""
    failure = output.first_failure()
    progress.line("")
    if failure is None:
        progress.line(f"the job ended with exit code {code} and no traceback; all it printed: {log}", "bold red")
        return
    rank, lines = failure
    progress.line(f"rank {rank} failed first (exit code {code}; all that was printed: {log}):", "bold red")
    for line in lines:
        progress.line(line)
