"""Runs a job over all hosts of a plan, from the first of them: under mpirun or by the engine's own launcher, behind one interface."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision.launch import mpirun
from provision.plan.model import Plan
from provision.remote import ssh
from provision.remote.session import Session
from provision.remote.ssh import Job, Verdict

LOG_TAIL_LINES = 15  # of a job that gave no report
_SCRIPT = "discovery"  # its name in the job's folder
THREADS = "OMP_NUM_THREADS"  # of a rank
# Runs the engine's cores.py before a program. The package itself is not imported: it would take each rank a quarter of a second.
_LIMIT = (
    "from importlib.util import find_spec; from runpy import run_path; "
    "run_path(find_spec('collective_core').submodule_search_locations[0] + '/cores.py', run_name='__main__')"
)
#: What mpirun and its daemons leave behind when they are killed is in the job's folders; the daemons carry the run's mark.
_PRIVATE_MPI = (
    *("--mca", "orte_tmpdir_base", "{job}"),
    *("--mca", "btl_vader_backing_directory", "{shm}"),
    *("--mca", "orte_launch_agent", "env PROVISION_RUN_ID={run} orted"),
)


@dataclass(frozen=True)
class Environment:
    """What the hosts hold that a launcher must know of.

    Attributes:
        interpreter: the Python that has the engine, at the same path on every host.
        networks: what the hosts shall use between them, as CIDR or the names of interfaces; empty leaves it to the engine.
        libraries: folders that the hosts' linkers do not know.
        ssh_config: with which the first host reaches the others; empty for the login's own.
        mpirun, mpi_prefix: of the first host; empty where there is no MPI.
        names: what people call the hosts, by their addresses.
    """

    interpreter: str
    networks: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    ssh_config: str = ""
    mpirun: str = ""
    mpi_prefix: str = ""
    as_root: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Environment:
        """That of hosts that `provision up` made ready."""
        first = next(iter(plan.hosts.values()))
        known = all(host.root for host in plan.hosts.values())  # the linker of a host without root does not know our libraries
        folders = dict.fromkeys(folder for host in plan.hosts.values() for folder in host.library_folders)
        return cls(
            interpreter=f"{first.prefix}/venv/bin/python",
            networks=tuple(plan.networks),
            libraries=() if known else tuple(folders),
            ssh_config="{home}/.ssh/provision_config" if len(plan.hosts) > 1 else "",
            mpirun=first.mpirun,
            mpi_prefix="" if first.openmpi.source == "distribution" else first.openmpi_home,
            as_root=first.login == "root",
            names={host.network.address: host.name for host in plan.hosts.values()},
        )

    def program(self, words: Sequence[str]) -> list[str]:
        """A command line in which ``python`` stands for the interpreter."""
        return [self.interpreter if words[0] in ("python", "python3") else words[0], *words[1:]]

    def limited(self, words: Sequence[str]) -> list[str]:
        """The same for ranks of mpirun, each of which takes its part of its host's cores; the engine's own launcher sees to that itself."""
        return [self.interpreter, "-I", "-c", _LIMIT, *self.program(words)]

    @property
    def rank(self) -> list[str]:
        """What a launcher starts as a rank: it runs the job's program and notes how that ended."""
        return [self.interpreter, "-I", "-S", ssh.RANK]

    def ssh(self, placed: Sequence[tuple[str, int]]) -> list[str]:
        """How the first host reaches the others of a job."""
        return [*Job.ssh, *(["-F", self.ssh_config] if self.ssh_config and len(placed) > 1 else [])]

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """What every rank gets, whoever launches it, besides ``more``."""
        given = {
            "COLLECTIVE_NETWORK": "" if more.get("HOROVOD_GLOO_IFACE") else ",".join(self.networks),  # ours would win over the user's
            "PATH": f"{self.interpreter.rpartition('/')[0]}:{{inherited}}",  # for programs that start others of the same environment
            "PYTHONUNBUFFERED": "1",
            **more,
        }
        if self.libraries:
            given["LD_LIBRARY_PATH"] = ":".join([*self.libraries, given.get("LD_LIBRARY_PATH", "{inherited}")])
        return given


