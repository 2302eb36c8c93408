"""Preflight problems: what prevents an installation on hosts, from their facts alone, each with a hint.

Pure: all problems are returned, none is raised. An unknown fact is not a problem.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from provision.base.problems import Problem
from provision.base.text import counted, duration, joined
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.inventory import Host, Inventory
from provision.survey import hardware
from provision.survey.model import Facts, System, Unsurveyed

OLDEST_PYTHON = "3.8"  # of the training environment: mpi4py 4 and the engine need no newer one
CLOCKS_APART_S = 5.0  # from here on, logs of two hosts cannot be compared, and short-lived certificates fail
NEEDED_TMP_MB = 100  # Ansible's own files
NEEDED_HOME_MB = 64  # Ansible's own modules and ~/.ssh
SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.glusterfs", "afs")
OWN_DISK_PREFIX = "/var/tmp/provision"  # noqa: S108 - that users without root can create
FEW_INODES = 20_000  # PyTorch alone has some 13,000 files

_INSTALL_PYTHON = (
    "install it there (Debian, Ubuntu: apt-get install python3; Red Hat family: dnf install python3), "
    "or name an installed one with ansible_python_interpreter"
)


def unsurveyed_problem(name: str, why: Unsurveyed, python: str | None = None) -> Problem:
    """Why there are no facts of a host. ``python``: the one that its inventory names (``provision_python``)."""
    if why.missing_python and python is not None:
        what = f"there is no {python}, which the inventory names (provision_python)"
        return Problem("error", what, "install it there, name another one, or leave provision_python out", host=name, id="python-missing")
    if why.missing_python:
        return Problem("error", "there is no Python 3, which the survey and Ansible need", _INSTALL_PYTHON, host=name, id="python-missing")
    return Problem("error", f"it cannot be reached: {why.unreachable}", host=name, message=why.unreachable or "", id="unreachable")


def host_problems(
    name: str, facts: Facts, catalog: Catalog, *, needed_mb: int, prefix: str, become_password: bool = False, has_engine: bool = False
) -> list[Problem]:
    """The problems of one host.

    Args:
        needed_mb: disk space that the installation needs in `prefix`.
        become_password: whether a sudo password will be given.
        has_engine: whether the host has the engine or gets it without a compiler.
    """
    found = (
        *_system(facts, catalog),
        *_python(facts, catalog),
        *_privileges(facts, prefix, become_password),
        *_missing_programs(facts, has_engine, catalog),
        *_other_users(facts, prefix),
        *_disk_space(facts, needed_mb, prefix),
        *_packages(facts),
    )
    has_error = any(problem.id == "needs-root" for problem in found)  # it names the missing root, as the warning does
    return [replace(problem, host=name) for problem in found if not (has_error and problem.id == "no-root")]


def lasting_problems(name: str, facts: Facts, catalog: Catalog, *, needed_mb: int, prefix: str, has_engine: bool) -> list[Problem]:
    """The problems of one host that old facts show, too: full file systems, programs that only root can install.

    The arguments are those of `host_problems`.
    """
    found = (*_missing_programs(facts, has_engine, catalog), *_disk_space(facts, needed_mb, prefix))
    return [replace(problem, host=name) for problem in found]


def cluster_problems(known: Mapping[str, Facts], times: Mapping[str, tuple[float, float]] | None = None) -> list[Problem]:
    """Problems between hosts: one machine under two names, equal names, a shared prefix, clocks apart.

    Args:
        times: host → this machine's clock (seconds since 1970) as it was asked, and as its answer came; without it clocks are not compared.
    """
    return [*_same_machines(known), *_shared_prefixes(known), *_clocks(known, times or {})]


def inventory_problems(inventory: Inventory, known: Mapping[str, Facts]) -> list[Problem]:
    """`slots` and interfaces of the inventory that the hosts do not have."""
    hosts = [(host, known[host.name]) for host in inventory.hosts if host.name in known]
    found = ((host, each) for host, facts in hosts for each in (*_slots(host, facts), *_interface(host, facts)))
    return [replace(each, what=f"{each.what} ({inventory.where})", host=host.name) for host, each in found]


def _system(facts: Facts, catalog: Catalog) -> Iterator[Problem]:
    system, known = facts.os, catalog.os()
    if facts.arch and facts.arch not in known.architectures:
        what, hint = f"its architecture {facts.arch} is not supported", f"supported are {', '.join(known.architectures)}"
        yield Problem("error", what, hint, id="unsupported-architecture")
    if why := system.no_wheels(catalog):
        yield Problem("error", f"{_name(system)} is not supported: {why}", f"supported are {known.supported}", id="unsupported-system")
    elif warning := untested_system(system, catalog):
        yield Problem("warning", warning, id="untested-system")


def untested_system(system: System, catalog: Catalog) -> str | None:
    """A warning for a system that is accepted and was never tested; None for others."""
    entry = catalog.os().distribution(system.id)
    if system.no_wheels(catalog):
        return None
    if system.family == "other":
        old = f"older than what is supported ({entry.oldest})" if entry else "not among the supported systems"
        return f"{_name(system)} is {old}; everything is installed without root, and none of its own packages"
    if entry is None:
        return f"{_name(system)} is not among the supported systems; it is treated like the {system.family} family"
    newest, release = key(entry.newest), key(system.version) if system.version else ()
    if release[: len(newest)] > newest:
        return f"{_name(system)} is newer than what this was tested with ({entry.newest})"
    if release > key(entry.oldest) and all(release[: len(key(each))] != key(each) for each in entry.pythons):
        return f"{_name(system)} is not among the supported releases ({', '.join(entry.pythons)}); its packages may be gone"
    return None


def _name(system: System) -> str:
    return system.name or f"{system.id} {system.version}".strip()


def _python(facts: Facts, catalog: Catalog) -> Iterator[Problem]:
    """Ansible's modules run on the Python that the survey ran on."""
    python, (oldest, why) = facts.python, _oldest_python(catalog)
    if python.version is None or key(python.version) >= key(oldest):
        return
    others = [each for each in python.others if each.version and key(each.version) >= key(oldest)]
    newer = max(others, key=lambda each: key(each.version or "0"), default=None)
    hint = "install a newer one next to it and name it: provision_python=/usr/bin/python3.11"
    hint = f"name a newer one in the inventory: provision_python={newer.path}" if newer else hint
    yield Problem("error", f"its Python is {python.version}; {oldest} or later is needed{why}", hint, id="python-too-old")


