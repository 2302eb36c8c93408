"""Checks of an inventory, all before any connection. Pure: they yield problems and raise nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from provision.base.problems import Problem, Severity
from provision.base.text import few, grouped
from provision.base.validation import MAX_COUNT
from provision.inventory.model import ENCRYPTED, Host, ParsedInventory

SSH_PORT = 22
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
_CONTAINER_INTERFACE = re.compile(r"^(docker|br-|veth|virbr|cni|flannel|podman)")

# The toolkit's own variables. All others are Ansible's or the user's.
OWN_VARIABLES = ("slots", "provision_prefix", "provision_sudo", "provision_python", "provision_interface")

# What a host may be called, an IPv6 address included. It is part of the names of Ansible's files.
HOST_NAME = re.compile(r"\[?[\w:][\w.:%-]{0,239}\]?")

# Folders of the system: a prefix is removed as a whole, so it must be a folder of its own.
SYSTEM_FOLDERS = frozenset(
    {"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv"}
    | {"/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/var", "/var/lib", "/var/tmp"}  # noqa: S108
)

_SAFE_PATH = r"/[A-Za-z0-9._/+@-]*"
_ADDRESS = (r"[\w:\[][\w.:%\[\]-]*", "a host name or an address")  # never an option of ssh
_LOGIN = (r"[^\s-]\S*", "a login name")
_PORT = (1, 65535)

_NUMBERS: dict[str, tuple[int, int]] = {"slots": (1, MAX_COUNT), "ansible_port": _PORT, "ansible_ssh_port": _PORT}
_TEXTS = {
    "ansible_host": _ADDRESS,
    "ansible_ssh_host": _ADDRESS,
    "ansible_user": _LOGIN,
    "ansible_ssh_user": _LOGIN,
    "ansible_connection": (r"(ansible\.builtin\.)?(ssh|local|smart)", "ssh or local"),
    "provision_sudo": (r"(?i:yes|no|true|false)", "yes or no"),
    "provision_python": (rf"python3(\.\d+)?|{_SAFE_PATH}", "an absolute path or a name like python3.11"),
    # 15 bytes: IFNAMSIZ of the kernel, less its ending zero
    "provision_interface": (r"(?!lo$)[A-Za-z0-9_.:@-]{1,15}", "the name of a network interface that reaches other hosts, such as eth0"),
}

# Variables whose templates are resolved; all others stay as they are.
VARIABLES_READ = (
    *_NUMBERS,
    *_TEXTS,
    "provision_prefix",
    "ansible_private_key_file",
    "ansible_python_interpreter",
    "ansible_ssh_executable",
    "ansible_ssh_private_key_file",
    "ansible_ssh_args",
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
)


def check(parsed: ParsedInventory, limit: str | None, origin: str) -> Iterator[Problem]:
    """All problems of a parsed inventory.

    Args:
        limit: ``--limit``.
        origin: the inventory as the user would type it.
    """
    yield from parsed.problems
    yield from host_names(parsed.hosts, origin)
    yield from duplicate_addresses(parsed.hosts, origin)
    yield from unknown_variables(parsed.hosts, origin)
    yield from invalid_values(parsed, origin)
    for host in parsed.hosts:
        if host.name == "localhost" and host.connection == "ssh" and host.address in _THIS_MACHINE and not host.port:
            what = "`localhost` is reached over SSH, as Ansible does for hosts in a file"
            hint = "add ansible_connection=local to work on this machine directly"
            yield Problem("warning", what, hint, where=origin, id="localhost-over-ssh")
    if not parsed.failed:
        if not parsed.hosts:
            yield Problem("error", "the inventory has no hosts", "write one host name per line", where=origin, id="no-hosts")
        yield from invalid_limit(parsed, limit)


def host_names(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Names become parts of paths, of Ansible's patterns and of other hosts' ssh configuration."""
    for host in hosts:
        if not HOST_NAME.fullmatch(host.name):
            hint = "a name has at most 240 letters, digits, `_`, `-`, `.` and `:`; the address may differ: ansible_host"
            yield Problem("error", f"{host.name[:60]!a} is not a host name", hint, where=origin, id="host-name-invalid")


