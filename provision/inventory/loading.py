"""From the HOSTS argument to an `Inventory`, or to one error that carries everything that is wrong with it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provision.inventory import checks, hostlist, reading
from provision.inventory.model import ENCRYPTED, Finding, Host, Inventory, InventoryError
from provision.inventory.names import FILE_ENDINGS
from provision.inventory.sources import scan, shown
from provision.inventory.values import whole_number

LOCAL = "localhost"
LOCAL_CONNECTION = "local"


def load(argument: str, *, limit: str | Sequence[str] | None = None) -> Inventory:
    """Read and check an inventory; no connection is made.

    Args:
        argument: a file or folder that Ansible accepts, ``localhost``, or ``host1,admin@host2:2222``.
        limit: as for ``ansible --limit``; a list of names or patterns works too.

    Raises:
        InventoryError: with every error, and every warning besides.
    """
    pattern = limit if limit is None or isinstance(limit, str) else ",".join(limit)
    argument = argument.strip()
    if argument != LOCAL and os.path.exists(argument):
        return _from_file(argument, pattern)
    if missing := _missing_file(argument):
        raise InventoryError([missing])
    return _from_list(argument, pattern)


# ---------------------------------------------------------------------------------------------------------------- files


def _from_file(argument: str, limit: str | None) -> Inventory:
    source = Path(argument).absolute()
    origin = shown(source)
    if source.is_file() and not os.access(source, os.R_OK):
        raise InventoryError([Finding("error", origin, "the file cannot be read", f"check who may read it: ls -l {origin}")])
    read = reading.read(str(source), limit=limit)
    groups, names = (None, None) if read.failure else (read.groups, [host.name for host in read.hosts])
    text = scan(source, groups, names, reading.ignored_names())
    where = text.places_of_hosts()
    places = text.places_of_variables({host.name: host.groups for host in read.hosts})
    defaults = reading.defaults()
    hosts = [_host(host, where.get(host.name), defaults) for host in read.hosts]

    failures = list(checks.ansible_failures(read, text, origin, lambda path: shown(Path(path))))
    findings = [
        *failures,
        *checks.ansible_warnings(read, origin),
        *([] if failures else checks.nothing_in_it(read, text, origin)),
        *checks.strange_names(hosts, where, origin),
        *checks.strange_keys(text),
        *checks.repeated_keys(text),
        *checks.duplicate_hosts(text),
        *checks.duplicate_addresses(hosts, where, origin),
        *checks.unprintable(hosts, where, origin),
        *checks.unknown_variables(text, read.named, reading.known_to_ansible(), origin),
        *checks.wrong_values(read.hosts, places, where, origin),
        *checks.local_by_ssh(hosts, where, origin),
        *([] if failures else checks.bad_limit(read, limit)),
    ]
    findings = list(dict.fromkeys(findings))
    _raise_errors(findings)
    selected = set(read.selected)
    return Inventory(
        argument=argument,
        source=source,
        ansible_argument=str(source),
        hosts=tuple(host for host in hosts if host.name in selected),
        everyone=tuple(hosts),
        findings=tuple(findings),
        places=places,
    )


def _host(host: reading.ReadHost, source: str | None, defaults: Mapping[str, Any]) -> Host:
    def value(*names: str, default: Any = None) -> Any:
        return next((host.resolved[name] for name in names if host.resolved.get(name) not in (None, "", ENCRYPTED)), default)

    def text(*names: str, default: Any = None) -> str | None:
        found = value(*names, default=default)
        return None if found is None else str(found)

    return Host(
        name=host.name,
        address=text("ansible_host", "ansible_ssh_host", default=host.name) or host.name,
        port=whole_number(value("ansible_port", "ansible_ssh_port", default=defaults.get("port"))),
        user=text("ansible_user", "ansible_ssh_user", default=defaults.get("user")),
        connection=_connection({"connection": text("ansible_connection", default=defaults.get("connection"))}),
        slots=whole_number(value("slots")),
        groups=tuple(sorted(name for name in host.groups if name not in ("all", "ungrouped"))),
        variables={**host.variables, **host.resolved},
        source=source,
        prefix=text("provision_prefix"),
        python=text("provision_python"),
        interface=text("provision_interface"),
        key_file=text("ansible_private_key_file", "ansible_ssh_private_key_file", default=defaults.get("key_file")),
    )


def _connection(settings: Mapping[str, Any]) -> str:
    name = str(settings.get("connection") or "ssh").replace("ansible.builtin.", "")
    return "ssh" if name == "smart" else name


def _missing_file(argument: str) -> Finding | None:
    """A finding when the argument can only be meant as a file, or is nearly the name of one."""
    looks_like_file = argument.endswith(FILE_ENDINGS) or ("/" in argument and "," not in argument)
    folder, name = os.path.split(argument)
    try:
        beside = [each for each in os.listdir(folder or ".") if each.endswith(FILE_ENDINGS) or "." not in each]
    except OSError:
        beside = []
    close = difflib.get_close_matches(name, beside, n=1, cutoff=0.6)
    if looks_like_file and "," not in argument:
        suggestion = os.path.join(folder or ".", close[0]) if close else None
        return Finding(
            "error",
            argument,
            "no such file",
            f"did you mean {suggestion}?" if suggestion else "name a file, `localhost`, or hosts as host1,host2",
        )
    nearly = difflib.get_close_matches(name, beside, n=1, cutoff=0.85)
    if not argument:
        return Finding("error", "HOSTS", "no hosts are named", "name a file, `localhost`, or hosts as host1,host2")
    if nearly and argument != LOCAL and re.fullmatch(r"[\w-]+", argument):
        return Finding(
            "error", argument, "no such file", f"did you mean {os.path.join('.', nearly[0])}? (a single host is written `{argument},`)"
        )
    return None


# ---------------------------------------------------------------------------------------------- localhost, host1,host2


def _from_list(argument: str, limit: str | None) -> Inventory:
    entries, findings = hostlist.parse(argument)
    _raise_errors(findings)
    defaults = reading.defaults()
    hosts = [_listed(entry, defaults) for entry in entries]
    findings += checks.duplicate_addresses(hosts, {}, argument)
    everyone = tuple(hosts)
    if limit is not None:
        read = reading.read(",".join(host.name for host in hosts) + ",", limit=limit)
        findings += checks.bad_limit(read, limit)
        hosts = [host for host in hosts if host.name in read.selected]
    _raise_errors(findings)
    simple = all(entry.user is None and entry.port is None and not entry.is_here for entry in entries)
    return Inventory(
        argument=argument,
        source=None,
        ansible_argument=",".join(entry.name for entry in entries) + "," if simple else None,
        hosts=tuple(hosts),
        findings=tuple(findings),
        everyone=everyone,
    )


def by_name(argument: str, names: Sequence[str], limit: str | None) -> Inventory:
    """Hosts of which nothing but their names is known, after ``limit``. Raises InventoryError where that leaves none, or names others."""
    everyone = tuple(Host(name, name) for name in names)
    _raise_errors(list(checks.unprintable(everyone, {}, argument)))
    hosts = everyone
    if limit is not None:
        read = reading.read(",".join(names) + ",", limit=limit)
        _raise_errors(list(checks.bad_limit(read, limit)))
        hosts = tuple(host for host in everyone if host.name in read.selected)
    return Inventory(argument, None, None, hosts, everyone=everyone)


def _listed(entry: hostlist.Entry, defaults: Mapping[str, Any]) -> Host:
    if entry.is_here:
        return Host(entry.name, entry.name, connection=LOCAL_CONNECTION, variables={"ansible_python_interpreter": hostlist.local_python()})
    port, user = entry.port or defaults.get("port"), entry.user or defaults.get("user")
    return Host(entry.name, entry.name, port=port, user=user, connection=_connection(defaults), key_file=defaults.get("key_file"))


# --------------------------------------------------------------------------------------------------------------- inside


def _raise_errors(findings: Sequence[Finding]) -> None:
    if any(finding.level == "error" for finding in findings):
        raise InventoryError(sorted(findings, key=_by_place))


def _by_place(finding: Finding) -> tuple[str, int]:
    file, _, line = finding.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (finding.where, 0)