@dataclass(frozen=True)
class Elastic:
    """A job whose ranks come and go: it needs ``np`` to begin, has at least ``least``, at most ``most`` (None: ``np``, else all
    slots; with a script always all).

    ``script``: a program that says which hosts there are; it is brought to the first host, and asked there. ``slots_per_host``: of those
    for which it names none. ``timeout``: seconds that it waits with too few ranks. ``reset_limit``: how often its ranks may change.
    ``cooldown``: seconds for which a host that fails again is set aside, at first and at most. None leaves them to the launcher.
    """

    np: int | None
    least: int
    most: int | None
    script: Path | None = None
    slots_per_host: int | None = None
    timeout: float | None = None
    reset_limit: int | None = None
    cooldown: tuple[int, int] | None = None

    def words(self) -> list[str]:
        """As the engine's own launcher takes them."""
        given = {
            "-np": self.np,
            "--min-np": self.least,
            "--max-np": self.most,
            "--slots-per-host": self.slots_per_host,
            "--elastic-timeout": self.timeout,
            "--reset-limit": self.reset_limit,
        }
        words = [word for name, number in given.items() if number is not None for word in (name, f"{number:g}")]
        if self.cooldown is not None:
            words += ["--blacklist-cooldown-range", *map(str, self.cooldown)]
        return words if self.script is None else [*words, "--host-discovery-script", f"{{job}}/{_SCRIPT}"]


