"""HOSTS without a file: `localhost`, or `node1,admin@node2:2222,node[3:5]`. Pure: text in, hosts and problems out."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from pathlib import Path

from provision.base.problems import Problem
from provision.inventory.model import Host

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$\\-]*")
_SYSTEM_PYTHON = Path("/usr/bin/python3")
_OLDEST_PYTHON_ANSIBLE_MANAGES = (3, 9)  # docs.ansible.com, support matrix: managed node of ansible-core 2.20 and 2.21


def parse(argument: str) -> tuple[list[Host], list[Problem]]:
    """The hosts of a comma list, with what it says of them alone, and all that is wrong with it. A bare ``localhost`` is this machine."""
    hosts: list[Host] = []
    seen: set[str] = set()
    problems: list[Problem] = []

    def error(message: str, hint: str | None = None) -> None:
        problems.append(Problem("error", message, hint, where=argument))

    for text in (part.strip() for part in re.split(r",(?![^\[]*\])", argument)):
        if not text:
            continue
        user, at, rest = text.rpartition("@")
        if at and not _USER.fullmatch(user):
            error(f"`{text}`: `{user}` is not a user name")
            continue
        port: int | None = None
        names: tuple[str, ...]
        if _is_address(rest):  # a bare IPv6 address: its colons are no port
            names = (rest,)
        else:
            if odd := re.search(r":(?!\d+$|\d+:|[^\[\]]*\])([^\]]*)$", rest):
                error(f"`{text}`: `{odd.group(1)}` is not a port", "write host:port, such as node1:2222")
                continue
            names, port = _expand(rest)
        bad = [name for name in names if not (_NAME.fullmatch(name) or _is_address(name.strip("[]")))]
        if bad:
            error(f"`{text}` is not a host name", "name a file, `localhost`, or hosts as host1,host2 (user@host and host:port work too)")
            continue
        if port is not None and not 1 <= port <= 65535:
            error(f"`{text}`: port {port} is out of range", "ports go from 1 to 65535")
            continue
        if port is not None and port < 22:
            hint = "slots need an inventory file: `NAME slots=N`"
            problems.append(Problem("warning", f"`{text}` means SSH on port {port}, not {port} slots", hint, where=argument))
        for name in (each.strip("[]") for each in names):
            if name in seen:
                error(f"host `{name}` is named twice", "name it once")
            elif name == "localhost" and not user and port is None:
                hosts.append(Host(name, name, connection="local", variables={"ansible_python_interpreter": local_python()}))
            else:
                hosts.append(Host(name, name, port=port, user=user or None))
            seen.add(name)
    if not hosts and not problems:
        error("no hosts are named", "name a file, `localhost`, or hosts as host1,host2")
    return hosts, problems


def _expand(pattern: str) -> tuple[tuple[str, ...], int | None]:
    """`node[1:3]:22` → (("node1", "node2", "node3"), 22), by Ansible's own rules."""
    from ansible.errors import AnsibleError
    from ansible.parsing.utils.addresses import parse_address
    from ansible.plugins.inventory import detect_range, expand_hostname_range

    try:
        name, port = parse_address(pattern, allow_ranges=True)
    except AnsibleError:
        name, port = pattern, None
    with contextlib.suppress(AnsibleError, ValueError):
        if detect_range(name):
            return tuple(str(each) for each in expand_hostname_range(name)), port
    return (str(name),), port


def local_python() -> str:
    """The Python that Ansible should run on this machine: the system's, which knows its package manager, unless it is too old."""
    version = re.search(r"python3\.(\d+)$", os.path.realpath(_SYSTEM_PYTHON))
    if version and (3, int(version.group(1))) >= _OLDEST_PYTHON_ANSIBLE_MANAGES:
        return str(_SYSTEM_PYTHON)
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return True
