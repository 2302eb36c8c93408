"""The hosts that `provision run` runs on: of ``--hosts``, ``-H`` or ``--hostfile``, of a discovery script, of Slurm or Kubernetes' MPI
operator, else of the last run that made hosts ready, else this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provision.base import paths
from provision.base.errors import UsageError
from provision.base.text import counted
from provision.base.validation import MAX_COUNT, count, max_here
from provision.inventory import Inventory, last_run, loading
from provision.launch.launchers import Elastic

_SSH_PORT, _UNPRIVILEGED_PORT = 22, 1024
_SCRIPT_S = 30.0  # horovodrun waits for ever; a script that hangs would never be noticed
Entry = tuple[str, int]  # a host's name and its slots
THIS_MACHINE = "localhost"
_HINT = "name the hosts: -H a:2,b:2"
#: How the hosts of a cluster reach each other: `provision up` writes it on each of them.
_MESH = "~/.ssh/provision_config"
#: Where the MPI operator lists its workers, for Open MPI, Intel MPI and MPICH. Source: github.com/kubeflow/mpi-operator,
#: pkg/controller/mpi_job_controller.go (v2beta1), read on 2026-11-22.
_OPERATORS_FOLDER = "/etc/mpi/"
_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")


@dataclass(frozen=True)
class HostOptions:
    """The options of `provision run` about hosts; `HOST_OPTIONS` says what each field means."""

    hosts: str | None
    host: str | None
    hostfile: Path | None
    ssh_port: int | None
    ssh_identity_file: Path | None
    limit: str | None
    image: str | None
    volume: list[str] | None
    keep_image: bool
    gpu_check: bool
    check_build: bool
    version: bool


def select(
    options: HostOptions, np: int | None, elastic: Elastic | None, environment: Mapping[str, str], say: Callable[[str], None]
) -> Inventory:
    """The inventory to run on.

    Args:
        np: number of ranks, where it is given.
        elastic: an elastic job may have a host discovery script.
        environment: of this process, which a scheduler may have started.
        say: prints where hosts come from that were not named.

    Raises:
        UsageError: the options contradict each other, nothing says where to run, or ``--limit`` leaves no host.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        raise UsageError(
            "this is a rank that torchrun started, and each of them would launch a job",
            hint="start the program itself with torchrun, and the engine takes ranks and hosts from it: torchrun … train.py",
        )
    if options.limit is not None and elastic is not None and elastic.script is not None:
        what = "--limit and --host-discovery-script: the script says again and again which hosts there are"
        raise UsageError(what, hint="let the script leave hosts out")
    hosts, listed = options.hosts, options.host
    if is_list(hosts, np):
        if listed is not None:
            raise UsageError("--hosts and -H say the same thing; give one of them")
        hosts, listed = None, hosts
    if listed is not None and options.hostfile is not None:
        raise UsageError("-H and --hostfile say the same thing; give one of them")
    entries: Sequence[Entry] = ()
    if options.hostfile is not None:
        entries = read_hostfile(options.hostfile)
    elif listed is not None:
        entries = parse_list(listed)
    elif not hosts and elastic is not None and elastic.script is not None:
        entries = run_discovery_script(elastic.script, elastic.slots_per_host)
    elif not hosts:
        entries = slurm_hosts(environment) or operator_hosts(environment)
    inventory = loading.limited(choose(hosts, entries, np, say), options.limit)
    ssh: dict[str, Any] = {"port": options.ssh_port} if options.ssh_port else {}
    if options.ssh_identity_file is not None:
        ssh["key_file"] = str(options.ssh_identity_file.absolute())
    return replace(inventory, hosts=tuple(replace(host, **ssh) if host.connection == "ssh" else host for host in inventory.hosts))


