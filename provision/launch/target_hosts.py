"""Where `provision run` runs: ``-H``, ``--hostfile``, inventory, what Slurm or Kubernetes' MPI operator gave us, the last run's,
here. The last run is the last that made hosts ready.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision.base.errors import UsageError
from provision.inventory import Inventory, last_run, loading

_SSH_PORT, _UNPRIVILEGED_PORT = 22, 1024
_SCRIPT_S = 30.0  # horovodrun waits as long as it takes; a script that hangs would never be noticed
Entry = tuple[str, int]  # a host's name and its slots
THIS_MACHINE = "localhost"
#: How the hosts of a cluster reach each other, as `provision up` has left it on each of them.
_MESH = "~/.ssh/provision_config"
#: Where the MPI operator says what its workers are, for Open MPI, Intel MPI and MPICH. Source: github.com/kubeflow/mpi-operator,
#: pkg/controller/mpi_job_controller.go (v2beta1), looked at on 2026-11-22.
_OPERATORS_FOLDER = "/etc/mpi/"
_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")


def choose(hosts: str | None, entries: Sequence[Entry], np: int | None, say: Callable[[str], None]) -> Inventory:
    """The inventory to run on: ``hosts``, else the last run's that made hosts ready, else the entries.

    Of it what ``entries`` (``-H``) name. Where nothing says it, it is this machine with ``np`` slots. ``say`` is told what was not asked
    for.

    Raises:
        UsageError: nothing says where to run, not even ``np``, or ``entries`` are not in the inventory that was named.
    """
    argument = hosts or last_run.newest_inventory()
    if argument is None and not entries:
        if np is None:
            raise UsageError("no hosts to run on: no earlier run has made hosts ready", hint="name them: --hosts hosts.ini, or -H a:2,b:2")
        say(f"no hosts are named and no earlier run has made hosts ready: {np} rank(s) on this machine (-H a:2,b:2 names others)")
        return _of_entries([(THIS_MACHINE, np)])
    if not hosts and not entries:
        vain = last_run.newest_failed_inventory()
        newer = f"; the newer run of {vain} made no host ready" if vain else ""
        say(f"no hosts are named: those of the last run that made hosts ready, {argument}{newer} (-H localhost:{np or 2} for this machine)")
    try:
        known = loading.load(argument) if argument is not None else None
    except UsageError:
        if hosts or not entries:
            raise
        known = None  # that run's is gone; the entries say all that is needed
    if known is None or not entries:
        return known if known is not None else _of_entries(entries)
    by_name = {each: host for host in known.hosts for each in (host.name, host.address)}
    unknown = [name for name, _ in entries if name not in by_name]
    if unknown and not hosts:
        # A name that the last run's inventory does not have says nothing against those that it has.
        plain = _of_entries(entries)
        mixed = tuple(replace(by_name[name], slots=slots) if name in by_name else plain.host(name) for name, slots in entries)
        return replace(plain, hosts=mixed, everyone=(), ansible_argument=None)
    if unknown:
        there = ", ".join(host.name for host in known.hosts)
        raise UsageError(f"-H {','.join(unknown)}: not in {hosts}", hint=f"its hosts are {there}")
    return replace(known, hosts=tuple(replace(by_name[name], slots=slots) for name, slots in entries))


def _of_entries(entries: Sequence[Entry]) -> Inventory:
    found = loading.load(",".join(name for name, _ in entries))
    hosts = [replace(host, slots=slots) for host, (_, slots) in zip(found.hosts, entries, strict=True)]
    known, way = _in_mesh(), {"ansible_ssh_common_args": f"-F {Path(_MESH).expanduser()}"}
    return replace(found, hosts=tuple(replace(host, variables={**host.variables, **way}) if host.name in known else host for host in hosts))


def _in_mesh() -> set[str]:
    """The hosts of the cluster that this host belongs to: it reaches them with a key of its own. None elsewhere."""
    try:
        lines = Path(_MESH).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {name for line in lines if line.startswith("Host ") for name in line.split()[1:]} - {"*"}


def of_list(text: str) -> list[Entry]:
    """``a:2,b:4`` → [("a", 2), ("b", 4)]; a host without a number has one slot. Raises UsageError for what cannot be meant."""
    return [_entry(f"-H {text}", *(word.rpartition(":")[::2] if ":" in word else (word, "1"))) for word in text.split(",")]


def is_list(hosts: str | None, np: int | None) -> bool:
    """Whether ``--hosts`` is what horovodrun means by it, ``a:2,b:2``, and not an inventory: the numbers are no ports then.

    A number is taken for slots where it is below ssh's own port, or, where ranks are counted (``np``), below those of unprivileged servers.
    """
    if hosts is None or Path(hosts).exists():
        return False
    numbers = [re.fullmatch(r"[^:@\[\]/]+:(\d+)", word) for word in hosts.split(",")]
    return all(match and int(match[1]) < (_SSH_PORT if np is None else _UNPRIVILEGED_PORT) for match in numbers)


def reached_by(inventory: Inventory, port: int | None, key: Path | None) -> Inventory:
    """The inventory with horovodrun's ``--ssh-port`` and ``--ssh-identity-file`` for all hosts that ssh reaches."""
    given: dict[str, Any] = {"port": port} if port else {}
    if key is not None:
        given["key_file"] = str(key.absolute())
    return replace(inventory, hosts=tuple(replace(host, **given) if host.connection == "ssh" else host for host in inventory.hosts))