def duplicate_addresses(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Two names for the same machine: it would be installed twice at once and count twice."""
    first: dict[tuple[str, str, int], str] = {}
    for host in hosts:
        port = host.port or SSH_PORT
        if host.connection == "local" or (host.address.lower() in _THIS_MACHINE and port == SSH_PORT):
            key, place = ("local", "", 0), "this machine itself"
        else:
            key = (host.connection, host.address.lower().rstrip("."), port)
            place = f"address {host.address}" + (f" port {port}" if port != SSH_PORT else "")
        other = first.setdefault(key, host.name)
        if other != host.name:
            hint = "give each its own address, or keep one of the names"
            yield Problem(
                "error", f"hosts `{other}` and `{host.name}` are the same machine: {place}", hint, where=origin, id="same-machine"
            )


def unknown_variables(hosts: Iterable[Host], origin: str) -> Iterator[Problem]:
    """Names that begin like the toolkit's or are almost one of them. The user's own variables and Ansible's are fine."""
    for name, of_hosts in _by_text((name, host.name) for host in hosts for name in host.variables if name not in OWN_VARIABLES):
        plain = name.lower().replace("-", "_")
        close = difflib.get_close_matches(plain, OWN_VARIABLES, n=1, cutoff=0.8)  # `solts` and `slots` reach 0.8
        if name not in VARIABLES_READ:
            close = close or difflib.get_close_matches(plain, ("ansible_host", "ansible_port", "ansible_user"), n=1, cutoff=0.9)
        if close or plain.startswith("provision_"):
            hint = f"did you mean `{close[0]}`?" if close else "known are " + ", ".join(f"`{each}`" for each in OWN_VARIABLES)
            # `plots` and `lots` are close to `slots`, too, and may well be the user's own variables.
            severity: Severity = "warning" if close == ["slots"] else "error"
            yield Problem(severity, f"unknown variable `{name}` ({of_hosts})", hint, where=origin, id="variable-unknown")


def invalid_values(parsed: ParsedInventory, origin: str) -> Iterator[Problem]:
    """Invalid values, and templates that cannot be resolved; one problem each, however many hosts it is about."""
    for text, of_hosts in _by_text(
        (f"{name} {error}", host.name)
        for host in parsed.hosts
        for name in VARIABLES_READ
        if name in host.variables and (host.name, name) not in parsed.unresolved
        if (error := value_error(name, host.variables[name]))
    ):
        yield Problem("error", f"{text} ({of_hosts})", where=origin, id="value-invalid")
    for text, of_hosts in _by_text(
        (f"the template in `{name}` cannot be resolved: {why}", host) for (host, name), why in parsed.unresolved.items()
    ):
        yield Problem("error", f"{text} ({of_hosts})", where=origin, id="template-unresolved")
    passwords = (
        (of, host) for host in parsed.hosts for of, word in (("ssh", host.password), ("sudo", host.sudo_password)) if word == ENCRYPTED
    )
    for of, of_hosts in _by_text((of, host.name) for of, host in passwords):
        what = f"the password of {of} cannot be decrypted, or its template not be resolved ({of_hosts})"
        hint = "name the file with the vault's password in ANSIBLE_VAULT_PASSWORD_FILE or in ansible.cfg (vault_password_file)"
        yield Problem("warning", what, hint, where=origin, id="value-invalid")
    interfaces = ((host.interface, host.name) for host in parsed.hosts if host.interface and _CONTAINER_INTERFACE.match(host.interface))
    for interface, of_hosts in _by_text(interfaces):
        what = f"provision_interface `{interface}` looks like a bridge for containers, which reaches no other host ({of_hosts})"
        yield Problem("warning", what, where=origin, id="container-interface")


def invalid_limit(parsed: ParsedInventory, limit: str | None) -> Iterator[Problem]:
    if limit is None or not parsed.hosts:
        return
    names = [host.name for host in parsed.hosts]
    groups = [name for name in parsed.groups if name not in ("all", "ungrouped")]
    for pattern in parsed.unmatched:
        close = difflib.get_close_matches(pattern.lstrip("!&"), names + groups, n=1, cutoff=0.6)
        hint = f"did you mean `{close[0]}`?" if close else "hosts are " + few(names)
        yield Problem("error", f"no host or group is called `{pattern}`", hint, where=f"--limit {limit}", id="limit-unknown")
    if not parsed.selected and not parsed.unmatched:
        yield Problem("error", "it leaves no host", "hosts are " + few(names), where=f"--limit {limit}", id="limit-empty")


def whole_number(value: object) -> int | None:
    """The value as a whole number; digits in quotes count, true and 2.5 do not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    return None


def value_error(name: str, value: object) -> str | None:
    """What is wrong with a variable's value, as the rest of a sentence that begins with its name; None: nothing."""
    if value == ENCRYPTED:
        return "is encrypted with ansible-vault; it is needed in plain text before any connection" if name in OWN_VARIABLES else None
    if name == "provision_prefix":
        return prefix_error(value)
    if name in _NUMBERS and not (value is None and name != "slots"):
        least, most = _NUMBERS[name]
        number = whole_number(value)
        if number is None or not least <= number <= most:
            return f"must be a whole number from {least} to {most}, not {_shown(value)}"
    if name in _TEXTS:
        pattern, what = _TEXTS[name]
        is_text = isinstance(value, str) or (isinstance(value, bool) if name == "provision_sudo" else type(value) is int)
        if not is_text or not re.fullmatch(pattern, str(value)):
            return f"must be {what}, not {_shown(value)}"
    return None


def prefix_error(value: object) -> str | None:
    """What is wrong with a prefix, in the same form."""
    if not isinstance(value, str) or not value.startswith("/"):
        return f"must be an absolute path, such as /opt/provision, not {_shown(value)}"
    if not re.fullmatch(_SAFE_PATH, value) or ".." in value.split("/"):
        return f"{_shown(value)} has characters that compilers and loaders do not handle; use letters, digits and . _ + @ -"
    if (re.sub(r"/+", "/", value).rstrip("/") or "/") in SYSTEM_FOLDERS:
        return f"{_shown(value)} is a folder of the system; choose a folder of its own, such as /opt/provision"
    return None


def _shown(value: object) -> str:
    if value is None or value == "":
        return "empty"
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


def _by_text(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(text, host) … → (text, its hosts as a phrase), each text once."""
    found = grouped((text, f"`{host}`") for text, host in pairs)
    return ((text, ("host " if len(hosts) == 1 else "hosts ") + few(hosts)) for text, hosts in found.items())
