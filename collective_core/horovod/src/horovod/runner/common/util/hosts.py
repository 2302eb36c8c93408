"""Hosts and their slots."""

from __future__ import annotations

from typing import NamedTuple

from collective_core.launch.hosts import read

__path__: list[str] = []  # so that names that are missing here are looked for, and refused, as modules


class HostInfo(NamedTuple):
    hostname: str
    slots: int


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts of ``a:2,b:2``. Raises :class:`CollectiveError` for what cannot be read."""
    return [HostInfo(host.name, host.slots) for host in read(hosts_string)]
