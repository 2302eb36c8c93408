"""What stands in the way of installing on a host, by its facts alone, each with the way out. Pure; all are collected, none raises."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from provision import catalog
from provision.base.problems import Problem
from provision.base.text import joined
from provision.facts.model import Facts, System, Unsurveyed
from provision.inventory import Host, Inventory

OLDEST_PYTHON = (3, 8)  # of the training environment: mpi4py 4 and the engine need no newer one
CLOCKS_APART_S = 5.0  # from here on logs of two hosts can no longer be read side by side, and short-lived certificates fail
NEEDED_TMP_MB = 100  # Ansible's own files; pip builds below the prefix
NEEDED_HOME_MB = 64  # Ansible's own modules and ~/.ssh
SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.glusterfs", "afs")
FEW_INODES = 20_000  # PyTorch alone brings some 13,000 files

_INSTALL_PYTHON = (
    "install it there (Debian, Ubuntu: apt-get install python3; RHEL and kin: dnf install python3), "
    "or name one that is there with ansible_python_interpreter"
)


def unsurveyed(name: str, why: Unsurveyed) -> Problem:
    """Why there are no facts of a host."""
    if why.missing_python:
        return Problem("error", "there is no Python 3, which the survey and Ansible run on", _INSTALL_PYTHON, host=name)
    return Problem("error", f"it cannot be reached: {why.unreachable}", host=name, said=why.unreachable or "")


def problems(name: str, facts: Facts, *, needed_mb: int, prefix: str, become_password: bool = False) -> list[Problem]:
    """What stands in the way of installing on one host. What is not known is no problem.

    Args:
        needed_mb: room that the plan needs below `prefix`.
        become_password: a sudo password will be given, so that one being asked for is no obstacle.
    """
    findings = (
        *_platform(facts),
        *_python(facts),
        *_rights(facts, become_password),
        *_without_root(facts, prefix),
        *_room(facts, needed_mb, prefix),
        *_packages(facts),
    )
    return [replace(found, host=name) for found in findings]


def problems_across(known: Mapping[str, Facts], received_at: Mapping[str, float] | None = None) -> list[Problem]:
    """What can only be seen by holding the hosts side by side: one machine under two names, names that collide, clocks apart.

    Args:
        received_at: host → this machine's clock (seconds since 1970) when its answer came; without it clocks are not compared.
    """
    return [*_same_machines(known), *_shared_prefixes(known), *_clocks(known, received_at or {})]


# --------------------------------------------------------------------------------------------------------- one host


def _platform(facts: Facts) -> Iterator[Problem]:
    system, arch = facts.os, facts.arch
    data = catalog.os()
    if arch and arch not in data.architectures:
        yield Problem("error", f"its architecture {arch} is not supported", "supported are " + ", ".join(data.architectures))
    entry = data.distributions.get(system.id)
    said = system.name or f"{system.id} {system.version}".strip()
    supported = "; ".join(f"{name} {each.oldest} to {each.newest}" for name, each in data.distributions.items())
    if entry is None and system.family not in ("debian", "rhel"):
        yield Problem("error", f"{said} is not supported", f"supported are {supported}")
    elif entry is not None and _version(system.version) < _version(entry.oldest):
        yield Problem("error", f"{said} is too old", f"supported are {supported}")
    elif odd := untested(system):
        yield Problem("warning", odd)


def untested(system: System) -> str | None:
    """What was never tried about a system that is used all the same; None where there is nothing."""
    entry = catalog.os().distributions.get(system.id)
    said = system.name or f"{system.id} {system.version}".strip()
    if entry is None:
        family = system.family
        listed = family in ("debian", "rhel")
        return f"{said} is not among the supported systems; it is treated like the {family} family" if listed else None
    if _version(system.version)[: len(_version(entry.newest))] > _version(entry.newest):
        return f"{said} is newer than what this was tested with ({entry.newest})"
    return None


def _python(facts: Facts) -> Iterator[Problem]:
    python = facts.python
    asked = python.asked_for
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if asked:
        if asked.version is None:
            yield Problem(
                "error",
                f"provision_python {asked.path} does not run: {asked.error or 'no such program'}",
                "name one that is there",
            )
        elif _version(asked.version) < OLDEST_PYTHON:
            yield Problem("error", f"provision_python {asked.path} is Python {asked.version}; {wanted} or later is needed")
        return
    versions = [each for each in (python.version, *(other.version for other in python.others)) if each]
    if versions and all(_version(version) < OLDEST_PYTHON for version in versions):
        newest = max(versions, key=_version)
        yield Problem(
            "error",
            f"its Python is {newest}; {wanted} or later is needed",
            "install a newer one next to it and name it: provision_python=/usr/bin/python3.11",
        )


def _rights(facts: Facts, become_password: bool) -> Iterator[Problem]:
    user = facts.user
    if user.can_become and user.sudo == "password" and not become_password:
        who = user.name or "the user"
        yield Problem(
            "error", f"sudo asks {who} for a password", "add --ask-become-pass, or do without root: provision_sudo=no in the inventory"
        )


def _without_root(facts: Facts, prefix: str) -> Iterator[Problem]:
    """Where root is not to be had, what it would have brought must be there."""
    if facts.user.can_become:
        return
    why = why_no_root(facts)
    password = facts.user.sudo == "password"
    if password:
        yield Problem("warning", why, "if the user may use sudo all the same: --ask-become-pass")
    missing = list(_missing_packages(facts))
    if missing:
        install = {"debian": "apt-get install", "rhel": "dnf install"}.get(facts.os.family, "install")
        who = facts.user.name or "the user"
        hint = (
            f"have an administrator run there: {install} {' '.join(missing)}; or let {who} use sudo; or connect as root (ansible_user=root)"
        )
        if password:
            hint += "; or give the sudo password: --ask-become-pass"
        yield Problem("error", f"{why}, and what only root can install is not there: {', '.join(missing)}", hint)
    if facts.disk.prefix.writable is False:
        who = facts.user.name or "USER"
        hint = f"have an administrator make it: install -d -o {who} {prefix}; or name another with provision_prefix"
        yield Problem("error", f"{why}, and {prefix} cannot be made or written without", hint)


def why_no_root(facts: Facts) -> str:
    """Why things are done without root on this host, as a sentence."""
    user = facts.user
    who = user.name or "the user"
    if user.sudo == "unwanted":
        return "provision_sudo=no"
    if user.sudo == "password":
        return f"{user.sudo_says or 'sudo asks for a password'}: done without root"
    if user.sudo_installed is False:
        return f"there is no sudo and {who} is not root"
    return f"{who} may not use sudo" + (f" ({user.sudo_says})" if user.sudo_says else "")


def _missing_packages(facts: Facts) -> Iterator[str]:
    """What a host without root lacks of what the engine and mpirun need; what is not known is not missing."""
    names = catalog.system_packages().without_root.get(facts.os.family)
    if facts.compiler is None and "compiler" not in facts.missing:
        yield names.compiler if names else "a C++ compiler"
    if facts.ssh.client is None and "ssh" not in facts.missing:
        yield names.ssh if names else "an ssh client"


def _room(facts: Facts, needed_mb: int, prefix: str) -> Iterator[Problem]:
    full: list[tuple[Any, ...]] = []  # one full file system is one problem, whatever is on it
    for place, disk, needed, said, elsewhere in (
        ("prefix", facts.disk.prefix, needed_mb, "", " with provision_prefix"),
        ("tmp", facts.disk.tmp, NEEDED_TMP_MB, " (temporary files)", " with TMPDIR"),
        ("home", facts.disk.home, NEEDED_HOME_MB, " (the home folder)", ""),
    ):
        path = disk.path or (prefix if place == "prefix" else place)
        free, inodes = disk.free_mb, disk.free_inodes
        label, filesystem = f"{path}{said}", (disk.filesystem, disk.total_mb, free)
        if disk.read_only:
            hint = f"mount it for writing (mount -o remount,rw), or choose another place{elsewhere}"
            yield Problem("error", f"the file system of {label} is mounted read-only", hint)
        elif free is not None and free < needed:
            if filesystem not in full:
                hint = f"make room (df -h {path}), or choose another place{elsewhere}"
                yield Problem(
                    "error", f"the disk is full: {label} has {_size(free)} free, {_size(needed)} are needed", hint, id="disk-full"
                )
            full.append(filesystem)
        elif place == "prefix" and inodes is not None and inodes < FEW_INODES:
            yield Problem(
                "warning", f"the file system of {label} has only {inodes} inodes free", f"remove small files (df -i {path})", id="disk-full"
            )
        if place == "prefix" and disk.noexec:
            yield Problem("error", f"programs may not run from {label}: it is mounted noexec", f"choose another place{elsewhere}")


def _packages(facts: Facts) -> Iterator[Problem]:
    if lock := facts.package_manager.lock:
        holder = f"process {lock.pid}" if lock.pid else "a process that cannot be seen"
        command = f" ({lock.command})" if lock.command else ""
        yield Problem(
            "warning",
            f"{facts.manager} is locked by {holder}{command}",
            "it is waited for; if it never ends, look at it there: "
            + (f"ps -fp {lock.pid}" if lock.pid else "sudo fuser -v /var/lib/dpkg/lock-frontend"),
            id="apt-lock",
        )
    # Warnings: an installation that another process is at right now looks the same, and what was cut off the run finishes itself.
    if facts.dpkg_interrupted:
        yield Problem(
            "warning",
            "a package installation is unfinished",
            "it is finished first; by hand: sudo dpkg --configure -a",
            id="apt-held-broken",
        )
    elif facts.broken_packages:
        names = ", ".join(facts.broken_packages[:5]) + (" …" if len(facts.broken_packages) > 5 else "")
        yield Problem(
            "warning",
            f"packages are half installed: {names}",
            "it is fixed first; by hand: sudo dpkg --configure -a && sudo apt-get -f install",
            id="apt-held-broken",
        )


# ------------------------------------------------------------------------------------------- against the inventory


def against_inventory(inventory: Inventory, known: Mapping[str, Facts]) -> list[Problem]:
    """`slots` and interfaces of the inventory against the hosts; those whose facts are not known are passed over."""
    hosts = [(host, known[host.name]) for host in inventory.hosts if host.name in known]
    found = (each for host, facts in hosts for each in (*_slots(host, facts), *_interface(host, facts)))
    return [replace(each, what=f"{each.what} ({inventory.where})") for each in found]


def _slots(host: Host, facts: Facts) -> Iterator[Problem]:
    if host.slots is None:
        return
    gpus, cores = len(facts.gpus), facts.cpu.cores
    has = f"host `{host.name}` has {_count(gpus, 'GPU') if gpus else _count(cores or 0, 'core')} but slots={host.slots}"
    if gpus and host.slots > gpus:
        yield Problem("error", f"{has}; NCCL refuses two ranks on one GPU", f"set slots={gpus} or less", host=host.name)
    elif gpus and host.slots < gpus:
        yield Problem("warning", f"{has}; {gpus - host.slots} would stay idle", host=host.name)
    elif not gpus and cores and host.slots > cores:
        yield Problem("warning", f"{has}; ranks would take turns on the cores", f"set slots={cores} or less", host=host.name)


def _interface(host: Host, facts: Facts) -> Iterator[Problem]:
    present = {each.name: each for each in facts.network.interfaces}
    if host.interface is None or not present:
        return
    usable = joined([name for name, each in present.items() if each.up and not each.loopback and not each.virtual]) or "none"
    if host.interface not in present:
        yield Problem("error", f"host `{host.name}` has no interface `{host.interface}`", f"it has {usable}", host=host.name)
    elif not present[host.interface].up:
        yield Problem("error", f"interface `{host.interface}` of host `{host.name}` is down", f"up are {usable}", host=host.name)


# ------------------------------------------------------------------------------------------------------- across them


def _same_machines(known: Mapping[str, Facts]) -> Iterator[Problem]:
    machines: dict[tuple[Any, ...], str] = {}
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, facts in known.items():
        identity = (facts.machine_id, facts.boot_id, facts.hostname)
        if all(identity) and identity in machines:
            what = f"it is the same machine as `{machines[identity]}` ({facts.hostname})"
            yield Problem("error", what, "keep one of the two names in the inventory", host=name, id="nccl-cuda-ipc-hostname")
            continue
        machines[identity] = name
        machine_id, hostname = facts.machine_id, facts.hostname
        if machine_id and machine_id in ids and facts.boot_id != known[ids[machine_id]].boot_id:
            what = f"it has the same machine id as `{ids[machine_id]}`: one was cloned from the other"
            yield Problem(
                "warning",
                what,
                "there: sudo rm /etc/machine-id && sudo systemd-machine-id-setup, then reboot",
                host=name,
                id="machine-id-cloned",
            )
        if hostname and hostname in names:
            what = f"it calls itself `{hostname}`, as `{names[hostname]}` does; MPI tells hosts apart by that name"
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
            what = (
                f"{place[0]} is a folder of a file server ({place[1]}), the same as on `{seen[place]}`: they would install over each other"
            )
            yield Problem("error", what, "name a folder of each host's own disk: provision_prefix=/var/tmp/provision", host=name)
        seen.setdefault(place, name)


def _clocks(known: Mapping[str, Facts], received_at: Mapping[str, float]) -> Iterator[Problem]:
    ahead = {name: facts.time.epoch - received_at[name] for name, facts in known.items() if name in received_at and facts.time.epoch}
    if len(ahead) < 2:
        return
    middle = statistics.median_low(ahead.values())
    reference = next(name for name, offset in ahead.items() if offset == middle)
    for name, offset in ahead.items():
        apart = offset - middle
        if abs(apart) > CLOCKS_APART_S:
            direction = "ahead of" if apart > 0 else "behind"
            hint = "there: sudo timedatectl set-ntp true (or sudo chronyc makestep)"
            yield Problem(
                "warning", f"its clock is {_duration(abs(apart))} {direction} that of `{reference}`", hint, host=name, id="clock-skew-make"
            )


# ---------------------------------------------------------------------------------------------------------- wording


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _size(mb: float) -> str:
    return f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb:.0f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
