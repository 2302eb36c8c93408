"""The facts of hosts on the controller's side: read what the survey printed, fill what a hand-written file leaves out, say what stands in the way.

Pure: nothing here connects to a host. The survey itself is `hostside/survey.py`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from provision.errors import ProvisionError, UsageError

Facts = dict[str, Any]

SCHEMA = 1
BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="

OLDEST_PYTHON = (3, 8)  # of the training environment: mpi4py 4 and the engine need no newer one
CLOCKS_APART_S = 5.0  # from here on logs of two hosts can no longer be read side by side, and short-lived certificates fail
NEEDED_TMP_MB = 1024  # pip unpacks the wheels and cmake builds there
NEEDED_HOME_MB = 64  # Ansible's own modules and ~/.ssh

_NOTHING_ON_DISK = {"path": None, "exists": None, "free_mb": None, "total_mb": None, "read_only": False, "noexec": False, "writable": None}

# What every host has, whoever wrote its facts. Sections that hand-written facts leave out get these and are named under "missing".
DEFAULTS: Mapping[str, Any] = {
    "hostname": None,
    "fqdn": None,
    "hosts_file": [],
    "machine_id": None,
    "boot_id": None,
    "container": None,
    "os": {"id": "linux", "version": "", "codename": None, "name": None, "id_like": [], "family": None, "kernel": None, "libc": None},
    "arch": None,
    "cpu": {"model": None, "cores": None, "logical": None, "physical": None, "sockets": None, "flags": []},
    "memory": {"total_mb": None, "available_mb": None, "swap_mb": None, "limited": False},
    "disk": {"prefix": _NOTHING_ON_DISK, "home": _NOTHING_ON_DISK, "tmp": _NOTHING_ON_DISK, "shm": _NOTHING_ON_DISK},
    "user": {"name": None, "uid": None, "home": None, "shell": None, "groups": [], "sudo": None, "sudo_says": None, "sudo_installed": None},
    "limits": {},
    "sysctl": {},
    "environment": {"path": "", "ld_library_path": None, "locale": None, "variables": {}},
    "security": {"selinux": None, "firewalld": None, "ufw": None},
    "time": {"epoch": None, "ntp_synced": None, "timezone": None},
    "python": {
        "executable": None,
        "version": None,
        "has_venv": None,
        "has_pip": None,
        "has_headers": None,
        "others": [],
        "asked_for": None,
    },
    "pip": {
        "index_url": None,
        "extra_index_urls": [],
        "find_links": [],
        "no_index": False,
        "torch_wheels": [],
        "certificates": None,
        "config_files": [],
        "proxies": [],
    },
    "package_manager": {"name": None, "lock": None},
    "packages": {},
    "held_packages": [],
    "broken_packages": [],
    "dpkg_interrupted": False,
    "driver": None,
    "gpus": [],
    "nvidia": {
        "smi": None,
        "smi_error": None,
        "pci_devices": [],
        "device_nodes": [],
        "nouveau": False,
        "peer_memory": False,
        "fabric_manager": None,
    },
    "cuda": {"toolkits": [], "nvcc": None},
    "nccl": {"libraries": [], "in_cache": []},
    "mpi": {"found": [], "first": None, "orted": None},
    "hwloc": {"libraries": [], "tool": None, "version": None},
    "linker": {"conf_d": {}, "ours": [], "cache": {}},
    "cmake": None,
    "compiler": None,
    "gcc": None,
    "make": None,
    "ninja": None,
    "network": {"interfaces": [], "default_route_interface": None, "ssh_connection": None},
    "infiniband": [],
    "ssh": {"sshd": None, "ports": [], "configured_ports": [], "settings": {}, "client": None, "host_keys": [], "files": []},
    "installed": {
        "prefix": None,
        "exists": False,
        "manifest": None,
        "manifest_error": None,
        "venv": None,
        "packages": {},
        "torch_cuda": None,
        "engine_libraries": [],
    },
}
_DRIVER = {"version": None, "cuda": None, "kernel_module": None, "library": None, "open": None}
_GPU = {"name": None, "compute_capability": None, "memory_mb": None, "uuid": None}
_BESIDES = ("schema", "errors", "missing", "survey", "missing_python", "unreachable")
_PACKAGE_MANAGERS = {"debian": "apt", "rhel": "dnf"}


@dataclass(frozen=True)
class Problem:
    """A condition of a host that stands in the way (error) or will make itself felt (warning), with the way out."""

    level: Literal["error", "warning"]
    host: str
    what: str
    todo: str | None = None

    def __str__(self) -> str:
        return f"{self.host}: {self.what}" + (f"\n  → {self.todo}" if self.todo else "")


# -------------------------------------------------------------------------------------------------------------- reading


def parse(stdout: str) -> Facts:
    """The document out of what the survey printed, whatever banners stand around it.

    Raises:
        ProvisionError: the output is something else, or breaks off.
    """
    before, begin, rest = stdout.rpartition(BEGIN)
    if not begin:
        said = _last_line(stdout)
        raise ProvisionError("the survey did not run" + (f"; the host said: {said}" if said else "; the host said nothing"))
    body, end, _ = rest.partition(END)
    if not end:
        raise ProvisionError("the survey's answer breaks off before its end", todo="run it again; if it stays so, look at the connection")
    try:
        document = json.loads(body)
    except ValueError as error:
        raise ProvisionError(
            f"the survey's answer is damaged: {error}", todo="run it again; if it stays so, look at the connection"
        ) from error
    if not isinstance(document, dict):
        raise ProvisionError("the survey's answer is no JSON object")
    return document


def load_file(path: str | Path) -> dict[str, Facts]:
    """Host → normalised facts, from a file as `provision survey --json` writes it or as a person does.

    Raises:
        UsageError: the file cannot be read or used; all that is wrong with it at once.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the facts cannot be read: {error.strerror or error}", where=name) from error
    except UnicodeDecodeError as error:
        raise UsageError("the facts are no UTF-8 text", where=name) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise UsageError(f"the facts are no JSON: {getattr(error, 'msg', error)}", where=f"{name}:{line}" if line else name) from error
    wrong = list(_wrong_in_file(document))
    if len(wrong) == 1:
        raise UsageError(wrong[0], where=name, todo=_SMALLEST)
    if wrong:
        raise UsageError("\n".join(f"{name}: {each}" for each in wrong), todo=_SMALLEST)
    return {host: normalise(facts) for host, facts in document["hosts"].items()}


