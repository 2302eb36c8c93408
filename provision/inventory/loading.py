"""From the HOSTS argument to an `Inventory`, or to one error that carries everything that is wrong with it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from provision.base.errors import UsageError
from provision.base.problems import Problem, Severity
from provision.base.text import few
from provision.inventory import checks, last_run, other_formats, parser
from provision.inventory.model import Host, Inventory, InventoryError, shown

LOCAL = "localhost"
_LISTED = "!@"  # of ``--limit``: without the hosts that the file of this name lists
_ALIKE = 0.7  # of names without their endings
_LARGEST_LIST = 1 << 20  # bytes of such a file
_MAX_FILES, _MAX_FILE, _MAX_LINE = 50_000, 32 << 20, 64 << 10  # of a folder; bytes: Ansible reads more for minutes, without a word
_FORMS = "name a file, `localhost`, or hosts (user@host, host:port and host[1:4] work too)"
# Endings by which HOSTS is meant as a file, whether or not it exists; by the first ones also where a program may stand in its place.
DATA_ENDINGS = (".ini", ".yml", ".yaml", ".json", ".cfg", ".conf", ".txt", ".toml", ".inv", ".inventory", ".hosts")
FILE_ENDINGS = (*DATA_ENDINGS, ".py", ".sh")

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$\\-]*")
_SYSTEM_PYTHON = Path("/usr/bin/python3")
_OLDEST_PYTHON_ANSIBLE_MANAGES = (3, 9)  # docs.ansible.com, support matrix: managed node of ansible-core 2.20 and 2.21


def load(argument: str, *, limit: str | Sequence[str] | None = None) -> Inventory:
    """Read and check an inventory; no connection is made.

    Args:
        argument: a file or folder that Ansible accepts, ``localhost``, or ``host1,admin@host2:2222``.
        limit: as for ``ansible --limit``, and ``@failed`` and ``!@FILE``; a list of names or patterns works too.

    Raises:
        InventoryError: with every error and every warning.
        UsageError: Ansible cannot read its own settings, or a word of ``limit`` has no hosts.
    """
    parser.read_settings()
    argument = argument.strip()
    pattern = limit if limit is None or isinstance(limit, str) else ",".join(limit)
    if pattern is not None and _has_own_words(pattern):
        of_ansible, left_out = _own_words(pattern, load(argument))
        return _left(load(argument, limit=of_ansible), lambda host: host.name not in left_out, pattern)
    if argument != LOCAL and os.path.exists(argument):
        return _from_file(argument, pattern)
    if missing := _missing_file(argument):
        raise InventoryError([missing])
    return _from_list(argument, pattern)


def by_name(argument: str, names: Sequence[str], limit: str | None) -> Inventory:
    """Hosts of which only the names are known, after ``limit``. Raises as `load` does."""
    parser.read_settings()
    everyone = tuple(Host(name, name) for name in names)
    if limit is not None and _has_own_words(limit):
        of_ansible, left_out = _own_words(limit, Inventory(argument, None, None, everyone))
        return _left(by_name(argument, names, of_ansible), lambda host: host.name not in left_out, limit)
    left, problems = _limited(everyone, limit)
    _raise_errors([*checks.host_names(everyone, argument), *problems])
    return Inventory(argument, None, None, left, everyone=everyone)


def limited(inventory: Inventory, limit: str | None) -> Inventory:
    """An inventory of which hosts were chosen already, after ``limit``. Raises as `load` does, and where none of those chosen is left."""
    if limit is None:
        return inventory
    names = {host.name for host in load(inventory.argument, limit=limit).hosts}
    return _left(inventory, lambda host: host.name in names, limit)


def _left(inventory: Inventory, stays: Callable[[Host], bool], limit: str) -> Inventory:
    """The inventory with those of its hosts that stay. Raises InventoryError where ``limit`` leaves none."""
    hosts = tuple(host for host in inventory.hosts if stays(host))
    if not hosts:
        hint = "hosts are " + few([host.name for host in inventory.hosts])
        raise InventoryError([Problem("error", "it leaves no host", hint, where=f"--limit {limit}", id="limit-empty")])
    return replace(inventory, hosts=hosts)


def _has_own_words(limit: str) -> bool:
    return any(word == last_run.FAILED or word.startswith(_LISTED) for word in limit.split(","))


def _own_words(limit: str, inventory: Inventory) -> tuple[str | None, set[str]]:
    """(``--limit`` with the hosts in place of ``@failed`` and without ``!@FILE``, the hosts in these files): Ansible knows only ``@FILE``.

    What files list is not a pattern of Ansible's, which splits ``!fe80::1`` at its colons. They may list hosts that are not in this
    inventory. Raises UsageError where no host failed, or a file cannot be read or lists something else than hosts.
    """
    words: list[str] = []
    left_out: set[str] = set()
    for word in limit.split(","):
        if word == last_run.FAILED:
            words += last_run.failed_hosts(inventory)
        elif word.startswith(_LISTED):
            left_out.update(listed(Path(word[len(_LISTED) :])))
        else:
            words.append(word)
    return ",".join(words) or None, left_out


def listed(path: Path) -> list[str]:
    """The hosts in a file, one on each line. Raises UsageError where it cannot be read or lists something else."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_LIST + 1)
        text = content.decode("utf-8")
    except OSError as error:
        hint = f"--limit '{_LISTED}{path}' reads it"
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error
    except ValueError as error:
        raise UsageError("not UTF-8 text", where=str(path)) from error
    if len(content) > _LARGEST_LIST:
        raise UsageError("it is too large for a list of hosts", where=str(path))
    names = [line.strip() for line in text.splitlines() if line.strip()]
    for number, name in enumerate(names, 1):
        if not checks.HOST_NAME.fullmatch(name):
            raise UsageError(f"{name[:60]!a} is not a host name", where=f"{path}:{number}", hint="one name per line")
    return names