def refuse_ranks(environment: Mapping[str, str]) -> None:
    """Raise UsageError where this process is itself a rank of torchrun's: each would start a whole job."""
    if "TORCHELASTIC_RUN_ID" in environment:
        raise UsageError(
            "this is a rank that torchrun started, and each of them would launch a job",
            hint="start the program itself with torchrun, and the engine takes ranks and hosts from it: torchrun … train.py",
        )


def of_file(path: Path) -> list[Entry]:
    """Lines ``host slots=N`` as of Open MPI and horovodrun, or ``host:N`` as of MPICH; ``#`` begins a remark. Raises UsageError."""
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
            name, _, slots = words[0].partition(":") if not match and words[0].count(":") == 1 else (words[0], "", "1")
            found.append(_entry(f"{path}:{number}", name, match.group(1) if match else slots))
    if not found:
        raise UsageError("it names no host", where=str(path))
    return found


def of_script(path: Path, slots: int | None = None) -> list[Entry]:
    """The hosts that a discovery script names now, ``host`` or ``host:slots`` a line; without a number they have ``slots``, or one.

    Raises:
        UsageError: it fails, or names none.
    """
    where = f"--host-discovery-script {path}"
    try:
        done = subprocess.run(
            [str(path.absolute())], capture_output=True, text=True, timeout=_SCRIPT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"it cannot be run: {error}", where=where, hint="is it executable, and does it begin with #! ?") from error
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        said = done.stderr.strip() or "it says nothing"
        raise UsageError(f"it ended with exit code {done.returncode} and named {len(lines)} hosts: {said}", where=where)
    return of_list(",".join(line if ":" in line else f"{line}:{slots or 1}" for line in lines))


def of_launcher(environment: Mapping[str, str]) -> list[Entry]:
    """What whoever started us gave us to run on: an allocation of Slurm, or the workers of an MPIJob; nothing elsewhere."""
    return of_slurm(environment) or of_operator(environment)


def of_operator(environment: Mapping[str, str]) -> list[Entry]:
    """The workers of an MPIJob and their slots, in its launcher. Raises UsageError where the operator's file cannot be read."""
    named = next((environment[name] for name in _OPERATOR if environment.get(name)), None)
    # Elsewhere a hostfile of somebody's Open MPI says nothing about this job.
    if named is None or not (environment.get("K_MPI_JOB_ROLE") == "launcher" or named.startswith(_OPERATORS_FOLDER)):
        return []
    return of_file(Path(named))


def of_slurm(environment: Mapping[str, str]) -> list[Entry]:
    """The nodes of the allocation and the tasks on each; nothing outside of one. Slurm's own `scontrol` is not needed.

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
            raise UsageError(f"SLURM_TASKS_PER_NODE={tasks} cannot be read", hint="name the hosts: -H a:2,b:2")
        slots += [match[1]] * int(match[2] or 1)
    if len(slots) != len(names):
        raise UsageError(f"{len(names)} nodes, but SLURM_TASKS_PER_NODE={tasks}", where=where, hint="name the hosts: -H a:2,b:2")
    return [_entry(where, name, count) for name, count in zip(names, slots, strict=True)]


def _expand(word: str, where: str) -> list[str]:
    """``gpu[1-2]n[08-10,12]`` → gpu1n08 … gpu2n12: numbers keep their leading zeros, the first bracket changes slowest."""
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", word)
    if not match or not word:
        raise UsageError("it cannot be read", where=where, hint="name the hosts: -H a:2,b:2")
    if match[2] is None:
        return [match[1]]
    numbers = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            raise UsageError("it cannot be read", where=where, hint="name the hosts: -H a:2,b:2")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    endings = _expand(match[3], where) if match[3] else [""]
    return [match[1] + number + ending for number in numbers for ending in endings]


def _entry(where: str, name: str, slots: str) -> Entry:
    if not name or not slots.isdigit() or int(slots) < 1:
        raise UsageError(f"{name}:{slots} is not HOST:SLOTS", where=where, hint="write it like a:2,b:2")
    return name, int(slots)