def normalise(host_facts: Mapping[str, Any]) -> Facts:
    """Facts with every section in place; what had to be assumed is named under ``missing``. Normalised facts stay as they are."""
    facts: Facts = {**host_facts}
    missing: list[str] = list(host_facts.get("missing") or ())
    if facts.get("missing_python") or facts.get("unreachable"):
        return facts
    for key, default in DEFAULTS.items():
        if key not in facts:
            facts[key] = copy.deepcopy(default)
            if key not in missing and key not in ("driver", "gpus"):  # no driver and no GPUs is what most hosts have
                missing.append(key)
        elif isinstance(default, dict) and default:
            facts[key] = copy.deepcopy(default) | dict(facts[key] or {})
    facts["arch"] = _architecture(facts["arch"])
    facts["os"] = _system(facts["os"])
    if facts["driver"] is not None:
        facts["driver"] = _DRIVER | facts["driver"]
        if facts["driver"]["cuda"] is None and "driver.cuda" not in missing:
            missing.append("driver.cuda")
    facts["gpus"] = [_GPU | gpu for gpu in facts["gpus"] or ()]
    for index, gpu in enumerate(facts["gpus"]):
        key = f"gpus[{index}].compute_capability"
        if gpu["compute_capability"] is None and key not in missing:
            missing.append(key)
        elif gpu["compute_capability"] is not None:
            gpu["compute_capability"] = str(gpu["compute_capability"])
    if facts["package_manager"]["name"] is None:
        facts["package_manager"]["name"] = _PACKAGE_MANAGERS.get(facts["os"]["family"], "none")
    facts.setdefault("errors", {})
    facts["missing"] = missing
    return facts


# ------------------------------------------------------------------------------------------------------------- problems


