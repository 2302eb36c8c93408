"""Everything that is judged about an inventory. Pure: what was read goes in, findings come out, all of them, none is raised."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from provision.inventory import values
from provision.inventory.model import ENCRYPTED, Finding, Host, Inventory
from provision.inventory.names import HOST_NAME, OURS
from provision.inventory.reading import Complaint, ReadHost, Reading
from provision.inventory.sources import HostLine, Sources, VariableLine
from provision.inventory.spelling import is_stray, meant

SSH_PORT = 22
_ADDRESS_VARIABLES = ("ansible_host", "ansible_ssh_host", "ansible_port", "ansible_ssh_port")
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
_OURS_TO_SAY = re.compile(
    r"^(Unable to parse|No inventory was parsed|provided hosts list is empty|Could not match supplied host pattern|Skipping unexpected key)"
    r"|duplicate (mapping|dict) key|Failed to parse|Invalid characters were found in group names"
)
_PYTHON_SAYS = re.compile(r"not enough values|invalid literal|too many values|.*object is not|list index")
_SET_BY_ANSIBLE = frozenset({"inventory_file", "inventory_dir", "inventory_hostname", "inventory_hostname_short"})
_CONTAINER_INTERFACE = re.compile(r"^(docker|br-|veth|virbr|cni|flannel|podman)")


# ------------------------------------------------------------------------------------------------ before any connection


def ansible_failures(reading: Reading, sources: Sources, origin: str, show: Callable[[str], str]) -> Iterator[Finding]:
    """What Ansible's parser could not read. Ansible itself only warns, and goes on without those hosts.

    Args:
        origin: the inventory as the user named it.
        show: turns a file's path into what the user would type.
    """
    if reading.failure:
        yield _failure(reading.failure, sources, origin, show)
    by_source: dict[str, list[Complaint]] = {}
    for complaint in reading.complaints:
        if complaint.plugin:
            by_source.setdefault(complaint.source or complaint.file or "", []).append(complaint)
    for source, group in by_source.items():
        name = show(source) if source else origin
        yield _failure(_most_telling(group, name in sources.yaml_files), sources, name, show)
    for complaint in reading.complaints:
        unread = re.match(r"Unable to parse (.+) as an inventory source", complaint.message)
        if unread and not by_source and not os.path.isdir(unread.group(1)):
            yield Finding("error", show(unread.group(1)), "Ansible cannot read this as an inventory")


def ansible_warnings(reading: Reading, origin: str) -> Iterator[Finding]:
    """What Ansible warns of and we have no check of our own for."""
    for complaint in reading.complaints:
        if not complaint.plugin and not _OURS_TO_SAY.search(complaint.message):
            yield Finding("warning", origin, f"Ansible says: {complaint.message}")


def strange_names(hosts: Iterable[Host], where: Mapping[str, str], origin: str) -> Iterator[Finding]:
    """Names become parts of paths, of patterns of Ansible's and of other hosts' ssh configuration. Of others `unprintable` tells."""
    for host in hosts:
        if host.name.isprintable() and not HOST_NAME.fullmatch(host.name):
            todo = "a name has letters, digits, `_`, `-`, `.` and `:`; the address may be another: ansible_host"
            yield Finding("error", where.get(host.name, origin), f"{host.name!r} is not a name for a host", todo)


def nothing_in_it(reading: Reading, sources: Sources, origin: str) -> Iterator[Finding]:
    empty = [line for line in sources.hosts if not line.names]
    for line in empty:
        yield Finding("error", line.place, f"the range `{line.pattern}` is empty", "ranges go upwards, as in node[1:3]")
    if not reading.hosts and not empty and not sources.strange_keys:
        yield Finding("error", origin, "the inventory has no hosts", "write one host name per line")


def strange_keys(sources: Sources) -> Iterator[Finding]:
    """YAML keys that Ansible skips, and with them whatever hosts are below."""
    for key, group, place in sources.strange_keys:
        close = difflib.get_close_matches(key, ("hosts", "vars", "children"), n=1, cutoff=0.6)
        todo = f"did you mean `{close[0]}`?" if close else "variables of a group go under `vars:`"
        yield Finding("error", place, f"`{key}` in group `{group}` is none of `hosts`, `vars`, `children`, so Ansible would skip it", todo)


def repeated_keys(sources: Sources) -> Iterator[Finding]:
    """A YAML key written twice in one mapping; hosts have a sentence of their own."""
    of_hosts = {line.place for line in sources.hosts}
    for key, first, place in sources.repeated_keys:
        if place not in of_hosts:
            yield Finding("error", place, f"`{key}` is written twice, at {first} and here; only the last would count", "keep one of them")


def duplicate_hosts(sources: Sources) -> Iterator[Finding]:
    """A host written twice: with two addresses anywhere, or twice in one group. Ansible merges silently, the last one wins."""
    seen: dict[str, list[HostLine]] = {}
    reported: set[tuple[str, str]] = set()
    for line in sources.hosts:
        for name in line.names:
            for earlier in seen.get(name, ()):
                if (earlier.place, line.place) in reported:
                    continue
                finding = _compare(name, earlier, line)
                if finding:
                    reported.add((earlier.place, line.place))
                    yield finding
            seen.setdefault(name, []).append(line)


def duplicate_addresses(hosts: Iterable[Host], where: Mapping[str, str], origin: str) -> Iterator[Finding]:
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
        if key in first:
            other = first[key]
            yield Finding(
                "error",
                where.get(host.name, origin),
                f"hosts `{other}` and `{host.name}` are the same machine: {said} (`{other}` is at {where.get(other, origin)})",
                "give each its own address, or keep one of the names",
            )
        else:
            first[key] = host.name


def unprintable(hosts: Iterable[Host], where: Mapping[str, str], origin: str) -> Iterator[Finding]:
    """Names and addresses with control characters: no host is called so, and on a terminal they could show another name than they are."""
    for host in hosts:
        for what, value in (("name", host.name), ("address", host.address)):
            if not value.isprintable():
                place = where.get(host.name, origin)
                yield Finding("error", place, f"the {what} {value!a} of a host holds control characters", "write it in plain letters")
                break


def unknown_variables(sources: Sources, named: Collection[str], known: Collection[str], origin: str) -> Iterator[Finding]:
    """Names that are almost one of ours or of Ansible's. Variables of the user's own pass in silence.

    Args:
        named: all variables that the inventory sets, also where no line of text says so (programs, plugins).
        known: the names Ansible knows.
    """
    located: set[str] = set()
    seen: set[tuple[str, str]] = set()
    verdicts: dict[str, str | None] = {}

    def judge(name: str, place: str) -> Iterator[Finding]:
        if name not in verdicts:
            verdicts[name] = meant(name, known)
        right = verdicts[name]
        if right:
            yield Finding("error", place, f"unknown variable `{name}`; did you mean `{right}`?")
        elif is_stray(name):
            yield Finding("error", place, f"unknown variable `{name}`", "ours are " + ", ".join(f"`{each}`" for each in OURS))

    for line in sources.all_variables():
        located.add(line.name)
        if (line.name, line.place) not in seen:
            seen.add((line.name, line.place))
            yield from judge(line.name, line.place)
    for name in sorted(set(named) - located - _SET_BY_ANSIBLE):
        yield from judge(name, origin)


def wrong_values(
    hosts: Iterable[ReadHost], places: Mapping[tuple[str, str], str], where: Mapping[str, str], origin: str
) -> Iterator[Finding]:
    """Values of the wrong type, and templates that do not resolve; one finding per line, however many hosts it is for."""
    seen: set[tuple[str, str]] = set()
    for host in hosts:
        for name, value in host.resolved.items():
            test = values.TESTS.get(name)
            place = places.get((host.name, name)) or where.get(host.name, origin)
            if value == ENCRYPTED:
                complaint = (
                    f"`{name}` is encrypted with ansible-vault; it is needed in plain text before any connection" if name in OURS else None
                )
            else:
                complaint = test(value) if test else None
            if complaint and (place, complaint) not in seen:
                seen.add((place, complaint))
                yield Finding("error", place, complaint)
            elif (
                name == "provision_interface" and isinstance(value, str) and _CONTAINER_INTERFACE.match(value) and (place, name) not in seen
            ):
                seen.add((place, name))
                yield Finding(
                    "warning", place, f"provision_interface `{value}` looks like a bridge for containers, which reaches no other host"
                )
        for name, reason in host.unresolved.items():
            place = places.get((host.name, name)) or where.get(host.name, origin)
            if (place, reason) not in seen:
                seen.add((place, reason))
                yield Finding("error", place, f"the template in `{name}` cannot be worked out for host `{host.name}`: {reason}")


def local_by_ssh(hosts: Iterable[Host], where: Mapping[str, str], origin: str) -> Iterator[Finding]:
    """`localhost` in a file goes over SSH, which rarely is what was meant."""
    for host in hosts:
        if host.name == "localhost" and host.connection == "ssh" and host.address in _THIS_MACHINE and not host.port:
            todo = "add ansible_connection=local to work on this machine directly"
            yield Finding(
                "warning", where.get(host.name, origin), "`localhost` is reached over SSH, as Ansible does for hosts in a file", todo
            )


def bad_limit(reading: Reading, limit: str | None) -> Iterator[Finding]:
    if limit is None or not reading.hosts:
        return
    names = [host.name for host in reading.hosts]
    groups = [name for name in reading.groups if name not in ("all", "ungrouped")]
    for pattern in reading.unmatched:
        close = difflib.get_close_matches(pattern.lstrip("!&"), names + groups, n=1, cutoff=0.6)
        todo = f"did you mean `{close[0]}`?" if close else "hosts are " + _few(names)
        yield Finding("error", f"--limit {limit}", f"no host or group is called `{pattern}`", todo)
    if not reading.selected and not reading.unmatched:
        yield Finding("error", f"--limit {limit}", "it leaves no host", "hosts are " + _few(names))


# ------------------------------------------------------------------------------------------------------ after the survey


def check_against_facts(inventory: Inventory, facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """`slots` and interfaces against what the survey saw.

    Args:
        facts: host → normalised facts; hosts that are not in it were not reached and are passed over.
    """
    findings: list[Finding] = []
    for host in inventory.hosts:
        if host.name in facts:
            findings += _slots(inventory, host, facts[host.name])
            findings += _interface(inventory, host, facts[host.name])
    return findings


def _slots(inventory: Inventory, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if host.slots is None:
        return
    where = inventory.where(host, "slots")
    gpus, cores = len(facts.get("gpus") or ()), (facts.get("cpu") or {}).get("cores")
    has = f"host `{host.name}` has {_count(gpus, 'GPU') if gpus else _count(cores or 0, 'core')} but slots={host.slots}"
    if gpus and host.slots > gpus:
        yield Finding("error", where, f"{has}; NCCL refuses two ranks on one GPU", f"set slots={gpus} or less", host.name)
    elif gpus and host.slots < gpus:
        yield Finding("warning", where, f"{has}; {gpus - host.slots} would stay idle", host=host.name)
    elif not gpus and cores and host.slots > cores:
        yield Finding("warning", where, f"{has}; ranks would take turns on the cores", f"set slots={cores} or less", host.name)


def _interface(inventory: Inventory, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    present = {str(entry.get("name")): entry for entry in (facts.get("network") or {}).get("interfaces") or ()}
    if host.interface is None or not present:
        return
    where, name = inventory.where(host, "provision_interface"), host.interface
    usable = _few([each for each, entry in present.items() if entry.get("up") and not entry.get("loopback") and not entry.get("virtual")])
    if name not in present:
        yield Finding("error", where, f"host `{host.name}` has no interface `{name}`", f"it has {usable}", host.name)
    elif not present[name].get("up"):
        yield Finding("error", where, f"interface `{name}` of host `{host.name}` is down", f"up are {usable}", host.name)


# --------------------------------------------------------------------------------------------------------------- inside


def _failure(complaint: Complaint, sources: Sources, origin: str, show: Callable[[str], str]) -> Finding:
    message = re.sub(r"^Failed to parse inventory[.:]*\s*", "", complaint.message)
    where = show(complaint.file) if complaint.file else origin
    if "vault" in message.lower():
        todo = "name the password's file in ANSIBLE_VAULT_PASSWORD_FILE or in ansible.cfg (vault_password_file)"
        return Finding("error", next(iter(sources.encrypted), where), f"it is encrypted and cannot be opened: {message}", todo)
    line = complaint.line
    refused = [(number, why) for file, number, why in sources.unreadable if file == where]
    if refused and line is None:  # from 2.19 on Ansible forgets the line of an INI file
        line = refused[0][0]
    why = next((why for number, why in refused if number == line), None)
    if why and _PYTHON_SAYS.match(message):
        message = why
    return Finding("error", f"{where}:{line}" if line else where, f"Ansible cannot read it: {message}")


def _most_telling(group: list[Complaint], is_yaml: bool) -> Complaint:
    """Of several parsers' complaints about one file, that of the parser it was written for."""
    said = {each.plugin: each for each in group}
    order = ["script", "ini"]
    if is_yaml:
        order = ["auto", "yaml"] if "Plugin configuration" in str(said.get("yaml")) else ["yaml"]
    return next((said[plugin] for plugin in order if plugin in said), group[-1])


