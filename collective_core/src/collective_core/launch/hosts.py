"""Hosts of a job, and how many ranks on each: ``a:2,b:2``, a list, a dictionary, a host file of mpirun, or an inventory."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from typing import Callable, Mapping, NamedTuple, Sequence, Union

from collective_core.errors import CollectiveError
from collective_core.launch import inventory

Hosts = Union[str, Sequence[str], Mapping[str, int], None]


class Host(NamedTuple):
    """``way``: what ssh is given to get there; the name alone where it is empty."""

    name: str
    slots: int
    way: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, which needs no ssh."""
        return not self.way and self.name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def read(hosts: Hosts) -> list[Host]:
    """Raises :class:`CollectiveError` for what cannot be read, a host that is named twice, and slots that are no positive number."""
    if hosts is None:
        return []
    if isinstance(hosts, Mapping):
        found = [_host(str(name), str(slots)) for name, slots in hosts.items()]
    elif isinstance(hosts, str) and os.path.isfile(hosts):
        found = _of_file(hosts)
    else:
        words = hosts.split(",") if isinstance(hosts, str) else list(hosts)
        found = [_of_word(word.strip()) for word in words]
    names = [host.name for host in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CollectiveError(f"{', '.join(twice)} is there twice in the hosts: give it once, with all its slots", "invalid")
    return found


def _host(name: str, slots: str) -> Host:
    # A name that begins with a dash would be an option of ssh.
    if not re.fullmatch(r"[\w:.@%][\w:.@%-]*", name):
        raise CollectiveError(f"{name!r} is not the name of a host: write name or name:slots, separated by commas", "invalid")
    if not slots.isdecimal() or int(slots) < 1:
        raise CollectiveError(f"the number of slots of host {name} is {slots!r}, not a positive number", "invalid")
    return Host(name, int(slots))


def _of_word(word: str) -> Host:
    """``name``, ``name:2``, ``[fe80::1]:2``; an IPv6 address without brackets is all name."""
    if word.startswith("["):
        name, _, slots = word[1:].partition("]")
        return _host(name, slots[1:] if slots.startswith(":") else slots or "1")
    if word.count(":") > 1:
        return _host(word, "1")
    name, _, slots = word.partition(":")
    return _host(name, slots if ":" in word else "1")


def _of_file(path: str) -> list[Host]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CollectiveError(f"the hosts in {path} cannot be read: {error}", "invalid") from error
    if not inventory.is_one(text):
        return [_of_line(line) for line in (line.split("#")[0].strip() for line in text.splitlines()) if line]
    found = []
    for name, variables in inventory.read(path, text).items():
        way = inventory.way_to(name, variables)
        host = _host(name, variables.get("slots", "1"))
        here = not way or (_host(way[-1], "1").is_here and way == (name,))
        found.append(host._replace(name="localhost") if here else host._replace(way=way))
    return found


def _of_line(line: str) -> Host:
    name, *rest = line.split()
    options = dict(part.split("=", 1) for part in rest if "=" in part)
    return _host(name, options["slots"]) if "slots" in options else _of_word(name)


def ways(hosts: Sequence[Host]) -> dict[str, tuple[str, ...]]:
    """How to get to those that are not this machine, by name."""
    return {host.name: host.way for host in hosts if not host.is_here}


def with_slots(hosts: Hosts | Callable[[], Hosts], slots: int | None) -> Hosts | Callable[[], Hosts]:
    """``a,b:4`` with so many slots for the hosts that have no number; so, too, what a function returns."""
    if slots is None or hosts is None or isinstance(hosts, Mapping) or (isinstance(hosts, str) and os.path.isfile(hosts)):
        return hosts
    if callable(hosts):
        return lambda: with_slots(hosts(), slots)  # type: ignore[return-value]  # of hosts it makes hosts
    return [word if ":" in word else f"{word}:{slots}" for word in (hosts.split(",") if isinstance(hosts, str) else hosts)]


def ask(script: str, slots: int | None = None, timeout: float = 30.0) -> list[Host]:
    """The hosts that a discovery script prints: a line ``name`` or ``name:slots`` for each that is there; without a number ``slots``, or 1.

    Raises :class:`CollectiveError` when it fails, does not end, or prints something else.
    """
    return read([line if ":" in line else f"{line}:{slots or 1}" for line in lines_of(script, timeout)])


def lines_of(script: str, timeout: float = 30.0) -> list[str]:
    """What a discovery script prints, without empty lines. Raises :class:`CollectiveError` when it fails or does not end."""
    try:
        done = subprocess.run(shlex.split(script), capture_output=True, text=True, timeout=timeout, check=True, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        raise CollectiveError(f"the script that lists the hosts failed: {error}" + (f": {said}" if said else ""), "invalid") from error
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def place_ranks(hosts: Sequence[Host], np: int | None) -> dict[str, list[int]]:
    """Ranks by host, each host filled before the next. Raises :class:`CollectiveError` if there are fewer slots than ranks."""
    slots = sum(host.slots for host in hosts)
    wanted = slots if np is None else np
    if wanted > slots:
        raise CollectiveError(f"{wanted} ranks do not fit into the {slots} slots of {len(hosts)} hosts", "invalid")
    placed: dict[str, list[int]] = {}
    rank = 0
    for host in hosts:
        mine = list(range(rank, min(rank + host.slots, wanted)))
        rank += len(mine)
        if mine:
            placed[host.name] = mine
    return placed
