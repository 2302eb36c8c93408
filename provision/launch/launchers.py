"""The two launchers of ranks: mpirun, and the engine's own, which needs no MPI. Each turns a program into a job. Pure.

Both run on the first host, reach the others over ssh, tag the output of ranks in the same way and take the ranks' variables by name from
their own environment: every user of a host can read a command line, so no value ever stands on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from provision.base.errors import UsageError
from provision.launch.jobs import RANK, Job
from provision.launch.stall_watch import StallOptions
from provision.plan.model import Plan

LAUNCHERS = ("mpi", "own")
THREADS = "OMP_NUM_THREADS"  # of a rank
_SCRIPT = "discovery"  # file name of the host discovery script in the job's folder
# Runs the engine's runtime/cores.py before a program. The package itself is not imported: it would take each rank a quarter of a second.
_LIMIT = (
    "from importlib.util import find_spec; from runpy import run_path; "
    "run_path(find_spec('collective_core').submodule_search_locations[0] + '/runtime/cores.py', run_name='__main__')"
)
# Checked with Open MPI 4.1.8 (the wheel of the Python package index) on two hosts; 4.0 and 4.1 of the distributions take the same.
_MPI_PARAMETERS = (
    # Left to choose, Open MPI also opens UCX and libfabric, which pick networks by rules of their own and complain on hosts without
    # fast fabrics; the engine needs MPI for its rendezvous only.
    *(("pml", "ob1"), ("btl", "self,vader,tcp")),
    # Copying straight between two processes' memory needs a right that default containers do not have; without it a message is lost.
    ("btl_vader_single_copy_mechanism", "none"),
    ("orte_keep_fqdn_hostnames", "1"),  # host.rack1 and host.rack2 are two hosts
    # The first host starts the daemons on all others itself: one key, one log, and a failure names the host that failed.
    ("plm_rsh_no_tree_spawn", "1"),
    ("plm_rsh_agent", "ssh"),
    ("mpi_yield_when_idle", "1"),  # there may be more ranks than cores
    # What killed daemons leave behind is in the job's folders, and they carry the run's mark.
    ("orte_tmpdir_base", "{job}"),
    ("btl_vader_backing_directory", "{shm}"),
    ("orte_launch_agent", "env PROVISION_RUN_ID={run} orted"),
)


@dataclass(frozen=True)
class Environment:
    """What a launcher must know of the hosts.

    Attributes:
        interpreter: the Python that has the engine, at the same path on every host.
        programs: the folder of our environment's programs, where the interpreter is of a project's environment over it.
        networks: networks between the hosts, as CIDR or names of interfaces; empty leaves the choice to the engine.
        libraries: folders that the hosts' linkers do not know.
        ssh_config: with which the first host reaches the others; empty for the login's own.
        mpirun, mpi_prefix: paths on the first host; empty where there is no MPI, or where it is the distribution's.
        names: address → name in the inventory.
    """

    interpreter: str
    networks: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    ssh_config: str = ""
    mpirun: str = ""
    mpi_prefix: str = ""
    as_root: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    programs: str = ""

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

    def variables(self, options: RunOptions) -> dict[str, str]:
        """What every rank gets, under any launcher."""
        for name in options.environment:
            if not name.isidentifier() or not name.isascii():
                raise UsageError(f"{name!r} is not the name of an environment variable")
        found = {
            # Ours would win over the user's.
            "COLLECTIVE_NETWORK": "" if options.environment.get("HOROVOD_GLOO_IFACE") else ",".join(self.networks),
            # For programs that start others of the same environment.
            "PATH": ":".join(filter(None, (self.interpreter.rpartition("/")[0], self.programs, "{inherited}"))),
            "PYTHONUNBUFFERED": "1",
            **options.environment,
        }
        if self.libraries:
            found["LD_LIBRARY_PATH"] = ":".join([*self.libraries, found.get("LD_LIBRARY_PATH", "{inherited}")])
        return found


@dataclass(frozen=True)
class Elastic:
    """A job whose ranks come and go.

    Attributes:
        np: ranks that it needs to begin; None: ``min_np``.
        min_np, max_np: how many it has at least and at most; max_np None: ``np``, else all slots; with a script always all.
        script: prints the hosts that there are; it is copied to the first host and run there.
        slots_per_host: of hosts for which the script names none.
        timeout: seconds that the job waits with too few ranks.
        reset_limit: how often its ranks may change.
        cooldown: seconds for which a host that fails again is set aside, at first and at most.
    """

    np: int | None
    min_np: int
    max_np: int | None
    script: Path | None = None
    slots_per_host: int | None = None
    timeout: float | None = None
    reset_limit: int | None = None
    cooldown: tuple[int, int] | None = None

    def arguments(self) -> list[str]:
        """The engine's launcher's arguments for it."""
        numbers = {
            "-np": self.np,
            "--min-np": self.min_np,
            "--max-np": self.max_np,
            "--slots-per-host": self.slots_per_host,
            "--elastic-timeout": self.timeout,
            "--reset-limit": self.reset_limit,
        }
        words = [word for name, number in numbers.items() if number is not None for word in (name, f"{number:.15g}")]
        if self.cooldown is not None:
            words += ["--blacklist-cooldown-range", *map(str, self.cooldown)]
        return words if self.script is None else [*words, "--host-discovery-script", f"{{job}}/{_SCRIPT}"]


@dataclass(frozen=True)
class RunOptions:
    """What to run on hosts, and how.

    Attributes:
        command: ``python`` as its first word stands for the environment's own.
        np: number of ranks; None: one per slot.
        environment: variables of every rank besides what the engine and Open MPI need; they stand on no command line.
        workdir: where the ranks run, a folder that exists on every host; None: the login's home (on the first host the job's folder).
            A user's program gets a folder to which its file, ``files`` and with ``modules`` what it imports from next to it are copied.
        report: a file in the job's folder that is read at the end.
        output: folder that gets each rank's output.
        quiet: show rank 0's output only.
        launcher: one of `LAUNCHERS`; None: mpirun where it is installed.
        python: an interpreter with the engine on every host; nothing of ours need be installed then.
        project: uv.lock, pyproject.toml or requirements.txt of the environment that the ranks run in; None: the installation's own.
        index_url: package index for it.
        stall: how the job is watched; None: it is not.
        networks: interfaces or CIDRs instead of the plan's.
        start_timeout: seconds in which hosts answer and ranks meet.
        elastic: ranks may come and go, by the launcher ``own``.
        timestamps: begin each line of the ranks with the time.
        mpi_args, binding: further arguments of mpirun, and those that place and bind ranks (empty: slot by slot, not bound).
        oversubscribe: allow more ranks than slots.
        nodes, per_node: torchrun's way to say how many ranks: the first so many hosts, and so many ranks on each.
        detach: the job goes on without this machine.
        wait: for other jobs that use what it wants, instead of an error.
        tune: what is set for training on processors: one of `tuning.LEVELS`.
        restarts: failures after which all ranks are started again; in an elastic job, failures that it survives. By the launcher ``own``.
    """

    command: tuple[str, ...]
    np: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    files: tuple[Path, ...] = ()
    modules: bool = True
    report: str | None = None
    output: Path | None = None
    quiet: bool = False
    launcher: str | None = None
    python: str | None = None
    networks: tuple[str, ...] = ()
    start_timeout: float | None = None
    verbose: bool = False
    elastic: Elastic | None = None
    timestamps: bool = False
    mpi_args: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    oversubscribe: bool = False
    nodes: int | None = None
    per_node: int | None = None
    restarts: int | None = None
    project: Path | None = None
    index_url: str | None = None
    stall: StallOptions | None = None
    detach: bool = False
    wait: bool = False
    tune: str = "off"


def mpi_job(where: Environment, placed: Sequence[tuple[str, int]], options: RunOptions) -> Job:
    """A program under mpirun, on the hosts ``placed``: (address, ranks)."""
    # For torch.distributed; the engine's launcher sets them itself. Its other variables rank.py makes from mpirun's.
    variables = {"MASTER_ADDR": placed[0][0] if len(placed) > 1 else "127.0.0.1", **where.variables(options)}
    free_ports = {"MASTER_PORT"} - set(variables)
    parameters = list(_MPI_PARAMETERS)
    if where.ssh_config and len(placed) > 1:
        parameters.append(("plm_rsh_args", f"-F {where.ssh_config}"))
    if where.networks:
        # Both, always: one is for MPI's messages, the other for mpirun's own. One of them left alone is how jobs end up on docker0.
        parameters += [(name, ",".join(where.networks)) for name in ("btl_tcp_if_include", "oob_tcp_if_include")]
    argv = [where.mpirun]
    if where.as_root:
        argv.append("--allow-run-as-root")
    if where.mpi_prefix:
        argv += ["--prefix", where.mpi_prefix]
    argv += ["--hostfile", "{job}/hostfile", "-np", str(sum(count for _, count in placed))]
    # The number of ranks has been checked: more of them than slots or cores is slow, not wrong.
    argv += [*(options.binding or ("--map-by", "slot", "--bind-to", "none")), "--oversubscribe", "--tag-output"]
    for name, value in parameters:
        argv += ["--mca", name, value]
    for name in sorted({*variables, *free_ports, "PROVISION_RUN_ID"}):
        argv += ["-x", name]
    if options.workdir:
        argv += ["--wdir", options.workdir]
    command = _command(where, options)
    if THREADS not in variables:  # each rank takes its part of its host's cores; the engine's launcher sees to that itself
        command = [where.interpreter, "-I", "-c", _LIMIT, *command]
    job = _job(where, placed, options, [*argv, *options.mpi_args], command, {"hostfile": hostfile(placed)}, variables)
    return replace(job, free_ports=sorted(free_ports))


def own_job(where: Environment, placed: Sequence[tuple[str, int]], options: RunOptions) -> Job:
    """The same by the engine's own launcher. The ranks' secret is made on the first host and never comes here."""
    argv = [where.interpreter, "-m", "collective_core.launch", "--tag-output", "-H", "{job}/hostfile"]
    if where.ssh_config and len(placed) > 1:
        argv += ["--ssh-config", where.ssh_config]
    if options.elastic is not None:
        argv += options.elastic.arguments()
    if options.start_timeout is not None:
        argv += ["--start-timeout", f"{options.start_timeout:.15g}"]
    if options.restarts is not None:
        argv += ["--max-restarts", str(options.restarts)]
    variables = where.variables(options)
    for name in sorted({*variables, "PROVISION_RUN_ID"}):
        argv += ["-x", name]
    if options.workdir:
        argv += ["--wdir", options.workdir]
    files = {"hostfile": hostfile([("localhost", placed[0][1]), *placed[1:]])}
    if options.elastic is not None and options.elastic.script is not None:
        files[_SCRIPT] = options.elastic.script.read_text(encoding="utf-8")
    return _job(where, placed, options, [*argv, "--"], _command(where, options), files, variables)


def _command(where: Environment, options: RunOptions) -> list[str]:
    first, *rest = options.command
    return [where.interpreter if first in ("python", "python3") else first, *rest]


def _job(
    where: Environment,
    placed: Sequence[tuple[str, int]],
    options: RunOptions,
    argv: list[str],
    command: list[str],
    files: dict[str, str],
    variables: dict[str, str],
) -> Job:
    """The job of a launcher's command line, to which the ranks' is still to be added."""
    guarded = options.elastic is None  # an elastic job continues without a host, and its launcher watches those that come
    return Job(
        [*argv, *([where.interpreter, "-I", "-S", RANK] if guarded else command)],
        host=where.names.get(placed[0][0], placed[0][0]),
        python=where.interpreter,
        environment=variables,
        files=files,
        report=options.report,
        program=command if guarded else (),
        hosts=[address for address, _ in placed[1:]] if guarded else (),
        names=where.names,
        sample=options.stall.sample if options.stall else 0.0,
        wait=options.wait,
        ssh=[*Job.ssh, *(["-F", where.ssh_config] if where.ssh_config and len(placed) > 1 else [])],
    )


def hostfile(placed: Sequence[tuple[str, int]]) -> str:
    """Open MPI's hostfile: a line ``ADDRESS slots=N`` per host, in the order in which ranks are numbered."""
    addresses = [address for address, _ in placed]
    for address in addresses:
        if not address or any(character.isspace() or character in "#=," for character in address):
            raise UsageError(f"{address!r} is not an address that a hostfile can hold")
        if addresses.count(address) > 1:
            raise UsageError(f"{address} is listed twice; give each host once, with all its slots")
    return "".join(f"{address} slots={slots}\n" for address, slots in placed)