def _oldest_python(catalog: Catalog) -> tuple[str, str]:
    """(the oldest Python that works on hosts, why where it is this machine's Ansible that needs it)"""
    ansible = importlib.metadata.version("ansible-core")
    known = catalog.os().ansible.of
    oldest = next((known[release] for release in sorted(known, key=key, reverse=True) if key(release) <= key(ansible)), OLDEST_PYTHON)
    if key(oldest) <= key(OLDEST_PYTHON):
        return OLDEST_PYTHON, ""
    return oldest, f" by ansible-core {minor(ansible)}, which is installed here"


def _privileges(facts: Facts, prefix: str, become_password: bool) -> Iterator[Problem]:
    """A sudo password that is missing; or, where the user cannot become root, a folder that only root can create."""
    user = facts.user
    password, who = user.sudo == "password", user.name or "the user"
    if user.can_become:
        if password and not become_password:
            hint = "add --ask-become-pass; or install all hosts without root: provision_sudo=no below [all:vars] in the inventory"
            yield Problem("error", f"sudo asks {who} for a password", hint, id="sudo-password")
        return
    why = why_no_root(facts)
    if password:
        yield Problem("warning", f"{why}: installed without root", f"if {who} may use sudo: --ask-become-pass", id="no-root")
    if facts.disk.prefix.writable is False and facts.disk.prefix.path in (None, prefix):
        hint = f"ask an administrator to create it: install -d -o {user.name or 'USER'} {prefix}; or choose another with provision_prefix"
        yield Problem("error", f"{why}, and only root can create or write {prefix}", hint, id="needs-root")


def _missing_programs(facts: Facts, has_engine: bool, catalog: Catalog) -> Iterator[Problem]:
    """Where the user cannot become root, what root would have installed and is missing."""
    if facts.user.can_become:
        return
    oldest = catalog.os().others.oldest_compiler
    version = facts.compiler.version if facts.compiler else None
    too_old = version and key(version) < key(oldest)
    compiler, ssh, *_ = catalog.system_packages().of(facts.os.family)
    if facts.os.family == "other":
        compiler, ssh = f"a C++ compiler (GCC {oldest} or newer{f', not {version}' if too_old else ''})", "an ssh client"
    lacks_compiler = (too_old or (facts.compiler is None and "compiler" not in facts.missing)) and not has_engine
    missing = [compiler] if lacks_compiler else []
    if facts.ssh.client is None and "ssh" not in facts.missing:
        missing.append(ssh)
    if missing:
        hint = "install them there"
        if install := {"debian": "apt-get install", "rhel": "dnf install"}.get(facts.os.family):
            root = f"let {facts.user.name or 'the user'} use sudo, log in as root (ansible_user=root)"
            root += ", or give the sudo password: --ask-become-pass" if facts.user.sudo == "password" else ""
            hint = f"{root}; or ask an administrator to run there: {install} {' '.join(missing)}"
        hint += "; or give a wheel of the engine, of the same sources (`make dist`): --wheels DIR" if lacks_compiler else ""
        what = f"{why_no_root(facts)}, and packages that only root can install are missing: {', '.join(missing)}"
        yield Problem("error", what, hint, id="needs-root")