def problems(name: str, facts: Mapping[str, Any], *, needed_mb: int, prefix: str, become_password: bool = False) -> list[Problem]:
    """What stands in the way of installing on one host. What is not known is no problem.

    Args:
        facts: of one host, normalised or not.
        needed_mb: room that the plan needs below `prefix`.
        become_password: a sudo password will be given, so that one being asked for is no obstacle.
    """
    if facts.get("missing_python"):
        todo = "install it there (Debian, Ubuntu: apt-get install python3; RHEL and kin: dnf install python3), or name one by ansible_python_interpreter"
        return [Problem("error", name, "there is no Python 3, which the survey and Ansible run on", todo)]
    if facts.get("unreachable"):
        return [Problem("error", name, f"it cannot be reached: {facts['unreachable']}")]
    known = normalise(facts)
    found: list[Problem] = []
    for level, what, todo in (
        *_platform(known),
        *_python(known),
        *_rights(known, become_password),
        *_room(known, needed_mb, prefix),
        *_packages(known),
    ):
        found.append(Problem(level, name, what, todo))
    return found


def problems_across(facts_by_host: Mapping[str, Mapping[str, Any]], received_at: Mapping[str, float] | None = None) -> list[Problem]:
    """What can only be seen by holding the hosts side by side: one machine under two names, names that collide, clocks apart.

    Args:
        received_at: host → this machine's clock (seconds since 1970) when its answer came; without it clocks are not compared.
    """
    known = {
        name: normalise(facts) for name, facts in facts_by_host.items() if not facts.get("missing_python") and not facts.get("unreachable")
    }
    return [*_same_machines(known), *_clocks(known, received_at or {})]


# ----------------------------------------------------------------------------------------------------- inside: one host

_Finding = tuple[Literal["error", "warning"], str, str | None]


def _platform(facts: Facts) -> Iterator[_Finding]:
    system, arch = facts["os"], facts["arch"]
    data = _catalogue()
    if arch is not None and arch not in data["architectures"]:
        yield "error", f"its architecture {arch} is not supported", "supported are " + ", ".join(data["architectures"])
    entry = data["distributions"].get(system["id"])
    said = system["name"] or f"{system['id']} {system['version']}".strip()
    supported = "; ".join(f"{name} {each['oldest']} to {each['newest']}" for name, each in data["distributions"].items())
    if entry is None:
        if system["family"] in ("debian", "rhel"):
            yield "warning", f"{said} is not among the supported systems; it is treated like the {system['family']} family", None
        else:
            yield "error", f"{said} is not supported", f"supported are {supported}"
    elif _version(system["version"]) < _version(entry["oldest"]):
        yield "error", f"{said} is too old", f"supported are {supported}"
    elif _version(system["version"])[: len(_version(entry["newest"]))] > _version(entry["newest"]):
        yield "warning", f"{said} is newer than what this was tested with ({entry['newest']})", None


def _python(facts: Facts) -> Iterator[_Finding]:
    python = facts["python"]
    asked = python.get("asked_for")
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if asked:
        if asked.get("version") is None:
            yield (
                "error",
                f"provision_python {asked.get('path')} does not run: {asked.get('error') or 'no such program'}",
                "name one that is there",
            )
        elif _version(asked["version"]) < OLDEST_PYTHON:
            yield "error", f"provision_python {asked['path']} is Python {asked['version']}; {wanted} or later is needed", None
        return
    versions = [each["version"] for each in (python, *python["others"]) if each.get("version")]
    if versions and all(_version(version) < OLDEST_PYTHON for version in versions):
        newest = max(versions, key=_version)
        yield (
            "error",
            f"its Python is {newest}; {wanted} or later is needed",
            "install a newer one beside it and name it: provision_python=/usr/bin/python3.11",
        )


def _rights(facts: Facts, become_password: bool) -> Iterator[_Finding]:
    user = facts["user"]
    who = user["name"] or "the user"
    root = "connect as root (ansible_user=root)"
    if user["sudo"] == "none" and user["sudo_installed"] is False:
        yield "error", f"there is no sudo and {who} is not root", f"install sudo and let {who} use it, or {root}"
    elif user["sudo"] == "none":
        said = f" ({user['sudo_says']})" if user["sudo_says"] else ""
        yield (
            "error",
            f"{who} may not use sudo{said}",
            f"as root there: echo '{who} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{who}; or {root}",
        )
    elif user["sudo"] == "password" and not become_password:
        yield "error", f"sudo asks {who} for a password", "add --ask-become-pass"