def _from_file(argument: str, limit: str | None) -> Inventory:
    source = Path(argument).absolute()
    origin = shown(source)
    if source.is_file() and not os.access(source, os.R_OK):
        raise InventoryError(
            [Problem("error", "the file cannot be read", f"check who may read it: ls -l {origin}", where=origin, id="inventory-unreadable")]
        )
    _raise_errors([*_unreadable_files(source), *other_formats.problems(source, origin)])
    parsed = parser.parse(str(source), limit=limit)
    problems = tuple(dict.fromkeys(checks.check(parsed, limit, origin)))
    _raise_errors(problems)
    hosts = tuple(host for host in parsed.hosts if host.name in set(parsed.selected))
    return Inventory(argument, source, str(source), hosts, problems, everyone=tuple(parsed.hosts))


def _unreadable_files(source: Path) -> Iterator[Problem]:
    """What is in an inventory and Ansible would read for minutes, or wait for, as a FIFO. It does not look at hidden files and folders."""
    for count, path in enumerate([source] if source.is_file() else _visible(source)):
        if count == _MAX_FILES:
            what, hint = f"it has more than {_MAX_FILES:,} files, and cannot be an inventory", "name the file or folder of the inventory"
            raise InventoryError([Problem("error", what, hint, where=shown(source), id="too-many-files")])
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(path.stat().st_mode):
                what = "it is not a regular file, and cannot be a part of an inventory"
                yield Problem("error", what, "remove it", where=shown(path), id="no-regular-file")
            elif large := _oversized(path):
                what = f"{large}, and cannot be a part of an inventory"
                yield Problem("error", what, "one host on each line", where=shown(path), id="file-too-large")


def _visible(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(where) / name for name in names if not name.startswith("."))


def _oversized(path: Path) -> str:
    """What of a file is too large for Ansible's parsers; empty where nothing is, or it is a program."""
    size = path.stat().st_size
    if size <= _MAX_LINE or os.access(path, os.X_OK):
        return ""
    if size > _MAX_FILE:
        return f"it has more than {_MAX_FILE >> 20} MB"
    with path.open("rb") as file:
        is_fast = path.suffix in (".yml", ".yaml", ".json") or file.read(1) == b"{"
        return f"a line has more than {_MAX_LINE >> 10} kB" if not is_fast and any(len(line) > _MAX_LINE for line in file) else ""


def is_meant_as_file(argument: str) -> bool:
    """Whether HOSTS can only be a file or folder, there or not."""
    return "," not in argument and ("/" in argument or argument.endswith(FILE_ENDINGS))