def _other_users(facts: Facts, prefix: str) -> Iterator[Problem]:
    if why := facts.installed.distrust:
        what = f"other users could change what is installed in {prefix}: {why}"
        hint = "choose a folder that only root or the login user can create or write: provision_prefix=DIR in the inventory"
        yield Problem("error", what, hint, id="prefix-of-another-user")


def why_no_root(facts: Facts) -> str:
    """Why the installation on this host does without root."""
    user = facts.user
    who = user.name or "the user"
    if user.sudo == "unwanted":
        return "provision_sudo=no"
    if user.sudo == "unmanaged":
        return f"packages of {_name(facts.os)} are not managed"
    if user.sudo_installed is False:
        return f"there is no sudo and {who} is not root"
    return f"{who} may not use sudo" + (f": {user.sudo_says.removeprefix('sudo: ')}" if user.sudo_says else "")


def _disk_space(facts: Facts, needed_mb: int, prefix: str) -> Iterator[Problem]:
    full: list[tuple[Any, ...]] = []  # one full file system is one problem
    for place, disk, needed, label, option in (
        (prefix, facts.disk.prefix, needed_mb, "", " with provision_prefix"),
        ("tmp", facts.disk.tmp, NEEDED_TMP_MB, " (temporary files)", " with TMPDIR"),
        ("home", facts.disk.home, NEEDED_HOME_MB, " (the home folder)", ""),
    ):
        path = disk.path or place
        name, filesystem = f"{path}{label}", (disk.filesystem, disk.total_mb, disk.free_mb)
        another = f"or choose another place{option}"
        if disk.read_only:
            hint = f"mount it for writing (mount -o remount,rw), {another}"
            yield Problem("error", f"the file system of {name} is mounted read-only", hint, id="disk-read-only")
        elif disk.free_mb is not None and disk.free_mb < needed:
            if filesystem not in full:
                what = f"the disk is full: {name} has {_size(disk.free_mb)} free, {_size(needed)} are needed"
                yield Problem("error", what, f"free some space (df -h {path}), {another}", id="disk-full")
            full.append(filesystem)
        elif disk is facts.disk.prefix and disk.free_inodes is not None and disk.free_inodes < FEW_INODES:
            what = f"the file system of {name} has only {disk.free_inodes} inodes free"
            yield Problem("warning", what, f"remove small files (df -i {path})", id="disk-full")
        if disk is facts.disk.prefix and disk.noexec:
            what = f"programs may not run from {name}: it is mounted noexec"
            yield Problem("error", what, f"choose another place{option}", id="disk-noexec")
        elif disk is facts.disk.tmp and disk.noexec:
            what = f"programs may not run from {name}: it is mounted noexec, which fails what is built or compiled there"
            yield Problem("warning", what, f"mount it with exec, {another}", id="disk-noexec")


def _packages(facts: Facts) -> Iterator[Problem]:
    """All are warnings: the installation waits for the lock, and repairs what an interrupted one has left."""
    if lock := facts.package_manager.lock:
        holder = f"process {lock.pid}" if lock.pid else "a process that cannot be seen"
        command = f" ({lock.command})" if lock.command else ""
        look = f"ps -fp {lock.pid}" if lock.pid else "sudo fuser -v /var/lib/dpkg/lock-frontend"
        hint = f"the installation waits for it; if it never ends, see there: {look}"
        manager = facts.package_manager.name or "the package manager"
        yield Problem("warning", f"{manager} is locked by {holder}{command}", hint, id="apt-lock")
    if facts.dpkg_interrupted:
        hint = "it is finished first; by hand: sudo dpkg --configure -a"
        yield Problem("warning", "a package installation is unfinished", hint, id="apt-held-broken")
    elif facts.broken_packages:
        names = ", ".join(facts.broken_packages[:5]) + (" …" if len(facts.broken_packages) > 5 else "")
        hint = "they are repaired first; by hand: sudo dpkg --configure -a && sudo apt-get -f install"
        yield Problem("warning", f"packages are half installed: {names}", hint, id="apt-held-broken")


