"""Everything that is judged about an inventory. Pure: what was read goes in, problems come out, all of them, none is raised."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from provision.base.problems import Problem, Severity
from provision.inventory.model import ENCRYPTED, Host
from provision.inventory.parser import Reading
from provision.inventory.values import HOST_NAME, OURS, READ_BY_US, wrong

SSH_PORT = 22
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
_CONTAINER_INTERFACE = re.compile(r"^(docker|br-|veth|virbr|cni|flannel|podman)")


# ------------------------------------------------------------------------------------------------ before any connection


def all_of(reading: Reading, limit: str | None, origin: str) -> Iterator[Problem]:
    """All that can be said of an inventory file before a connection is made.

    Args:
        limit: ``--limit``.
        origin: the inventory as the user would type it.
    """
    yield from reading.problems
    yield from names(reading.hosts, origin)
    yield from duplicate_addresses(reading.hosts, origin)
    yield from unknown_variables(reading.hosts, origin)
    yield from wrong_values(reading, origin)
    yield from local_by_ssh(reading.hosts, origin)
    if not reading.failed:
        if not reading.hosts:
            yield Problem("error", "the inventory has no hosts", "write one host name per line", where=origin)
        yield from bad_limit(reading, limit)


def names(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Names become parts of paths, of patterns of Ansible's and of other hosts' ssh configuration; and on a terminal, names and addresses
    with control characters could show another name than they are."""
    for host in hosts:
        unprintable = [(what, value) for what, value in (("name", host.name), ("address", host.address)) if not value.isprintable()]
        for what, value in unprintable[:1]:  # the address is the name, where there is no other
            yield Problem("error", f"the {what} {value!a} of a host holds control characters", "write it in plain letters", where=origin)
        if host.name.isprintable() and not HOST_NAME.fullmatch(host.name):
            hint = "a name has letters, digits, `_`, `-`, `.` and `:`; the address may be another: ansible_host"
            yield Problem("error", f"{host.name!r} is not a name for a host", hint, where=origin)


def duplicate_addresses(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Two names that lead to one and the same machine: it would be installed twice at once and count twice."""
    first: dict[tuple[str, str, int], str] = {}
    for host in hosts:
        port = host.port or SSH_PORT
        here = host.address.lower() in _THIS_MACHINE and port == SSH_PORT
        if host.connection == "local" or here:
            key, said = ("local", "", 0), "this machine itself"
        else:
            key = (host.connection, host.address.lower().rstrip("."), port)
            said = f"address {host.address}" + (f" port {port}" if port != SSH_PORT else "")
        other = first.setdefault(key, host.name)
        if other != host.name:
            hint = "give each its own address, or keep one of the names"
            yield Problem("error", f"hosts `{other}` and `{host.name}` are the same machine: {said}", hint, where=origin)


def unknown_variables(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Names that begin as ours do or are almost one of ours. Variables of the user's own and Ansible's pass in silence."""
    for name, of_hosts in _hosts_by((name, host.name) for host in hosts for name in host.variables if name not in OURS):
        plain = name.lower().replace("-", "_")
        close = difflib.get_close_matches(plain, OURS, n=1, cutoff=0.8)  # `solts` and `slots` reach 0.8
        if close or plain.startswith("provision_"):
            hint = f"did you mean `{close[0]}`?" if close else "ours are " + ", ".join(f"`{each}`" for each in OURS)
            # `plots` and `lots` are near `slots`, too, and may well be words of the user's own.
            level: Severity = "warning" if close == ["slots"] else "error"
            yield Problem(level, f"unknown variable `{name}` ({of_hosts})", hint, where=origin)


def wrong_values(reading: Reading, origin: str) -> Iterator[Problem]:
    """Values of the wrong type, and templates that do not resolve; one problem each, however many hosts it is for."""
    read = [(name, host) for host in reading.hosts for name in READ_BY_US if name in host.variables]
    checked = [(name, host) for name, host in read if (host.name, name) not in reading.unresolved]
    refused = ((f"{name} {said}", host.name) for name, host in checked if (said := _refused(name, host.variables[name])))
    for said, of_hosts in _hosts_by(refused):
        yield Problem("error", f"{said} ({of_hosts})", where=origin)
    templates = ((f"the template in `{name}` cannot be worked out: {why}", host) for (host, name), why in reading.unresolved.items())
    for said, of_hosts in _hosts_by(templates):
        yield Problem("error", f"{said} ({of_hosts})", where=origin)
    bridges = ((host.interface, host.name) for host in reading.hosts if host.interface and _CONTAINER_INTERFACE.match(host.interface))
    for bridge, of_hosts in _hosts_by(bridges):
        said = f"provision_interface `{bridge}` looks like a bridge for containers, which reaches no other host ({of_hosts})"
        yield Problem("warning", said, where=origin)


def _refused(name: str, value: Any) -> str | None:
    if value == ENCRYPTED:
        return "is encrypted with ansible-vault; it is needed in plain text before any connection" if name in OURS else None
    return wrong(name, value)


def local_by_ssh(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """`localhost` in a file goes over SSH, which rarely is what was meant."""
    for host in hosts:
        if host.name == "localhost" and host.connection == "ssh" and host.address in _THIS_MACHINE and not host.port:
            hint = "add ansible_connection=local to work on this machine directly"
            yield Problem("warning", "`localhost` is reached over SSH, as Ansible does for hosts in a file", hint, where=origin)


def bad_limit(reading: Reading, limit: str | None) -> Iterator[Problem]:
    if limit is None or not reading.hosts:
        return
    names = [host.name for host in reading.hosts]
    groups = [name for name in reading.groups if name not in ("all", "ungrouped")]
    for pattern in reading.unmatched:
        close = difflib.get_close_matches(pattern.lstrip("!&"), names + groups, n=1, cutoff=0.6)
        hint = f"did you mean `{close[0]}`?" if close else "hosts are " + _few(names)
        yield Problem("error", f"no host or group is called `{pattern}`", hint, where=f"--limit {limit}")
    if not reading.selected and not reading.unmatched:
        yield Problem("error", "it leaves no host", "hosts are " + _few(names), where=f"--limit {limit}")


# --------------------------------------------------------------------------------------------------------------- inside


def _hosts_by(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(what, host) … → (what, its hosts in words), each once."""
    found: dict[str, list[str]] = {}
    for what, host in pairs:
        found.setdefault(what, []).append(f"`{host}`")
    return ((what, ("host " if len(hosts) == 1 else "hosts ") + _few(hosts)) for what, hosts in found.items())


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