def _missing_file(argument: str) -> Problem | None:
    """A problem when the argument can only be meant as a file, or is nearly the name of one."""
    if not argument:
        return Problem("error", "no hosts are named", _FORMS, where="HOSTS", id="no-hosts")
    is_file = is_meant_as_file(argument)
    folder, name = os.path.split(argument)
    files: list[str] = []
    with contextlib.suppress(OSError):
        files = [each for each in os.listdir(folder or ".") if each.endswith(FILE_ENDINGS) or "." not in each]
    if is_file:  # equal endings make no names alike
        files = [each for each in files if difflib.SequenceMatcher(None, _stem(name), _stem(each)).ratio() >= _ALIKE]
    close = [os.path.join(folder or ".", each) for each in difflib.get_close_matches(name, files, n=1, cutoff=0.6 if is_file else 0.85)]
    if is_file:
        return Problem("error", "no such file", f"did you mean {close[0]}?" if close else _FORMS, where=argument, id="no-such-file")
    if close and argument != LOCAL and re.fullmatch(r"[\w-]+", argument):
        return Problem(
            "error", "no such file", f"did you mean {close[0]}? (a single host is written `{argument},`)", where=argument, id="no-such-file"
        )
    return None


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _from_list(argument: str, limit: str | None) -> Inventory:
    listed, problems = parse_list(argument)
    _raise_errors(problems)
    defaults = parser.connection_defaults()
    hosts = [
        host
        if host.connection == "local"
        else replace(defaults, name=host.name, address=host.address, port=host.port or defaults.port, user=host.user or defaults.user)
        for host in listed
    ]
    left, limit_problems = _limited(hosts, limit)
    problems += [*checks.duplicate_addresses(hosts, argument), *limit_problems]
    _raise_errors(problems)
    simple = all(host.user is None and host.port is None and host.connection == "ssh" for host in listed)
    ansible_argument = ",".join(host.name for host in hosts) + "," if simple else None
    return Inventory(argument, None, ansible_argument, left, tuple(problems), everyone=tuple(hosts))


def parse_list(argument: str) -> tuple[list[Host], list[Problem]]:
    """The hosts of a comma list and all that is wrong with it. A bare ``localhost`` is this machine, without SSH."""
    hosts: dict[str, Host] = {}
    problems: list[Problem] = []

    def report(id: str, what: str, hint: str | None = None, severity: Severity = "error") -> None:
        problems.append(Problem(severity, what, hint, where=argument, id=id))

    for text in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", argument))):
        user, at, rest = text.rpartition("@")
        if at and not _USER.fullmatch(user):
            report("user-name-invalid", f"`{text}`: `{user}` is not a user name")
            continue
        try:
            names, port = _expand(rest)
        except ValueError:
            report("host-name-invalid", f"`{text[:60]}` is not a host name", f"{_FORMS}; a name has at most 240 characters")
            continue
        if port is not None and not 1 <= port <= 65535:
            report("port-out-of-range", f"`{text}`: port {port} is out of range", "ports go from 1 to 65535")
        elif port is not None and port < checks.SSH_PORT:
            hint = "slots need an inventory file: `NAME slots=N`"
            report("port-not-slots", f"`{text}` means SSH on port {port}, not {port} slots", hint, "warning")
        for name in names:
            if name in hosts:
                report("host-named-twice", f"host `{name}` is named twice", "name it once")
            elif name == LOCAL and not user and port is None:
                hosts[name] = Host(name, name, connection="local", variables={"ansible_python_interpreter": _local_python()})
            else:
                hosts[name] = Host(name, name, port=port, user=user or None)
    if not hosts and not problems:
        report("no-hosts", "no hosts are named", _FORMS)
    return list(hosts.values()), problems


def _expand(pattern: str) -> tuple[list[str], int | None]:
    """``node[1:3]:22`` → (["node1", "node2", "node3"], 22), by Ansible's own rules. Raises ValueError."""
    from ansible.errors import AnsibleError
    from ansible.parsing.utils.addresses import parse_address
    from ansible.plugins.inventory import detect_range, expand_hostname_range

    try:
        name, port = parse_address(pattern, allow_ranges=True)
        names = [str(each) for each in expand_hostname_range(name)] if detect_range(name) else [str(name)]
    except AnsibleError as error:
        raise ValueError(pattern) from error
    if not names or not all(map(checks.HOST_NAME.fullmatch, names)):
        raise ValueError(pattern)
    return names, port


def _local_python() -> str:
    """The Python that Ansible should run on this machine: the system's, which knows its package manager, unless it is too old."""
    version = re.search(r"python3\.(\d+)$", os.path.realpath(_SYSTEM_PYTHON))
    if version and (3, int(version.group(1))) >= _OLDEST_PYTHON_ANSIBLE_MANAGES:
        return str(_SYSTEM_PYTHON)
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _limited(hosts: Sequence[Host], limit: str | None) -> tuple[tuple[Host, ...], list[Problem]]:
    """The hosts that ``--limit`` leaves, and what is wrong with it."""
    if limit is None:
        return tuple(hosts), []
    parsed = parser.parse(",".join(host.name for host in hosts) + ",", limit=limit)
    errors = [problem for problem in parsed.problems if problem.severity == "error"] or list(checks.invalid_limit(parsed, limit))
    return tuple(host for host in hosts if host.name in parsed.selected), errors


def _raise_errors(problems: Sequence[Problem]) -> None:
    if any(problem.severity == "error" for problem in problems):
        raise InventoryError(sorted(problems, key=lambda problem: problem.severity != "error"))