def _slots(host: Host, facts: Facts) -> Iterator[Problem]:
    if host.slots is None:
        return
    gpus, cores = len(facts.gpus), facts.cpu.cores
    has = f"host `{host.name}` has {counted(gpus, 'GPU') if gpus else counted(cores or 0, 'core')} but slots={host.slots}"
    if hardware.in_mig_mode(facts)[0] and (usable := hardware.ranks(facts)):
        if host.slots > usable:
            hint = f"set slots={usable}, or CUDA_VISIBLE_DEVICES of each rank to another instance's UUID (nvidia-smi -L)"
            yield Problem(
                "warning", f"{has}; with MIG mode on, {counted(usable, 'rank')} can have a GPU to itself", hint, id="slots-above-gpus"
            )
    elif gpus and host.slots > gpus:
        yield Problem("error", f"{has}; NCCL refuses two ranks on one GPU", f"set slots={gpus} or less", id="slots-above-gpus")
    elif gpus and host.slots < gpus:
        yield Problem("warning", f"{has}; {gpus - host.slots} would stay idle", id="slots-below-gpus")
    elif not gpus and cores and host.slots > cores:
        yield Problem("warning", f"{has}; ranks would take turns on the cores", f"set slots={cores} or less", id="slots-above-cores")


def _interface(host: Host, facts: Facts) -> Iterator[Problem]:
    present = {each.name: each for each in facts.network.interfaces}
    if host.interface is None or not present:
        return
    usable = joined([name for name, each in present.items() if each.up and not each.loopback and not each.virtual]) or "none"
    if host.interface not in present:
        yield Problem("error", f"host `{host.name}` has no interface `{host.interface}`", f"it has {usable}", id="interface-missing")
    elif not present[host.interface].up:
        yield Problem("error", f"interface `{host.interface}` of host `{host.name}` is down", f"up are {usable}", id="interface-down")


def _same_machines(known: Mapping[str, Facts]) -> Iterator[Problem]:
    machines: dict[tuple[Any, ...], str] = {}
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, facts in known.items():
        machine_id, hostname = facts.machine_id, facts.hostname
        identity = (machine_id, facts.boot_id, hostname)
        if all(identity) and identity in machines:
            what = f"it is the same machine as `{machines[identity]}` ({hostname})"
            yield Problem("error", what, "keep one of the two names in the inventory", host=name, id="nccl-cuda-ipc-hostname")
            continue
        machines[identity] = name
        if machine_id and machine_id in ids and facts.boot_id != known[ids[machine_id]].boot_id:
            what = f"it has the same machine id as `{ids[machine_id]}`: one was cloned from the other"
            hint = "there: sudo rm /etc/machine-id && sudo systemd-machine-id-setup, then reboot"
            yield Problem("warning", what, hint, host=name, id="machine-id-cloned")
        if hostname and hostname in names:
            what = f"its host name is `{hostname}`, as that of `{names[hostname]}`; MPI tells hosts apart by that name"
            yield Problem("warning", what, f"there: sudo hostnamectl set-hostname {name}", host=name, id="nccl-cuda-ipc-hostname")
        ids.setdefault(machine_id or name, name)
        names.setdefault(hostname or name, name)


def _shared_prefixes(known: Mapping[str, Facts]) -> Iterator[Problem]:
    """Homes are often one folder of a file server: hosts would install over each other."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, facts in known.items():
        disk = facts.disk.prefix
        place = (disk.path, disk.filesystem, disk.total_mb)
        if disk.filesystem not in SHARED_FILE_SYSTEMS or None in place:
            continue
        if place in seen:
            same = f"is on a file server ({disk.filesystem}), the same as on `{seen[place]}`: they would install over each other"
            hint = f"choose a folder on each host's own disk: provision_prefix={OWN_DISK_PREFIX}"
            yield Problem("error", f"{disk.path} {same}", hint, host=name, id="shared-prefix")
        seen.setdefault(place, name)


def _clocks(known: Mapping[str, Facts], times: Mapping[str, tuple[float, float]]) -> Iterator[Problem]:
    ahead = {name: facts.time.epoch - times[name][1] for name, facts in known.items() if name in times and facts.time.epoch}
    if len(ahead) < 2:
        return
    middle = statistics.median_low(ahead.values())
    reference = next(name for name, offset in ahead.items() if offset == middle)
    for name, offset in ahead.items():
        began, ended = times[name]
        apart = max(offset, min(middle, offset + ended - began)) - middle  # the host looked at its clock at some time between
        if abs(apart) > CLOCKS_APART_S:
            what = f"its clock is {duration(abs(apart))} {'ahead of' if apart > 0 else 'behind'} that of `{reference}`"
            hint = "there: sudo timedatectl set-ntp true (or sudo chronyc makestep)"
            yield Problem("warning", what, hint, host=name, id="clock-skew-make")


def _size(mb: float) -> str:
    return f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb:.0f} MB"