def _room(facts: Facts, needed_mb: int, prefix: str) -> Iterator[_Finding]:
    for place, needed, said in (
        ("prefix", needed_mb, prefix),
        ("tmp", NEEDED_TMP_MB, "temporary files"),
        ("home", NEEDED_HOME_MB, "the home folder"),
    ):
        disk = facts["disk"].get(place) or {}
        path = disk.get("path") or (prefix if place == "prefix" else place)
        label = path if place == "prefix" else f"{path} ({said})"
        free = disk.get("free_mb")
        if disk.get("read_only"):
            yield (
                "error",
                f"the file system of {label} is mounted read-only",
                f"mount it for writing (mount -o remount,rw), or choose another place{_elsewhere(place)}",
            )
        elif free is not None and free < needed:
            yield (
                "error",
                f"the disk is full: {label} has {_size(free)} free, {_size(needed)} are needed",
                f"make room (df -h {path}), or choose another place{_elsewhere(place)}",
            )
        elif disk.get("free_inodes") is not None and disk["free_inodes"] < 20_000 and place == "prefix":
            yield "warning", f"the file system of {label} has only {disk['free_inodes']} inodes free", f"remove small files (df -i {path})"
        if place == "prefix" and disk.get("noexec"):
            yield "error", f"programs may not run from {label}: it is mounted noexec", f"choose another place{_elsewhere(place)}"


def _packages(facts: Facts) -> Iterator[_Finding]:
    manager = facts["package_manager"]
    if lock := manager["lock"]:
        holder = f"process {lock['pid']}" if lock.get("pid") else "a process that cannot be seen"
        command = f" ({lock['command']})" if lock.get("command") else ""
        yield (
            "warning",
            f"{manager['name']} is locked by {holder}{command}",
            "it is waited for; if it never ends, look at it there: "
            + (f"ps -fp {lock['pid']}" if lock.get("pid") else "sudo fuser -v /var/lib/dpkg/lock-frontend"),
        )
    if facts["dpkg_interrupted"]:
        yield "error", "an earlier package installation was interrupted", "there: sudo dpkg --configure -a"
    elif facts["broken_packages"]:
        names = ", ".join(facts["broken_packages"][:5]) + (" …" if len(facts["broken_packages"]) > 5 else "")
        yield "error", f"packages are half installed: {names}", "there: sudo dpkg --configure -a && sudo apt-get -f install"


# ------------------------------------------------------------------------------------------------------ inside: across


def _same_machines(known: Mapping[str, Facts]) -> Iterator[Problem]:
    machines: dict[tuple[Any, ...], str] = {}
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, facts in known.items():
        identity = (facts["machine_id"], facts["boot_id"], facts["hostname"])
        if all(identity) and identity in machines:
            what = f"it is the same machine as `{machines[identity]}` ({facts['hostname']})"
            yield Problem("error", name, what, "keep one of the two names in the inventory")
            continue
        machines[identity] = name
        machine_id, hostname = facts["machine_id"], facts["hostname"]
        if machine_id and machine_id in ids and facts["boot_id"] != known[ids[machine_id]]["boot_id"]:
            what = f"it has the same machine id as `{ids[machine_id]}`: one was cloned from the other"
            yield Problem("warning", name, what, "there: sudo rm /etc/machine-id && sudo systemd-machine-id-setup, then reboot")
        if hostname and hostname in names:
            what = f"it calls itself `{hostname}`, as `{names[hostname]}` does; MPI tells hosts apart by that name"
            yield Problem("warning", name, what, f"there: sudo hostnamectl set-hostname {name}")
        ids.setdefault(machine_id or name, name)
        names.setdefault(hostname or name, name)


def _clocks(known: Mapping[str, Facts], received_at: Mapping[str, float]) -> Iterator[Problem]:
    ahead = {
        name: facts["time"]["epoch"] - received_at[name] for name, facts in known.items() if name in received_at and facts["time"]["epoch"]
    }
    if len(ahead) < 2:
        return
    middle = statistics.median_low(ahead.values())
    reference = next(name for name, offset in ahead.items() if offset == middle)
    for name, offset in ahead.items():
        apart = offset - middle
        if abs(apart) > CLOCKS_APART_S:
            direction = "ahead of" if apart > 0 else "behind"
            todo = "there: sudo timedatectl set-ntp true (or sudo chronyc makestep)"
            yield Problem("warning", name, f"its clock is {_duration(abs(apart))} {direction} that of `{reference}`", todo)


# ----------------------------------------------------------------------------------------------------- inside: the file

_SMALLEST = (
    'the least a host needs: {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", '
    '"driver": {"version": "535.104.05", "cuda": "12.2"}, "gpus": [{"name": "…", "compute_capability": "8.0"}]}'
)