def choose(hosts: str | None, entries: Sequence[Entry], np: int | None, say: Callable[[str], None]) -> Inventory:
    """The hosts of ``entries`` as the inventory ``hosts``, else the last run's, knows them; without entries all of its hosts.

    Where nothing names hosts it is this machine with ``np`` slots.

    Raises:
        UsageError: nothing says where to run, not even ``np``, or ``entries`` are not in the inventory ``hosts``.
    """
    if not hosts and not entries:
        return _unnamed(np, say)
    known = loading.load(hosts) if hosts else None
    if known is None and (last := last_run.newest_inventory()):
        with suppress(UsageError):  # it is gone; the entries say all that is needed
            known = loading.load(last)
    if not entries and known is not None:
        return known
    by_name = {each: host for host in known.hosts for each in (host.name, host.address)} if known is not None else {}
    unknown = [name for name, _ in entries if name not in by_name]
    if unknown and known is not None and hosts:
        there = ", ".join(host.name for host in known.hosts)
        raise UsageError(f"-H {','.join(unknown)}: not in {hosts}", hint=f"its hosts are {there}")
    if known is not None and not unknown:
        return replace(known, hosts=tuple(replace(by_name[name], slots=slots) for name, slots in entries))
    # A name that the last run's inventory does not have says nothing against those that it has.
    plain = _of_entries(entries)
    mixed = tuple(replace(by_name[name], slots=slots) if name in by_name else plain.host(name) for name, slots in entries)
    return replace(plain, hosts=mixed, everyone=(), ansible_argument=None) if by_name else plain


def _unnamed(np: int | None, say: Callable[[str], None]) -> Inventory:
    last = last_run.newest_inventory()
    if last is not None:
        failed = last_run.newest_failed_inventory()
        newer = f"; the newer run of {failed} made no host ready" if failed else ""
        say(paths.short(f"hosts of the last run: {last}{newer} (here: -H localhost:{np or 2})"))
        return loading.load(last)
    if np is None:
        raise UsageError("no hosts to run on: no earlier run has made hosts ready", hint="name them: --hosts hosts.ini, or -H a:2,b:2")
    say(f"no earlier run has made hosts ready: {counted(np, 'rank')} on this machine (others: -H a:2,b:2)")
    return _of_entries([(THIS_MACHINE, min(np, max_here()))])


def _of_entries(entries: Sequence[Entry]) -> Inventory:
    found = loading.load(",".join(name for name, _ in entries))
    hosts = [replace(host, slots=slots) for host, (_, slots) in zip(found.hosts, entries, strict=True)]
    mesh, variables = _mesh_hosts(), {"ansible_ssh_common_args": f"-F {Path(_MESH).expanduser()}"}
    return replace(
        found, hosts=tuple(replace(host, variables={**host.variables, **variables}) if host.name in mesh else host for host in hosts)
    )


def _mesh_hosts() -> set[str]:
    """The hosts of the cluster that this host belongs to: it reaches them with a key of its own."""
    try:
        lines = Path(_MESH).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {name for line in lines if line.startswith("Host ") for name in line.split()[1:]} - {"*"}


def parse_list(text: str) -> list[Entry]:
    """``a:2,b:4`` → [("a", 2), ("b", 4)]; a host without a number has one slot. Raises UsageError."""
    return [_entry(f"-H {text}", *(word.rpartition(":")[::2] if ":" in word else (word, "1"))) for word in text.split(",")]


def is_list(hosts: str | None, np: int | None) -> bool:
    """Whether ``--hosts`` is horovodrun's list ``a:2,b:2``, and not an inventory, where the numbers would be ports.

    A number is one of slots where it is below ssh's own port, or, with ``np``, below the ports of unprivileged servers.
    """
    if hosts is None or os.path.exists(hosts):
        return False
    numbers = [re.fullmatch(r"[^:@\[\]/]+:(\d+)", word) for word in hosts.split(",")]
    return all(match and int(match[1]) < (_SSH_PORT if np is None else _UNPRIVILEGED_PORT) for match in numbers)


