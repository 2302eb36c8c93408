"""From the HOSTS argument to an `Inventory`, or to one error that carries everything that is wrong with it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision.base.problems import Problem
from provision.inventory import checks, hostlist, parser
from provision.inventory.model import Host, Inventory, InventoryError, shown

LOCAL = "localhost"
_FORMS = "name a file, `localhost`, or hosts as host1,host2"
# Endings by which HOSTS is meant as a file, whether or not it is there.
FILE_ENDINGS = (".ini", ".yml", ".yaml", ".json", ".cfg", ".conf", ".txt", ".toml", ".inv", ".inventory", ".hosts", ".py", ".sh")


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
        raise InventoryError([Problem("error", "the file cannot be read", f"check who may read it: ls -l {origin}", where=origin)])
    reading = parser.read(str(source), limit=limit)
    problems = tuple(dict.fromkeys(checks.all_of(reading, limit, origin)))
    _raise_errors(problems)
    selected = set(reading.selected)
    return Inventory(
        argument=argument,
        source=source,
        ansible_argument=str(source),
        hosts=tuple(host for host in reading.hosts if host.name in selected),
        everyone=tuple(reading.hosts),
        problems=problems,
    )


def _missing_file(argument: str) -> Problem | None:
    """A problem when the argument can only be meant as a file, or is nearly the name of one."""
    if not argument:
        return Problem("error", "no hosts are named", _FORMS, where="HOSTS")
    is_file = "," not in argument and ("/" in argument or argument.endswith(FILE_ENDINGS))
    folder, name = os.path.split(argument)
    files: list[str] = []
    with contextlib.suppress(OSError):
        files = [each for each in os.listdir(folder or ".") if each.endswith(FILE_ENDINGS) or "." not in each]
    close = [os.path.join(folder or ".", each) for each in difflib.get_close_matches(name, files, n=1, cutoff=0.6 if is_file else 0.85)]
    if is_file:
        return Problem("error", "no such file", f"did you mean {close[0]}?" if close else _FORMS, where=argument)
    if close and argument != LOCAL and re.fullmatch(r"[\w-]+", argument):
        return Problem("error", "no such file", f"did you mean {close[0]}? (a single host is written `{argument},`)", where=argument)
    return None


# ---------------------------------------------------------------------------------------------- localhost, host1,host2


def _from_list(argument: str, limit: str | None) -> Inventory:
    listed, problems = hostlist.parse(argument)
    _raise_errors(problems)
    defaults = parser.defaults()
    hosts = [_with_defaults(host, defaults) for host in listed]
    problems += checks.duplicate_addresses(hosts, argument)
    left, wrong = _limited(hosts, limit)
    problems += wrong
    _raise_errors(problems)
    simple = all(host.user is None and host.port is None and host.connection == "ssh" for host in listed)
    return Inventory(
        argument=argument,
        source=None,
        ansible_argument=",".join(host.name for host in hosts) + "," if simple else None,
        hosts=left,
        problems=tuple(problems),
        everyone=tuple(hosts),
    )


def by_name(argument: str, names: Sequence[str], limit: str | None) -> Inventory:
    """Hosts of which nothing but their names is known, after ``limit``. Raises InventoryError where that leaves none, or names others."""
    everyone = tuple(Host(name, name) for name in names)
    left, wrong = _limited(everyone, limit)
    _raise_errors([*checks.names(everyone, argument), *wrong])
    return Inventory(argument, None, None, left, everyone=everyone)


def _limited(hosts: Sequence[Host], limit: str | None) -> tuple[tuple[Host, ...], list[Problem]]:
    """The hosts that ``--limit`` leaves, and what is wrong with it."""
    if limit is None:
        return tuple(hosts), []
    reading = parser.read(",".join(host.name for host in hosts) + ",", limit=limit)
    wrong = [problem for problem in reading.problems if problem.severity == "error"] or list(checks.bad_limit(reading, limit))
    return tuple(host for host in hosts if host.name in reading.selected), wrong


def _with_defaults(host: Host, defaults: Mapping[str, Any]) -> Host:
    if host.connection == "local":
        return host
    port, user = host.port or defaults["port"], host.user or defaults["user"]
    return replace(host, port=port, user=user, connection=defaults["connection"], key_file=defaults["key_file"])


# --------------------------------------------------------------------------------------------------------------- inside


def _raise_errors(problems: Sequence[Problem]) -> None:
    if any(problem.severity == "error" for problem in problems):
        raise InventoryError(sorted(problems, key=lambda problem: problem.severity != "error"))