def mpi_job(
    where: Environment,
    placed: Sequence[tuple[str, int]],
    program: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    workdir: str = "",
    start_timeout: float | None = None,  # noqa: ARG001 - the ranks have it in their environment; mpirun has none of its own
    report: str | None = None,
    binding: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Job:
    """A program as the first host starts it: mpirun over the hosts ``placed``, its hostfile in the job's private folder.

    Args:
        placed: (address, ranks) per host that takes part.
        program: its first word may be ``python``, which stands for the environment's own.
        environment: what the ranks get besides what the engine and Open MPI need; it stands on no command line.
        workdir: where the ranks run, on every host; empty for the login's home (on the first host the job's folder).
        start_timeout: seconds in which all hosts must have answered.
        report: a file in the job's folder that is handed back.
        binding, more: as of `mpirun.command`.
    """
    given = where.variables(environment or {})
    argv = mpirun.command(
        mpirun=where.mpirun,
        prefix=where.mpi_prefix,
        hosts=placed,
        hostfile="{job}/hostfile",
        np=sum(count for _, count in placed),
        networks=where.networks,
        ssh_config=where.ssh_config if len(placed) > 1 else "",
        environment={**given, "PROVISION_RUN_ID": ""},  # only the names; job.py sets the values
        program=where.rank,
        workdir=workdir,
        as_root=where.as_root,
        binding=binding,
        more=[*_PRIVATE_MPI, *more],
        oversubscribe=True,  # the inventory's slots are what was asked for; more of them than cores is slow, not wrong
    )
    return Job(
        argv,
        given,
        {"hostfile": mpirun.hostfile_text(placed)},
        report=report,
        program=where.program(program) if THREADS in given else where.limited(program),
        hosts=[address for address, _ in placed[1:]],
        names={"": where.names.get(placed[0][0], placed[0][0]), **where.names},
        ssh=where.ssh(placed),
    )


def own_job(
    where: Environment,
    placed: Sequence[tuple[str, int]],
    program: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    workdir: str = "",
    start_timeout: float | None = None,
    report: str | None = None,
    elastic: Elastic | None = None,
) -> Job:
    """The same by the engine's own launcher, which needs no MPI: it is to the engine what mpirun is to MPI, with the same tags.

    It runs on the first host, where the engine is, and reaches the others over ssh as mpirun does; so this side needs no engine, and
    what starts, follows and ends ranks is written once. The ranks' secret is made there and never comes here.
    """
    given = where.variables(environment or {})
    hosts = [("localhost", placed[0][1]), *placed[1:]]
    argv = [where.interpreter, "-m", "collective_core.launch", "--tag-output", "-H", "{job}/hostfile"]
    if where.ssh_config and len(placed) > 1:
        argv += ["--ssh-config", where.ssh_config]
    if elastic is not None:
        argv += elastic.words()
    if start_timeout is not None:
        argv += ["--start-timeout", f"{start_timeout:g}"]
    for name in sorted({*given, "PROVISION_RUN_ID"}):
        argv += ["-x", name]
    if workdir:
        argv += ["--wdir", workdir]
    files = {"hostfile": mpirun.hostfile_text(hosts)}
    if elastic is not None and elastic.script is not None:
        files[_SCRIPT] = elastic.script.read_text(encoding="utf-8")
    if elastic is not None:  # it goes on without a host, and its launcher looks after those that come
        return Job([*argv, "--", *where.program(program)], given, files, report=report)
    return Job(
        [*argv, "--", *where.rank],
        given,
        files,
        report=report,
        program=where.program(program),
        hosts=[address for address, _ in placed[1:]],
        names={"": where.names.get(placed[0][0], placed[0][0]), **where.names},
        ssh=where.ssh(placed),
    )


#: How `provision run` starts ranks.
LAUNCHERS: Mapping[str, Callable[..., Job]] = {"mpi": mpi_job, "own": own_job}


def run(
    session: Session, first: str, job: Job, python: str, title: str, log: Path, on_line: Callable[[str], None], inside: str = ""
) -> ssh.JobResult:
    """Start the job on its first host with that host's ``python``, keep its output in ``log``, and hand on each line as it comes.

    ``inside``: as `ssh.run_job` takes it.
    """
    session.progress.stage(title)
    with log.open("w", encoding="utf-8") as file:

        def note(line: str) -> None:
            file.write(line + "\n")
            file.flush()
            on_line(line)

        host, password = session.inventory.host(first), session.passwords.get("connection")
        result = ssh.run_job(host, job, python=python, run_id=session.run_id, on_line=note, password=password, inside=inside)
        file.writelines(f"{line}\n" for line in result.last)
        return result


def told(verdict: Verdict, job: Job) -> str:
    """What ended a job, for people."""
    name = job.names.get(verdict.host, verdict.host)
    host = f"{name} ({verdict.host})" if verdict.host not in ("", name) else name or "the first host"
    rank, said = f"rank {verdict.rank} on {host}", f": {' / '.join(verdict.said)}" if verdict.said else ""
    ended = f"was ended by {_signal(-verdict.code)}" if verdict.code < 0 else f"ended with exit code {verdict.code}"
    halted = f"has been stopped by a signal for {verdict.seconds:g} s (pid {verdict.pid}; kill -CONT would have let it go on)"
    return {
        "ended": f"{rank} {ended}",
        "launcher": f"the launcher on {host} {ended}",
        "orphaned": f"the launcher's process on {host} was killed, or has crashed",
        "stopped": f"{f'{verdict.name} on {host}' if verdict.rank is None else rank} {halted}",
        "silent": f"{host} has not been heard of for {verdict.seconds:g} s: it stands still, or the network to it is cut{said}",
        "lost": f"the connection to {host} has ended{said}",
        "unreachable": f"{host} cannot take part: it cannot be reached from the first host{said}",
        "refused": f"{host} cannot take part{said}",
        "controller": f"{host} has not heard of `provision` for {verdict.seconds:g} s: it was stopped (Ctrl-Z), or cut off from there",
        "gone": f"the connection to {host} has ended, or what ran the job there was killed",
    }[verdict.kind]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def no_report(result: ssh.JobResult, job: Job, log: Path) -> str:
    """What is said of a job that ended without its report: why, and the end of its log."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()][-LOG_TAIL_LINES:]
    why = f" ({told(result.verdict, job)})" if result.verdict else ""
    return "\n".join(
        [f"the job ended with exit code {result.code}{why} and gave no report; its last lines:", *(f"    {line}" for line in lines)]
    )