def read_hostfile(path: Path) -> list[Entry]:
    """Lines ``host slots=N`` as of Open MPI and horovodrun, or ``host:N`` as of MPICH; ``#`` begins a comment. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=f"--hostfile {path}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            match = re.fullmatch(r"([^\s:]+):(\w*)|(\S+)(?:\s+slots=(\d+))?", text)
            if match is None:
                raise UsageError(f"{line.strip()!r} is not `host slots=N`", where=f"{path}:{number}")
            name, slots = (match[1], match[2]) if match[1] else (match[3], match[4] or "1")
            found.append(_entry(f"{path}:{number}", name, slots))
    if not found:
        raise UsageError("it names no host", where=str(path))
    return found


def run_discovery_script(path: Path, slots: int | None = None) -> list[Entry]:
    """The hosts that a discovery script prints, ``host`` or ``host:slots`` a line; without a number they have ``slots``, or one.

    Raises:
        UsageError: it fails, or names none.
    """
    where = f"--host-discovery-script {path}"
    command = [str(path.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRIPT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"it cannot be run: {error}", where=where, hint="is it executable, and does it begin with #! ?") from error
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        printed = done.stderr.strip() or "it prints nothing"
        raise UsageError(f"it ended with exit code {done.returncode} and named {len(lines)} hosts: {printed}", where=where)
    return parse_list(",".join(line if ":" in line else f"{line}:{slots or 1}" for line in lines))


def operator_hosts(environment: Mapping[str, str]) -> list[Entry]:
    """The workers of an MPIJob on Kubernetes and their slots, in its launcher. Raises UsageError for a file that cannot be read."""
    named = next((environment[name] for name in _OPERATOR if environment.get(name)), None)
    # Elsewhere a hostfile of another Open MPI says nothing about this job.
    if named is None or not (environment.get("K_MPI_JOB_ROLE") == "launcher" or named.startswith(_OPERATORS_FOLDER)):
        return []
    return read_hostfile(Path(named))


def slurm_hosts(environment: Mapping[str, str]) -> list[Entry]:
    """The nodes of a Slurm allocation and the tasks on each; nothing outside of one. `scontrol` is not needed.

    Source of the two short forms: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES" (SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE), Slurm 24.

    Raises:
        UsageError: the variables cannot be read.
    """
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
    if not listed:
        return []
    where = f"SLURM_JOB_NODELIST={listed}"
    names = [name for word in re.split(r",(?![^\[]*\])", listed) for name in _expand(word, where)]
    tasks = environment.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})")
    slots: list[str] = []
    for word in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not match:
            raise UsageError(f"SLURM_TASKS_PER_NODE={tasks} cannot be read", hint=_HINT)
        slots += [match[1]] * int(match[2] or 1)
    if len(slots) != len(names):
        raise UsageError(f"{len(names)} nodes, but SLURM_TASKS_PER_NODE={tasks}", where=where, hint=_HINT)
    return [_entry(where, name, count) for name, count in zip(names, slots, strict=True)]


def _expand(word: str, where: str) -> list[str]:
    """``gpu[1-2]n[08-10,12]`` → gpu1n08 … gpu2n12: numbers keep their leading zeros, the first bracket changes slowest."""
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", word)
    if not match or not word:
        raise UsageError("it cannot be read", where=where, hint=_HINT)
    if match[2] is None:
        return [match[1]]
    numbers = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            raise UsageError("it cannot be read", where=where, hint=_HINT)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    endings = _expand(match[3], where) if match[3] else [""]
    return [match[1] + number + ending for number in numbers for ending in endings]


def _entry(where: str, name: str, slots: str) -> Entry:
    number = count(slots)
    if not name or number is None:
        raise UsageError(f"{name}:{slots} is not HOST:SLOTS", where=where, hint=f"write it like a:2,b:2, with 1 to {MAX_COUNT} slots")
    return name, number
