"""HOSTS without a file: `localhost`, or `node1,admin@node2:2222,node[3:5]`. Pure: text in, hosts and findings out."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from provision.inventory.model import Finding
from provision.inventory.sources import expand

_NAME = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
_USER = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.@$\\-]*$")
_SYSTEM_PYTHON = Path("/usr/bin/python3")
_OLDEST_PYTHON_ANSIBLE_MANAGES = (3, 9)  # docs.ansible.com, support matrix: managed node of ansible-core 2.20 and 2.21


@dataclass(frozen=True)
class Entry:
    """One part of the list, taken apart."""

    text: str
    name: str
    user: str | None
    port: int | None

    @property
    def is_here(self) -> bool:
        return self.name == "localhost" and self.user is None and self.port is None


def parse(argument: str) -> tuple[list[Entry], list[Finding]]:
    """The entries of a comma list, and all that is wrong with it."""
    entries: list[Entry] = []
    findings: list[Finding] = []

    def error(message: str, todo: str | None = None) -> None:
        findings.append(Finding("error", argument, message, todo))

    for text in (part.strip() for part in _split(argument)):
        if not text:
            continue
        user, at, rest = text.rpartition("@")
        if at and not _USER.match(user):
            error(f"`{text}`: `{user}` is not a user name")
            continue
        if _is_address(rest):  # a bare IPv6 address: its colons are no port
            names, port = _alone(rest)
        else:
            if odd := re.search(r":(?!\d+$|\d+:|[^\[\]]*\])([^\]]*)$", rest):
                error(f"`{text}`: `{odd.group(1)}` is not a port", "write host:port, such as node1:2222")
                continue
            names, port = expand(rest)
        bad = [name for name in names if not (_NAME.match(name) or _is_address(name.strip("[]")))]
        if bad:
            error(f"`{text}` is not a host name", "name a file, `localhost`, or hosts as host1,host2 (user@host and host:port work too)")
            continue
        if port is not None and not 1 <= port <= 65535:
            error(f"`{text}`: port {port} is out of range", "ports go from 1 to 65535")
            continue
        if port is not None and port < 22:
            todo = "slots need an inventory file: `NAME slots=N`"
            findings.append(Finding("warning", argument, f"`{text}` means SSH on port {port}, not {port} slots", todo))
        entries += [Entry(text, name.strip("[]"), user or None, port) for name in names]
    seen: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in seen:
            error(f"host `{entry.name}` is named twice", "name it once")
        seen[entry.name] = entry
    if not entries and not findings:
        error("no hosts are named", "name a file, `localhost`, or hosts as host1,host2")
    return entries, findings


def local_python() -> str:
    """The Python that Ansible should run on this machine: the system's, which knows its package manager, unless it is too old."""
    version = re.search(r"python3\.(\d+)$", os.path.realpath(_SYSTEM_PYTHON))
    if version and (3, int(version.group(1))) >= _OLDEST_PYTHON_ANSIBLE_MANAGES:
        return str(_SYSTEM_PYTHON)
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _split(argument: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", argument)


def _alone(name: str) -> tuple[tuple[str, ...], int | None]:
    return (name,), None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return True