def _wrong_in_file(document: Any) -> Iterator[str]:
    if not isinstance(document, dict):
        yield "the facts must be a JSON object with the key `hosts`"
        return
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        yield f"`schema` is {schema!r}; this version reads {SCHEMA}"
    hosts = document.get("hosts")
    if not isinstance(hosts, dict):
        yield "the key `hosts` is missing" if "hosts" not in document else "`hosts` must be an object: host name → facts"
        return
    if not hosts:
        yield "`hosts` is empty"
    for name, facts in hosts.items():
        yield from _wrong_in_host(f"hosts.{name}", facts)


def _wrong_in_host(at: str, facts: Any) -> Iterator[str]:
    if not isinstance(facts, dict):
        yield f"`{at}` must be an object"
        return
    if facts.get("missing_python") or facts.get("unreachable"):
        return
    for key in facts:
        if key not in DEFAULTS and key not in _BESIDES:
            close = difflib.get_close_matches(key, DEFAULTS, n=1, cutoff=0.75)
            if close and close[0] not in facts:
                yield f"`{at}.{key}` is unknown; did you mean `{close[0]}`?"
    system = facts.get("os")
    if not isinstance(system, dict):
        yield f"`{at}.os` is missing" if system is None else f"`{at}.os` must be an object with `id` and `version`"
    else:
        for key in ("id", "version"):
            if not isinstance(system.get(key), str) or (key == "id" and not system[key]):
                yield f"`{at}.os.{key}` " + ("is missing" if key not in system else "must be a text in quotes")
    if not isinstance(facts.get("arch"), str):
        yield f"`{at}.arch` " + ("is missing" if facts.get("arch") is None else "must be a text in quotes")
    driver = facts.get("driver")
    if driver is not None and not isinstance(driver, dict):
        yield f"`{at}.driver` must be an object with `version` and `cuda`, or null"
    elif driver is not None:
        for key in ("version", "cuda"):
            if (driver.get(key) is not None and not re.fullmatch(r"\d+(\.\d+)*", str(driver[key]))) or (
                key == "version" and driver.get(key) is None
            ):
                yield f"`{at}.driver.{key}` must be a version in quotes, such as " + ('"535.104.05"' if key == "version" else '"12.2"')
            elif driver.get(key) is not None and not isinstance(driver[key], str):
                yield f"`{at}.driver.{key}` must be a version in quotes: 12.10 and 12.1 are one number"
    gpus = facts.get("gpus")
    if gpus is not None and not isinstance(gpus, list):
        yield f"`{at}.gpus` must be a list"
    for index, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
        if not isinstance(gpu, dict):
            yield f"`{at}.gpus[{index}]` must be an object with `name` and `compute_capability`"
        elif gpu.get("compute_capability") is not None and not re.fullmatch(r"\d+\.\d+", str(gpu["compute_capability"])):
            yield f'`{at}.gpus[{index}].compute_capability` must look like "8.0"'
    for key, default in DEFAULTS.items():
        if key not in ("os", "arch", "driver", "gpus") and default is not None and key in facts and facts[key] is not None:
            if not isinstance(facts[key], type(default)):
                yield f"`{at}.{key}` must be " + {dict: "an object", list: "a list", bool: "true or false"}[type(default)]


# ------------------------------------------------------------------------------------------------------- inside: values


@cache
def _catalogue() -> dict[str, Any]:
    text = (Path(__file__).parent / "catalog" / "os.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def _architecture(name: str | None) -> str | None:
    aliases = {alias: real for real, others in _catalogue()["architectures"].items() for alias in others}
    return aliases.get(name, name) if name else name


def _system(system: dict[str, Any]) -> dict[str, Any]:
    entry = _catalogue()["distributions"].get(system["id"])
    alike = set(system["id_like"])
    family = system["family"] or (entry or {}).get("family")
    if family is None:
        family = "debian" if alike & {"debian", "ubuntu"} else "rhel" if alike & {"rhel", "fedora", "centos"} else "other"
    codename = system["codename"] or ((entry or {}).get("codenames") or {}).get(system["version"])
    return system | {"family": family, "codename": codename}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def _elsewhere(place: str) -> str:
    return {"prefix": " with provision_prefix", "tmp": " with TMPDIR"}.get(place, "")


def _size(mb: int) -> str:
    return f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb} MB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