def _compare(name: str, earlier: HostLine, later: HostLine) -> Finding | None:
    for variable in _ADDRESS_VARIABLES:
        one, two = _written(earlier, variable), _written(later, variable)
        if one is not None and two is not None and one != two:
            what = "address" if variable.endswith("host") else "port"
            message = f"host `{name}` is given two {what}{'es' if what == 'address' else 's'}: {one} at {earlier.place} and {two} here"
            return Finding("error", later.place, message, "if they are two machines, give them two names")
    one, two = _written(earlier, "slots"), _written(later, "slots")
    if one is not None and two is not None and one != two:
        return Finding(
            "error", later.place, f"host `{name}` is given slots={one} at {earlier.place} and slots={two} here", "keep one of them"
        )
    if earlier.group != later.group:
        return None
    message = f"host `{name}` is listed twice in group `{later.group}`: at {earlier.place} and here"
    # A range for all and a line for the odd one out is a habit of some; it works, and only looks like a mistake.
    level = "warning" if earlier.is_range != later.is_range and later.variables + earlier.variables else "error"
    return Finding("warning" if level == "warning" else "error", later.place, message, "write it once")


def _written(line: HostLine, variable: str) -> str | None:
    if variable == "ansible_port" and line.port is not None:
        return str(line.port)
    found: VariableLine | None = next((each for each in reversed(line.variables) if each.name == variable), None)
    return found.value if found else None


def _few(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
